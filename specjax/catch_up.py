"""A dense pass over tokens that sparse passes have taken in: their keys and values become the dense ones, and the target says its own mind.

Its number of rows is static: rows behind a short context are computed and count for nothing, and what they write stands beyond the length.
A row that has no room for all of them begins earlier, with tokens whose keys and values were dense already.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.kv_cache import KVCache
from specjax.models.transformer import Transformer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseRows:
    """What the dense pass made of W positions a row.

    Attributes:
        hidden: `[B,W,D]` after the final norm.
        features: `[B,W,*]` at the boundaries asked for, or `None`.
        start: `[B]` int32, the position of the first.
        cache: The cache with their keys and values written; its length is what it was.
    """

    hidden: jax.Array
    features: jax.Array | None
    start: jax.Array
    cache: KVCache

    def at(self, rows: jax.Array, position: jax.Array, count: int) -> jax.Array:
        """The rows of `count` positions on from `position`, one of them a batch row.

        Args:
            rows: `[B,W,...]`: `hidden`, or what was made of it.
            position: `[B]` int32, from `dense_length` on.
            count: Static.

        Returns:
            `[B,count,...]`; what would stand behind the last row is the last row.
        """
        index = jnp.clip((position - self.start)[:, None] + jnp.arange(count), 0, rows.shape[1] - 1)
        return jnp.take_along_axis(rows, index.reshape(*index.shape, *(1,) * (rows.ndim - 2)), axis=1)


def catch_up(
    target: Transformer,
    target_params: Any,
    tokens: jax.Array,
    cache: KVCache,
    dense_length: jax.Array,
    *,
    num_rows: int,
    feature_layers: tuple[int, ...] = (),
) -> DenseRows:
    """Runs the dense target over the positions `dense_length ... dense_length + num_rows - 1`.

    Costs one dense pass over `num_rows` rows: all weights once, and all keys and values once.

    Args:
        target: The target. Static.
        target_params: Its params.
        tokens: `[B,S]` int32, the token at each position: a context, with a draft behind it if that is to be verified too.
        cache: The target's; the keys and values of its first `dense_length` tokens are dense.
        dense_length: `[B]` int32.
        num_rows: W, at most the cache's capacity. Static.
        feature_layers: As in `Transformer`.

    Returns:
        The `DenseRows`.

    Raises:
        ValueError: More rows than the cache has slots.
    """
    if not 0 < num_rows <= cache.capacity:
        raise ValueError(f"catch_up needs 1 to {cache.capacity} rows, as many as the cache has slots, got {num_rows}")
    start = jnp.minimum(dense_length, cache.capacity - num_rows).astype(jnp.int32)  # a write beyond the end would land elsewhere
    index = start[:, None] + jnp.arange(num_rows)
    window = jnp.take_along_axis(tokens, jnp.minimum(index, tokens.shape[1] - 1), axis=1)
    output = target.apply({"params": target_params}, window, cache.with_length(start), feature_layers=feature_layers)
    return DenseRows(hidden=output.hidden, features=output.features, start=start, cache=output.cache.with_length(cache.length))
