"""The specification: the chosen rows of both matrices are copied together, and two products are taken of the copies."""

from __future__ import annotations

import jax

from specjax.kernels.few_row_linear import product, rows_product
from specjax.kernels.gated_unit import GatedUnit


def gathered_ffn_reference(
    x: jax.Array,
    activated: jax.Array,
    channels: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    unit: GatedUnit,
    up_bias: jax.Array | None,
) -> jax.Array:
    """See `specjax.kernels.gathered_ffn.gathered_ffn`."""

    def of_group(x: jax.Array, activated: jax.Array, channels: jax.Array) -> jax.Array:
        raised = rows_product(x, up[channels])
        if up_bias is not None:
            raised = raised + up_bias[channels].astype(raised.dtype)
        return product(unit.combine(activated[:, channels], raised), down[channels])

    if x.shape[0] == 1:  # a batch of one product is a product of another kind to XLA
        return of_group(x[0], activated[0], channels[0])[None]
    return jax.vmap(of_group)(x, activated, channels)
