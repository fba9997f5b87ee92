"""What stands between the gate and up projections and the down projection: SwiGLU (arXiv:2002.05202), or GPT-OSS's clamped form of it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedUnit:
    """`silu(gate) * up`; with a limit `g sigmoid(alpha g) (u + 1)`, of the gate cut above and up cut on both sides.

    A callable of the two halves `[..., F]`, elementwise. Kernels know it by its numbers, which another callable does not have.

    Attributes:
        limit: Where both are cut; `None` is SwiGLU.
        alpha: Read with a limit only.
    """

    limit: float | None = None
    alpha: float = 1.0

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The inner activation."""
        return self.combine(self.activate(gate), up)

    def activate(self, gate: jax.Array) -> jax.Array:
        """What the gate's half becomes before up multiplies it."""
        if self.limit is None:
            return jax.nn.silu(gate)
        gate = jnp.minimum(gate, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate)

    def combine(self, activated: jax.Array, up: jax.Array) -> jax.Array:
        """The inner activation from the activated gate and up."""
        if self.limit is None:
            return activated * up
        return (jnp.clip(up, -self.limit, self.limit) + 1) * activated
