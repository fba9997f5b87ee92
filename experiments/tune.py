"""Which implementation is the fastest here, for each shape of the operations that have kernels?

Command: python -m experiments.run tune
Hardware: the GPU that `implementation="auto"` shall know, with specjax[gpu]
Time: as `kernels`
Result: rows of kernels/measured.json, which `"auto"` reads; commit them

Rows of other devices and dtypes stay as they are. A kernel is preferred where it wins by more than three per cent.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
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
        if set(self.implementations) != set(kernels.IMPLEMENTATIONS):
            raise ExperimentError("tune compares reference and triton; implementations must name both")


def run(config: Config) -> Iterator[dict]:
    """One row a shape; the file is written after each."""
    path = Path(config.table)
    device = jax.devices()[0].device_kind
    for shape, times in kernels.measure(config):
        # A time that is not positive is lost in noise, and shows nothing.
        fastest = "triton" if 0 < times["triton"] < _MARGIN * times["reference"] else "reference"
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
    return f"{row['op']:22} {row['implementation']:9} {row['us']:8.1f} us, reference {row['reference_us']:8.1f} us  {sizes}"
