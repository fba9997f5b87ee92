"""One decoder for every dense family: pre-norm, grouped-query attention, rotary embedding, SwiGLU.

Layers are unrolled, each with its own weights and cache arrays: `lax.scan` over stacked weights copies them. Projections that read the
same input are one product: `qkv` is stored `[D,K,N/K+2,H]` (per key/value head: its query heads, its key, its value), `gate_up`
`[D,2,F]`. Those layouts shard over K and F without crossing a boundary.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.config import ModelConfig
from specjax.kernels.cached_attention import cached_attention
from specjax.models.kv_cache import KVCache, write_layer
from specjax.models.rope import apply_rotary, rotary_angles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransformerOutput:
    """What one forward pass returns.

    Attributes:
        hidden: `[B,T,D]` after the final norm; `Transformer.logits` turns it into scores.
        cache: The cache with the T new positions written and `length` advanced by T.
        features: `[B,T,C*D]`, the residual stream at the C boundaries asked for, side by side; `None` if none were.
    """

    hidden: jax.Array
    cache: KVCache
    features: jax.Array | None


def _product(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """`x [..., D] @ weight [D, ...]`, in full float32 when `x` is float32 (TF32 would change which token wins)."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    flat = weight.astype(x.dtype).reshape(weight.shape[0], -1)
    out = jax.lax.dot_general(x, flat, (((x.ndim - 1,), (0,)), ((), ())), precision=precision, preferred_element_type=out_dtype)
    return out.reshape(*x.shape[:-1], *weight.shape[1:])


_PROJECTION_INIT = nn.initializers.normal(0.02)


class RMSNorm(nn.Module):
    """`x / rms(x) * scale`, statistics in float32. arXiv:1910.07467."""

    epsilon: float
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        x_f32 = x.astype(jnp.float32)
        normed = x_f32 * jax.lax.rsqrt(jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True) + self.epsilon)
        return normed.astype(x.dtype) * scale.astype(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over the cache."""

    config: ModelConfig
    param_dtype: jnp.dtype
    implementation: str

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        length: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        step_mask: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        cfg = self.config
        group_size = cfg.num_heads // cfg.num_kv_heads
        qkv_shape = (cfg.num_kv_heads, group_size + 2, cfg.head_dim)
        qkv = _product(x, self.param("qkv", _PROJECTION_INIT, (cfg.hidden_size, *qkv_shape), self.param_dtype))
        if cfg.qkv_bias:
            qkv = qkv + self.param("qkv_bias", nn.initializers.zeros, qkv_shape, self.param_dtype).astype(x.dtype)
        query = qkv[:, :, :, :group_size].reshape(*x.shape[:2], cfg.num_heads, cfg.head_dim)
        key, value = qkv[:, :, :, group_size], qkv[:, :, :, group_size + 1]
        if cfg.qk_norm:
            query = RMSNorm(cfg.rms_norm_eps, self.param_dtype, name="query_norm")(query)
            key = RMSNorm(cfg.rms_norm_eps, self.param_dtype, name="key_norm")(key)
        query, key = apply_rotary(query, *angles), apply_rotary(key, *angles)
        keys, values = write_layer(keys, values, key, value, length)
        mixed = cached_attention(
            query, keys, values, length, scale=cfg.head_dim**-0.5, step_mask=step_mask, implementation=self.implementation
        )
        output = self.param("output", _PROJECTION_INIT, (cfg.num_heads * cfg.head_dim, cfg.hidden_size), self.param_dtype)
        return _product(mixed.reshape(*x.shape[:2], -1), output), keys, values


class FeedForward(nn.Module):
    """SwiGLU: `(silu(x W_gate) * (x W_up)) W_down`. arXiv:2002.05202."""

    config: ModelConfig
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        gate_up = _product(x, self.param("gate_up", _PROJECTION_INIT, (cfg.hidden_size, 2, cfg.intermediate_size), self.param_dtype))
        inner = nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
        return _product(inner, self.param("down", _PROJECTION_INIT, (cfg.intermediate_size, cfg.hidden_size), self.param_dtype))


class Transformer(nn.Module):
    """The decoder. `apply({"params": p}, tokens, cache)` runs a pass, `apply(..., hidden, method="logits")` the LM head.

    Attributes:
        config: Sizes.
        dtype: Compute dtype: activations, and the cache that `init_cache` makes. Softmax, rotary angles, norms' statistics and logits are
            float32 whatever it is.
        param_dtype: Dtype that `init` gives the parameters. Parameters of another dtype than `dtype` are cast at each use; where speed
            counts store them in `dtype`.
        attention_implementation: Passed to `cached_attention`.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.bfloat16
    param_dtype: jnp.dtype = jnp.bfloat16
    attention_implementation: str = "auto"

    if TYPE_CHECKING:
        # Flax types both as a union that also has the mutated collections.
        def init(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102
        def apply(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102

    def setup(self) -> None:
        """Declares the parameters."""
        cfg = self.config
        self.embedding = self.param("embedding", _PROJECTION_INIT, (cfg.vocab_size, cfg.hidden_size), self.param_dtype)
        self.blocks = [
            _Block(cfg, self.param_dtype, self.attention_implementation, name=f"layer_{index}") for index in range(cfg.num_layers)
        ]
        self.final_norm = RMSNorm(cfg.rms_norm_eps, self.param_dtype)
        if not cfg.tie_word_embeddings:
            self.lm_head = self.param("lm_head", _PROJECTION_INIT, (cfg.vocab_size, cfg.hidden_size), self.param_dtype)

    def __call__(
        self, tokens: jax.Array, cache: KVCache, *, feature_layers: tuple[int, ...] = (), step_mask: jax.Array | None = None
    ) -> TransformerOutput:
        """Runs T new positions a row.

        Args:
            tokens: `[B,T]` int32, standing at positions `cache.length ... cache.length + T - 1`.
            cache: Keys and values so far; its capacity must hold `length + T`.
            feature_layers: Boundaries 0 ... L at which to capture the residual stream: i is the input of layer i, L the output of the last
                layer before the final norm.
            step_mask: `[T,T]` bool among the new rows; `None` is causal.

        Returns:
            A `TransformerOutput`.

        Raises:
            ValueError: A feature layer outside 0 ... L.
        """
        cfg = self.config
        if any(not 0 <= index <= cfg.num_layers for index in feature_layers):
            raise ValueError(f"feature_layers must be boundaries from 0 to {cfg.num_layers}, got {feature_layers}")
        length = cache.length
        positions = length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        angles = rotary_angles(cfg.rope, cfg.head_dim, positions)
        x = jnp.take(self.embedding, tokens, axis=0, mode="clip").astype(self.dtype)
        captured, all_keys, all_values = {}, [], []
        for index, block in enumerate(self.blocks):
            if index in feature_layers:
                captured[index] = x
            x, keys, values = block(x, cache.keys[index], cache.values[index], length, angles, step_mask)
            all_keys.append(keys)
            all_values.append(values)
        captured[cfg.num_layers] = x
        features = jnp.concatenate([captured[index] for index in feature_layers], axis=-1) if feature_layers else None
        cache = dataclasses.replace(cache, keys=tuple(all_keys), values=tuple(all_values), length=length + tokens.shape[1])
        return TransformerOutput(hidden=self.final_norm(x), cache=cache, features=features)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The LM head: `[..., D]` → `[..., V]` float32."""
        head = self.embedding if self.config.tie_word_embeddings else self.lm_head
        precision = jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None
        return jnp.einsum("...d,vd->...v", hidden, head.astype(hidden.dtype), precision=precision, preferred_element_type=jnp.float32)

    def init_cache(self, *, batch_size: int, capacity: int, sharding=None) -> KVCache:
        """An empty cache in the compute dtype: `batch_size` rows of `capacity` slots."""
        cfg = self.config
        return KVCache.zeros(
            num_layers=cfg.num_layers,
            batch_size=batch_size,
            num_kv_heads=cfg.num_kv_heads,
            capacity=capacity,
            head_dim=cfg.head_dim,
            dtype=self.dtype,
            sharding=sharding,
        )

    def init_params(self, rng: jax.Array) -> dict:
        """Random parameters (for tests and timing; untrained).

        Args:
            rng: A JAX key.

        Returns:
            The nested dict that `apply` takes under `"params"`.
        """
        tokens = jnp.zeros((1, 1), jnp.int32)
        return self.init(rng, tokens, self.init_cache(batch_size=1, capacity=1), method="_touch_all")["params"]

    def _touch_all(self, tokens: jax.Array, cache: KVCache) -> jax.Array:
        return self.logits(self(tokens, cache).hidden)


class _Block(nn.Module):
    config: ModelConfig
    param_dtype: jnp.dtype
    implementation: str

    @nn.compact
    def __call__(self, x, keys, values, length, angles, step_mask):
        cfg = self.config
        normed = RMSNorm(cfg.rms_norm_eps, self.param_dtype, name="attention_norm")(x)
        mixed, keys, values = Attention(cfg, self.param_dtype, self.implementation, name="attention")(
            normed, keys, values, length, angles, step_mask
        )
        x = x + mixed
        normed = RMSNorm(cfg.rms_norm_eps, self.param_dtype, name="mlp_norm")(x)
        return x + FeedForward(cfg, self.param_dtype, name="mlp")(normed), keys, values
