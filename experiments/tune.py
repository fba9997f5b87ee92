"""Which implementation is the fastest here, for each shape of the operations that have kernels?

Command: python -m experiments.run tune
Hardware: the GPU that `implementation="auto"` shall know, with specjax[gpu]
Time: as `kernels`; a moment with `times=experiments/results/kernels.json`, which that experiment left
Result: rows of kernels/measured.json, which `"auto"` reads; commit them

Rows of other devices and dtypes stay as they are. A kernel is preferred where it wins by more than three per cent, and of the ways to cut
its work that `implementations` names, another than the default where that wins by as much again. The row keeps which.

What takes more shared memory than the device has is left out, and a line says so.

Where the reference's own time is not positive, noise has swallowed it: nothing is written, an earlier row of that shape stays, and the row
says so.
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
from specjax.kernels.shapes import ChoiceShape, LargestShape, Shape

_MARGIN = 0.97
_LOST = "lost in noise and not written: use longer loops"


@dataclasses.dataclass(frozen=True)
class Config(kernels.Config):
    """Settings.

    Attributes:
        table: The file to fill.
        times: A result of the experiment `kernels` with kernels beside the reference, whose times are taken, those of `ops` if there are
            any; all other settings are then those of that result. Empty measures here.
    """

    table: str = path_field(str(PATH))
    times: str = path_field("")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not set(kernels.IMPLEMENTATIONS) <= set(self.implementations):
            raise ExperimentError("tune compares reference and triton; implementations must name both, and may name cuts")


def run(config: Config) -> Iterator[dict]:
    """One row a shape; the file is written after each that is known."""
    path = Path(config.table)
    for device, dtype, shape, times in _recorded(config) if config.times else _measured(config):
        fastest = choice(times)
        row = {
            "device": device,
            "op": shape.op,
            "dtype": shape.dtype if isinstance(shape, ChoiceShape | LargestShape) else dtype,
            "shape": dataclasses.asdict(shape),
            "implementation": fastest,
            "us": None if fastest is None else times[fastest],
            "reference_us": times["reference"],
        }
        if fastest is not None:
            add_row(path, row)
        yield row | {"note": _LOST if fastest is None else None, "weights": "random", "synthetic": False}


Times = tuple[str, str, Shape, Mapping[str, float]]


def _measured(config: Config) -> Iterator[Times]:
    """Device, dtype, shape, and microseconds by implementation."""
    device = jax.devices()[0].device_kind
    for shape, times in kernels.measure(config):
        yield device, config.dtype, shape, times


def _recorded(config: Config) -> Iterator[Times]:
    """Likewise, out of a result of `kernels`, of the operations that are asked for."""
    recorded = kernels.read_result(config.times)
    compared = {shape: times for shape, times in recorded.times.items() if "reference" in times and len(times) > 1}
    if not compared:
        raise ExperimentError(f"times={config.times} has no times of kernels beside the reference's")
    for shape, times in compared.items():
        if not config.ops or shape.op in config.ops:
            yield recorded.device, recorded.dtype, shape, times


def choice(times: Mapping[str, float]) -> str | None:
    """The fastest kernel where it wins, cut as it is by default unless another cut wins again.

    A time that is not positive is noise; `None` where the reference's is, which kernels are held against.
    """
    known = {name: us for name, us in times.items() if us > 0}
    if "reference" not in known:
        return None
    fastest = "reference"
    if known.get("triton", math.inf) < _MARGIN * known["reference"]:
        fastest = "triton"
    best = min(known, key=lambda name: known[name])
    return best if "@" in best and known[best] < _MARGIN * known[fastest] else fastest


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
    found = f"({row['note']})" if row["note"] else f"{row['implementation']:24} {row['us']:8.1f} us"
    return f"{row['op']:22} {found}, reference {row['reference_us']:8.1f} us  {sizes}"
