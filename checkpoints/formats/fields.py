"""Reads a model's config.json, field by field: a missing or odd field is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LARGEST = 1e300


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
    except (ValueError, RecursionError) as error:
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


def needed_number(raw: Mapping[str, Any], field: str, where: str = "config.json") -> float:
    """A field that must be a finite number.

    Raises:
        ValueError: It is not.
    """
    return _number(needed(raw, field, where), field, where)


def optional_number(raw: Mapping[str, Any], field: str, default: float, where: str = "config.json") -> float:
    """A field that must be a finite number if it is there and not null.

    Raises:
        ValueError: It is something else.
    """
    return default if raw.get(field) is None else _number(raw[field], field, where)


def flag(raw: Mapping[str, Any], field: str, default: bool = False, where: str = "config.json") -> bool:
    """A field that must be true or false if it is there and not null. Text such as "false" would count as true.

    Raises:
        ValueError: It is something else.
    """
    value = raw.get(field)
    if value is None:
        return default
    if value not in (True, False):  # 0 and 1 too
        raise ValueError(f"{field} in {where} should be true or false, got {value!r:.80}")
    return bool(value)


def optional_list(raw: Mapping[str, Any], field: str, kind: Any, where: str = "config.json") -> list[Any] | None:
    """A field that must be a list of values of a kind if it is there and not null.

    Raises:
        ValueError: It is something else.
    """
    value = raw.get(field)
    if value is not None and not (isinstance(value, list | tuple) and all(isinstance(item, kind) for item in value)):
        raise ValueError(f"{field} in {where} should be a list of {getattr(kind, '__name__', 'numbers')}, got {value!r:.80}")
    return None if value is None else list(value)


def optional_object(raw: Mapping[str, Any], field: str, where: str = "config.json") -> Mapping[str, Any]:
    """A field that must be an object if it is there and not null; `{}` where it is not.

    Raises:
        ValueError: It is something else.
    """
    value = raw.get(field)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{field} in {where} should be an object, got {value!r:.80}")
    return {} if value is None else value


def _number(value: Any, field: str, where: str) -> float:
    # The comparison refuses integers that no float holds, infinity and NaN alike.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _LARGEST:
        raise ValueError(f"{field} in {where} should be a number, got {value!r:.80}")
    return float(value)


def _size(value: Any, field: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field} in {where} should be a positive int, got {value!r}")
    return value
