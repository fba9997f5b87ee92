"""A histogram of non-negative numbers of any size, by their leading bits: streams add up, and a quantile is known to 1.6 %."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

# Of a float32's bits those below are dropped: 8 bits of exponent and 6 of mantissa remain, so a bin is 1/64 of its value wide at most.
_DROPPED_BITS = 17
NUM_BINS = 1 << (31 - _DROPPED_BITS)
RELATIVE_WIDTH = 2.0**-6


def histogram(values: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """How many of the values fall into each bin.

    Args:
        values: Of any shape, not negative; bins hold float32.
        counted: bool, broadcast against the values: which count; `None` is all.

    Returns:
        `[NUM_BINS]` int32.

    Raises:
        ValueError: So many values that a bin might not count them.
    """
    if values.size > np.iinfo(np.int32).max:
        raise ValueError(f"a histogram counts in int32: take fewer than 2^31 values at a time, such as of fewer rows, got {values.size}")
    bins = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32) >> _DROPPED_BITS
    ones = jnp.ones(values.shape, jnp.int32) if counted is None else jnp.broadcast_to(counted, values.shape).astype(jnp.int32)
    return jnp.zeros((NUM_BINS,), jnp.int32).at[bins.reshape(-1)].add(ones.reshape(-1))


def quantile(counts: np.ndarray, share: float) -> np.ndarray:
    """The largest edge of a bin below which at most a share of the values lies.

    Args:
        counts: `[..., NUM_BINS]` integers.
        share: From 0 to 1.

    Returns:
        `[...]` float32. At a share of 1 it is the lower edge of the largest value's bin, so that this value itself is not below it.

    Raises:
        ValueError: A share outside [0, 1], or a histogram of nothing.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be from 0 to 1, got {share!r}")
    totals = counts.sum(axis=-1, keepdims=True, dtype=np.int64)
    if not totals.all():
        raise ValueError("a histogram holds no values: there is no quantile of them")
    below = counts.cumsum(axis=-1, dtype=np.int64) - counts
    possible = (below <= share * totals) & (below < totals)
    last = NUM_BINS - 1 - np.argmax(possible[..., ::-1], axis=-1)
    return _edges()[last]


def share_at_least(counts: np.ndarray, value: float) -> np.ndarray:
    """The share of the values at or above an edge, `[...]` of `[..., NUM_BINS]`."""
    return np.where(_edges() >= np.float32(value), counts, 0).sum(axis=-1, dtype=np.int64) / counts.sum(axis=-1, dtype=np.int64)


def _edges() -> np.ndarray:
    return (np.arange(NUM_BINS, dtype=np.uint32) << _DROPPED_BITS).view(np.float32)
