"""Sums of counts: of 64 bits on the host once their values are known, for what calls add up to passes 2^31.

A device counts in int32 and float32, which is enough for one call. Within a traced function, or over several hosts, they stay so.

Counts of a call begin with one axis, its rows. What `vmap`, `scan` or `stack` made of several calls' has more in front, whose entries
are rows like all others: nothing but the axes behind them tells rows apart from what is counted.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def added(ours: Any, theirs: Any) -> Any:
    """Two pytrees of counts, leaf by leaf."""
    return jax.tree.map(lambda *pair: operator.add(*wide(*pair)), ours, theirs)


def total(count: Any, *, behind: int = 0) -> Any:
    """The sum of an array over its rows: over all axes but the last `behind`."""
    (count,) = wide(count)
    return count.sum(axis=tuple(range(count.ndim - behind)))


def one_row(counts: Any, *, row_axes: int) -> Any:
    """A pytree of counts with the sums over rows, which the first `row_axes` axes of each leaf are, as its only row."""
    return jax.tree.map(lambda count: total(count, behind=count.ndim - row_axes)[None], counts)


def ratio(part: Any, whole: Any, *, otherwise: float) -> Any:
    """`part / whole`; `otherwise` where there is nothing of the whole."""
    part, whole = wide(part, whole)
    xp = np if isinstance(whole, np.ndarray) else jnp
    return xp.where(whole > 0, part / xp.maximum(whole, 1), otherwise)[()]


def wide(*counts: Any) -> tuple[Any, ...]:
    """The same numbers as NumPy's int64 or float64, if the values of all can be read here; else as they are."""
    if any(isinstance(count, Tracer) or not getattr(count, "is_fully_addressable", True) for count in counts):
        return counts
    arrays = [np.asarray(count) for count in counts]
    return tuple(array.astype(np.float64 if array.dtype.kind == "f" else np.int64) for array in arrays)
