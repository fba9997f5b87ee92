"""Which blocks the queries of a text choose in every layer, and how alike the choices are: of layers, and of the draft rows of a step.

arXiv:2512.21911 reuses one choice for all draft rows because they overlap, and for layers that are alike. Both are measured here on blocks
that compete: those that are always kept would be alike by themselves, so our overlaps are lower than ones that count them.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.models.block_selection import Selection
from specjax.models.kv_cache import KVCache
from specjax.models.transformer import Transformer
from specjax.sparsity.agreement import read_context, rows_from
from specjax.sparsity.attention_sparsity import SparseAttention
from specjax.sparsity.calibration import jaccard
from specjax.sparsity.sparsity_config import SparsityConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionSamples:
    """Choices of single queries. Two of the same settings add up with `+`.

    Attributes:
        chosen: `[layers, samples, T, blocks]` bool: a sample is a step, a text and a key/value head; T are the rows of a step.
        layers: The layers, those whose attention can be sparse.
    """

    chosen: np.ndarray
    layers: tuple[int, ...]

    def __add__(self, other: SelectionSamples) -> SelectionSamples:
        """Both."""
        return dataclasses.replace(self, chosen=np.concatenate([self.chosen, other.chosen], axis=1))

    def layer_similarity(self) -> np.ndarray:
        """`[layers, layers]`: the mean Jaccard similarity of what the first row chooses."""
        return jaccard(self.chosen[:, :, 0])

    def row_overlap(self) -> np.ndarray:
        """`[layers, T - 1]`: of the blocks that the first row chooses, the share that the row j behind it chooses too."""
        first, later = self.chosen[:, :, :1], self.chosen[:, :, 1:]
        sizes = first.sum(axis=-1)
        shares = (first & later).sum(axis=-1) / np.maximum(sizes, 1)
        return shares.mean(axis=1, where=np.broadcast_to(sizes > 0, shares.shape))


def sample_selections(
    target: Transformer,
    target_params: Any,
    tokens: Any,
    *,
    attention: SparseAttention,
    num_context: int,
    num_rows: int,
    num_samples: int = 16,
) -> SelectionSamples:
    """Lets every row of a few steps along texts choose for itself, in every layer, behind a dense context.

    Args:
        target: The target.
        target_params: Its params.
        tokens: `[B,N]` int, texts of equal length.
        attention: Its budget and score; its `rows` is not read.
        num_context: Tokens before the first step.
        num_rows: T, rows of a step: G + 1, at least 2.
        num_samples: Steps, spread evenly over the rest of the texts; fewer if these are short.

    Returns:
        The samples.

    Raises:
        ValueError: Texts that are too short, a score that no query decides, or contexts of which every block is kept.
    """
    sparsity = SparsityConfig(attention=dataclasses.replace(attention, rows="each"))
    sparsity.check(target.config)
    tokens = jnp.asarray(tokens, jnp.int32)
    num_steps = (tokens.shape[1] - num_context) // num_rows
    if num_rows < 2 or num_context < 1 or num_steps < 1:
        raise ValueError(
            f"sample_selections needs steps of at least 2 rows and texts of at least num_context + num_rows tokens, got num_rows = "
            f"{num_rows}, num_context = {num_context} and texts of {tokens.shape[1]}"
        )
    if not attention.scores_queries:
        raise ValueError(f"SparseAttention.score = {attention.score!r} chooses the same blocks for every query: there is nothing to sample")
    kept, forced = attention.budget_blocks(num_context + num_rows), attention.max_forced(num_rows)
    there = -(-(num_context + num_rows) // attention.block_size)
    if not forced < kept < there:
        raise ValueError(
            f"a context of {num_context} tokens leaves no query a choice: of its {there} blocks of {attention.block_size} tokens "
            f"{kept} are kept, {forced} of them always"
        )
    stride = max(num_steps // num_samples, 1)
    chosen = _sample(target, sparsity, num_context, num_rows, stride, min(num_steps // stride, num_samples), target_params, tokens)
    chosen = np.asarray(chosen)  # [samples, layers, B, K, T, blocks]
    chosen = np.moveaxis(chosen, 1, 0).reshape(chosen.shape[1], -1, *chosen.shape[-2:])
    return SelectionSamples(chosen=chosen, layers=sparsity.attention_layers(target.config))


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _sample(
    target: Transformer,
    sparsity: SparsityConfig,
    num_context: int,
    num_rows: int,
    stride: int,
    num_samples: int,
    params: Any,
    tokens: jax.Array,
) -> jax.Array:
    attention, layers = sparsity.attention, sparsity.attention_layers(target.config)
    assert attention is not None
    size = attention.block_size
    starts, ends = (jnp.full(tokens.shape[:1], count, jnp.int32) for count in (num_context, tokens.shape[1]))
    cache = read_context(target, params, tokens, sparsity=sparsity, num_context=starts, lengths=ends)
    num_blocks = cache.capacity // size

    def rows_at(cache: KVCache) -> jax.Array:
        return rows_from(tokens, cache.length, num_rows)

    def mask(selection: Selection, length: jax.Array) -> jax.Array:
        assert selection.row_mask is not None
        block = jnp.arange(num_blocks)
        listed = jnp.arange(selection.block_ids.shape[-1]) < selection.num_blocks[..., None]
        places = (selection.block_ids[..., None] == block) & listed[..., None]  # [B,K,C,blocks]
        chosen = (selection.row_mask[..., None] & places[:, :, None]).any(axis=3)
        competes = (block >= attention.head_blocks) & (block < (length // size - attention.tail_blocks)[:, None])
        return chosen & competes[:, None, None]

    def sample(cache: KVCache, _: None) -> tuple[KVCache, jax.Array]:
        _, captured = target.apply(
            {"params": params},
            rows_at(cache),
            cache,
            sparsity=sparsity,
            mutable=["intermediates"],
            capture_intermediates=lambda module, _: module.name == "attention",
        )
        kept = [captured["intermediates"][f"layer_{layer}"]["attention"]["__call__"][0][1] for layer in layers]
        chosen = jnp.stack([mask(layer.selection, cache.length) for layer in kept])
        cache = lax.fori_loop(0, stride, lambda _, cache: target.apply({"params": params}, rows_at(cache), cache).cache, cache)
        return cache, chosen

    return lax.scan(sample, cache, None, length=num_samples)[1]
