"""The products of a mixture of experts: each row through the experts that it chose, weighted and added up."""

from __future__ import annotations

from collections.abc import Callable

import jax

from specjax.kernels.expert_products.grouped import expert_products_grouped
from specjax.kernels.expert_products.reference import expert_products_reference

IMPLEMENTATIONS = ("auto", "reference", "grouped")
# Up to this many (row, expert) pairs each pair's weights are gathered: one batched product, and nothing of an expert that no row chose is
# read. Beyond it the gathered copies would outgrow the experts themselves.
_MAX_GATHERED_PAIRS = 64


def expert_products(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """`y[m] = sum over j of weights[m,j] * FFN(experts[m,j])(x[m])`, with no limit on the rows that an expert serves.

    Args:
        x: `[M,D]`.
        experts: `[M,C]` int32, the C experts that each row chose, each from 0 to E - 1.
        weights: `[M,C]` float32.
        gate_up: `[E,D,2,F]`.
        down: `[E,F,D]`.
        activation: Of the two inner halves `[..., F]`, gate and up; elementwise.
        gate_up_bias: `[E,2,F]` or `None`.
        down_bias: `[E,D]` or `None`.
        implementation: `"auto"`, `"reference"` or `"grouped"`.

    Returns:
        `[M,D]` in the dtype of `x`, added up in float32.

    Raises:
        ValueError: Shapes that disagree, or an unknown implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"expert_products: implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    num_experts, width, _, ffn = gate_up.shape
    if x.shape[1:] != (width,) or down.shape != (num_experts, ffn, width):
        raise ValueError(
            f"expert_products: expected x [M,D], gate_up [E,D,2,F], down [E,F,D], got {x.shape}, {gate_up.shape}, {down.shape}"
        )
    if experts.shape != weights.shape or experts.shape[0] != x.shape[0]:
        raise ValueError(f"expert_products: experts {experts.shape} and weights {weights.shape} should be [M,C] with M = {x.shape[0]}")
    if implementation == "auto":
        implementation = "reference" if experts.size <= _MAX_GATHERED_PAIRS else "grouped"
    run = expert_products_reference if implementation == "reference" else expert_products_grouped
    return run(x, experts, weights, gate_up, down, activation=activation, gate_up_bias=gate_up_bias, down_bias=down_bias)
