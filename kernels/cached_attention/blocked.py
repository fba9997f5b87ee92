"""Attention of many new rows over a long cache, a block of slots at a time: what a prefill of long prompts runs.

The reference's numbers up to the order of sums, with another cost: blocks that no row sees, above all the slots beyond the length, are not
read, and neither scores `[B,N,T,S]` nor a mask `[B,T,S]` is made, only those of 2048 slots. The softmax is kept up from block to block: the
largest score so far, and sums relative to it (arXiv:1805.02867).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from specjax.kernels.grouped_attention import attention_scores, visible_offsets, weighted_values
from specjax.kernels.varying import varying_as

# Scores of a chunk of 512 rows of 12 heads take 50 MB in float32: what an H200's L2 holds.
BLOCK_SLOTS = 2048


def is_long(num_rows: int, capacity: int) -> bool:
    """Whether a pass of many rows goes block by block; one over a whole text at once (T = S, as in training) has nothing to leave out.

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
    """See `specjax.kernels.cached_attention.cached_attention`; S must be at least `BLOCK_SLOTS`. It has no derivative in reverse mode."""
    batch_size, num_rows, num_heads, head_dim = query.shape
    num_kv_heads, capacity = keys.shape[1:3]
    group_size = num_heads // num_kv_heads
    last = length.max() + num_rows  # slots from here on are nobody's
    first = jnp.int32(0) if window is None else jnp.maximum(length.min() - window, 0)

    def add_block(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        largest, total, summed = carry
        start = jnp.minimum(index * BLOCK_SLOTS, capacity - BLOCK_SLOTS)  # the last block may overlap the one before
        slots = start + jnp.arange(BLOCK_SLOTS, dtype=jnp.int32)
        visible = visible_offsets(slots - length[:, None], num_rows, step_mask, window) & (slots >= index * BLOCK_SLOTS)
        keys_block, values_block = (lax.dynamic_slice_in_dim(x, start, BLOCK_SLOTS, axis=2) for x in (keys, values))
        scores = jnp.where(visible[:, None, None], attention_scores(query, keys_block, scale=scale), -jnp.inf)
        new_largest = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
        base = jnp.where(jnp.isneginf(new_largest), 0, new_largest)  # of a row that has seen nothing yet
        exponentials, shrunk = jnp.exp(scores - base), jnp.exp(largest - base)
        total = total * shrunk + exponentials.sum(axis=-1, keepdims=True)
        return new_largest, total, summed * shrunk + weighted_values(exponentials, values_block)

    # Zeros that are made of the query: over a mesh they are divided as it is.
    rows = query.reshape(batch_size, num_rows, num_kv_heads, group_size, head_dim).transpose(0, 2, 3, 1, 4)
    summed = jnp.where(False, rows.astype(jnp.float32), 0)
    total = summed[..., :1]
    if sinks is None:
        largest = total - jnp.inf
    else:  # a score without a value
        largest = total + sinks.astype(jnp.float32).reshape(num_kv_heads, group_size, 1, 1)
        total = total + 1
    sums = varying_as((largest, total, summed), query, keys, values, length, step_mask, sinks)
    _, total, summed = lax.fori_loop(first // BLOCK_SLOTS, -(-last // BLOCK_SLOTS), add_block, sums)
    return (summed / total).transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)
