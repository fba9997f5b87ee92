"""Scoring and choosing blocks: the specification, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from specjax.kernels.block_scores.reference import block_scores_reference


def block_selection_reference(
    query: jax.Array,
    means: jax.Array,
    first_tail: jax.Array,
    num_there: jax.Array,
    num_kept: jax.Array,
    *,
    head_blocks: int,
    max_chosen: int,
    group: str,
) -> tuple[jax.Array, jax.Array]:
    """See `specjax.kernels.block_selection.block_selection`."""
    scores = block_scores_reference(query[:, None], (means,), group=group)[:, :, 0]  # [B,K,NB]
    chosen = top_blocks(scores[:, :, None], first_tail, num_there, num_kept, head_blocks=head_blocks, max_chosen=max_chosen)[:, :, 0]
    counted = chosen < means.shape[2]
    return jnp.where(counted, chosen, 0).astype(jnp.int32), counted.sum(axis=-1, dtype=jnp.int32)


def top_blocks(
    scores: jax.Array, first_tail: jax.Array, num_there: jax.Array, num_kept: jax.Array, *, head_blocks: int, max_chosen: int
) -> jax.Array:
    """The blocks with the largest scores; those at the head and the tail come before all others, the earlier before the later at a tie.

    A score that is NaN, of either sign, comes next to those: its block holds what a pass should not miss.

    Args:
        scores: `[B,K,R,NB]` float32.
        first_tail: `[B]` int32, the first of the blocks at the end that are always kept.
        num_there: `[B]` int32, blocks that exist.
        num_kept: `[B]` int32, how many are kept; at most `num_there`.
        head_blocks: Blocks at the start that are always kept.
        max_chosen: C, at least `num_kept`.

    Returns:
        `[B,K,R,C]`, ascending; NB stands for none, behind all others.
    """
    num_blocks = scores.shape[-1]
    block = jnp.arange(num_blocks)
    forced = (block < head_blocks) | (block >= first_tail[:, None])
    there = block < num_there[:, None]
    scores = jnp.where(jnp.isnan(scores), jnp.finfo(scores.dtype).max, scores)
    ranked = jnp.where(there[:, None, None], jnp.where(forced[:, None, None], jnp.inf, scores), -jnp.inf)
    _, ids = lax.top_k(ranked, max_chosen)
    return jnp.sort(jnp.where(jnp.arange(ids.shape[-1]) < num_kept[:, None, None, None], ids, num_blocks), axis=-1)
