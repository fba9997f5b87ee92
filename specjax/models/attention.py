"""Grouped-query attention: projections and rotary embedding, around whatever the new rows attend to. arXiv:2305.13245."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.kernel_settings import Kernels
from specjax.kernels.cached_attention import cached_attention
from specjax.kernels.few_row_linear import Normed, few_row_linear
from specjax.kernels.rope_and_write import Heads, rope_and_write
from specjax.model_config import ModelConfig
from specjax.models.kv_cache import KVCache, LayerCache
from specjax.models.layers import PROJECTION_INIT, RMSNorm

# From the heads of the new rows as the projection gave them, and sinks ([N] or None), to what the rows make of all that they attend to,
# [B,T,N,H], and what is to be kept of them.
Attend = Callable[[Heads, jax.Array | None], tuple[jax.Array, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendCached:
    """Attention over a layer of the cache and the new rows, which are written to it: kept is the layer's `LayerCache`.

    Attributes:
        cache: Of that layer alone; the new rows stand from its `length` on.
        step_mask: As in `cached_attention`.
        window: Latest positions that a row attends to, or `None` for all. Static.
        kernels: Of attention and of the cache's writes. Static.
    """

    cache: KVCache
    step_mask: jax.Array | None
    window: int | None = dataclasses.field(metadata={"static": True})
    kernels: Kernels = dataclasses.field(metadata={"static": True})

    def __call__(self, heads: Heads, sinks: jax.Array | None) -> tuple[jax.Array, LayerCache]:
        """See `Attend`."""
        query, kept = written_layer(self.cache, heads, self.kernels)
        options: dict[str, Any] = dict(step_mask=self.step_mask, window=self.window, sinks=sinks, implementation=self.kernels.attention)
        return cached_attention(query, kept.keys, kept.values, self.cache.length, scale=query.shape[-1] ** -0.5, **options), kept


def attend_cached(cache: KVCache, layer: int, *, step_mask: jax.Array | None, window: int | None, kernels: Kernels) -> AttendCached:
    """Attention over a layer of a cache of several; the others as in `AttendCached`."""
    return AttendCached(cache=cache.only(layer), step_mask=step_mask, window=window, kernels=kernels)


def written_layer(cache: KVCache, heads: Heads, kernels: Kernels) -> tuple[jax.Array, LayerCache]:
    """The new rows' queries `[B,T,N,H]`, and a cache's one layer with their keys and values from `length` on, and its new summaries."""
    (keys,), (values,) = cache.keys, cache.values
    query, keys, values = rope_and_write(heads, keys, values, cache.length, implementation=kernels.cache_write)
    if cache.summaries is None:
        return query, LayerCache(keys, values)
    return query, LayerCache(keys, values, cache.summaries.written(0, keys, cache.length, query.shape[1]))


class Attention(nn.Module):
    """One layer's attention. Its input may be wider than D (an EAGLE-3 drafter's is 2 D); its output is `[B,T,D]`, and what is kept.

    Attributes:
        config: Sizes, biases, norms.
        param_dtype: Dtype of the parameters.
        implementation: Passed to `few_row_linear`.
    """

    config: ModelConfig
    param_dtype: jnp.dtype
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self, x: Normed | jax.Array, angles: tuple[jax.Array, jax.Array], attend: Attend, residual: jax.Array
    ) -> tuple[jax.Array, Any]:
        """The rows, perhaps still to be normed, their angles, what they attend to, and what the output is added to."""
        cfg = self.config
        qkv_shape = (cfg.num_kv_heads, cfg.num_heads // cfg.num_kv_heads + 2, cfg.head_dim)
        weight = self.param("qkv", PROJECTION_INIT, (x.shape[-1], *qkv_shape), self.param_dtype)
        bias = self.param("qkv_bias", nn.initializers.zeros, qkv_shape, self.param_dtype) if cfg.qkv_bias else None
        qkv = few_row_linear(x, weight, bias=bias, implementation=self.implementation)
        query_scale, key_scale = self._norm_scale(qkv, cfg.num_heads, "query_norm"), self._norm_scale(qkv, cfg.num_kv_heads, "key_norm")
        norms: dict[str, Any] = dict(query_scale=query_scale, key_scale=key_scale, epsilon=cfg.rms_norm_eps)
        heads = Heads(qkv=qkv, cos=angles[0], sin=angles[1], **norms, clip=cfg.clip_qkv)
        sinks = self.param("sinks", PROJECTION_INIT, (cfg.num_heads,), self.param_dtype) if cfg.attention_sinks else None
        mixed, kept = attend(heads, sinks)
        weight = self.param("output", PROJECTION_INIT, (cfg.num_heads * cfg.head_dim, cfg.hidden_size), self.param_dtype)
        bias = self.param("output_bias", nn.initializers.zeros, (cfg.hidden_size,), self.param_dtype) if cfg.output_bias else None
        mixed = mixed.reshape(*x.shape[:2], -1)
        return few_row_linear(mixed, weight, bias=bias, residual=residual, implementation=self.implementation), kept

    def _norm_scale(self, qkv: jax.Array, num_heads: int, name: str) -> jax.Array | None:
        """Of the norm over each head, or over all heads together."""
        if self.config.qk_norm is None:
            return None
        width = self.config.head_dim * (1 if self.config.qk_norm == "head" else num_heads)
        norm = RMSNorm(self.config.rms_norm_eps, self.param_dtype, name=name)
        return norm.deferred(jnp.zeros((width,), qkv.dtype)).scale
