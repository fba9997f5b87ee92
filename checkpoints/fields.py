"""Reads a model's config.json, field by field: a missing or odd field is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: The file.
        name: What to call the model in messages.

    Raises:
        ValueError: No file, no JSON, or no object.
    """
    if not path.is_file():
        raise ValueError(f"{name}: no {path.name} in the folder")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}: {path.name} is not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name}: {path.name} should hold an object, got {type(values).__name__}")
    return values


def needed(raw: Mapping[str, Any], field: str, where: str = "config.json") -> Any:
    """A field that must be there.

    Raises:
        ValueError: It is absent, or null.
    """
    if raw.get(field) is None:
        raise ValueError(f"{where} lacks the field {field!r}, which is needed")
    return raw[field]


def needed_size(raw: Mapping[str, Any], field: str, where: str = "config.json") -> int:
    """A field that must be a positive int.

    Raises:
        ValueError: It is not.
    """
    return _size(needed(raw, field, where), field, where)


def optional_size(raw: Mapping[str, Any], field: str, default: int | None = None, where: str = "config.json") -> int | None:
    """A field that must be a positive int if it is there and not null.

    Raises:
        ValueError: It is something else.
    """
    return default if raw.get(field) is None else _size(raw[field], field, where)


def _size(value: Any, field: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field} in {where} should be a positive int, got {value!r}")
    return value
