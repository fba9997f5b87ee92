"""A function of a batch, some rows at a time: what it holds meanwhile is bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def over_row_groups(function: Callable[..., Any], arrays: Any, *, bytes_a_row: int, max_bytes: int) -> Any:
    """`function(*arrays)`, called on as many rows as keep to a limit, and on one if that exceeds it.

    Args:
        function: Treats the rows (leading axis) of its arguments and results each by itself.
        arrays: Its arguments, pytrees of `[B,...]`.
        bytes_a_row: What it holds for each row.
        max_bytes: The limit.
    """
    batch_size = jax.tree.leaves(arrays)[0].shape[0]
    most = max(max_bytes // bytes_a_row, 1)
    rows = next(rows for rows in range(min(most, batch_size), 0, -1) if batch_size % rows == 0)
    if rows == batch_size:
        return function(*arrays)
    groups = jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), tuple(arrays))
    results = jax.lax.map(lambda group: function(*group), groups)
    return jax.tree.map(lambda x: x.reshape(batch_size, *x.shape[2:]), results)
