"""Timing of what runs in a loop on the device: the marginal cost of a step, the bandwidth of a copy, the executables of a call."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.compiling import compile_all

K = TypeVar("K", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class LoopTiming:
    """A step's marginal cost: (time of a long loop - time of a short one) / the difference in steps, once a repeat.

    Attributes:
        ms_per_step: One estimate a repeat.
        raw_short_ms: Wall time of the short loops.
        raw_long_ms: Wall time of the long loops.
        compile_s: Time to compile.
        temp_bytes: Scratch memory of the program as XLA reports it, or `None`.
        counts: What `Loop.count` said of the states that the short and the long loop end in; `None` without it.
    """

    ms_per_step: tuple[float, ...]
    raw_short_ms: tuple[float, ...]
    raw_long_ms: tuple[float, ...]
    compile_s: float
    temp_bytes: int | None
    counts: tuple[Any, Any] | None = None

    @property
    def median_ms(self) -> float:
        """The median estimate."""
        return statistics.median(self.ms_per_step)

    def as_row(self, prefix: str = "") -> dict[str, Any]:
        """Median, spread and raw times under names that begin with `prefix`."""
        return {
            f"{prefix}ms_per_step": self.median_ms,
            f"{prefix}ms_per_step_min": min(self.ms_per_step),
            f"{prefix}ms_per_step_max": max(self.ms_per_step),
            f"{prefix}compile_s": self.compile_s,
            f"{prefix}temp_bytes": self.temp_bytes,
            f"{prefix}raw_short_ms": list(self.raw_short_ms),
            f"{prefix}raw_long_ms": list(self.raw_long_ms),
        }


@dataclasses.dataclass(frozen=True)
class Loop:
    """What a loop repeats: `state = step(params, state)`.

    Attributes:
        step: Pure.
        params: What does not change.
        state: Where every loop starts; it is not donated.
        num_steps: Steps of its short and its long loops, where they are not those of the others: its steps are longer ones.
        count: Of the state that a loop ends in, what is to be known; outside of what is timed.
    """

    step: Callable[[Any, Any], Any]
    params: Any
    state: Any
    num_steps: tuple[int, int] | None = None
    count: Callable[[Any], Any] | None = None


def time_loop(step: Callable[[Any, Any], Any], params: Any, state: Any, *, short: int, long: int, repeats: int) -> LoopTiming:
    """Times one loop; see `time_loops`."""
    return time_loops({"": Loop(step, params, state)}, short=short, long=long, repeats=repeats)[""]


def time_loops(
    loops: Mapping[K, Loop], *, short: int, long: int, repeats: int, compile_threads: int = 1, compile_first: int = 1
) -> dict[K, LoopTiming]:
    """Times loops side by side: each as a jitted `while_loop`, in turn, `repeats` times, so that what drifts meets all of them alike.

    The number of steps is traced, so the short and the long loop are one program, and its fixed cost (launch, copying the state into the
    carry) cancels.

    Args:
        loops: By name.
        short: Steps of the short loop.
        long: Steps of the long one.
        repeats: Pairs of loops to time, after a warm-up of each.
        compile_threads: Programs to compile at a time; `compile_s` is then longer than it would be alone.
        compile_first: Loops that are compiled before the others; see `compile_all`.

    Raises:
        ValueError: Unless 0 < short < long, of every loop's own too, and repeats > 0.
    """
    for first, last in [(short, long), *(loop.num_steps for loop in loops.values() if loop.num_steps is not None)]:
        if not (0 < first < last and repeats > 0):
            raise ValueError(f"time_loop needs 0 < short < long and repeats > 0, got short={first}, long={last}, {repeats=}")
    jobs = [(name, (f"loop of {_said(name) or 'steps'}", functools.partial(_compiled, loop))) for name, loop in loops.items()]
    compiled = compile_all(dict(jobs), threads=compile_threads, first=compile_first)

    def end(name: K, num_steps: int) -> Any:
        return jax.block_until_ready(compiled[name][0](loops[name].params, loops[name].state, np.int32(num_steps)))

    def wall_ms(name: K, num_steps: int) -> float:
        begin = time.perf_counter()
        end(name, num_steps)
        return (time.perf_counter() - begin) * 1e3

    sizes = {name: loop.num_steps or (short, long) for name, loop in loops.items()}
    counts: dict[K, tuple[Any, Any]] = {}
    for name, loop in loops.items():
        count = loop.count or (lambda _: None)
        first, last = (count(end(name, num_steps)) for num_steps in sizes[name])
        counts[name] = first, last
    pairs: dict[K, list[tuple[float, float]]] = {name: [] for name in loops}
    for _ in range(repeats):
        for name, found in pairs.items():
            first, last = (wall_ms(name, num_steps) for num_steps in sizes[name])
            found.append((first, last))
    return {
        name: LoopTiming(
            ms_per_step=tuple((long_ms - short_ms) / (sizes[name][1] - sizes[name][0]) for short_ms, long_ms in found),
            raw_short_ms=tuple(short_ms for short_ms, _ in found),
            raw_long_ms=tuple(long_ms for _, long_ms in found),
            compile_s=compiled[name][1],
            temp_bytes=_temp_bytes(compiled[name][0]),
            counts=None if loops[name].count is None else counts[name],
        )
        for name, found in pairs.items()
    }


def _said(key: Any) -> str:
    """A loop's key on a line: of a tuple its parts, and of what has a name that."""
    if isinstance(key, tuple):
        return ", ".join(filter(None, map(_said, key)))
    return "" if key is None else str(getattr(key, "name", key))


def _lower(loop: Loop) -> Any:
    def repeated(params: Any, state: Any, num_steps: Any) -> Any:
        carry = (jnp.int32(0), state)
        return lax.while_loop(lambda carry: carry[0] < num_steps, lambda carry: (carry[0] + 1, loop.step(params, carry[1])), carry)[1]

    return jax.jit(repeated).lower(loop.params, loop.state, np.int32(0))


def _compiled(loop: Loop) -> tuple[Any, float]:
    lowered, begin = _lower(loop), time.perf_counter()
    return lowered.compile(), time.perf_counter() - begin


def copy_bandwidth(num_bytes: int, *, repeats: int = 5) -> float | None:
    """Bytes a second, read and written, of copying an array of `num_bytes` on the device; `None` where that is lost in the noise.

    The array must be much larger than the device's caches, or theirs is the bandwidth measured.
    """
    array = jnp.arange(num_bytes // 4, dtype=jnp.int32)
    timing = time_loop(lambda _, x: x ^ 1, None, jax.block_until_ready(array), short=4, long=20, repeats=repeats)
    return 2 * array.nbytes / (timing.median_ms / 1e3) if timing.median_ms > 0 else None


# What the runtime's own trace calls the start of an executable (helpers below it bear other names, once an execution each).
_EXECUTION = re.compile(r"LoadedExecutable::Execute")


def count_executions(call: Callable[[], Any]) -> int:
    """How many executables one call runs, read from a profiler trace of it. Call it once before, so that nothing compiles.

    Raises:
        RuntimeError: The trace holds no execution under a name that is known here.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        counts: collections.Counter[str] = collections.Counter()
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines:
                    counts.update(event.name for event in line.events if _EXECUTION.search(event.name))
    if not counts:
        raise RuntimeError("the profiler's trace names no execution of an executable")
    return max(counts.values())


def _temp_bytes(compiled: Any) -> int | None:
    analysis = compiled.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)
