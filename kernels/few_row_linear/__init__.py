"""A linear layer of few rows together with what stands around it: the norm before it, and bias, gate or residual behind it."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from specjax.kernels.few_row_linear.normed import Normed, rms_norm, value_of
from specjax.kernels.few_row_linear.reference import few_row_linear_reference, product, rows_product
from specjax.kernels.few_row_linear.triton_launch import MAX_ROWS, LinearTuning, few_row_linear_triton, why_not
from specjax.kernels.measured import check_implementation, dispatch
from specjax.kernels.shapes import LinearShape

__all__ = ["Normed", "few_row_linear", "product", "rms_norm", "rows_product", "value_of"]

IMPLEMENTATIONS = ("auto", "reference", "triton")


def few_row_linear(
    x: Normed | jax.Array,
    weight: jax.Array,
    *,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    gated: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """`x W + b`, added to `residual` or not; where gated, `silu(x W[:, 0] + b[0]) * (x W[:, 1] + b[1])`.

    The reference rounds to the dtype of `x` after each of these steps, the kernel once at the end, and of `Normed` rows it rounds
    `x * scale` where the reference rounds the normed rows.

    Args:
        x: `[..., D]`; `Normed` rows are normed on the way.
        weight: `[D, ...]`, `[D,2,N]` where gated.
        bias: The weight's shape without D.
        residual: The result's shape, in the dtype of `x`.
        gated: Static.
        implementation: `"auto"`, `"reference"` or `"triton"`, for up to 64 rows in all: more, such as a prefill's, are the reference's.
            `"triton@..."` also says how the work is cut; see `LinearTuning`.

    Returns:
        `[..., *weight.shape[1:]]`, `[..., N]` where gated, in the dtype of `x`.

    Raises:
        ValueError: Shapes that disagree, a residual of another dtype, an unknown implementation, or one that cannot run here.
    """
    check_implementation("few_row_linear", implementation, IMPLEMENTATIONS, tuning=LinearTuning)
    columns = weight.shape[1:]
    if weight.ndim < 2 or x.shape[-1] != weight.shape[0] or (gated and (len(columns) != 2 or columns[0] != 2)):
        expected = "[D,2,N]" if gated else "[D, ...]"
        raise ValueError(f"few_row_linear: expected x [..., D] and weight {expected}, got {tuple(x.shape)} and {tuple(weight.shape)}")
    result = (*x.shape[:-1], *(columns[1:] if gated else columns))
    if bias is not None and bias.shape != columns:
        raise ValueError(f"few_row_linear: expected a bias of shape {columns}, got {bias.shape}")
    if residual is not None and residual.shape != result:
        raise ValueError(f"few_row_linear: expected a residual of shape {result}, got {residual.shape}")
    if residual is not None and residual.dtype != x.dtype:  # one of more digits would lose them in the sum, or change the result's dtype
        raise ValueError(f"few_row_linear: expected a residual of {x.dtype}, as the rows are, got {residual.dtype}")
    reference = functools.partial(few_row_linear_reference, gated=gated)
    arrays = x, weight, bias, residual
    num_rows = math.prod(x.shape[:-1])
    if not 0 < num_rows <= MAX_ROWS or (implementation == "auto" and why_not(_in_rows(x), weight) is not None):
        return reference(*arrays)
    sizes = dict(rows=num_rows, inner=weight.shape[0], columns=math.prod(columns[1:] if gated else columns))
    shape = LinearShape(**sizes, gated=gated, normed=isinstance(x, Normed))

    def flattened(x: Any, weight: Any, bias: Any, residual: Any, tuning: LinearTuning | None = None) -> jax.Array:
        flat = (shape.inner, 2, shape.columns) if gated else (shape.inner, shape.columns)
        bias = None if bias is None else bias.reshape(flat[1:])
        residual = None if residual is None else residual.reshape(num_rows, -1)
        out = few_row_linear_triton(_in_rows(x), weight.reshape(flat), bias, residual, gated=gated, tuning=tuning)
        return out.reshape(result)

    return dispatch(
        implementation,
        shape,
        weight.dtype,
        triton=flattened,
        tuning=LinearTuning,
        reference=reference,
        arrays=arrays,
    )


def _in_rows(x: Normed | jax.Array) -> Any:
    if isinstance(x, Normed):
        return dataclasses.replace(x, x=x.x.reshape(-1, x.shape[-1]))
    return x.reshape(-1, x.shape[-1])
