"""The k largest of many numbers, not sorted by size: a radix selection instead of a sort. Alabi et al., doi:10.1145/2133803.2345676.

On a GPU XLA answers `jax.lax.top_k` with a sort of all the numbers once k is more than a few. Which k are largest takes less: the k-th
largest is found digit by digit, each digit by counting; then what lies above it is moved together.

Each digit reads the numbers anew, once a threshold. Where they are many beside k, most can be left aside after one reading: the k largest
lie in the k chunks of neighbours whose own largest numbers are the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

_KEY_BITS = 32
# Bits of the k-th largest number's key that a pass over the numbers finds. A pass counts against 2^bits - 1 thresholds.
_DIGIT_BITS = 4
# Numbers whose prefix sums are taken at once, each from scratch.
_BLOCK = 64
# Chunks are for rows that hold so many times k numbers, of which half or fewer are then left to two selections,
_TIMES_CHOSEN = 16
# and for so many numbers in all: two selections are twice as many launches, and of fewer numbers a pass is hardly more than its launch. By
# an estimate from what screened heads take at batches 1, 8 and 64 in experiments/results/head_latency.json.
_MANY_NUMBERS = 3 * 2**19
# Numbers of a row that what selects from chunks should find at most, as the Triton kernel does.
_MOST_AT_ONCE = 16384


def radix_largest(values: jax.Array, k: int) -> jax.Array:
    """`largest` by radix selection; columns ascend.

    Args:
        values: `[..., V]` float32.
        k: Static, from 1 to V.
    """
    keys = _ordered_keys(values)
    kth = jnp.zeros((*keys.shape[:-1], 1), jnp.uint32)
    for shift in range(_KEY_BITS - _DIGIT_BITS, -1, -_DIGIT_BITS):
        # The largest digit with which at least k numbers are no smaller: 0, or as many as there are thresholds that so many reach.
        thresholds = kth | jnp.arange(1, 2**_DIGIT_BITS, dtype=jnp.uint32) << shift
        reached = jnp.sum(keys[..., None, :] >= thresholds[..., None], axis=-1, dtype=jnp.int32) >= k
        kth |= reached.sum(axis=-1, keepdims=True, dtype=jnp.uint32) << shift
    above, equal = prefix_sums(jnp.stack([keys > kth, keys == kth]).astype(jnp.int32))
    # Of those that equal the k-th largest, the first ones fill up. Ranks grow at the columns that are chosen, and nowhere else.
    ranks = above + jnp.minimum(equal, k - above[..., -1:])
    wanted = jnp.arange(1, k + 1, dtype=jnp.int32)
    columns = jax.vmap(lambda row: jnp.searchsorted(row, wanted, method="scan_unrolled"))(ranks.reshape(-1, ranks.shape[-1]))
    return columns.reshape(*values.shape[:-1], k).astype(jnp.int32)


def in_chunks(values: jax.Array, k: int, *, select: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
    """`largest` by `chunked_largest` as often as it is worth while, and by `select`.

    Args:
        values: `[..., V]` float32.
        k: Static, from 1 to V.
        select: `largest` with ascending columns, for what is selected from.
    """
    chunk = chunk_size(values.shape, k)
    if chunk == 1:
        return select(values, k)
    return chunked_largest(values, k, chunk=chunk, select=lambda values, k: in_chunks(values, k, select=select))


def selections(shape: tuple[int, ...], k: int) -> list[tuple[int, ...]]:
    """Shapes of what `in_chunks` selects from, of values of a shape."""
    chunk = chunk_size(shape, k)
    if chunk == 1:
        return [shape]
    return [found for size in (-(-shape[-1] // chunk), k * chunk) for found in selections((*shape[:-1], size), k)]


def chunk_size(shape: tuple[int, ...], k: int) -> int:
    """Neighbours a chunk that `chunked_largest` should take of values `[..., V]`; 1 where it is not worth while.

    Args:
        shape: Of the values.
        k: Numbers to choose.
    """
    size = shape[-1]
    if size < _TIMES_CHOSEN * k or math.prod(shape) < _MANY_NUMBERS:
        return 1
    # V / c chunks and k c numbers are then selected from, the fewest with c = sqrt(V / k); a power of two near it.
    chunk = 1 << round(math.log2(size / k) / 2)
    while size > _MOST_AT_ONCE * chunk and size >= 2 * k * chunk:
        chunk *= 2
    return chunk


def chunked_largest(values: jax.Array, k: int, *, chunk: int, select: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
    """`largest` in two selections: of the k chunks with the largest maxima, then of their numbers; columns ascend.

    Exact, ties included: before a number of any other chunk come k numbers, one of each chosen chunk: larger ones, or equal ones in front.

    Args:
        values: `[..., V]` float32.
        k: Static, from 1 to V / chunk.
        chunk: Neighbours a chunk; static.
        select: `largest` with ascending columns, for what is selected from.
    """
    # What is added stands behind all others, and so is taken after all that are equal to it: never, for there are k others.
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % chunk)]
    chunks = jnp.pad(values, padding, constant_values=-jnp.inf).reshape(*values.shape[:-1], -1, chunk)
    # As integers: a NaN is a chunk's largest number too, and a maximum of floats may take the smallest ones for zero.
    chosen = select(_values_of(_ordered_keys(chunks).max(axis=-1)), k)
    members = jnp.take_along_axis(chunks, chosen[..., None], axis=-2).reshape(*values.shape[:-1], k * chunk)
    inside = select(members, k)
    return jnp.take_along_axis(chosen, inside // chunk, axis=-1) * chunk + inside % chunk


def sorted_largest(values: jax.Array, k: int) -> jax.Array:
    """`largest` by XLA's own top-k; columns ascend.

    Args:
        values: `[..., V]` float32.
        k: Static, from 1 to V.
    """
    # top_k tells the signs of NaN and of zero apart.
    bits = _bits(values)
    bits = jnp.where(_is_nan(bits), jnp.uint32(0x7FC00000), bits)
    return jnp.sort(jax.lax.top_k(jax.lax.bitcast_convert_type(bits, jnp.float32), k)[1].astype(jnp.int32), axis=-1)


def prefix_sums(values: jax.Array) -> jax.Array:
    """`jnp.cumsum(values, axis=-1)` in few passes: on a GPU that one is a pass, or several, for each doubling of the length.

    Args:
        values: `[..., n]` integers, whose sums stay below 2^24.
    """
    size = values.shape[-1]
    if size <= _BLOCK:
        # A product, which no compiler writes out as [..., n, n].
        sums = jnp.matmul(values.astype(jnp.float32), jnp.tri(size).T, precision=jax.lax.Precision.HIGHEST)
        return sums.astype(values.dtype)
    padded = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -size % _BLOCK)])
    inside = prefix_sums(padded.reshape(*values.shape[:-1], -1, _BLOCK))
    totals = inside[..., -1]
    before = prefix_sums(totals) - totals
    return (inside + before[..., None]).reshape(padded.shape)[..., :size]


def _ordered_keys(values: jax.Array) -> jax.Array:
    """uint32 that compare as the values do."""
    bits = _bits(values)
    keys = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    return jnp.where(_is_nan(bits), jnp.uint32(2**32 - 1), keys)


def _is_nan(bits: jax.Array) -> jax.Array:
    """Of the bits, as all here: where floats are compared too, XLA's compiler for CPUs takes the smallest ones for zero."""
    return bits << 1 > jnp.uint32(0xFF000000)


def _values_of(keys: jax.Array) -> jax.Array:
    """Values that have these keys."""
    return jax.lax.bitcast_convert_type(jnp.where(keys >> 31 == 1, keys & jnp.uint32(2**31 - 1), ~keys), jnp.float32)


def _bits(values: jax.Array) -> jax.Array:
    """Those of the values, with one zero; to add 0.0 would say the same, but XLA leaves it out."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits << 1 == 0, jnp.uint32(0), bits)
