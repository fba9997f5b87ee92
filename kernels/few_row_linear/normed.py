"""Rows that are still to be normed: whoever multiplies by them may norm them on the way. arXiv:1910.07467."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Normed:
    """`x / rms(x) * scale`, not computed yet.

    Attributes:
        x: `[..., D]`.
        scale: `[D]`.
        epsilon: Added to the mean square; static.
    """

    x: jax.Array
    scale: jax.Array
    epsilon: float = dataclasses.field(metadata={"static": True})

    @property
    def value(self) -> jax.Array:
        """`[..., D]` in the dtype of `x`; statistics in float32."""
        return rms_norm(self.x, self.scale, self.epsilon)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return self.x.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of the rows."""
        return self.x.dtype


def value_of(x: Normed | jax.Array) -> jax.Array:
    """The rows, normed where they were to be."""
    return x.value if isinstance(x, Normed) else x


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """`x [..., D] / rms(x) * scale [D]`, statistics in float32."""
    x_f32 = x.astype(jnp.float32)
    normed = x_f32 * jax.lax.rsqrt(jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True) + epsilon)
    return normed.astype(x.dtype) * scale.astype(x.dtype)
