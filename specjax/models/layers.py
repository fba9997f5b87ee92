"""What every module is built of: the dense product and the norm."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from specjax.kernels.few_row_linear import Normed, product
from specjax.kernels.precision import full_precision

__all__ = ["PROJECTION_INIT", "PureModule", "RMSNorm", "float32_einsum", "head_product", "product"]

PROJECTION_INIT = nn.initializers.normal(0.02)


class PureModule(nn.Module):
    """A module that is used as pure functions: its variables are never mutated, and `init` and `apply` return what they compute."""

    if TYPE_CHECKING:
        # Flax types both as a union that also has the mutated collections.
        def init(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102
        def apply(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102


def head_product(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """The product of every LM head: `hidden [..., D]`, `weight [V,D]` (a row a token) → `[..., V]` float32, accumulated in float32."""
    return float32_einsum("...d,vd->...v", hidden, weight.astype(hidden.dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def float32_einsum(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """A product of two arrays of one dtype, in float32; its derivatives are products of arrays of that dtype too.

    (The transpose that JAX would make multiplies float32 by, say, bfloat16: on a GPU at a fraction of the speed of bfloat16 alone.)
    """
    return jnp.einsum(subscripts, x, y, precision=full_precision(x), preferred_element_type=jnp.float32)


@functools.partial(float32_einsum.defjvp, symbolic_zeros=True)
def _float32_einsum_tangent(subscripts: str, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    x, y = primals
    pairs = ((tangents[0], y), (x, tangents[1]))
    parts = [
        jnp.einsum(subscripts, *pair, precision=full_precision(x)).astype(jnp.float32)
        for pair, tangent in zip(pairs, tangents, strict=True)
        if not isinstance(tangent, SymbolicZero)
    ]
    out = float32_einsum(subscripts, x, y)
    return out, functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(out)


class RMSNorm(nn.Module):
    """`x / rms(x) * scale`, statistics in float32. arXiv:1910.07467."""

    epsilon: float
    param_dtype: jnp.dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., D]` → the same."""
        return self.deferred(x).value

    @nn.compact
    def deferred(self, x: jax.Array) -> Normed:
        """The same, to be computed by whoever reads it."""
        return Normed(x, self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype), self.epsilon)
