"""Scores of blocks from their summaries: the specification, in plain jnp. Memory: one float32 array `[B,N,R,NB]`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.precision import full_precision


def block_scores_reference(query: jax.Array, summaries: tuple[jax.Array, ...], *, group: str) -> jax.Array:
    """See `specjax.kernels.block_scores.block_scores`."""
    batch_size, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = summaries[0].shape[1]
    group_size = num_heads // num_kv_heads
    precision = full_precision(query)
    # m: query heads of one key/value head.
    q_bkmrh = query.reshape(batch_size, num_queries, num_kv_heads, group_size, head_dim).transpose(0, 2, 3, 1, 4)
    q_bkxh = q_bkmrh.reshape(batch_size, num_kv_heads, group_size * num_queries, head_dim)

    def product(queries: jax.Array, summary: jax.Array) -> jax.Array:
        summary = summary.astype(query.dtype)
        return jnp.einsum("bkxh,bkjh->bkxj", queries, summary, precision=precision, preferred_element_type=jnp.float32)

    if len(summaries) == 1:
        scores_bkxj = product(q_bkxh, summaries[0])
    else:
        # max(q a, q b) with a <= b is q b where q is positive and q a where it is negative: two products instead of [..., NB, H].
        least, greatest = summaries
        scores_bkxj = product(jnp.maximum(q_bkxh, 0), greatest) + product(jnp.minimum(q_bkxh, 0), least)
    scores_bkmrj = scores_bkxj.reshape(batch_size, num_kv_heads, group_size, num_queries, -1)
    return scores_bkmrj.mean(axis=2) if group == "mean" else scores_bkmrj.max(axis=2)
