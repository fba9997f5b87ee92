"""Acceptance rates of draft heads that were measured elsewhere, or are assumed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.draft_heads import CUT_FROM_FULL, label
from experiments.experiment import ExperimentError

Heads = Mapping[str, Mapping[str, Any]]


def assumed_rates(words: Sequence[str], heads: Heads) -> dict[str, tuple[float, ...]]:
    """Rates by position from words like `full=0.75/0.55/0.4`.

    Args:
        words: HEAD=RATE/RATE/...
        heads: By name, what `describe` says of them.

    Raises:
        ExperimentError: A head that is not among them, or what is no number.
    """
    given = {name: text for name, _, text in (word.partition("=") for word in words)}
    unknown = set(given) - set(heads)
    if unknown:
        raise ExperimentError(f"rates name {', '.join(sorted(unknown))}; the heads are {', '.join(heads)}")
    try:
        return {name: tuple(float(rate) for rate in text.split("/")) for name, text in given.items()}
    except ValueError:
        raise ExperimentError(f"rates must be HEAD=RATE/RATE/..., got {','.join(words)}") from None


def recorded_rates(path: Path, heads: Heads, *, sampled: bool, drafter: str) -> tuple[dict[str, tuple[float, ...]], bool]:
    """The mean over a file's rows of each head, as far as all of them go.

    Args:
        path: JSON, a list of rows or an experiment's record.
        heads: By name, what `describe` says of them. What a row does not say fits.
        sampled: Rows of a `temperature` above 0 count, otherwise those of 0.
        drafter: The kind of drafter that the heads are on. Rows of heads that were cut from a full one and not trained do not count.

    Returns:
        Rates by position of the heads that have rows, and whether any of those is synthetic.

    Raises:
        ExperimentError: No such file, not JSON, or no row for any head.
    """
    try:
        content = json.loads(path.expanduser().read_text(encoding="utf-8"))
        rows = content["rows"] if isinstance(content, dict) else content
        rows = [row for row in rows if row.get("acceptance_rate_per_position") and (row.get("temperature", sampled) > 0) == sampled]
        rows = [row for row in rows if row.get("drafter", drafter) == drafter and row.get("init") != CUT_FROM_FULL]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ExperimentError(f"acceptance={path}: expected a JSON file of rows, got {type(error).__name__}: {error}") from None
    found, synthetic = {}, False
    for name, head in heads.items():
        mine = [row for row in rows if row.get("head") == head["head"] and all(row.get(key, head[key]) == head[key] for key in head)]
        if mine:
            length = min(len(row["acceptance_rate_per_position"]) for row in mine)
            rates = np.mean([row["acceptance_rate_per_position"][:length] for row in mine], axis=0)
            found[name], synthetic = tuple(map(float, rates)), synthetic or any(row.get("synthetic", False) for row in mine)
    if not found:
        wanted = ", ".join(label(head) for head in heads.values())
        raise ExperimentError(
            f"acceptance={path}: no row has acceptance_rate_per_position, {'sampled' if sampled else 'greedy'}, of any of: {wanted}"
        )
    return found, synthetic
