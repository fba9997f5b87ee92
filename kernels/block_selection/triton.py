"""Triton kernel that scores the blocks of a cache and chooses the best: the k-th largest score by bisection of its bits, then compaction.

Imported only where it runs: this module needs triton.
"""
# What stands below is Triton's language, which only looks like Python.
# pyright: reportMissingImports=false, reportOperatorIssue=false, reportOptionalOperand=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl


@triton.jit
def score_and_choose(
    query,  # [B,N,H]
    means,  # [B,K,NB,H]
    first_tail,  # [B] int32
    num_there,  # [B] int32
    num_kept,  # [B] int32
    block_ids,  # [B,K,C] int32
    counts,  # [B,K] int32
    scores,  # [B,K,NB] float32, scratch
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_CHOSEN: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    IS_MEAN: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_NB: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One batch row and key/value head."""
    head = tl.program_id(0)
    batch, kv_head = head // NUM_KV_HEADS, head % NUM_KV_HEADS
    there = tl.minimum(tl.load(num_there + batch), NUM_BLOCKS)
    members, columns = tl.arange(0, 16), tl.arange(0, BLOCK_H)
    is_member, is_column = members < GROUP, columns < HEAD_DIM
    q_offsets = ((batch * NUM_KV_HEADS + kv_head) * GROUP + members) * HEAD_DIM
    q = tl.load(query + q_offsets[:, None] + columns[None, :], mask=is_member[:, None] & is_column[None, :], other=0.0)
    for tile in range(0, tl.cdiv(there, BLOCK_J)):
        block = tile * BLOCK_J + tl.arange(0, BLOCK_J)
        offsets = (head * NUM_BLOCKS + block).to(tl.int64)[:, None] * HEAD_DIM + columns[None, :]
        mean_keys = tl.load(means + offsets, mask=(block < there)[:, None] & is_column[None, :], other=0.0)
        products = tl.dot(q, tl.trans(mean_keys.to(q.dtype)), input_precision="ieee")
        if IS_MEAN:
            score = tl.sum(tl.where(is_member[:, None], products, 0.0), axis=0) / GROUP  # padding times infinity is NaN
        else:
            score = tl.max(tl.where(is_member[:, None], products, float("-inf")), axis=0)
            is_nan = is_member[:, None] & (products != products)  # which a maximum passes over
            score = tl.where(tl.max(is_nan.to(tl.int32), axis=0) > 0, float("nan"), score)
        tl.store(scores + head * NUM_BLOCKS + block, score, mask=block < there)
    tl.debug_barrier()  # every thread sees what the others have stored

    block = tl.arange(0, BLOCK_NB)
    is_there = block < there
    score = tl.load(scores + head * NUM_BLOCKS + block, mask=is_there, other=0.0)
    # The order of float32 is that of these integers, which are then made unsigned.
    bits = score.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    ordered = tl.where(score != score, 4294967294, ordered)  # a NaN stands above all numbers, whatever its bits
    is_forced = (block < HEAD_BLOCKS) | (block >= tl.load(first_tail + batch))
    ordered = tl.where(is_forced, 4294967295, ordered)
    ordered = tl.where(is_there, ordered, -1)
    wanted = tl.minimum(tl.load(num_kept + batch), tl.minimum(there, MAX_CHOSEN))
    least = tl.full([], 0, tl.int64)  # the greatest number that `wanted` scores reach: the wanted-th largest
    for step in range(32):
        candidate = least + (tl.full([], 2147483648, tl.int64) >> step)
        reached = tl.sum((ordered >= candidate).to(tl.int32), axis=0)
        least = tl.where(reached >= wanted, candidate, least)
    above, level = ordered > least, ordered == least
    places_left = wanted - tl.sum(above.to(tl.int32), axis=0)
    is_chosen = above | (level & (tl.cumsum(level.to(tl.int32), axis=0) <= places_left))
    place = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    tl.store(block_ids + head * MAX_CHOSEN + place, block, mask=is_chosen)
    entry = tl.arange(0, BLOCK_C)
    tl.store(block_ids + head * MAX_CHOSEN + entry, tl.zeros([BLOCK_C], tl.int32), mask=(entry >= wanted) & (entry < MAX_CHOSEN))
    tl.store(counts + head, wanted)
