"""Attention of many new rows over a long cache, a block of slots at a time: what a prefill of long prompts runs.

The reference's numbers up to the order of sums, with another cost: blocks that no row sees, above all the slots beyond the length, are not
read, and no score array `[B,N,T,S]` is made, only `[B,N,T,2048]` of it. The softmax is kept up from block to block: the largest score so
far, and sums relative to it (arXiv:1805.02867).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from specjax.kernels.cached_attention.reference import visible_slots
from specjax.kernels.grouped_attention import attention_scores, weighted_values

# Scores of a chunk of 512 rows of 12 heads take 50 MB in float32: what an H200's L2 holds.
BLOCK_SLOTS = 2048


def is_long(num_rows: int, capacity: int) -> bool:
    """Whether a pass of many rows goes block by block.

    A pass over a whole text at once (T = S, as in training) does not: it has nothing to leave out, and the loop has no reverse-mode
    derivative.

    Args:
        num_rows: T.
        capacity: S.
    """
    return num_rows < capacity and capacity >= 2 * BLOCK_SLOTS


def blocked_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
    *,
    step_mask: jax.Array | None,
    window: int | None,
    sinks: jax.Array | None,
    scale: float,
) -> jax.Array:
    """See `specjax.kernels.cached_attention.cached_attention`; S must be at least `BLOCK_SLOTS`."""
    batch_size, num_rows, num_heads, head_dim = query.shape
    num_kv_heads, capacity = keys.shape[1:3]
    group_size = num_heads // num_kv_heads
    visible_bts = visible_slots(length, num_rows, capacity, step_mask, window)
    last = length.max() + num_rows  # slots from here on are nobody's
    first = jnp.int32(0) if window is None else jnp.maximum(length.min() - window, 0)

    def add_block(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        largest, total, summed = carry
        start = jnp.minimum(index * BLOCK_SLOTS, capacity - BLOCK_SLOTS)  # the last block may overlap the one before

        def block(x: jax.Array, axis: int) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, start, BLOCK_SLOTS, axis=axis)

        is_new = start + jnp.arange(BLOCK_SLOTS) >= index * BLOCK_SLOTS
        visible = (block(visible_bts, 2) & is_new)[:, None, None]
        scores = jnp.where(visible, attention_scores(query, block(keys, 2), scale=scale), -jnp.inf)
        new_largest = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
        base = jnp.where(jnp.isneginf(new_largest), 0, new_largest)  # of a row that has seen nothing yet
        exponentials, shrunk = jnp.exp(scores - base), jnp.exp(largest - base)
        total = total * shrunk + exponentials.sum(axis=-1, keepdims=True)
        return new_largest, total, summed * shrunk + weighted_values(exponentials, block(values, 2))

    rows = (batch_size, num_kv_heads, group_size, num_rows)
    if sinks is None:
        largest, total = jnp.full((*rows, 1), -jnp.inf, jnp.float32), jnp.zeros((*rows, 1), jnp.float32)
    else:  # a score without a value
        largest = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(num_kv_heads, group_size, 1, 1), (*rows, 1))
        total = jnp.ones((*rows, 1), jnp.float32)
    carry = (largest, total, jnp.zeros((*rows, head_dim), jnp.float32))
    _, total, summed = lax.fori_loop(first // BLOCK_SLOTS, -(-last // BLOCK_SLOTS), add_block, carry)
    return (summed / total).transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)
