"""Writing new rows into one layer's `[B,K,S,H]` arrays, in place inside a jitted loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from specjax.kernels.varying import varying_as

# Above this many rows one scatter is cheaper than a dynamic_update_slice a row (each is a kernel launch on a GPU).
_MAX_UNROLLED_ROWS = 8


def write_layer(
    keys: jax.Array, values: jax.Array, new_keys: jax.Array, new_values: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes T new positions a row into one layer's arrays, in place inside a jitted loop.

    A component of a value that is not finite becomes zero, and the key's component NaN: whatever attends to that position still becomes
    NaN, and whatever does not is left alone (a zero attention weight times NaN would be NaN).

    Args:
        keys: `[B,K,S,H]`.
        values: `[B,K,S,H]`.
        new_keys: `[B,T,K,H]`.
        new_values: `[B,T,K,H]`.
        start: `[B]` int32, first slot to write in each row; `start + T <= S` is the caller's duty (JAX would shift the write back).

    Returns:
        The updated `(keys, values)`.
    """
    finite = jnp.isfinite(new_values)
    new_keys = jnp.where(finite, new_keys, jnp.nan)  # component by component: one NaN suffices to make every score NaN
    new_values = jnp.where(finite, new_values, 0)
    return _write_rows(keys, new_keys, start), _write_rows(values, new_values, start)


def _write_rows(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    return write_slots(cache, jnp.swapaxes(new, 1, 2), start)  # [B,K,T,H]


def write_slots(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Writes `new` `[B,K,T,H]` into `cache` `[B,K,S,H]` from slot `start` `[B]` of each row on, in place inside a jitted loop."""
    return _write(cache, new.astype(cache.dtype), start)


@jax.custom_jvp
def _write(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    return lax.platform_dependent(cache, new, start, cpu=_write_in_loop, default=_write_unrolled)


@_write.defjvp
def _write_tangent(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """The write is linear. Said here, because JAX cannot transpose a loop whose length it does not know: training needs the gradient."""
    return _write(*primals), _write_unrolled(tangents[0], tangents[1], primals[2])


def _write_unrolled(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    if cache.shape[0] > _MAX_UNROLLED_ROWS:
        return jax.vmap(lambda c, n, s: lax.dynamic_update_slice_in_dim(c, n, s, axis=1))(cache, new, start)
    for row in range(cache.shape[0]):
        cache = _write_row(cache, new[row : row + 1], jnp.int32(row), start[row])
    return cache


def _write_row(cache: jax.Array, new: jax.Array, row: jax.Array, start: jax.Array) -> jax.Array:
    zero = jnp.int32(0)  # all indices of one type, under jax_enable_x64 too
    return lax.dynamic_update_slice(cache, new, (row, zero, start, zero))


def _write_in_loop(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """A loop over the rows.

    XLA's CPU compiler fuses a bare update of a batch of one twice (into the carry, and into the attention that reads it) and then copies
    the cache to keep the two apart. It does not look into a loop whose length it cannot see.
    """
    num_rows = jnp.where(start[0] > jnp.iinfo(jnp.int32).min, jnp.int32(cache.shape[0]), 0)  # always all of them

    def write(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row, cache = carry
        return row + 1, _write_row(cache, lax.dynamic_slice_in_dim(new, row, 1), row, start[row])

    cache = varying_as(cache, new, start)
    return lax.while_loop(lambda carry: carry[0] < num_rows, write, (jnp.int32(0), cache))[1]
