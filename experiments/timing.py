"""Timing of what runs in a loop on the device: the marginal cost of a step, the bandwidth of a copy, the executables of a call."""

from __future__ import annotations

import collections
import dataclasses
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class LoopTiming:
    """A step's marginal cost: (time of a long loop - time of a short one) / the difference in steps, once a repeat.

    Attributes:
        ms_per_step: One estimate a repeat.
        raw_short_ms: Wall time of the short loops.
        raw_long_ms: Wall time of the long loops.
        compile_s: Time to compile.
        temp_bytes: Scratch memory of the program as XLA reports it, or `None`.
    """

    ms_per_step: tuple[float, ...]
    raw_short_ms: tuple[float, ...]
    raw_long_ms: tuple[float, ...]
    compile_s: float
    temp_bytes: int | None

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


def time_loop(step: Callable[[Any, Any], Any], params: Any, state: Any, *, short: int, long: int, repeats: int) -> LoopTiming:
    """Times `state = step(params, state)` inside a jitted `while_loop`.

    The number of steps is traced, so both loops are one program, and its fixed cost (launch, copying the state into the carry) cancels.

    Args:
        step: Pure.
        params: What does not change.
        state: Where every loop starts; it is not donated.
        short: Steps of the short loop.
        long: Steps of the long one.
        repeats: Pairs of loops to time, after a warm-up of each.

    Raises:
        ValueError: Unless 0 < short < long and repeats > 0.
    """
    if not (0 < short < long and repeats > 0):
        raise ValueError(f"time_loop needs 0 < short < long and repeats > 0, got {short=}, {long=}, {repeats=}")

    def loop(params, state, num_steps):
        carry = (jnp.int32(0), state)
        return lax.while_loop(lambda carry: carry[0] < num_steps, lambda carry: (carry[0] + 1, step(params, carry[1])), carry)[1]

    begin = time.perf_counter()
    compiled = jax.jit(loop).lower(params, state, np.int32(0)).compile()
    compile_s = time.perf_counter() - begin

    def wall_ms(num_steps: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(compiled(params, state, np.int32(num_steps)))
        return (time.perf_counter() - begin) * 1e3

    for num_steps in (short, long):
        wall_ms(num_steps)
    pairs = [(wall_ms(short), wall_ms(long)) for _ in range(repeats)]
    return LoopTiming(
        ms_per_step=tuple((long_ms - short_ms) / (long - short) for short_ms, long_ms in pairs),
        raw_short_ms=tuple(short_ms for short_ms, _ in pairs),
        raw_long_ms=tuple(long_ms for _, long_ms in pairs),
        compile_s=compile_s,
        temp_bytes=_temp_bytes(compiled),
    )


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
