"""The key/value cache: per-layer `[B,K,S,H]` arrays and one length a row.

Rolling back is setting `length`: slots at or beyond it are never attended and will be overwritten. S stands before H and after K, so that
attention reads it without a transpose. Two invariants let attention mask scores only, and not the values (which would read and write the
whole cache once more): values are always finite (`specjax.kernels.rope_and_write` replaces what is not, and marks the key NaN so that the
fault still shows), and every slot is written before the first query that may see it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from specjax.models.block_selection import Selection
from specjax.models.block_summaries import BlockSummaries


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """What one layer's attention keeps.

    Attributes:
        keys: `[B,K,S,H]`, the new rows among them.
        values: `[B,K,S,H]`, likewise.
        summaries: The layer's entry in `BlockSummaries.layers`; empty without summaries.
        selection: The blocks that the new rows attended to; `None` is all.
    """

    keys: jax.Array
    values: jax.Array
    summaries: tuple[jax.Array, ...] = ()
    selection: Selection | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer.

    Attributes:
        keys: L arrays `[B,K,S,H]`, after the rotary embedding.
        values: L arrays `[B,K,S,H]`.
        length: `[B]` int32, tokens that count in each row.
        context_limit: `[B]` int32, tokens that each row may come to hold: what `dynamic` and `longrope` rotary frequencies were chosen
            for. They may not change while the cache lives, since its keys are rotated already. `None` where nothing depends on it.
        summaries: Of the blocks, for sparse attention; `None` without it.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array
    context_limit: jax.Array | None = None
    summaries: BlockSummaries | None = None

    @classmethod
    def zeros(
        cls,
        *,
        num_layers: int,
        batch_size: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: jnp.dtype,
        context_limit: jax.Array | None = None,
        sharding=None,
    ) -> KVCache:
        """An empty, zero-filled cache of length 0.

        Args:
            num_layers: L.
            batch_size: B.
            num_kv_heads: K.
            capacity: S, slots a row.
            head_dim: H.
            dtype: Dtype of keys and values.
            context_limit: `[B]` int32 or `None`.
            sharding: Optional sharding of each `[B,K,S,H]` array.
        """

        def empty() -> tuple[jax.Array, ...]:
            arrays = (jnp.zeros((batch_size, num_kv_heads, capacity, head_dim), dtype) for _ in range(num_layers))
            return tuple(arrays if sharding is None else (lax.with_sharding_constraint(x, sharding) for x in arrays))

        return cls(keys=empty(), values=empty(), length=jnp.zeros((batch_size,), jnp.int32), context_limit=context_limit)

    @property
    def capacity(self) -> int:
        """S, slots a row."""
        return self.keys[0].shape[2]

    def only(self, layer: int) -> KVCache:
        """One layer of it, as a cache: layers of equal shapes then look the same to whoever is handed one."""
        summaries = self.summaries
        if summaries is not None:
            summaries = dataclasses.replace(summaries, layers=(summaries.layers[layer],))
        return KVCache(keys=(self.keys[layer],), values=(self.values[layer],), length=self.length, summaries=summaries)

    def with_length(self, length: jax.Array) -> KVCache:
        """The same slots with another length `[B]`: the rollback."""
        return dataclasses.replace(self, length=length.astype(jnp.int32))

    def with_layers(self, layers: Sequence[LayerCache], length: jax.Array) -> KVCache:
        """The cache after a pass: what its L layers kept, and the length `[B]` that counts now."""
        summaries = self.summaries
        if summaries is not None:
            summaries = dataclasses.replace(summaries, layers=tuple(layer.summaries for layer in layers))
        keys, values = tuple(layer.keys for layer in layers), tuple(layer.values for layer in layers)
        return dataclasses.replace(self, keys=keys, values=values, length=length, summaries=summaries)

    def grown(self, capacity: int) -> KVCache:
        """The same cache with `capacity` slots (copies); unchanged where it has as many already."""
        extra = capacity - self.capacity
        if extra <= 0:
            return self

        def pad(x: jax.Array) -> jax.Array:
            return jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0)))

        summaries = None if self.summaries is None else self.summaries.grown(capacity)
        return dataclasses.replace(self, keys=tuple(map(pad, self.keys)), values=tuple(map(pad, self.values)), summaries=summaries)

    def with_finite_values(self) -> KVCache:
        """Zeroes the values beyond each row's length (copies). For a cache that comes from outside and may hold anything there."""
        inside = (jnp.arange(self.capacity) < self.length[:, None])[:, None, :, None]
        return dataclasses.replace(self, values=tuple(jnp.where(inside, v, jnp.zeros_like(v)) for v in self.values))
