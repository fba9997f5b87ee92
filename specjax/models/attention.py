"""Grouped-query attention: projections and rotary embedding, around whatever the new rows attend to. arXiv:2305.13245."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.config import ModelConfig
from specjax.kernels.cached_attention import cached_attention
from specjax.models.kv_cache import KVCache, LayerCache, write_layer
from specjax.models.layers import PROJECTION_INIT, RMSNorm, product
from specjax.models.rope import apply_rotary

# From query [B,T,N,H], key and value [B,T,K,H] of the new rows (rotary embedding applied) and sinks ([N] or None) to what the rows make of
# all that they attend to, [B,T,N,H], and what is to be kept of them.
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], tuple[jax.Array, Any]]


def attend_cached(cache: KVCache, layer: int, *, step_mask: jax.Array | None, window: int | None, implementation: str) -> Attend:
    """Attention over a layer of the cache and the new rows, which are written to it: kept is the layer's `LayerCache`.

    Args:
        cache: The new rows stand from its `length` on.
        layer: Which.
        step_mask: As in `cached_attention`.
        window: Latest positions that a row attends to, or `None` for all.
        implementation: Passed to `cached_attention`.
    """

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, Any]:
        kept = written_layer(cache, layer, key, value)
        options: dict[str, Any] = dict(step_mask=step_mask, window=window, sinks=sinks, implementation=implementation)
        return cached_attention(query, kept.keys, kept.values, cache.length, scale=query.shape[-1] ** -0.5, **options), kept

    return attend


def written_layer(cache: KVCache, layer: int, key: jax.Array, value: jax.Array) -> LayerCache:
    """A layer of the cache with the new rows' keys and values `[B,T,K,H]` written from `cache.length` on, and the summaries after that."""
    keys, values = write_layer(cache.keys[layer], cache.values[layer], key, value, cache.length)
    if cache.summaries is None:
        return LayerCache(keys, values)
    return LayerCache(keys, values, cache.summaries.written(layer, keys, cache.length, key.shape[1]))


class Attention(nn.Module):
    """One layer's attention. Its input may be wider than D (an EAGLE-3 drafter's is 2 D); its output is `[B,T,D]`, and what is kept.

    Attributes:
        config: Sizes, biases, norms.
        param_dtype: Dtype of the parameters.
    """

    config: ModelConfig
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, angles: tuple[jax.Array, jax.Array], attend: Attend) -> tuple[jax.Array, Any]:
        cfg = self.config
        group_size = cfg.num_heads // cfg.num_kv_heads
        qkv_shape = (cfg.num_kv_heads, group_size + 2, cfg.head_dim)
        qkv = product(x, self.param("qkv", PROJECTION_INIT, (x.shape[-1], *qkv_shape), self.param_dtype))
        if cfg.qkv_bias:
            qkv = qkv + self.param("qkv_bias", nn.initializers.zeros, qkv_shape, self.param_dtype).astype(x.dtype)
        query, key, value = qkv[:, :, :, :group_size], qkv[:, :, :, group_size], qkv[:, :, :, group_size + 1]
        query = query.reshape(*x.shape[:2], cfg.num_heads, cfg.head_dim)
        query, key = self._normed(query, "query_norm"), self._normed(key, "key_norm")
        if cfg.clip_qkv is not None:
            query, key, value = (jnp.clip(part, -cfg.clip_qkv, cfg.clip_qkv) for part in (query, key, value))
        query, key = apply_rotary(query, *angles), apply_rotary(key, *angles)
        sinks = self.param("sinks", PROJECTION_INIT, (cfg.num_heads,), self.param_dtype) if cfg.attention_sinks else None
        mixed, kept = attend(query, key, value, sinks)
        output = self.param("output", PROJECTION_INIT, (cfg.num_heads * cfg.head_dim, cfg.hidden_size), self.param_dtype)
        mixed = product(mixed.reshape(*x.shape[:2], -1), output)
        if cfg.output_bias:
            mixed = mixed + self.param("output_bias", nn.initializers.zeros, (cfg.hidden_size,), self.param_dtype).astype(x.dtype)
        return mixed, kept

    def _normed(self, heads: jax.Array, name: str) -> jax.Array:
        """`[B,T,heads,H]`, normed over each head, over all heads together, or not at all."""
        cfg = self.config
        if cfg.qk_norm is None:
            return heads
        norm = RMSNorm(cfg.rms_norm_eps, self.param_dtype, name=name)
        return norm(heads) if cfg.qk_norm == "head" else norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)
