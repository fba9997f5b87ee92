"""Triton kernel of a product with few rows: a strip of columns, or a part of the inner sum of one, with the norm before and what follows.

Imported only where it runs: this module needs triton.
"""
# What stands below is Triton's language, which only looks like Python.
# pyright: reportMissingImports=false, reportOperatorIssue=false, reportOptionalOperand=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl


@triton.jit
def _load(pointers, inside, RAGGED: tl.constexpr):
    """Without a mask where every tile is whole: a mask costs registers and may cost the width of a load."""
    if RAGGED:
        return tl.load(pointers, mask=inside, other=0.0)
    return tl.load(pointers)


@triton.jit
def multiply_strip(
    x,  # [M,D]
    weight,  # [D,N], or [D,2,N] of a gated product
    scale,  # [D]; read where NORMED
    bias,  # [N] or [2,N]; read where HAS_BIAS
    residual,  # [M,N]; read where HAS_RESIDUAL
    last_row,  # M - 1
    inner_units,  # D in units of INNER_UNIT: sizes are arguments, so that a compiled kernel serves all layers, and their divisors are known
    column_units,  # N in units of COLUMN_UNIT
    out,  # [M,N]; of several parts [PARTS,M,N] float32, or [PARTS,M,2,N] of a gated product
    squares,  # [PARTS,M] float32, each part's sum of x^2; written where NORMED, by several parts
    EPSILON: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PARTS: tl.constexpr,
    INNER_UNIT: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    RAGGED: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    READ_AHEAD: tl.constexpr,  # of one row a tile's numbers are less than 4 bytes a thread, too few for an asynchronous copy
    STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,  # one without tensor cores
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_N columns (of both halves, where gated) and one part of the inner sum, all rows.

    For one row tensor cores would multiply fifteen more that are nothing, and norm them before. Without them each thread adds up what it
    loads, in float32, and the threads' sums are added at the end.
    """
    strip, part = tl.program_id(0), tl.program_id(1)
    inner, width = inner_units * INNER_UNIT, column_units * COLUMN_UNIT
    stride = 2 * width if GATED else width
    rows, columns, steps = tl.arange(0, BLOCK_M), strip * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    is_row, is_column = rows <= last_row, columns < width
    tiles = tl.cdiv(inner, BLOCK_D)
    first, last = part * tiles // PARTS, (part + 1) * tiles // PARTS

    w_offsets = steps[:, None] * stride + columns[None, :]
    strip_weight = weight + first.to(tl.int64) * BLOCK_D * stride  # a matrix may hold more than 2^31 numbers
    if TENSOR_CORES:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        squared = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        x_offsets = rows[:, None] * inner + steps[None, :]
    else:
        sums = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
        up_sums = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
        squared = tl.zeros([BLOCK_D], tl.float32)
        if READ_AHEAD:
            ahead = first * BLOCK_D + steps
            row_ahead = tl.load(x + ahead, mask=ahead < inner, other=0.0)
            gain_ahead = tl.load(scale + ahead, mask=ahead < inner, other=0.0) if NORMED else row_ahead
    for tile in tl.range(first, last, num_stages=STAGES):
        inside_steps = tile * BLOCK_D + steps < inner
        inside = inside_steps[:, None] & is_column[None, :]
        w = _load(strip_weight + w_offsets, inside, RAGGED)
        if TENSOR_CORES:
            in_rows = is_row[:, None] & inside_steps[None, :] if RAGGED else is_row[:, None]
            a = tl.load(x + tile * BLOCK_D + x_offsets, mask=in_rows, other=0.0)
            if NORMED:  # the rows' own factor comes at the end: a program needs no pass over x before its first product
                wide = a.to(tl.float32)
                squared += wide * wide
                gain = _load(scale + tile * BLOCK_D + steps, inside_steps, RAGGED)
                a = (wide * gain.to(tl.float32)[None, :]).to(a.dtype)
            sums = tl.dot(a, w, sums, input_precision="ieee")
            if GATED:
                w_up = _load(strip_weight + width + w_offsets, inside, RAGGED)
                up_sums = tl.dot(a, w_up, up_sums, input_precision="ieee")
        else:
            if READ_AHEAD:
                row, gain = row_ahead.to(tl.float32), gain_ahead.to(tl.float32)
                ahead = (tile + 1) * BLOCK_D + steps
                row_ahead = tl.load(x + ahead, mask=ahead < inner, other=0.0)
                gain_ahead = tl.load(scale + ahead, mask=ahead < inner, other=0.0) if NORMED else row_ahead
            else:
                row = _load(x + tile * BLOCK_D + steps, inside_steps, RAGGED).to(tl.float32)
                gain = _load(scale + tile * BLOCK_D + steps, inside_steps, RAGGED).to(tl.float32) if NORMED else row
            if NORMED:
                squared += row * row
                row *= gain
            sums += row[:, None] * w.to(tl.float32)
            if GATED:
                w_up = _load(strip_weight + width + w_offsets, inside, RAGGED)
                up_sums += row[:, None] * w_up.to(tl.float32)
        strip_weight += BLOCK_D * stride
    if not TENSOR_CORES:
        sums = tl.sum(sums, axis=0)[None, :]
        up_sums = tl.sum(up_sums, axis=0)[None, :]
        squared = squared[None, :]

    in_result = is_row[:, None] & is_column[None, :]
    if PARTS == 1:
        if NORMED:
            factor = tl.rsqrt(tl.sum(squared, axis=1) / inner + EPSILON)
            sums *= factor[:, None]
            up_sums *= factor[:, None]
        if HAS_BIAS:
            sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if GATED:
            if HAS_BIAS:
                up_sums += tl.load(bias + width + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
            sums = sums / (1.0 + tl.exp(-sums)) * up_sums
        offsets = rows[:, None] * width + columns[None, :]
        if HAS_RESIDUAL:
            sums += tl.load(residual + offsets, mask=in_result, other=0.0).to(tl.float32)
        tl.store(out + offsets, sums.to(out.dtype.element_ty), mask=in_result)
    else:
        places = part * (last_row + 1) + rows
        offsets = places[:, None] * stride + columns[None, :]
        tl.store(out + offsets, sums, mask=in_result)
        if GATED:
            tl.store(out + width + offsets, up_sums, mask=in_result)
        if NORMED:
            tl.store(squares + places, tl.sum(squared, axis=1), mask=is_row & (strip == 0))
