"""Every expert for every row, and the weights of those that a row did not choose are zero: two large dense products. Plain XLA.

Reads all experts once, whatever the rows chose, and computes E / C times what is needed: on a GPU that is still the fastest that XLA does
beyond a few rows, because a loop over experts is bound by its launches. Measured on an H200 with experts of Qwen3-30B-A3B's shape (E = 128,
C = 8), 64 rows, microseconds a layer: 318, in a loop over blocks 5,721, with `lax.ragged_dot` 962; reading all experts takes 281.
(One run, not on record.)
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from specjax.kernels.precision import full_precision

# Rows at a time: bounds the inner activations, which are E F numbers a row.
_MAX_ROWS = 512


def expert_products_dense(
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
    num_rows, num_experts = x.shape[0], gate_up.shape[0]
    precision = full_precision(x)

    def products(x_md: jax.Array, weights_me: jax.Array) -> jax.Array:
        # With the rows repeated it is one product for each expert; otherwise XLA transposes, and so copies, the experts.
        x_emd = jnp.broadcast_to(x_md, (num_experts, *x_md.shape))
        inner_emcf = jnp.einsum("emd,edcf->emcf", x_emd, gate_up.astype(x.dtype), precision=precision)
        if gate_up_bias is not None:
            inner_emcf = inner_emcf + gate_up_bias[:, None].astype(x.dtype)
        weights_em1 = weights_me.T[:, :, None]
        inner_emf = activation(inner_emcf[:, :, 0], inner_emcf[:, :, 1]).astype(jnp.float32) * weights_em1
        # An expert that was not chosen may overflow; zero times infinity would reach the row.
        inner_emf = jnp.where(weights_em1 != 0, inner_emf, 0.0).astype(x.dtype)
        # Contracted over experts and channels at once: the sum over a row's experts costs no pass of its own.
        inner_mx = inner_emf.transpose(1, 0, 2).reshape(x_md.shape[0], -1)
        down_xd = down.astype(x.dtype).reshape(-1, down.shape[2])
        out = jnp.einsum("mx,xd->md", inner_mx, down_xd, precision=precision, preferred_element_type=jnp.float32)
        if down_bias is not None:
            out = out + jnp.einsum("me,ed->md", weights_me, down_bias.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        return out.astype(x.dtype)

    del may_skip  # a choice of expert E is out of bounds, and dropped
    rows = jnp.arange(num_rows)[:, None]
    weights_me = jnp.zeros((num_rows, num_experts), jnp.float32).at[rows, experts].add(weights)
    if num_rows <= _MAX_ROWS:
        return products(x, weights_me)
    extra = -num_rows % _MAX_ROWS
    blocks = [jnp.pad(array, ((0, extra), (0, 0))).reshape(-1, _MAX_ROWS, array.shape[1]) for array in (x, weights_me)]
    return lax.map(lambda block: products(*block), tuple(blocks)).reshape(-1, down.shape[2])[:num_rows]
