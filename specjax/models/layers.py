"""What every module is built of: the dense product and the norm."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

PROJECTION_INIT = nn.initializers.normal(0.02)


class PureModule(nn.Module):
    """A module that is used as pure functions: its variables are never mutated, and `init` and `apply` return what they compute."""

    if TYPE_CHECKING:
        # Flax types both as a union that also has the mutated collections.
        def init(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102
        def apply(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102


def product(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """`x [..., D] @ weight [D, ...]`, in full float32 when `x` is float32 (TF32 would change which token wins)."""
    flat = weight.astype(x.dtype).reshape(weight.shape[0], -1)
    out = jax.lax.dot_general(x, flat, (((x.ndim - 1,), (0,)), ((), ())), precision=full_precision(x), preferred_element_type=out_dtype)
    return out.reshape(*x.shape[:-1], *weight.shape[1:])


@jax.custom_jvp
def head_product(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """The product of every LM head: `hidden [..., D]`, `weight [V,D]` (a row a token) → `[..., V]` float32, accumulated in float32."""
    weight = weight.astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, weight, precision=full_precision(hidden), preferred_element_type=jnp.float32)


@functools.partial(head_product.defjvp, symbolic_zeros=True)
def _head_product_tangent(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """Derivatives in the dtype of `hidden`: the transpose of the above would multiply bfloat16 by float32, at a fraction of the speed."""
    hidden, weight = primals

    def rounded(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        out = jnp.einsum("...d,vd->...v", hidden, weight.astype(hidden.dtype), precision=full_precision(hidden))
        return out.astype(jnp.float32)

    pairs = ((tangents[0], weight), (hidden, tangents[1]))
    parts = [rounded(*pair) for pair, tangent in zip(pairs, tangents, strict=True) if not isinstance(tangent, SymbolicZero)]
    out = head_product(hidden, weight)
    return out, functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(out)


def full_precision(x: jax.Array) -> jax.lax.Precision | None:
    """The `precision` of a product with `x`: all of float32, where it is float32."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


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
