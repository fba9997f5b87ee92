"""Which implementation is the fastest here, for each shape of the operations that have kernels?

Command: python -m experiments.run tune
Hardware: the GPU that `implementation="auto"` shall know, with specjax[gpu]
Time: as `kernels`
Result: rows of kernels/measured.json, which `"auto"` reads; commit them

Rows of other devices and dtypes stay as they are. A kernel is preferred where it wins by more than three per cent, and of the ways to cut
its work that `implementations` names, another than the default where that wins by as much again. The row keeps which.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from experiments import kernels
from experiments.experiment import ExperimentError, path_field
from experiments.record import write_json
from specjax.kernels.measured import PATH, read_table
from specjax.kernels.shapes import ChoiceShape, LargestShape

_MARGIN = 0.97


@dataclasses.dataclass(frozen=True)
class Config(kernels.Config):
    """Settings.

    Attributes:
        table: The file to fill.
    """

    table: str = path_field(str(PATH))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not set(kernels.IMPLEMENTATIONS) <= set(self.implementations):
            raise ExperimentError("tune compares reference and triton; implementations must name both, and may name cuts")


def run(config: Config) -> Iterator[dict]:
    """One row a shape; the file is written after each."""
    path = Path(config.table)
    device = jax.devices()[0].device_kind
    for shape, times in kernels.measure(config):
        fastest = choice(times)
        row = {
            "device": device,
            "op": shape.op,
            "dtype": shape.dtype if isinstance(shape, ChoiceShape | LargestShape) else config.dtype,
            "shape": dataclasses.asdict(shape),
            "implementation": fastest,
            "us": times[fastest],
            "reference_us": times["reference"],
        }
        add_row(path, row)
        yield row | {"weights": "random", "synthetic": False}


def choice(times: Mapping[str, float]) -> str:
    """The fastest kernel where it wins, cut as it is by default unless another cut wins again; a time that is not positive is noise."""
    known = {name: us for name, us in times.items() if us > 0}
    fastest = "reference"
    if known.get("triton", math.inf) < _MARGIN * times["reference"]:
        fastest = "triton"
    best = min(known, key=lambda name: known[name], default="reference")
    return best if "@" in best and known[best] < _MARGIN * times[fastest] else fastest


def add_row(path: Path, row: dict) -> None:
    """Puts a row into the table, in the place of an earlier one of the same device, operation, dtype and shape."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    same = ("device", "op", "dtype", "shape")
    rows = [other for other in rows if any(other[key] != row[key] for key in same)]
    write_json(path, [*rows, row])
    read_table(path)


def show(row: dict) -> str:
    """A row's main figures on one line."""
    sizes = " ".join(f"{name}={size}" for name, size in row["shape"].items() if size is not None)
    return f"{row['op']:22} {row['implementation']:24} {row['us']:8.1f} us, reference {row['reference_us']:8.1f} us  {sizes}"
