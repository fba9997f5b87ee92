"""Attention of a few new rows over gathered blocks of a cache: the specification, in plain jnp.

Scores and softmax are float32. Memory: the gathered keys and values `[B,K,C*block,H]`, and one float32 score array `[B,N,T,C*block]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.grouped_attention import attend, attention_scores, visible_offsets


def block_sparse_attention_reference(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
    block_ids: jax.Array,
    num_blocks: jax.Array,
    *,
    block_size: int,
    scale: float,
    step_mask: jax.Array | None,
    row_mask: jax.Array | None,
) -> jax.Array:
    """See `specjax.kernels.block_sparse_attention.block_sparse_attention`."""
    # c: slots of listed blocks.
    keys_bkch, values_bkch = (_gather(x, block_ids, block_size) for x in (keys, values))
    scores_bkmtc = attention_scores(query, keys_bkch, scale=scale)
    visible_bktc = _visible(length, block_ids, num_blocks, block_size, query.shape[1], step_mask, row_mask)
    return attend(scores_bkmtc, values_bkch, visible=visible_bktc[:, :, None]).astype(query.dtype)


def _gather(cache: jax.Array, block_ids: jax.Array, block_size: int) -> jax.Array:
    """`[B,K,S,H]` → the listed blocks' slots, `[B,K,C*block,H]`."""
    batch_size, num_kv_heads, capacity, head_dim = cache.shape
    blocks = cache.reshape(batch_size, num_kv_heads, capacity // block_size, block_size, head_dim)
    listed = jax.vmap(jax.vmap(lambda one, ids: jnp.take(one, ids, axis=0, mode="clip")))(blocks, block_ids)
    return listed.reshape(batch_size, num_kv_heads, -1, head_dim)


def _visible(
    length: jax.Array,
    block_ids: jax.Array,
    num_blocks: jax.Array,
    block_size: int,
    num_rows: int,
    step_mask: jax.Array | None,
    row_mask: jax.Array | None,
) -> jax.Array:
    """Which of the listed slots each new row attends to, `[B,K,T,C*block]` bool."""
    slots_bkic = block_ids[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)  # i: places in the list
    batch_size, num_kv_heads, num_listed = block_ids.shape
    offsets_bkc = slots_bkic.reshape(batch_size, num_kv_heads, -1) - length[:, None, None]
    visible = visible_offsets(offsets_bkc.reshape(batch_size * num_kv_heads, -1), num_rows, step_mask)
    counted = (jnp.arange(num_listed) < num_blocks[..., None])[:, :, None, :]
    if row_mask is not None:
        counted = counted & row_mask
    return visible.reshape(batch_size, num_kv_heads, num_rows, -1) & jnp.repeat(counted, block_size, axis=-1)
