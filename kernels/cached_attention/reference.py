"""Attention of a few new rows over a cache: the specification, in plain jnp.

Scores and softmax are float32. Memory: one float32 score array `[B,N,T,S]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cached_attention_reference(
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
    """See `specjax.kernels.cached_attention.cached_attention`."""
    batch_size, num_rows, num_heads, head_dim = query.shape
    num_kv_heads, capacity = keys.shape[1], keys.shape[2]
    group_size = num_heads // num_kv_heads
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None

    # m: query heads of one key/value head. Its rows lie together, so that both products are batched over (B, K) alone.
    q_bkmth = query.reshape(batch_size, num_rows, num_kv_heads, group_size, head_dim).transpose(0, 2, 3, 1, 4)
    q_bkxh = q_bkmth.reshape(batch_size, num_kv_heads, group_size * num_rows, head_dim)
    scores_bkxs = jnp.einsum("bkxh,bksh->bkxs", q_bkxh, keys, precision=precision, preferred_element_type=jnp.float32)
    scores_bkmts = scores_bkxs.reshape(batch_size, num_kv_heads, group_size, num_rows, capacity) * scale

    visible = visible_slots(length, num_rows, capacity, step_mask, window)
    scores_bkmts = jnp.where(visible[:, None, None], scores_bkmts, -jnp.inf)
    weights_bkmts = _softmax(scores_bkmts, sinks)
    weights_bkxs = weights_bkmts.reshape(batch_size, num_kv_heads, group_size * num_rows, capacity).astype(values.dtype)
    out_bkxh = jnp.einsum("bkxs,bksh->bkxh", weights_bkxs, values, precision=precision, preferred_element_type=jnp.float32)
    out_bkmth = out_bkxh.reshape(batch_size, num_kv_heads, group_size, num_rows, head_dim)
    return out_bkmth.transpose(0, 3, 1, 2, 4).reshape(batch_size, num_rows, num_heads, head_dim).astype(query.dtype)


def _softmax(scores_bkmts: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Over the slots, and over the head's sink, whose own share is left out."""
    if sinks is None:
        return jax.nn.softmax(scores_bkmts, axis=-1)
    num_kv_heads, group_size = scores_bkmts.shape[1:3]
    sinks_km11 = sinks.astype(jnp.float32).reshape(num_kv_heads, group_size, 1, 1)
    largest = jnp.maximum(scores_bkmts.max(axis=-1, keepdims=True), sinks_km11)
    exponentials = jnp.exp(scores_bkmts - largest)
    return exponentials / (exponentials.sum(axis=-1, keepdims=True) + jnp.exp(sinks_km11 - largest))


def visible_slots(length: jax.Array, num_rows: int, capacity: int, step_mask: jax.Array | None, window: int | None = None) -> jax.Array:
    """Which slots each new row may attend to.

    Args:
        length: `[B]` int32, tokens before this call; the new rows stand at `length ... length + T - 1`.
        num_rows: T.
        capacity: S.
        step_mask: `[T,T]` bool among the new rows, or `None` for causal.
        window: Latest slots that a row may attend to, its own included; `None` is all.

    Returns:
        `[B,T,S]` bool.
    """
    offset_bs = jnp.arange(capacity, dtype=jnp.int32)[None, :] - length[:, None]  # 0 is the first new row
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    if step_mask is None:
        visible = offset_bs[:, None, :] <= rows[None, :, None]
    else:
        among_new = jnp.take(step_mask, jnp.clip(offset_bs, 0, num_rows - 1), axis=1).transpose(1, 0, 2)
        inside = (offset_bs >= 0) & (offset_bs < num_rows)
        visible = (offset_bs < 0)[:, None, :] | (inside[:, None, :] & among_new)
    return visible if window is None else visible & (offset_bs[:, None, :] > rows[None, :, None] - window)
