"""Which blocks of the key/value cache a layer's rows attend to: those always kept, and the most relevant of the others. arXiv:2512.21911.

Only blocks that committed tokens fill compete: the choice never sees a token that is not there yet, or one that was rolled back.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.kernels.block_scores import block_scores
from specjax.kernels.block_selection import block_selection, top_blocks
from specjax.kernels.precision import full_precision
from specjax.sparsity.attention_sparsity import SparseAttention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """The blocks that a pass reads in a layer, and in those that reuse its choice.

    Attributes:
        block_ids: `[B,K,C]` int32, ascending; entries at or beyond `num_blocks` do not count.
        num_blocks: `[B,K]` int32.
        row_mask: `[B,K,T,C]` bool, which of them each row attends to; `None` is all.
    """

    block_ids: jax.Array
    num_blocks: jax.Array
    row_mask: jax.Array | None


def select_blocks(
    settings: SparseAttention,
    query: jax.Array,
    keys: jax.Array,
    summaries: tuple[jax.Array, ...],
    length: jax.Array,
    *,
    layer: Any,
    counted: jax.Array | None = None,
    implementation: str = "auto",
) -> Selection:
    """Chooses for each batch row and key/value head.

    Args:
        settings: The budget, what is always kept, and how the rest competes.
        query: `[B,T,N,H]` of the new rows, after the rotary embedding.
        keys: `[B,K,S,H]`; read by `"oracle"` only.
        summaries: The layer's block summaries; empty where the score reads none.
        length: `[B]` int32, committed tokens, which stand before the new rows.
        layer: Its index, an int or a scalar int32, for `"random"`.
        counted: `[B,T]` bool, the first few rows of each, which count; `None` is all. The others have no say in what is read, and what
            they attend to is not defined.
        implementation: Passed to `block_selection`, which one query's choice by mean keys is.

    Returns:
        The `Selection`.
    """
    num_rows, capacity = query.shape[1], keys.shape[2]
    num_blocks, size = capacity // settings.block_size, settings.block_size
    if settings.rows == "first" or not settings.scores_queries:
        scorers = query[:, :1]
    elif settings.rows == "mean":
        weights = None if counted is None else jnp.broadcast_to((counted | _is_first(counted))[..., None, None], query.shape)
        scorers = query.astype(jnp.float32).mean(axis=1, keepdims=True, where=weights).astype(query.dtype)
    elif counted is not None:
        scorers = jnp.where(counted[..., None, None], query, query[:, :1])
    else:
        scorers = query
    block, total = jnp.arange(num_blocks), length + rows_that_count(num_rows, counted)
    first_tail, num_there = length // size - settings.tail_blocks, jnp.minimum(-(-total // size), num_blocks)
    always = ((block < settings.head_blocks) | (block >= first_tail[:, None])) & (block < num_there[:, None])
    num_kept = jnp.clip(settings.budget_blocks(total), always.sum(axis=1, dtype=jnp.int32), num_there)
    budget = dict(head_blocks=settings.head_blocks, max_chosen=settings.max_chosen(capacity=capacity, num_rows=num_rows))
    if settings.score == "mean" and scorers.shape[1] == 1 and settings.budget == "head":
        options: dict[str, Any] = dict(group=settings.group, implementation=implementation)
        chosen_blocks = block_selection(scorers[:, 0], summaries[0], first_tail, num_there, num_kept, **budget, **options)
        return Selection(*chosen_blocks, row_mask=None)
    scores = _scores(settings, scorers, keys, summaries, length, layer)  # [B,K,R,NB]
    # num_blocks stands for "none" until the end: it sorts behind every block.
    choose = top_blocks if settings.budget == "head" else top_blocks_of_layer
    chosen = choose(scores, first_tail, num_there, num_kept, **budget)
    if chosen.shape[2] == 1:
        listed, row_mask = chosen[:, :, 0], None
    else:
        listed = _union(chosen, num_blocks, settings.max_read(capacity=capacity, num_rows=num_rows))
        row_mask = (listed[:, :, None, :, None] == chosen[:, :, :, None, :]).any(axis=-1) if settings.rows == "each" else None
    counted = listed < num_blocks
    return Selection(
        block_ids=jnp.where(counted, listed, 0).astype(jnp.int32), num_blocks=counted.sum(axis=-1, dtype=jnp.int32), row_mask=row_mask
    )


def top_blocks_of_layer(
    scores: jax.Array, first_tail: jax.Array, num_there: jax.Array, num_kept: jax.Array, *, head_blocks: int, max_chosen: int
) -> jax.Array:
    """`top_blocks` of all heads together: K times `num_kept` for each query, the largest scores whosever they are.

    What is always kept is so in each head, and no head keeps more than `max_chosen`; at a tie the earlier head comes before the later.

    Args:
        scores: `[B,K,R,NB]` float32.
        first_tail: As in `top_blocks`, and so the others.
        num_there: `[B]` int32.
        num_kept: `[B]` int32, what a head keeps on average.
        head_blocks: Static.
        max_chosen: C. Static.

    Returns:
        `[B,K,R,C]`, ascending; NB stands for none, behind all others.
    """
    batch_size, num_heads, num_queries, num_blocks = scores.shape
    sizes = dict(head_blocks=head_blocks, max_chosen=max_chosen)
    best = top_blocks(scores, first_tail, num_there, jnp.minimum(num_there, max_chosen), **sizes)  # of each head, more than it may keep
    block = jnp.minimum(best, num_blocks - 1)
    forced = (block < head_blocks) | (block >= first_tail[:, None, None, None])
    ranked = jnp.where(forced, jnp.inf, jnp.take_along_axis(scores, block, axis=-1))
    ranked = jnp.where(best < num_blocks, ranked, -jnp.inf)
    together = jnp.moveaxis(ranked, 1, 2).reshape(batch_size, num_queries, -1)
    _, order = lax.top_k(together, together.shape[-1])
    first = jnp.arange(together.shape[-1]) < num_heads * num_kept[:, None, None]
    first = jnp.broadcast_to(first, order.shape)
    kept = jax.vmap(jax.vmap(lambda order, first: jnp.zeros(order.shape, bool).at[order].set(first)))(order, first)
    kept = jnp.moveaxis(kept.reshape(batch_size, num_queries, num_heads, -1), 2, 1)
    return jnp.sort(jnp.where(kept, best, num_blocks), axis=-1)


def rows_that_count(num_rows: int, counted: jax.Array | None) -> Any:
    """How many rows count, an int or `[B]` int32. At least one: that of the pending token."""
    return num_rows if counted is None else jnp.maximum(counted.sum(axis=1, dtype=jnp.int32), 1)


def _is_first(rows: jax.Array) -> jax.Array:
    """The pending token always counts: without any there would be no mean."""
    return jnp.arange(rows.shape[1]) == 0


def _union(chosen: jax.Array, none: int, width: int) -> jax.Array:
    """`[B,K,R,C]` → `[B,K,width]`: every block that stands in any row's list, once, ascending; then `none`."""
    together = jnp.sort(chosen.reshape(*chosen.shape[:2], -1), axis=-1)
    again = together == jnp.pad(together, ((0, 0), (0, 0), (1, 0)), constant_values=-1)[..., :-1]
    return jnp.sort(jnp.where(again, none, together), axis=-1)[..., :width]


def _scores(
    settings: SparseAttention, query: jax.Array, keys: jax.Array, summaries: tuple[jax.Array, ...], length: jax.Array, layer: Any
) -> jax.Array:
    """`[B,K,R,NB]` float32. Blocks that do not compete have a score too, which counts for nothing."""
    batch_size, num_kv_heads, capacity, _ = keys.shape
    num_blocks = capacity // settings.block_size
    if settings.summary is not None:
        return block_scores(query, summaries, group=settings.group)
    if settings.score == "oracle":
        return _attention_mass(settings, query, keys, length)
    if settings.score == "window":
        return jnp.broadcast_to(jnp.arange(num_blocks, dtype=jnp.float32), (batch_size, num_kv_heads, 1, num_blocks))
    layer_key = jax.random.fold_in(jax.random.key(settings.seed, impl="threefry2x32"), layer)

    def draw(row: jax.Array, length: jax.Array) -> jax.Array:
        row_key = jax.random.fold_in(jax.random.fold_in(layer_key, row), length)
        return jax.random.uniform(row_key, (num_kv_heads, 1, num_blocks))

    return jax.vmap(draw)(jnp.arange(batch_size), length)


def _attention_mass(settings: SparseAttention, query: jax.Array, keys: jax.Array, length: jax.Array) -> jax.Array:
    """The share of each block in the softmax over all committed tokens."""
    batch_size, num_queries, num_heads, head_dim = query.shape
    num_kv_heads, capacity = keys.shape[1:3]
    q_brkmh = query.reshape(batch_size, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    precision = full_precision(query)
    scores = jnp.einsum("brkmh,bksh->bkmrs", q_brkmh, keys, precision=precision, preferred_element_type=jnp.float32)
    committed = (jnp.arange(capacity) < length[:, None])[:, None, None, None, :]
    weights = jax.nn.softmax(jnp.where(committed, scores * head_dim**-0.5, -jnp.inf), axis=-1)
    mass = weights.reshape(*weights.shape[:-1], -1, settings.block_size).sum(axis=-1)
    return mass.mean(axis=2) if settings.group == "mean" else mass.max(axis=2)
