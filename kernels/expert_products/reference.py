"""The specification: sums are float32, the weights of each (row, expert) pair are gathered, and every pair is a product of its own.

Memory: M * C copies of an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.kernels.precision import full_precision


def expert_products_reference(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    gate_up_bias: jax.Array | None,
    down_bias: jax.Array | None,
    may_skip: bool,
) -> jax.Array:
    """See `specjax.kernels.expert_products.expert_products`."""
    precision = full_precision(x)
    sums = {"precision": precision, "preferred_element_type": jnp.float32}
    skipped = (experts == gate_up.shape[0])[:, :, None] if may_skip else None
    if may_skip:
        experts = jnp.minimum(experts, gate_up.shape[0] - 1)  # weights of some expert, whose result nobody reads
    inner = jnp.einsum("md,mjdcf->mjcf", x, gate_up[experts].astype(x.dtype), **sums)
    if gate_up_bias is not None:
        inner = inner + gate_up_bias[experts].astype(jnp.float32)
    inner = activation(inner[:, :, 0], inner[:, :, 1]).astype(x.dtype)
    out = jnp.einsum("mjf,mjfd->mjd", inner, down[experts].astype(x.dtype), **sums)
    if down_bias is not None:
        out = out + down_bias[experts].astype(jnp.float32)
    out = out * weights[:, :, None]
    if skipped is not None:
        out = jnp.where(skipped, 0.0, out)
    return out.sum(axis=1).astype(x.dtype)
