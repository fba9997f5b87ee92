"""Attention of a few new rows over gathered blocks of a cache: the specification, in plain jnp.

Scores and softmax are float32. Memory: the gathered keys and values `[B,K,C*block,H]`, and one float32 score array `[B,N,T,C*block]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
    batch_size, num_rows, num_heads, head_dim = query.shape
    num_kv_heads, num_listed = block_ids.shape[1:]
    group_size, width = num_heads // num_kv_heads, num_listed * block_size
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    keys_bkch, values_bkch = (_gather(x, block_ids, block_size) for x in (keys, values))  # c: slots of listed blocks

    # m: query heads of one key/value head. Its rows lie together, so that both products are batched over (B, K) alone.
    q_bkmth = query.reshape(batch_size, num_rows, num_kv_heads, group_size, head_dim).transpose(0, 2, 3, 1, 4)
    q_bkxh = q_bkmth.reshape(batch_size, num_kv_heads, group_size * num_rows, head_dim)
    scores_bkxc = jnp.einsum("bkxh,bkch->bkxc", q_bkxh, keys_bkch, precision=precision, preferred_element_type=jnp.float32)
    scores_bkmtc = scores_bkxc.reshape(batch_size, num_kv_heads, group_size, num_rows, width) * scale

    visible_bktc = _visible(length, block_ids, num_blocks, block_size, num_rows, step_mask, row_mask)
    weights_bkmtc = jax.nn.softmax(jnp.where(visible_bktc[:, :, None], scores_bkmtc, -jnp.inf), axis=-1)
    weights_bkxc = weights_bkmtc.reshape(batch_size, num_kv_heads, group_size * num_rows, width).astype(values.dtype)
    out_bkxh = jnp.einsum("bkxc,bkch->bkxh", weights_bkxc, values_bkch, precision=precision, preferred_element_type=jnp.float32)
    out_bkmth = out_bkxh.reshape(batch_size, num_kv_heads, group_size, num_rows, head_dim)
    return out_bkmth.transpose(0, 3, 1, 2, 4).reshape(batch_size, num_rows, num_heads, head_dim).astype(query.dtype)


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
    offsets = slots_bkic.reshape(*block_ids.shape[:2], -1) - length[:, None, None]  # 0 is the first new row
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    if step_mask is None:
        visible = offsets[:, :, None, :] <= rows[:, None]
    else:
        among_new = jnp.moveaxis(jnp.take(step_mask, jnp.clip(offsets, 0, num_rows - 1), axis=1), 0, 2)
        inside = (offsets >= 0) & (offsets < num_rows)
        visible = (offsets < 0)[:, :, None, :] | (inside[:, :, None, :] & among_new)
    counted = (jnp.arange(block_ids.shape[2]) < num_blocks[..., None])[:, :, None, :]
    if row_mask is not None:
        counted = counted & row_mask
    return visible & jnp.repeat(counted, block_size, axis=-1)
