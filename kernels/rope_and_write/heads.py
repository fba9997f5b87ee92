"""Queries, keys and values of new rows as one projection gives them: what is still to be done to them, and how."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.kernels.few_row_linear.normed import rms_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """Rows that are neither normed, clipped nor rotated yet.

    Attributes:
        qkv: `[B,T,K,N/K+2,H]`: for each key/value head its query heads, its key, its value.
        cos: `[B,T,H/2]` float32.
        sin: `[B,T,H/2]` float32.
        query_scale: Of the norm over each query head `[H]`, or over all of them `[N*H]`; `None` norms neither queries nor keys.
        key_scale: The same of the keys, `[H]` or `[K*H]`.
        epsilon: Of the norms; static.
        clip: Queries, keys and values are clipped to plus and minus this; `None` does not clip. Static.
    """

    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    query_scale: jax.Array | None = None
    key_scale: jax.Array | None = None
    epsilon: float = dataclasses.field(default=0.0, metadata={"static": True})
    clip: float | None = dataclasses.field(default=None, metadata={"static": True})

    def rotated(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query `[B,T,N,H]`, key and value `[B,T,K,H]`: normed, clipped, and rotated but for the value."""
        batch, num_rows, _, both, head_dim = self.qkv.shape
        query, key, value = self.qkv[:, :, :, : both - 2], self.qkv[:, :, :, both - 2], self.qkv[:, :, :, both - 1]
        query = query.reshape(batch, num_rows, -1, head_dim)
        query, key = self._normed(query, self.query_scale), self._normed(key, self.key_scale)
        if self.clip is not None:
            query, key, value = (jnp.clip(part, -self.clip, self.clip) for part in (query, key, value))
        return apply_rotary(query, self.cos, self.sin), apply_rotary(key, self.cos, self.sin), value

    def _normed(self, heads: jax.Array, scale: jax.Array | None) -> jax.Array:
        if scale is None:
            return heads
        if scale.shape[0] == heads.shape[-1]:
            return rms_norm(heads, scale, self.epsilon)
        return rms_norm(heads.reshape(*heads.shape[:2], -1), scale, self.epsilon).reshape(heads.shape)


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs `(x[i], x[i + H/2])`.

    Args:
        x: `[B,T,heads,H]`.
        cos: `[B,T,H/2]` float32.
        sin: `[B,T,H/2]` float32.

    Returns:
        `[B,T,heads,H]` in the dtype of `x`; the arithmetic is float32.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
