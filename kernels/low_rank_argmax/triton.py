"""Triton kernels of the low-rank head's arg-max: the best token of each part of the vocabulary, and the best of these.

Imported only where it runs: this module needs triton.
"""
# What stands below is Triton's language, which only looks like Python.
# pyright: reportMissingImports=false, reportOperatorIssue=false, reportOptionalOperand=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl


@triton.jit
def _ordered(scores):
    """Integers in the order of `jnp.argmax`: -0 and 0 are one, and a NaN comes before all. None is the least int32."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(scores != scores, 2147483647, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def best_of_part(
    inner,  # [M,R]
    up,  # [V,R]
    part_scores,  # [M,PARTS] float32
    part_tokens,  # [M,PARTS] int32
    NUM_ROWS: tl.constexpr,
    VOCAB: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """BLOCK_V tokens, all rows."""
    part, num_parts = tl.program_id(0), tl.num_programs(0)
    rows, token = tl.arange(0, BLOCK_M), part * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row, is_token = rows < NUM_ROWS, token < VOCAB
    scores = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(0, RANK, BLOCK_R):
        column = start + tl.arange(0, BLOCK_R)
        is_column = column < RANK
        x = tl.load(inner + rows[:, None] * RANK + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
        offsets = token.to(tl.int64)[:, None] * RANK + column[None, :]
        weight = tl.load(up + offsets, mask=is_token[:, None] & is_column[None, :], other=0.0)
        scores = tl.dot(x, tl.trans(weight), scores, input_precision="ieee")
    ordered = tl.where(is_token[None, :], _ordered(scores), -2147483648)
    best = tl.max(ordered, axis=1)
    first = tl.min(tl.where(ordered == best[:, None], token[None, :], 2147483647), axis=1)
    score = tl.sum(tl.where(token[None, :] == first[:, None], scores, 0.0), axis=1)
    tl.store(part_scores + rows * num_parts + part, score, mask=is_row)
    tl.store(part_tokens + rows * num_parts + part, first, mask=is_row)


@triton.jit
def best_of_parts(
    part_scores,  # [M,PARTS] float32
    part_tokens,  # [M,PARTS] int32
    scores,  # [M] float32
    tokens,  # [M] int32
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One row."""
    row, parts = tl.program_id(0), tl.arange(0, BLOCK_P)
    is_part = parts < NUM_PARTS
    score = tl.load(part_scores + row * NUM_PARTS + parts, mask=is_part, other=0.0)
    token = tl.load(part_tokens + row * NUM_PARTS + parts, mask=is_part, other=2147483647)
    ordered = tl.where(is_part, _ordered(score), -2147483648)
    first = tl.min(tl.where(ordered == tl.max(ordered, axis=0), token, 2147483647), axis=0)
    tl.store(scores + row, tl.sum(tl.where(token == first, score, 0.0), axis=0))
    tl.store(tokens + row, first)
