"""Sparse attention inside the decoder: which layers choose blocks, which reuse a choice, and how much was read. arXiv:2512.21911.

Lossy wherever a block is left out. A layer's rows are written to the cache first; then they attend to chosen blocks of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.kernel_settings import Kernels
from specjax.kernels.block_sparse_attention import block_sparse_attention
from specjax.kernels.rope_and_write import Heads
from specjax.model_config import ModelConfig
from specjax.models.attention import written_layer
from specjax.models.block_selection import Selection, rows_that_count, select_blocks
from specjax.models.block_summaries import BlockSummaries
from specjax.models.kv_cache import KVCache, LayerCache
from specjax.sparsity.attention_reads import AttentionReads, blocks_in_reach
from specjax.sparsity.attention_sparsity import SparseAttention
from specjax.sparsity.sparsity_config import SparsityConfig


def prepare_cache(cache: KVCache, sparsity: SparsityConfig, model: ModelConfig) -> KVCache:
    """The same cache with the block summaries that sparse passes read, and without any others; computed only where they are not there.

    Args:
        cache: Any, of this model; its capacity must be whole blocks where attention is sparse.
        sparsity: What the passes over it will leave out.
        model: The model's shape.
    """
    settings = sparsity.attention
    if settings is None or settings.summary is None:
        return dataclasses.replace(cache, summaries=None)
    kind, size, layers = settings.summary, settings.block_size, sparsity.choosing_layers(model)
    if cache.summaries is not None and cache.summaries.fits(kind=kind, block_size=size, layers=layers):
        return cache
    return dataclasses.replace(cache, summaries=BlockSummaries.of(cache.keys, kind=kind, block_size=size, layers=layers))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendBlocks:
    """Attention of a layer's new rows over chosen blocks of it; kept is its `LayerCache`.

    Attributes:
        cache: Of that layer alone, before the pass.
        layer: Scalar int32, which.
        selection: The choice of an earlier layer; `None`: it chooses.
        counted: As in `SparsePass`.
        step_mask: Likewise.
        settings: Of sparse attention. Static.
        kernels: Of attention and of the cache's writes. Static.
    """

    cache: KVCache
    layer: Any
    selection: Selection | None
    counted: jax.Array | None
    step_mask: jax.Array | None
    settings: SparseAttention = dataclasses.field(metadata={"static": True})
    kernels: Kernels = dataclasses.field(metadata={"static": True})

    def __call__(self, heads: Heads, sinks: jax.Array | None) -> tuple[jax.Array, LayerCache]:
        """See `Attend`."""
        assert sinks is None
        settings, length = self.settings, self.cache.length
        query, kept = written_layer(self.cache, heads, self.kernels)
        selection = self.selection
        if selection is None:
            options: dict[str, Any] = dict(layer=self.layer, counted=self.counted)
            options |= dict(implementation=self.kernels.attention.partition("@")[0])  # a cut is attention's
            selection = select_blocks(settings, query, kept.keys, kept.summaries, length, **options)
        mixed = block_sparse_attention(
            query,
            kept.keys,
            kept.values,
            length,
            selection.block_ids,
            selection.num_blocks,
            block_size=settings.block_size,
            scale=query.shape[-1] ** -0.5,
            step_mask=self.step_mask,
            row_mask=selection.row_mask,
            implementation=self.kernels.attention,
        )
        return mixed, dataclasses.replace(kept, selection=selection)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparsePass:
    """One pass over T rows of a cache, as its layers see it.

    Attributes:
        sparsity: What is left out; its `attention` is not `None`.
        model: The model's shape.
        cache: The cache before the pass.
        num_rows: T.
        counted: `[B,T]` bool, rows whose queries count in a choice; `None` is all.
        step_mask: `[T,T]` bool among the new rows; `None` is causal.
        kernels: Of attention and of the cache's writes.

    Raises:
        ValueError: A cache that is not whole blocks or lacks the summaries that the score reads.
    """

    sparsity: SparsityConfig
    model: ModelConfig
    cache: KVCache
    num_rows: int
    counted: jax.Array | None
    step_mask: jax.Array | None
    kernels: Kernels

    def __post_init__(self) -> None:
        size, summaries = self.settings.block_size, self.cache.summaries
        if self.cache.capacity % size:
            raise ValueError(f"sparse attention needs a cache of whole blocks of {size}, got {self.cache.capacity} slots")
        kind, layers = self.settings.summary, self.sparsity.choosing_layers(self.model)
        if kind is not None and (summaries is None or not summaries.fits(kind=kind, block_size=size, layers=layers)):
            raise ValueError(f"the cache has no {kind!r} summaries of blocks of {size} for layers {layers}: see prepare_cache")

    @property
    def settings(self) -> SparseAttention:
        """The settings of sparse attention."""
        assert self.sparsity.attention is not None
        return self.sparsity.attention

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer leaves anything out. Where the budget holds every block of the cache none does: there is nothing to choose."""
        most = self.settings.max_kept(capacity=self.cache.capacity, num_rows=self.num_rows)
        return most < self.cache.capacity // self.settings.block_size and layer in self.sparsity.attention_layers(self.model)

    def attend(self, layer: int, earlier: list[LayerCache]) -> AttendBlocks:
        """Attention of a sparse layer.

        Args:
            layer: Which.
            earlier: What the layers before it kept: the choice of the nearest anchor is among them.
        """
        anchor = self.sparsity.reuse.anchor(layer)
        return AttendBlocks(
            cache=self.cache.only(layer),
            layer=np.int32(layer),
            selection=None if anchor == layer else earlier[anchor].selection,
            counted=self.counted,
            step_mask=self.step_mask,
            settings=self.settings,
            kernels=self.kernels,
        )

    def reads(self, layers: list[LayerCache]) -> AttentionReads:
        """What the pass read, from what all layers kept."""
        settings, length = self.settings, self.cache.length
        there = _blocks_there(self.model, settings, length, rows_that_count(self.num_rows, self.counted))
        full = (length // settings.block_size).astype(jnp.float32)
        none, read, scored = jnp.zeros_like(full), [], []
        for layer, kept in enumerate(layers):
            read.append(there[:, layer] if kept.selection is None else kept.selection.num_blocks.astype(jnp.float32).mean(axis=1))
            chose = kept.selection is not None and self.sparsity.reuse.anchor(layer) == layer and settings.scores_queries
            scored.append(full if chose else none)
        zeros = no_reads(self.cache, settings)
        return dataclasses.replace(
            zeros,
            blocks_read=jnp.stack(read, axis=1),
            blocks_scored=jnp.stack(scored, axis=1),
            blocks_there=there,
            num_passes=jnp.ones_like(zeros.num_passes),
        )


def dense_reads(cache: KVCache, settings: SparseAttention, num_rows: int, model: ModelConfig) -> AttentionReads:
    """What a dense pass over a cache and `num_rows` new rows reads, counted in the blocks of sparse ones."""
    zeros = no_reads(cache, settings)
    blocks = _blocks_there(model, settings, cache.length, num_rows)
    return dataclasses.replace(zeros, blocks_read=blocks, blocks_there=blocks, num_passes=jnp.ones_like(zeros.num_passes))


def _blocks_there(model: ModelConfig, settings: SparseAttention, length: jax.Array, num_rows: Any) -> jax.Array:
    """`[B,L]` float32."""
    windows = map(model.window, range(model.num_layers))
    return jnp.stack([blocks_in_reach(length, num_rows, block_size=settings.block_size, window=window) for window in windows], axis=1)


def no_reads(cache: KVCache, settings: SparseAttention) -> AttentionReads:
    """The count before the first pass over a cache."""
    batch_size, num_kv_heads, _, head_dim = cache.keys[0].shape
    vector = num_kv_heads * head_dim * cache.keys[0].dtype.itemsize  # bytes of one key, all heads
    vectors_scored = {"mean": 1, "bounds": 2, "oracle": settings.block_size}.get(settings.score, 0)
    sizes = dict(block_bytes=2 * settings.block_size * vector, summary_bytes=vectors_scored * vector)
    return AttentionReads.zeros(batch_size, len(cache.keys), **sizes)
