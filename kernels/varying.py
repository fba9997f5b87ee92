"""Types of arrays inside `shard_map`: over which axes of the mesh a value differs from device to device.

A loop's carry must keep its type. One that begins with a constant, the same everywhere, and takes in what differs, does not; `shard_map`
then refuses the loop, unless it is told to look at no types (`check_vma=False`).
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def varying_as(tree: Any, *others: Any) -> Any:
    """A pytree whose arrays differ over all mesh axes over which any array of `others` does; unchanged outside `shard_map`."""
    axes = frozenset[str]().union(*map(_axes, jax.tree.leaves(others)))
    return jax.tree.map(lambda x: lax.pcast(x, tuple(sorted(axes - _axes(x))), to="varying") if axes - _axes(x) else x, tree)


def _axes(x: Any) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
