"""Triton kernels of few-row attention: parts of the cache side by side (split-K, arXiv:2311.01282), and the merge of the parts.

Imported only where it runs: this module needs triton.
"""
# What stands below is Triton's language, which only looks like Python.
# pyright: reportMissingImports=false, reportOperatorIssue=false, reportOptionalOperand=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl


@triton.jit
def attend_part(
    query,  # [B,T,N,H]
    keys,  # [B,K,S,H]
    values,  # [B,K,S,H]
    length,  # [B] int32
    step_bits,  # [T,W] int32: bit u % 32 of word u // 32 of row t says whether new row t attends to new row u; read unless IS_CAUSAL
    block_ids,  # [B,K,C] int32; read where LISTED
    num_blocks,  # [B,K] int32; read where LISTED
    row_mask,  # [B,K,T,C] bool; read where HAS_ROW_MASK
    sinks,  # [N]; read where HAS_SINKS
    out,  # with one part [B,T,N,H] in the dtype of `query`, otherwise [B,K,PARTS,M,H] float32, not divided by its sum
    part_max,  # [B,K,PARTS,M] float32, base-2 logarithm; written with more than one part
    part_sum,  # [B,K,PARTS,M] float32; likewise
    NUM_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    CAPACITY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,  # times log2(e)
    WINDOW: tl.constexpr,  # 0 is none
    LISTED: tl.constexpr,
    WIDTH: tl.constexpr,  # C
    BLOCK_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    MASK_WORDS: tl.constexpr,  # W
    HAS_ROW_MASK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """BLOCK_M rows, one part of the slots of a batch row and key/value head; row r of M is query head r % GROUP of new row r // GROUP."""
    part, head = tl.program_id(1), tl.program_id(2)
    batch, kv_head = head // NUM_KV_HEADS, head % NUM_KV_HEADS
    rows, columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H)
    new_row, member = rows // GROUP, rows % GROUP
    is_row, is_column = rows < NUM_ROWS * GROUP, columns < HEAD_DIM
    q_offsets = ((batch * NUM_ROWS + new_row) * NUM_KV_HEADS * GROUP + kv_head * GROUP + member) * HEAD_DIM
    in_query = is_row[:, None] & is_column[None, :]
    q = tl.load(query + q_offsets[:, None] + columns[None, :], mask=in_query, other=0.0)
    if not IS_CAUSAL:
        bits = tl.load(step_bits + new_row * MASK_WORDS, mask=is_row, other=0)
        if MASK_WORDS == 2:
            more_bits = tl.load(step_bits + new_row * MASK_WORDS + 1, mask=is_row, other=0)
    committed = tl.load(length + batch)
    end = tl.minimum(committed + NUM_ROWS, CAPACITY)

    first_tile = 0
    if LISTED:
        last = tl.minimum(tl.load(num_blocks + head), WIDTH) * BLOCK_SIZE
    else:
        last = end
        if WINDOW > 0:  # row 0 sees the earliest slot of all
            first_tile = tl.maximum(committed + 1 - WINDOW, 0) // BLOCK_S
    num_tiles = tl.cdiv(last, BLOCK_S) - first_tile
    begin, stop = first_tile + part * num_tiles // PARTS, first_tile + (part + 1) * num_tiles // PARTS

    cache_offset = head.to(tl.int64) * CAPACITY * HEAD_DIM  # a cache may hold more than 2^31 numbers
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    for tile in range(begin, stop):
        place = tile * BLOCK_S + tl.arange(0, BLOCK_S)
        if LISTED:
            entry = tl.minimum(place // BLOCK_SIZE, WIDTH - 1)
            block = tl.load(block_ids + head * WIDTH + entry)
            slot = tl.minimum(tl.maximum(block, 0), CAPACITY // BLOCK_SIZE - 1) * BLOCK_SIZE + place % BLOCK_SIZE
        else:
            slot = place
        is_slot = (place < last) & (slot < end)
        offsets = cache_offset + slot[:, None] * HEAD_DIM + columns[None, :]
        in_cache = is_slot[:, None] & is_column[None, :]
        k = tl.load(keys + offsets, mask=in_cache, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
        behind = slot - committed  # 0 is the first new row
        if IS_CAUSAL:
            among_new = behind[None, :] <= new_row[:, None]
        else:
            place_in_word = (tl.maximum(behind, 0) % 32)[None, :]
            among_new = ((bits[:, None] >> place_in_word) & 1) != 0
            if MASK_WORDS == 2:
                among_more = ((more_bits[:, None] >> place_in_word) & 1) != 0
                among_new = tl.where((behind < 32)[None, :], among_new, among_more)
        visible = is_slot[None, :] & ((behind < 0)[None, :] | among_new)
        if WINDOW > 0:
            visible = visible & (behind[None, :] > new_row[:, None] - WINDOW)
        if HAS_ROW_MASK:
            mask_offsets = (head * NUM_ROWS + new_row)[:, None] * WIDTH + entry[None, :]
            reads = tl.load(row_mask + mask_offsets, mask=is_row[:, None] & is_slot[None, :], other=0)
            visible = visible & (reads != 0)
        scores = tl.where(visible, scores, float("-inf"))  # and so the NaN of a key that nobody sees is gone
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(weights, axis=1)
        v = tl.load(values + offsets, mask=in_cache, other=0.0)
        mixed = mixed * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top

    if PARTS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + kv_head * GROUP + member).to(tl.float32) * 1.4426950408889634
            new_top = tl.maximum(top, sink)
            rescale = tl.exp2(top - new_top)
            total = total * rescale + tl.exp2(sink - new_top)
            mixed = mixed * rescale[:, None]
        result = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + q_offsets[:, None] + columns[None, :], result, mask=in_query)
    else:
        places = (head * PARTS + part) * NUM_ROWS * GROUP + rows
        tl.store(part_max + places, top, mask=is_row)
        tl.store(part_sum + places, total, mask=is_row)
        if begin < stop:
            tl.store(out + places.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :], mixed, mask=in_query)


@triton.jit
def merge_parts(
    part_out,  # [B,K,PARTS,M,H] float32
    part_max,  # [B,K,PARTS,M] float32
    part_sum,  # [B,K,PARTS,M] float32
    sinks,  # [N]; read where HAS_SINKS
    out,  # [B,T,N,H]
    NUM_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One row of M of one batch row and key/value head, its parts summed in one fixed order."""
    row, head = tl.program_id(0), tl.program_id(1)
    parts, columns = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_H)
    is_part, is_column = parts < PARTS, columns < HEAD_DIM
    places = (head * PARTS + parts) * NUM_ROWS * GROUP + row
    tops = tl.load(part_max + places, mask=is_part, other=float("-inf"))
    sums = tl.load(part_sum + places, mask=is_part, other=0.0)
    batch, kv_head = head // NUM_KV_HEADS, head % NUM_KV_HEADS
    out_head = kv_head * GROUP + row % GROUP
    top = tl.max(tops, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + out_head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    seen = tops > float("-inf")  # a part that saw nothing may not have written its row
    weights = tl.exp2(tops - top)
    total = tl.sum(weights * sums, axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    part_offsets = places.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :]
    mixed = tl.load(part_out + part_offsets, mask=seen[:, None] & is_column[None, :], other=0.0)
    result = tl.sum(mixed * weights[:, None], axis=0) / total
    out_offset = ((batch * NUM_ROWS + row // GROUP) * NUM_KV_HEADS * GROUP + out_head) * HEAD_DIM
    tl.store(out + out_offset + columns, result.to(out.dtype.element_ty), mask=is_column)
