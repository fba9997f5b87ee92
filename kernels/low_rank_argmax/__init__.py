"""The token that a low-rank draft LM head scores highest, `argmax W_up W_down h`. arXiv:2605.10453."""

from __future__ import annotations

from typing import Any

import jax

from specjax.kernels.low_rank_argmax.reference import low_rank_argmax_reference
from specjax.kernels.low_rank_argmax.triton_launch import MAX_ROWS, low_rank_argmax_triton, why_not
from specjax.kernels.measured import check_implementation, dispatch
from specjax.kernels.shapes import LowRankShape

IMPLEMENTATIONS = ("auto", "reference", "triton")


def low_rank_argmax(hidden: jax.Array, down: jax.Array, up: jax.Array, *, implementation: str = "auto") -> tuple[jax.Array, jax.Array]:
    """The arg-max and its score, as `jnp.argmax` has it: of equal scores the lower token, and the first NaN before all.

    Args:
        hidden: `[M,D]`.
        down: `[R,D]`; the inner product is rounded to the dtype of `hidden`.
        up: `[V,R]`.
        implementation: `"auto"`, `"reference"` or `"triton"`, which never writes the scores `[M,V]`; for M up to 64: more are the
            reference's.

    Returns:
        Tokens `[M]` int32 and scores `[M]` float32.

    Raises:
        ValueError: Shapes that disagree, an unknown implementation, or one that cannot run here.
    """
    check_implementation("low_rank_argmax", implementation, IMPLEMENTATIONS)
    fits = hidden.ndim == down.ndim == up.ndim == 2 and hidden.shape[1] == down.shape[1] and up.shape[1] == down.shape[0]
    if not fits:
        raise ValueError(f"low_rank_argmax: expected hidden [M,D], down [R,D], up [V,R], got {hidden.shape}, {down.shape}, {up.shape}")
    if not 0 < hidden.shape[0] <= MAX_ROWS or (implementation == "auto" and why_not(hidden, up) is not None):
        return low_rank_argmax_reference(hidden, down, up)
    shape = LowRankShape(rows=hidden.shape[0], hidden=hidden.shape[1], rank=down.shape[0], vocab=up.shape[0])
    functions: dict[str, Any] = dict(triton=low_rank_argmax_triton, reference=low_rank_argmax_reference)
    return dispatch(implementation, shape, up.dtype, **functions, arrays=(hidden, down, up))
