"""Attention of a few new rows over a cache: the specification, in plain jnp.

Scores and softmax are float32. Memory: one float32 score array `[B,N,T,S]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.grouped_attention import attend, attention_scores, visible_offsets


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
    scores_bkmts = attention_scores(query, keys, scale=scale)
    visible = visible_slots(length, query.shape[1], keys.shape[2], step_mask, window)
    return attend(scores_bkmts, values, visible=visible[:, None, None], sinks=sinks).astype(query.dtype)


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
    return visible_offsets(offset_bs, num_rows, step_mask, window)
