"""Summaries of the blocks of a key/value cache: what sparse attention scores blocks by, without reading their keys.

A block's summary is only ever computed from its keys, never changed by difference: each write recomputes those of the few blocks that it
touches. So a rollback heals by itself. What rolled-back rows left in the summary of an unfinished block is not read, since only blocks that
committed tokens fill are scored, and the write that fills a block recomputes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from specjax.kernels.rope_and_write import write_slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockSummaries:
    """Summaries of all blocks.

    Attributes:
        layers: L tuples of arrays `[B,K,NB,H]` in the cache's dtype, NB = S / block_size: `(mean,)` of each block's keys, or their
            `(least, greatest)` components; `()` for a layer that scores no blocks.
        kind: `"mean"` or `"bounds"`. Static.
        block_size: Slots a block. Static.
    """

    layers: tuple[tuple[jax.Array, ...], ...]
    kind: str = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, keys: Sequence[jax.Array], *, kind: str, block_size: int, layers: Collection[int]) -> BlockSummaries:
        """Of all that a cache holds; reads its keys once.

        Args:
            keys: Each layer's, `[B,K,S,H]`; S must be a multiple of `block_size`.
            kind: `"mean"` or `"bounds"`.
            block_size: Slots a block.
            layers: Which layers score blocks.

        Raises:
            ValueError: A capacity that is not whole blocks.
        """
        if (capacity := keys[0].shape[2]) % block_size:
            raise ValueError(f"a cache of {capacity} slots is not whole blocks of {block_size}")
        kept = (summarise(x, kind, block_size) if layer in layers else () for layer, x in enumerate(keys))
        return cls(layers=tuple(kept), kind=kind, block_size=block_size)

    def fits(self, *, kind: str, block_size: int, layers: Collection[int]) -> bool:
        """Whether these are the summaries that `of` would make with the same arguments."""
        return (self.kind, self.block_size) == (kind, block_size) and {i for i, kept in enumerate(self.layers) if kept} == set(layers)

    def grown(self, capacity: int) -> BlockSummaries:
        """For a cache grown to `capacity` slots."""

        def pad(x: jax.Array) -> jax.Array:
            return jnp.pad(x, ((0, 0), (0, 0), (0, -(-capacity // self.block_size) - x.shape[2]), (0, 0)))

        return dataclasses.replace(self, layers=jax.tree.map(pad, self.layers))

    def written(self, layer: int, keys: jax.Array, start: jax.Array, num_rows: int) -> tuple[jax.Array, ...]:
        """The layer's summaries after a write: the blocks that it touched, from their keys.

        Args:
            layer: Which.
            keys: `[B,K,S,H]`, after the write.
            start: `[B]` int32, the first slot written.
            num_rows: T, slots written from there on.
        """
        kept = self.layers[layer]
        if not kept:
            return ()
        size = self.block_size
        # T slots stand in at most ceil((T - 1) / block) + 1 blocks.
        num_touched = min(kept[0].shape[2], -(-(num_rows - 1) // size) + 1)
        first = jnp.clip(start // size, 0, kept[0].shape[2] - num_touched)
        touched = jax.vmap(lambda row, slot: lax.dynamic_slice_in_dim(row, slot, num_touched * size, axis=1))(keys, first * size)
        return tuple(write_slots(old, new, first) for old, new in zip(kept, summarise(touched, self.kind, size), strict=True))


def summarise(keys: jax.Array, kind: str, block_size: int) -> tuple[jax.Array, ...]:
    """`[B,K,n*block,H]` → `(mean,)` or `(least, greatest)`, `[B,K,n,H]` each."""
    blocks = keys.reshape(*keys.shape[:2], keys.shape[2] // block_size, block_size, keys.shape[3])
    if kind == "mean":
        return (blocks.astype(jnp.float32).mean(axis=3).astype(keys.dtype),)
    return blocks.min(axis=3), blocks.max(axis=3)
