"""How much of the key/value cache the passes of decoding read, counted in blocks: the measured side of sparse attention's budget.

What counts is what attention needs: blocks that hold tokens, up to the last row of the pass. An implementation may read more (XLA's dense
attention reads the capacity) or move data twice (a gather writes what it read). Of a layer with a sliding window the blocks count that its
window touches, as there and as read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.counts import added, one_row, ratio, total


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionReads:
    """Blocks a row and layer, summed over passes; add two with `+`.

    Attributes:
        blocks_read: `[B,L]` float32, mean over the key/value heads.
        blocks_scored: `[B,L]` float32, blocks whose summaries were read to choose.
        blocks_there: `[B,L]` float32, what dense attention reads.
        num_passes: `[B]` int32.
        block_bytes: Keys and values of one block, all heads of a layer. Static.
        summary_bytes: What scoring reads of one block, all heads of a layer. Static.
    """

    blocks_read: jax.Array
    blocks_scored: jax.Array
    blocks_there: jax.Array
    num_passes: jax.Array
    block_bytes: int = dataclasses.field(metadata={"static": True})
    summary_bytes: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def zeros(cls, batch_size: int, num_layers: int, *, block_bytes: int, summary_bytes: int) -> AttentionReads:
        """No pass yet."""
        none = jnp.zeros((batch_size, num_layers), jnp.float32)
        passes = jnp.zeros((batch_size,), jnp.int32)
        return cls(none, none, none, passes, block_bytes=block_bytes, summary_bytes=summary_bytes)

    def of_rows(self, active: jax.Array) -> AttentionReads:
        """Only those of the rows that took part, `[B]` bool."""
        return jax.tree.map(lambda x: jnp.where(active.reshape(-1, *(1,) * (x.ndim - 1)), x, 0), self)

    def total(self) -> AttentionReads:
        """The sum over rows, as one row."""
        return one_row(self, row_axes=self.num_passes.ndim)

    def __add__(self, other: AttentionReads) -> AttentionReads:
        """Row by row."""
        ours, theirs = ((x.block_bytes, x.summary_bytes, x.blocks_read.shape[-1]) for x in (self, other))
        if ours != theirs:
            raise ValueError(f"AttentionReads of different settings or models do not add: bytes and layers {ours} and {theirs}")
        return added(self, other)

    @property
    def keep_ratio(self) -> Any:
        """Blocks read / blocks there, over all rows, passes and layers; 1 where nothing was there."""
        return ratio(total(self.blocks_read), total(self.blocks_there), otherwise=1.0)

    @property
    def keep_ratio_per_layer(self) -> Any:
        """`[L]`; 1 in layers that stay dense."""
        return ratio(total(self.blocks_read, behind=1), total(self.blocks_there, behind=1), otherwise=1.0)

    @property
    def kv_bytes_per_pass(self) -> Any:
        """Bytes of keys, values and summaries that one pass reads for one row, all layers: the mean over passes."""
        # Floats: an array takes no Python int of 2^31 and more.
        read, scored = total(self.blocks_read) * float(self.block_bytes), total(self.blocks_scored) * float(self.summary_bytes)
        return ratio(read + scored, total(self.num_passes), otherwise=0.0)

    @property
    def dense_kv_bytes_per_pass(self) -> Any:
        """What dense attention would read."""
        return ratio(total(self.blocks_there) * float(self.block_bytes), total(self.num_passes), otherwise=0.0)

    def summary(self) -> dict:
        """Plain numbers, for printing and JSON."""
        return {
            "keep_ratio": float(self.keep_ratio),
            "keep_ratio_per_layer": [float(x) for x in self.keep_ratio_per_layer],
            "kv_bytes_per_pass": float(self.kv_bytes_per_pass),
            "dense_kv_bytes_per_pass": float(self.dense_kv_bytes_per_pass),
        }


def blocks_in_reach(length: jax.Array, num_rows: Any, *, block_size: int, window: int | None) -> jax.Array:
    """`[B]` float32: blocks that dense attention reads in one layer, for rows that stand behind `length` tokens.

    Args:
        length: `[B]` int32.
        num_rows: Rows of the pass, an int or `[B]` int32.
        block_size: Static.
        window: Latest positions that a row sees, itself included; `None` is all.
    """
    first = 0 if window is None else jnp.maximum(length - window + 1, 0) // block_size
    return (-(-(length + num_rows) // block_size) - first).astype(jnp.float32)
