"""How near the memory's bandwidth does each kernel come, and does it beat what XLA makes of the reference?

Command: python -m experiments.run kernels --record
Hardware: one H200 with specjax[gpu] (`shapes=tiny implementations=reference l2_bytes=0` on a CPU)
Time: 2 minutes on an H200 for 33 shapes of attention and selection; `ops`, `rows`, `min_mib` and `max_mib` choose less
Result: see "Kernels" in the README, made from results/kernels.json: attention; other operations are not measured yet

`us` is a call's marginal time: of a loop whose steps run the operation over several copies of its arrays, one after another, less a loop
without the operation, over the copies. Together the copies are four times the L2 cache, or what is lacking is read besides, in both loops:
every copy comes from memory, as a layer's cache does in a model. A call's result is the next one's query, or is added to it, so that
nothing is computed once for all; for all but attention that is a small elementwise operation, and in `us`.

`floor_us` is the time that the bytes which must move take: keys and values of the slots that are read, summaries, factors, the experts that
rows use between them.

The reference of `expert_products` is what XLA is fastest with at the shape: experts gathered for each row, or all of them dense.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.experiment import ExperimentError, path_field
from experiments.timing import Loop, LoopTiming, time_loops
from specjax.kernels.cases import arguments, takes
from specjax.kernels.cases import run as run_case
from specjax.kernels.shape_lists import SHAPES, TINY_SHAPES
from specjax.kernels.shapes import SHAPE_TYPES, AttentionShape, LinearShape, RotaryShape, Shape
from specjax.kernels.shared_memory import TooMuchSharedMemory
from specjax.kernels.triton_call import what_is_missing

SIZES = {"full": SHAPES, "tiny": TINY_SHAPES}
IMPLEMENTATIONS = ("reference", "triton")
EMPTY = "empty"
_MAX_COPIES = 32
_TIMES_L2 = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        shapes: "full", those of `specjax.kernels.shape_lists`, or "tiny".
        ops: Operations to measure; none is all.
        rows: Numbers of new rows to measure; none is all.
        but_for: A result of this experiment: what it has is left out, shape by shape. With `--append` only what is new is measured.
        min_mib: Shapes that move less are left out.
        max_mib: So are those that move as much or more; `None` is no limit.
        implementations: "reference", and of "triton", "triton@PARTS:SLOTS:WARPS:STAGES:ROWS" (few-row attention: `TuningConfig`),
            "triton@BLOCK_D:BLOCK_N:WARPS:STAGES:PARTS:CORES" (few-row products, as `LinearTuning` does) and
            "triton@CHANNELS:OUTPUTS:DEPTH:WARPS:STAGES" (a mixture of experts, as `ExpertTuning` does). Each is measured where it fits.
        dtype: Of the arrays.
        l2_bytes: The cache that inputs must exceed.
        bandwidth_bytes_per_s: What the floors divide by.
        short_steps: Steps of the short loop.
        long_steps: Steps of the long loop.
        repeats: Pairs of loops.
        compile_threads: Programs to compile at a time.
        together: Shapes whose programs are compiled together, and then timed in turn: memory for the arrays of all of them is needed.
    """

    shapes: str = "full"
    ops: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    but_for: str = path_field("")
    min_mib: float = 0.0
    max_mib: float | None = None
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    dtype: str = "bfloat16"
    l2_bytes: int = 60_000_000
    bandwidth_bytes_per_s: float = 4.3e12
    short_steps: int = 10
    long_steps: int = 110
    repeats: int = 7
    compile_threads: int = 1
    together: int = 1

    def __post_init__(self) -> None:
        if self.together < 1:
            raise ExperimentError(f"together must be at least 1, got {self.together}")
        if self.shapes not in SIZES:
            raise ExperimentError(f"shapes must be one of {', '.join(SIZES)}, got {self.shapes!r}")
        known = {shape.op for shape in SHAPES}
        if set(self.ops) - known:
            raise ExperimentError(f"ops must be some of {', '.join(sorted(known))}, got {', '.join(self.ops)}")
        bare = {name.partition("@")[0] for name in self.implementations}
        if "reference" not in self.implementations or bare - set(IMPLEMENTATIONS):
            raise ExperimentError(f"implementations must be reference, and may be triton, got {', '.join(self.implementations) or 'none'}")
        shapes = self.chosen_shapes
        if not shapes:
            lacking = f", or all are in {self.but_for}" if self.but_for else ""
            raise ExperimentError(f"no shape of {self.shapes!r} has these ops, rows and sizes: {self.ops}, {self.rows}{lacking}")
        for name in self.implementations:
            if not any(takes(shape, name) for shape in shapes):
                raise ExperimentError(f"no operation that is measured can be cut as {name!r} says")

    @property
    def chosen_shapes(self) -> tuple[Shape, ...]:
        """What is measured."""
        shapes = [shape for shape in SIZES[self.shapes] if not self.ops or shape.op in self.ops]
        shapes = [shape for shape in shapes if not self.rows or getattr(shape, "rows", None) in self.rows]
        if self.but_for:
            there = read_result(self.but_for).times
            shapes = [shape for shape in shapes if shape not in there]
        most = math.inf if self.max_mib is None else self.max_mib
        return tuple(shape for shape in shapes if self.min_mib <= shape.moved_bytes(jnp.dtype(self.dtype).itemsize) / 2**20 < most)


def run(config: Config) -> Iterator[dict]:
    """One row a shape and implementation."""
    for shape, times in measure(config):
        for implementation, us in times.items():
            floor_us = shape.moved_bytes(jnp.dtype(config.dtype).itemsize) / config.bandwidth_bytes_per_s * 1e6
            yield {
                "op": shape.op,
                "shape": dataclasses.asdict(shape),
                "implementation": implementation,
                "us": us,
                "reference_us": times["reference"],
                "floor_us": floor_us,
                "ratio_to_floor": us / floor_us,
                "weights": "random",
                "synthetic": False,
            }


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A recorded result of this experiment.

    Attributes:
        device: On what it ran.
        dtype: Of the arrays.
        times: Microseconds of a call by implementation, of each shape.
    """

    device: str
    dtype: str
    times: dict[Shape, dict[str, float]]


def read_result(path: str) -> Recorded:
    """Reads a recorded result of this experiment.

    Raises:
        ExperimentError: It is none.
    """
    try:
        result = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        return Recorded(device=result["device"]["kind"], dtype=result["config"]["dtype"], times=_recorded_times(result["rows"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExperimentError(f"{path} is no result of the experiment kernels: {error!r}") from None


def _recorded_times(rows: list[dict]) -> dict[Shape, dict[str, float]]:
    found: dict[Shape, dict[str, float]] = {}
    for row in rows:
        found.setdefault(SHAPE_TYPES[row["op"]](**row["shape"]), {})[row["implementation"]] = row["us"]
    return found


def measure(config: Config) -> Iterator[tuple[Shape, dict[str, float]]]:
    """Microseconds of a call by implementation, shape by shape.

    Raises:
        ExperimentError: A kernel is asked for that cannot run here.
    """
    missing = what_is_missing() if set(config.implementations) != {"reference"} else None
    if missing is not None:
        raise ExperimentError(f"{missing}; implementations=reference measures XLA alone")
    chosen = config.chosen_shapes
    for shapes in (chosen[at : at + config.together] for at in range(0, len(chosen), config.together)):
        timings = time_loops(
            {(shape, name): loop for shape in shapes for name, loop in loops(shape, config).items()},
            short=config.short_steps,
            long=config.long_steps,
            repeats=config.repeats,
            compile_threads=config.compile_threads,
        )
        for shape in shapes:
            own = {name: timing for (other, name), timing in timings.items() if other == shape}
            yield shape, {name: marginal_us(own, name, num_copies(shape, config)) for name in own if name != EMPTY}


def loops(shape: Shape, config: Config) -> dict[str, Loop]:
    """A loop for each implementation that the operation has, and one that only reads what the cache's size lacks."""
    dtype, copies = jnp.dtype(config.dtype), num_copies(shape, config)
    make = jax.jit(lambda rng: arguments(shape, dtype, rng))
    all_arrays = [make(rng) for rng in jax.random.split(jax.random.key(0), copies)]
    lacking = max(0, _TIMES_L2 * config.l2_bytes - copies * shape.moved_bytes(dtype.itemsize))
    params = {"rest": [arrays[1:] for arrays in all_arrays], "lacking": jnp.arange(max(1, lacking // 4), dtype=jnp.int32)}
    state = (all_arrays[0][0], jnp.int32(0))

    def step(implementation: str | None) -> Callable[[Any, Any], Any]:
        def repeated(params: Any, state: Any) -> Any:
            query, mark = state
            if implementation is not None:
                for rest in params["rest"]:
                    query = _next_state(shape, query, run_case(shape, (query, *rest), implementation))
            return query, (params["lacking"] ^ mark).max()  # the mark changes: the sum is not a constant of the loop

        return repeated

    names = [name for name in config.implementations if name == "reference" or (takes(shape, name) and _fits(shape, all_arrays[0], name))]
    return {name or EMPTY: Loop(step(name), params, state) for name in (None, *names)}


def _fits(shape: Shape, arrays: Any, implementation: str) -> bool:
    """Whether this device can run it; where a kernel takes too much shared memory, a line says so and what it takes."""
    try:
        jax.eval_shape(lambda *arrays: run_case(shape, arrays, implementation), *arrays)
    except TooMuchSharedMemory as error:
        sizes = " ".join(f"{name}={size}" for name, size in dataclasses.asdict(shape).items() if size is not None)
        print(f"{implementation} left out of {shape.op} {sizes}: {error}", file=sys.stderr, flush=True)
        return False
    return True


def _next_state(shape: Shape, state: Any, result: Any) -> Any:
    if isinstance(shape, AttentionShape):
        return result
    # A factor of a millionth: the numbers stay what they were.
    if isinstance(shape, RotaryShape):
        (qkv, *_), (query, keys, values) = state, result
        return qkv.at[:, :, :, :-2].add(query.reshape(qkv[:, :, :, :-2].shape) * 1e-6), keys, values
    if isinstance(shape, LinearShape):
        # All of the result must be there, and one elementwise operation hands it on.
        result = jax.lax.optimization_barrier(result)[:, : shape.inner]
        return state + jnp.pad(result, ((0, 0), (0, shape.inner - result.shape[1]))) * 1e-6
    return state + (jax.tree.leaves(result)[0].astype(jnp.float32).mean() * 1e-6).astype(state.dtype)


def num_copies(shape: Shape, config: Config) -> int:
    """Calls in a step: what it takes to exceed the cache, within reason."""
    return max(1, min(_MAX_COPIES, -(-_TIMES_L2 * config.l2_bytes // shape.moved_bytes(jnp.dtype(config.dtype).itemsize))))


def marginal_us(timings: dict[str, LoopTiming], name: str, copies: int) -> float:
    """A call's time: what the loop takes more than the one without it, over the calls in a step."""
    return 1e3 * (timings[name].median_ms - timings[EMPTY].median_ms) / copies


def show(row: dict) -> str:
    """A row's main figures on one line."""
    sizes = " ".join(f"{name}={size}" for name, size in row["shape"].items() if size is not None)
    line = f"{row['op']:22} {row['implementation']:24} {row['us']:8.1f} us, {row['ratio_to_floor']:5.2f} x its floor"
    lost = "" if row["us"] > 0 else "  (lost in noise: use longer loops)"
    return f"{line}, reference {row['reference_us']:8.1f} us  {sizes}{lost}"


def table_rows(rows: list[dict]) -> list[dict]:
    """A shape's fastest kernel each, whose row has the reference's time too; the reference where no kernel ran."""
    fastest: dict[tuple, dict] = {}
    for row in rows:
        key = row["op"], *row["shape"].items()
        best = fastest.get(key)
        if best is None or best["implementation"] == "reference" or (row["implementation"] != "reference" and row["us"] < best["us"]):
            fastest[key] = row
    return list(fastest.values())


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    return {
        "operation": row["op"],
        "shape": " ".join(f"{name} {size}" for name, size in row["shape"].items() if size is not None),
        "floor, µs": row["floor_us"],
        "XLA, µs": row["reference_us"],
        "kernel": row["implementation"],
        "µs": row["us"],
        "over its floor": f"{row['ratio_to_floor']:.2f} ×",
        "faster than XLA": f"{row['reference_us'] / row['us']:.2f} ×" if row["us"] > 0 else None,
    }
