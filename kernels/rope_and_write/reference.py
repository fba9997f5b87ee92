"""Rotating new rows and writing their keys and values into the cache: the specification, in plain jnp."""

from __future__ import annotations

import jax

from specjax.kernels.rope_and_write.cache_write import write_layer
from specjax.kernels.rope_and_write.heads import Heads


def rope_and_write_reference(heads: Heads, keys: jax.Array, values: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `specjax.kernels.rope_and_write.rope_and_write`."""
    query, key, value = heads.rotated()
    return query, *write_layer(keys, values, key, value, start)
