"""What error messages share."""

from __future__ import annotations

from collections.abc import Iterable

_MAX_LISTED = 8


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    shown = ", ".join(names[:_MAX_LISTED]) or "none"
    return shown + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")
