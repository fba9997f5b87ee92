"""What is said of a setting that cannot be: `ValueError`s with what was expected and what came."""

from __future__ import annotations

import math
from typing import Any


def require(condition: bool, message: str) -> None:
    """Raises a `ValueError` with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def is_int(value: Any, least: int) -> bool:
    """Whether a value is an int, no bool, and at least so much."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require_size(what: str, value: Any, most: int | None = None, of: str = "") -> None:
    """Refuses what is not a positive int, or is above `most`."""
    require(is_int(value, 1), f"{what} must be a positive int, got {value!r}")
    require(most is None or value <= most, f"{what} must be at most {of} = {most}, got {value}")


def require_positive(**values: float) -> None:
    """Refuses what is not a positive finite number."""
    for name, value in values.items():
        require(value > 0 and math.isfinite(value), f"{name} must be a positive finite number, got {value!r}")


def require_positive_ints(owner: object, *names: str) -> None:
    """Refuses an object whose fields of these names are not positive ints."""
    for name in names:
        require_size(f"{type(owner).__name__}.{name}", getattr(owner, name))


def require_seed(what: str, value: Any) -> None:
    """Refuses a seed that is not an int from 0 to 2^32 - 1: of a larger one JAX drops the upper bits, unsaid."""
    require(is_int(value, 0) and value < 1 << 32, f"{what} must be an int from 0 to 2^32 - 1, got {value!r}")
