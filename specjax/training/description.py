"""What a run is, as JSON values, and in which fields two runs differ."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np


def describe(value: Any) -> Any:
    """Nested dicts, lists, numbers and strings for a configuration; a dataclass says its type beside its fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Where a Flax module stands in another one says nothing of what it computes.
        left_out = ("parent", "name") if isinstance(value, nn.Module) else ()
        names = [field.name for field in dataclasses.fields(value) if field.name not in left_out]
        return {"type": type(value).__name__, **{name: describe(getattr(value, name)) for name in names}}
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return np.dtype(value).name


def digests(trees: Mapping[str, Any]) -> dict[str, str | None]:
    """For nested arrays a digest of their names, dtypes, shapes and values; `None` where there are none.

    Reads about a gigabyte a second, and an array that stands in several trees once.

    Args:
        trees: By name, nested dicts of arrays, on the host or a device.
    """
    known: dict[int, str] = {}
    found: dict[str, str | None] = {}
    for name, tree in trees.items():
        lines = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if id(leaf) not in known:
                known[id(leaf)] = _digest(leaf)
            lines.append(f"{jax.tree_util.keystr(path)} {known[id(leaf)]}\n")
        found[name] = hashlib.sha256("".join(lines).encode()).hexdigest()[:16] if lines else None
    return found


def first_difference(wanted: Any, found: Any) -> str | None:
    """Where two descriptions differ first, as `a.b.c is 1, was 2`; `None` if nowhere.

    Args:
        wanted: That of now.
        found: That of then.
    """
    return next(_differences(wanted, found, ""), None)


def _digest(leaf: Any) -> str:
    array = np.ascontiguousarray(jax.device_get(leaf))
    digest = hashlib.sha256(f"{array.dtype.name} {list(array.shape)} ".encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _differences(wanted: Any, found: Any, path: str) -> Iterator[str]:
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        for key in [*wanted, *(key for key in found if key not in wanted)]:
            yield from _differences(wanted.get(key), found.get(key), f"{path}.{key}" if path else str(key))
    elif wanted != found:
        yield f"{path} is {_short(wanted)}, was {_short(found)}"


def _short(value: Any) -> str:
    return value.get("type", "given") if isinstance(value, Mapping) else "not there" if value is None else repr(value)
