"""Params in two: those that are trained, and those that stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import traverse_util


def split_params(params: Mapping[str, Any], is_trained: Callable[[tuple[str, ...]], bool]) -> tuple[dict, dict]:
    """The trained and the fixed part of nested params; what is not floating-point, such as token ids, is always fixed.

    Args:
        params: Nested dict of arrays or their shapes.
        is_trained: Of a leaf's path.
    """
    trained: dict[tuple[str, ...], Any] = {}
    fixed: dict[tuple[str, ...], Any] = {}
    for path, leaf in _flat(params).items():
        (trained if jnp.issubdtype(leaf.dtype, jnp.floating) and is_trained(path) else fixed)[path] = leaf
    return traverse_util.unflatten_dict(trained), traverse_util.unflatten_dict(fixed)


def merge_params(trained: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict:
    """The inverse of `split_params`."""
    return traverse_util.unflatten_dict(_flat(trained) | _flat(fixed))


def check_params(name: str, params: Any, expected: Mapping[str, Any]) -> None:
    """Refuses params of another shape.

    Args:
        name: Whose, for the message.
        params: What was given.
        expected: Nested dict of shapes.

    Raises:
        ValueError: They differ; the message names a leaf.
    """
    found = {path: leaf.shape for path, leaf in _flat(params).items()} if isinstance(params, Mapping) else {}
    wanted = {path: leaf.shape for path, leaf in _flat(expected).items()}
    wrong = sorted(path for path in found.keys() | wanted.keys() if found.get(path) != wanted.get(path))
    if wrong:
        path = wrong[0]
        raise ValueError(f"{name}: {'.'.join(path)} should have shape {wanted.get(path)} by its configuration, got {found.get(path)}")


def _flat(tree: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    return traverse_util.flatten_dict(dict(tree))  # pyright: ignore[reportReturnType]  # its keys are tuples without `sep`
