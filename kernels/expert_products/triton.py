"""Triton kernels of a mixture of experts for few rows: the rows of each expert find one another, and its weights are read once for them.

Imported only where it runs: this module needs triton.
"""
# What stands below is Triton's language, which only looks like Python.
# pyright: reportMissingImports=false, reportOperatorIssue=false, reportOptionalOperand=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl


@triton.jit
def _leads(experts, pair, expert, NUM_EXPERTS: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr):
    """How many earlier pairs chose the same expert, and whether this one is the first of a block of BLOCK_M of them.

    Of one row every pair is a block by itself, and nothing is looked up.
    """
    if ONE_ROW:
        return pair * 0, (expert >= 0) & (expert < NUM_EXPERTS)
    other = tl.arange(0, BLOCK_P)
    chosen = tl.load(experts + other, mask=other < pair, other=-1)
    before = tl.sum((chosen == expert).to(tl.int32), axis=0)
    return before, (expert >= 0) & (expert < NUM_EXPERTS) & (before % BLOCK_M == 0)


@triton.jit
def _block_of(experts, pair, expert, before, NUM_PAIRS: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr):
    """The pairs of the block that begins at `pair`, in their order, and which slots hold one."""
    CHUNK: tl.constexpr = 64 if BLOCK_P > 64 else BLOCK_P
    slot = tl.arange(0, BLOCK_M)
    if ONE_ROW:
        return slot * 0 + pair, slot == 0
    pairs = tl.zeros([BLOCK_M], tl.int32)
    seen = before * 0
    for start in range(0, NUM_PAIRS, CHUNK):
        other = start + tl.arange(0, CHUNK)
        chose = tl.load(experts + other, mask=other < NUM_PAIRS, other=-1) == expert
        rank = seen + tl.cumsum(chose.to(tl.int32), axis=0) - 1 - before
        is_here = chose[None, :] & (rank[None, :] == slot[:, None])
        pairs += tl.sum(tl.where(is_here, other[None, :], 0), axis=1)
        seen += tl.sum(chose.to(tl.int32), axis=0)
    return pairs, slot < seen - before


@triton.jit
def gate_and_up(
    x,  # [M,D]
    experts,  # [M,C] int32
    weights,  # [E,D,2,F]
    bias,  # [E,2,F]; read where HAS_BIAS
    inner,  # [M,C,F] in the dtype of `x`: what the down projection multiplies
    NUM_PAIRS: tl.constexpr,  # M C
    NUM_CHOICES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,  # D
    FFN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    LIMIT: tl.constexpr,  # read where IS_CLAMPED
    ALPHA: tl.constexpr,  # likewise
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_N channels for the block of pairs that begins at one pair; nothing where no block does."""
    first = tl.program_id(1)
    expert = tl.load(experts + first)
    before, leads = _leads(experts, first, expert, NUM_EXPERTS, NUM_PAIRS == NUM_CHOICES, BLOCK_M, BLOCK_P)
    if leads:
        pairs, is_pair = _block_of(experts, first, expert, before, NUM_PAIRS, NUM_PAIRS == NUM_CHOICES, BLOCK_M, BLOCK_P)
        channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_channel = channel < FFN
        row_offsets = (pairs // NUM_CHOICES)[:, None] * WIDTH
        matrix = weights + expert.to(tl.int64) * (2 * WIDTH * FFN)  # all experts hold more than 2^31 numbers
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, WIDTH, BLOCK_D):
            depth = start + tl.arange(0, BLOCK_D)
            is_depth = depth < WIDTH
            rows = tl.load(x + row_offsets + depth[None, :], mask=is_pair[:, None] & is_depth[None, :], other=0.0)
            offsets = depth[:, None] * (2 * FFN) + channel[None, :]
            in_matrix = is_depth[:, None] & is_channel[None, :]
            of_gate = tl.load(matrix + offsets, mask=in_matrix, other=0.0)
            of_up = tl.load(matrix + FFN + offsets, mask=in_matrix, other=0.0)
            gate = tl.dot(rows, of_gate.to(rows.dtype), gate, input_precision="ieee")
            up = tl.dot(rows, of_up.to(rows.dtype), up, input_precision="ieee")
        if HAS_BIAS:
            of_expert = bias + expert * (2 * FFN) + channel
            gate += tl.load(of_expert, mask=is_channel, other=0.0).to(tl.float32)[None, :]
            up += tl.load(of_expert + FFN, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if IS_CLAMPED:  # comparisons, which let a NaN through
            gate = tl.where(gate > LIMIT, LIMIT, gate)
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
            result = gate * tl.sigmoid(ALPHA * gate) * up
        else:
            result = gate * tl.sigmoid(gate) * up
        places = pairs[:, None] * FFN + channel[None, :]
        tl.store(inner + places, result.to(inner.dtype.element_ty), mask=is_pair[:, None] & is_channel[None, :])


@triton.jit
def weighted_down(
    inner,  # [M,C,F]
    experts,  # [M,C] int32
    factors,  # [M,C] float32
    weights,  # [E,F,O]
    bias,  # [E,O]; read where HAS_BIAS
    out,  # [M,C,O] float32; not written where a pair has no expert
    NUM_PAIRS: tl.constexpr,  # M C
    NUM_CHOICES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    FFN: tl.constexpr,
    WIDTH: tl.constexpr,  # O
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_N outputs for the block of pairs that begins at one pair; nothing where no block does."""
    first = tl.program_id(1)
    expert = tl.load(experts + first)
    before, leads = _leads(experts, first, expert, NUM_EXPERTS, NUM_PAIRS == NUM_CHOICES, BLOCK_M, BLOCK_P)
    if leads:
        pairs, is_pair = _block_of(experts, first, expert, before, NUM_PAIRS, NUM_PAIRS == NUM_CHOICES, BLOCK_M, BLOCK_P)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = column < WIDTH
        matrix = weights + expert.to(tl.int64) * (FFN * WIDTH)
        result = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, FFN, BLOCK_D):
            channel = start + tl.arange(0, BLOCK_D)
            is_channel = channel < FFN
            rows = tl.load(inner + pairs[:, None] * FFN + channel[None, :], mask=is_pair[:, None] & is_channel[None, :], other=0.0)
            offsets = channel[:, None] * WIDTH + column[None, :]
            of_down = tl.load(matrix + offsets, mask=is_channel[:, None] & is_column[None, :], other=0.0)
            result = tl.dot(rows, of_down.to(rows.dtype), result, input_precision="ieee")
        if HAS_BIAS:
            result += tl.load(bias + expert * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        result *= tl.load(factors + pairs, mask=is_pair, other=0.0)[:, None]
        tl.store(out + pairs[:, None] * WIDTH + column[None, :], result, mask=is_pair[:, None] & is_column[None, :])
