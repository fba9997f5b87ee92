"""A linear layer with the norm before it and what follows: the specification, in plain jnp, and what runs wherever no kernel does."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.few_row_linear.normed import Normed, value_of
from specjax.kernels.precision import full_precision


def few_row_linear_reference(x: Normed | jax.Array, weight: jax.Array, bias, residual, *, gated: bool) -> jax.Array:
    """See `specjax.kernels.few_row_linear.few_row_linear`.

    Args:
        x: `[..., D]`.
        weight: `[D, ...]`.
        bias: The weight's shape without D, or `None`.
        residual: The result's shape, or `None`.
        gated: Static.
    """
    out = product(value_of(x), weight)
    if bias is not None:
        out = out + bias.astype(out.dtype)
    if gated:
        out = jax.nn.silu(out[..., 0, :]) * out[..., 1, :]
    return out if residual is None else residual + out


def product(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """`x [..., D] @ weight [D, ...]`, in full float32 when `x` is float32."""
    flat = weight.astype(x.dtype).reshape(weight.shape[0], -1)
    out = jax.lax.dot_general(x, flat, (((x.ndim - 1,), (0,)), ((), ())), precision=full_precision(x), preferred_element_type=out_dtype)
    return out.reshape(*x.shape[:-1], *weight.shape[1:])


def rows_product(x: jax.Array, rows: jax.Array) -> jax.Array:
    """`x [..., D]`, `rows [F,D]` → `[..., F]`."""
    contracted = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, rows.astype(x.dtype), contracted, precision=full_precision(x))
