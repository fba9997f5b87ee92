"""Triton kernels of a feed-forward network's chosen channels: rows of the up and down projections, read by their numbers.

Imported only where it runs: this module needs triton.
"""
# What stands below is Triton's language, which only looks like Python.
# pyright: reportMissingImports=false, reportOperatorIssue=false, reportOptionalOperand=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl


@triton.jit
def chosen_up(
    x,  # [G,T,D]
    activated,  # [G,T,F]
    channels,  # [G,k] int32
    up,  # [F,D]
    bias,  # [F]; read where HAS_BIAS
    inner,  # [G,T,k] in the dtype of `x`
    NUM_ROWS: tl.constexpr,  # T
    KEPT: tl.constexpr,  # k
    WIDTH: tl.constexpr,  # D
    FFN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    LIMIT: tl.constexpr,  # read where IS_CLAMPED
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_N of a group's channels."""
    group = tl.program_id(1)
    row, entry = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_entry = row < NUM_ROWS, entry < KEPT
    channel = tl.load(channels + group * KEPT + entry, mask=is_entry, other=0)
    place = group * NUM_ROWS + row
    row_of_up = channel.to(tl.int64) * WIDTH
    raised = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, WIDTH, BLOCK_D):
        depth = start + tl.arange(0, BLOCK_D)
        is_depth = depth < WIDTH
        tokens = tl.load(x + place[:, None] * WIDTH + depth[None, :], mask=is_row[:, None] & is_depth[None, :], other=0.0)
        weight = tl.load(up + row_of_up[:, None] + depth[None, :], mask=is_entry[:, None] & is_depth[None, :], other=0.0)
        raised = tl.dot(tokens, tl.trans(weight.to(tokens.dtype)), raised, input_precision="ieee")
    if HAS_BIAS:
        raised += tl.load(bias + channel, mask=is_entry, other=0.0).to(tl.float32)[None, :]
    in_inner = is_row[:, None] & is_entry[None, :]
    gate = tl.load(activated + place[:, None] * FFN + channel[None, :], mask=in_inner, other=0.0).to(tl.float32)
    if IS_CLAMPED:  # comparisons, which let a NaN through
        raised = tl.where(raised > LIMIT, LIMIT, tl.where(raised < -LIMIT, -LIMIT, raised)) + 1.0
    tl.store(inner + place[:, None] * KEPT + entry[None, :], (gate * raised).to(inner.dtype.element_ty), mask=in_inner)


@triton.jit
def chosen_down(
    inner,  # [G,T,k]
    channels,  # [G,k] int32
    down,  # [F,O]
    out,  # [G,PARTS,T,O] float32
    NUM_ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    WIDTH: tl.constexpr,  # O
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N outputs of one part of a group's channels."""
    part, group = tl.program_id(1), tl.program_id(2)
    row, column = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < NUM_ROWS, column < WIDTH
    num_tiles = tl.cdiv(KEPT, BLOCK_K)
    result = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in range(part * num_tiles // PARTS, (part + 1) * num_tiles // PARTS):
        entry = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        is_entry = entry < KEPT
        channel = tl.load(channels + group * KEPT + entry, mask=is_entry, other=0)
        offsets = (group * NUM_ROWS + row)[:, None] * KEPT + entry[None, :]
        tokens = tl.load(inner + offsets, mask=is_row[:, None] & is_entry[None, :], other=0.0)
        weight_offsets = channel.to(tl.int64)[:, None] * WIDTH + column[None, :]
        weight = tl.load(down + weight_offsets, mask=is_entry[:, None] & is_column[None, :], other=0.0)
        result = tl.dot(tokens, weight.to(tokens.dtype), result, input_precision="ieee")
    places = ((group * PARTS + part) * NUM_ROWS + row)[:, None] * WIDTH + column[None, :]
    tl.store(out + places, result, mask=is_row[:, None] & is_column[None, :])
