"""The products of a mixture of experts: each row through the experts that it chose, weighted and added up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.kernels.expert_products.dense import expert_products_dense
from specjax.kernels.expert_products.grouped import expert_products_grouped
from specjax.kernels.expert_products.reference import expert_products_reference
from specjax.kernels.expert_products.triton_launch import ExpertTuning, expert_products_triton, serves
from specjax.kernels.gated_unit import GatedUnit
from specjax.kernels.measured import check_implementation, in_place_of, kernel_choice, where_it_fits, with_derivative_of
from specjax.kernels.shapes import ExpertShape

__all__ = ["IMPLEMENTATIONS", "ExpertTuning", "expert_products", "without_kernel"]

IMPLEMENTATIONS = ("auto", "reference", "grouped", "dense", "triton")
_RUN = {"reference": expert_products_reference, "grouped": expert_products_grouped, "dense": expert_products_dense}
# Gathering a pair's weights costs about five times the reading of its expert (4.0 to 5.3 in one run on an H200, not on record).
_GATHER_COST = 5


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
    may_skip: bool = False,
) -> jax.Array:
    """`y[m] = sum over j of weights[m,j] * FFN(experts[m,j])(x[m])`, with no limit on the rows that an expert serves.

    Args:
        x: `[M,D]`.
        experts: `[M,C]` int32, the C experts that each row chose, each from 0 to E - 1; where `may_skip`, E is none at all.
        weights: `[M,C]` float32.
        gate_up: `[E,D,2,F]`.
        down: `[E,F,O]`; O is D but where something else is added up than the mixture.
        activation: Of the two inner halves `[..., F]`, gate and up; elementwise.
        gate_up_bias: `[E,2,F]` or `None`.
        down_bias: `[E,D]` or `None`.
        implementation: `"reference"` gathers the experts of each row; `"grouped"` loops over blocks of rows that share an expert;
            `"dense"` runs every row through every expert; `"triton"` is a kernel that reads the chosen experts once, for up to 64 rows
            (more, such as a prefill's, are those of `"auto"` without it) and a `GatedUnit` as activation, and `"triton@..."` also says how
            its work is cut; see `ExpertTuning`. `"auto"` takes what is fastest: on a CPU `grouped` (for few bfloat16 rows
            `reference`), elsewhere `triton` where it was measured to be (see `specjax.kernels.measured`), or else `reference` for few rows
            and `dense` for more. The derivative of `"grouped"` and `"triton"` is that of `"dense"`, which runs every expert.
        may_skip: Static: some of `experts` may be E. Such a choice adds nothing, whatever its weight; `"grouped"` and `"triton"` spend
            nothing on it, `"reference"` and `"dense"` as much as on any other.

    Returns:
        `[M,O]` in the dtype of `x`, added up in float32.

    Raises:
        ValueError: Shapes that disagree, an unknown implementation, or one that cannot run here.
    """
    check_implementation("expert_products", implementation, IMPLEMENTATIONS, tuning=ExpertTuning)
    if gate_up.ndim != 4 or x.shape[1:] != gate_up.shape[1:2] or down.shape[:2] != (gate_up.shape[0], gate_up.shape[3]):
        raise ValueError(
            f"expert_products: expected x [M,D], gate_up [E,D,2,F], down [E,F,O], got {x.shape}, {gate_up.shape}, {down.shape}"
        )
    if experts.shape != weights.shape or experts.shape[0] != x.shape[0]:
        raise ValueError(f"expert_products: experts {experts.shape} and weights {weights.shape} should be [M,C] with M = {x.shape[0]}")
    arrays = x, experts, weights, gate_up, down, gate_up_bias, down_bias

    def positional(products: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def run(*arrays: Any) -> jax.Array:
            return products(*arrays[:5], activation=activation, gate_up_bias=arrays[5], down_bias=arrays[6], may_skip=may_skip)

        return run

    # The loop has no derivative, and the reference gathers a copy of an expert for each pair.
    dense = positional(expert_products_dense)
    run = {name: positional(products) for name, products in _RUN.items()}
    run["grouped"] = with_derivative_of(dense, run["grouped"])
    if implementation in run:
        return run[implementation](*arrays)
    elsewhere = without_kernel(experts.size, gate_up.shape[0])
    # On a CPU the loop is the faster for any number of rows, but XLA of JAX 0.10 converts bfloat16 experts to float32 for it, all of them.
    on_cpu = "reference" if elsewhere == "reference" and x.dtype != jnp.float32 else "grouped"
    branches = {"cpu": run[on_cpu], "default": run[elsewhere]}
    if serves(experts.shape) and (implementation != "auto" or isinstance(activation, GatedUnit)):
        runs, cut = kernel_choice(implementation, ExpertShape.of(experts.shape, gate_up.shape), gate_up.dtype)
        kernel = functools.partial(expert_products_triton, tuning=ExpertTuning.of_text(cut) if cut else None)
        triton = positional(kernel)
        if implementation != "auto":
            return in_place_of(dense, triton)(*arrays)
        if runs:
            branches["cuda"] = in_place_of(dense, where_it_fits(triton, run[elsewhere]))
    return lax.platform_dependent(*arrays, **branches)


def without_kernel(num_pairs: int, num_experts: int) -> str:
    """What `"auto"` takes on a GPU where no kernel is known to be faster.

    Args:
        num_pairs: M C.
        num_experts: E.
    """
    return "reference" if _GATHER_COST * num_pairs <= num_experts else "dense"
