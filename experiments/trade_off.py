"""The trade-off of sparse verification: how much faster it is, against how often it takes the dense target's token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.speeds import was_timed

# A marker a data set, a colour a method.
_MARKERS = "osD^vP*X"


def trade_off(rows: Sequence[Mapping[str, Any]]) -> Callable[[Any], None] | None:
    """The figure of rows of `sparse_quality`: a point a setting and data set, speed over that of dense verification of the same prompts.

    Args:
        rows: Of that experiment; those of several metrics count once. Rows whose batches emptied while they were timed are left out.

    Returns:
        A function that draws it on Matplotlib's axes; `None` where no sparse setting has a speed that was measured.
    """
    points: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    timed = [row for row in rows if was_timed(row)]
    dense = {row["dataset"]: row["tokens_per_s"] for row in timed if row["method"] == "dense"}
    for row in timed:
        speed, base = row["tokens_per_s"], dense.get(row["dataset"])
        if row["method"] != "dense" and speed and base:
            one = f"{row['setting']} {row['reuse']}"
            points.setdefault((row["dataset"], row["method"]), {})[one] = (row["token_agreement"], speed / base)
    return (lambda axes: _draw(axes, points)) if points else None


def _draw(axes: Any, points: Mapping[tuple[str, str], Mapping[str, tuple[float, float]]]) -> None:
    datasets, methods = (list(dict.fromkeys(names)) for names in zip(*points, strict=True))
    for (dataset, method), settings in points.items():
        line = sorted(settings.values())
        style = {"marker": _MARKERS[datasets.index(dataset) % len(_MARKERS)], "color": f"C{methods.index(method)}"}
        axes.plot([agreement for agreement, _ in line], [speed for _, speed in line], linestyle=":", label=f"{method}, {dataset}", **style)
    axes.plot([1.0], [1.0], "k+", markersize=12, label="dense verification")
    axes.axhline(1, color="gray", linestyle="--", linewidth=0.5)
    axes.set_xlabel("share of the dense target's tokens")
    axes.set_ylabel("speed over dense verification")
    axes.legend(fontsize=7)
