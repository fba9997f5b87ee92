"""What a calibration shows: agreement against the bytes of a step, and how alike layers and draft rows choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Draw = Callable[[Any], None]


def calibration_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Draw]:
    """By what a figure is of, a function that draws it on Matplotlib's axes.

    Args:
        rows: Of the experiment `calibrate`.

    Returns:
        `""`, the settings; `"overlap"`, a curve over layers, where attention was calibrated.
    """
    settings = [row for row in rows if row["kind"] == "setting"]
    figures: dict[str, Draw] = {}
    if settings:
        figures[""] = lambda axes: _settings(axes, settings)
    for row in rows:
        if row["kind"] == "selection":
            figures["overlap"] = lambda axes, row=row: _overlap(axes, row)
    return figures


def _settings(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """One point a setting; those of a component are of one colour."""
    by_part: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_part.setdefault(row["setting"].split()[0], []).append(row)
    for part, points in by_part.items():
        axes.plot([row["bytes_ratio"] for row in points], [row["token_agreement"] for row in points], "o", label=part)
    axes.set_xlabel("bytes of a step, of a dense one's")
    axes.set_ylabel("share of the same tokens")
    axes.legend()


def _overlap(axes: Any, row: Mapping[str, Any]) -> None:
    layers, similarity = row["layers"], row["layer_similarity"]
    axes.plot(layers, row["row_overlap_per_layer"], marker=".", label="draft rows: chosen by the first, and by the others too")
    axes.plot(
        layers[1:], [similarity[i][i + 1] for i in range(len(layers) - 1)], marker=".", label="a layer and the one before it (Jaccard)"
    )
    for anchor in row["anchors"]:
        axes.axvline(anchor, color="grey", linewidth=0.5)
    axes.set_ylim(0, 1)
    axes.set_xlabel("layer (grey: those that choose)")
    axes.set_ylabel("overlap")
    axes.legend()
