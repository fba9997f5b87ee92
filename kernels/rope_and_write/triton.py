"""Triton kernel that norms and rotates queries and keys of new rows, and writes keys and values where they belong in the cache.

Imported only where it runs: this module needs triton.
"""
# What stands below is Triton's language, which only looks like Python.
# pyright: reportMissingImports=false, reportOperatorIssue=false, reportOptionalOperand=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl


@triton.jit
def _halves(array, offsets, inside, HALF: tl.constexpr):
    """Both halves of vectors in float32."""
    first = tl.load(array + offsets, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(array + HALF + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _normed(first, second, gain, second_gain, EPSILON: tl.constexpr, HALF: tl.constexpr, dtype: tl.constexpr):
    """Both halves of heads, rounded to `dtype` before and after the scale as the reference is."""
    factor = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + EPSILON)[:, None]
    first = (first * factor).to(dtype).to(tl.float32) * gain
    second = (second * factor).to(dtype).to(tl.float32) * second_gain
    return first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)


@triton.jit
def rotate_and_write(
    qkv,  # [B,T,K,GROUP+2,H]
    cos,  # [B,T,H/2] float32
    sin,  # [B,T,H/2] float32
    start,  # [B]
    query_scale,  # [H]; read where NORMED
    key_scale,  # [H]; read where NORMED
    old_keys,  # [B,K,S,H], the memory of `keys`; not read
    old_values,  # [B,K,S,H], that of `values`; not read
    num_tokens,  # T
    capacity,  # S
    query,  # [B,T,N,H]
    keys,  # [B,K,S,H]
    values,  # [B,K,S,H]
    EPSILON: tl.constexpr,
    NORMED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One new row of one key/value head.

    Everything is asked for before anything is waited for, and what heads share comes in their layout: but for a norm's sum nothing crosses
    threads.
    """
    row, kv_head = tl.program_id(0), tl.program_id(1)
    batch, token = row // num_tokens, row % num_tokens
    members, halves, one = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_H), tl.arange(0, 1)
    is_half, is_member = halves < HALF, members < GROUP
    place = row * NUM_KV_HEADS + kv_head
    heads = qkv + place * (GROUP + 2) * 2 * HALF
    offsets = members[:, None] * (2 * HALF) + halves[None, :]
    inside = is_member[:, None] & is_half[None, :]
    key_offsets = (GROUP + one)[:, None] * (2 * HALF) + halves[None, :]
    is_key = (one >= 0)[:, None] & is_half[None, :]
    shared, key_shared = members[:, None] * 0 + halves[None, :], one[:, None] + halves[None, :]

    begin = tl.load(start + batch)
    first, second = _halves(heads, offsets, inside, HALF)
    key_first, key_second = _halves(heads, key_offsets, is_key, HALF)
    value_first, value_second = _halves(heads, key_offsets + 2 * HALF, is_key, HALF)
    c = tl.load(cos + row * HALF + shared, mask=inside, other=0.0)
    s = tl.load(sin + row * HALF + shared, mask=inside, other=0.0)
    key_c = tl.load(cos + row * HALF + key_shared, mask=is_key, other=0.0)
    key_s = tl.load(sin + row * HALF + key_shared, mask=is_key, other=0.0)
    if NORMED:
        gain, second_gain = _halves(query_scale, shared, inside, HALF)
        key_gain, second_key_gain = _halves(key_scale, key_shared, is_key, HALF)
        first, second = _normed(first, second, gain, second_gain, EPSILON, HALF, query.dtype.element_ty)
        key_first, key_second = _normed(key_first, key_second, key_gain, second_key_gain, EPSILON, HALF, keys.dtype.element_ty)

    out = query + place * GROUP * 2 * HALF
    tl.store(out + offsets, (first * c - second * s).to(query.dtype.element_ty), mask=inside)
    tl.store(out + HALF + offsets, (second * c + first * s).to(query.dtype.element_ty), mask=inside)
    finite, second_finite = tl.abs(value_first) < float("inf"), tl.abs(value_second) < float("inf")  # of NaN neither
    new_first = tl.where(finite, key_first * key_c - key_second * key_s, float("nan"))
    new_second = tl.where(second_finite, key_second * key_c + key_first * key_s, float("nan"))
    # As dynamic_update_slice shifts a write back that would run over the end.
    slot = tl.maximum(tl.minimum(begin, capacity - num_tokens), 0) + token
    cache_offset = ((batch * NUM_KV_HEADS + kv_head).to(tl.int64) * capacity + slot) * (2 * HALF)  # more than 2^31 numbers, perhaps
    cached = cache_offset + (one * 2 * HALF)[:, None] + halves[None, :]
    tl.store(keys + cached, new_first.to(keys.dtype.element_ty), mask=is_key)
    tl.store(keys + HALF + cached, new_second.to(keys.dtype.element_ty), mask=is_key)
    tl.store(values + cached, tl.where(finite, value_first, 0.0).to(values.dtype.element_ty), mask=is_key)
    tl.store(values + HALF + cached, tl.where(second_finite, value_second, 0.0).to(values.dtype.element_ty), mask=is_key)
