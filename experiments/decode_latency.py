"""How far is a decode step from the time that reading its weights and cache takes?

Command: python -m experiments.run decode_latency --record
Hardware: one H200 (any device works; `model=tiny` on a CPU)
Time: 4 minutes on an H200
Result: see "Decode latency" in the README, made from results/decode_latency.json

`modes=decode` times the library's own step (target, head, greedy sampling, commit) with `rows` new positions a sequence: 1 is plain, more
is a verification pass of `NoDraft`. `modes=speculative_step` times a whole speculative step of a pair and its parts: proposing alone (of an
EAGLE-3 drafter the chain with given tokens too, which is what its bodies take), verification alone, and a plain step. What belongs to one
batch and context is timed side by side. Every time is a marginal cost inside a `while_loop`: (long loop - short loop) / steps between.
`modes=executions` counts the executables that one call of `speculative_generate` runs. Weights (unless `model` is a checkpoint), cache and
tokens are random.

Llama-3.1-8B's shape at all sizes, and a whole EAGLE-3 step with where its time goes (about 9 minutes, not measured yet): `repeats=5
pair_target=llama31_8b pair_drafter=eagle3:low_rank:8 points=1:1024,1:16384,1:131072,16:4096,64:1024 rows=1,6,16 pair_points=1:1024`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from experiments.executions import executions_row
from experiments.experiment import ExperimentError, local_field, path_field
from experiments.latency_pair import Pair
from experiments.mid_decode import Middle, decoding_loop, drafting_loop
from experiments.models import Model, load_model
from experiments.presets import kv_bytes, weight_bytes_per_pass
from experiments.timing import Loop, LoopTiming, copy_bandwidth, time_loops
from specjax import NoDraft
from specjax.drafting.drafter import Drafter
from specjax.models.kv_cache import KVCache

K = TypeVar("K", bound=Hashable)
MODES = ("decode", "speculative_step", "executions")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        model: `decode`, `executions`: a preset's name or a checkpoint's path.
        pair_target: `speculative_step`: the target, likewise.
        pair_drafter: `speculative_step`: the draft model, likewise, or "prompt_lookup", or "eagle3:HEAD", an EAGLE-3 drafter of the shape
            published for the target, with a head of that name ("full", "low_rank:8") and random weights.
        modes: What to time.
        batches: Sequences in a batch.
        contexts: Tokens in the cache when the loop ends, the last pass's rows included.
        points: BATCH:CONTEXT words, in the place of `batches` and `contexts`.
        pair_points: Likewise, for `speculative_step` alone; none is as the others.
        rows: `decode`: new positions a pass.
        num_speculative_tokens: `speculative_step`: G.
        dtype: Compute dtype, and that of random weights.
        implementation: Of the kernels; see `Kernels.of`.
        bandwidth_bytes_per_s: What the floor divides by.
        copy_mib: Size of the array that the copy benchmark moves.
        short_steps: Steps of the short loop.
        long_steps: Steps of the long loop.
        repeats: Pairs of loops.
        compile_threads: Programs to compile at a time.
        cache_dir: Where converted checkpoints are kept; `None` is the user's cache folder.
    """

    model: str = path_field("llama31_8b")
    pair_target: str = path_field("qwen25_15b")
    pair_drafter: str = path_field("qwen25_05b")
    modes: tuple[str, ...] = MODES
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (1024, 16384)
    points: tuple[str, ...] = ()
    pair_points: tuple[str, ...] = ()
    rows: tuple[int, ...] = (1, 6, 8)
    num_speculative_tokens: int = 5
    dtype: str = "bfloat16"
    implementation: str = "auto"
    bandwidth_bytes_per_s: float = 4.3e12
    copy_mib: int = 4096
    short_steps: int = 16
    long_steps: int = 64
    repeats: int = 9
    compile_threads: int = 4
    cache_dir: str | None = local_field()

    def __post_init__(self) -> None:
        unknown = set(self.modes) - set(MODES)
        if unknown or not self.modes:
            raise ExperimentError(f"modes must be some of {', '.join(MODES)}, got {', '.join(self.modes) or 'none'}")
        for mode in self.modes:
            self.sizes(mode)

    def sizes(self, mode: str) -> list[tuple[int, int]]:
        """Batches and contexts of a mode.

        Raises:
            ExperimentError: A point that is not two positive numbers.
        """
        points = self.pair_points or self.points if mode == "speculative_step" else self.points
        if not points:
            return [(batch, context) for batch in self.batches for context in self.contexts]
        found = []
        for point in points:
            numbers = point.split(":")
            if len(numbers) != 2 or not all(number.isdecimal() and int(number) for number in numbers):
                raise ExperimentError(f"points must be BATCH:CONTEXT, such as 16:4096, got {point!r}")
            found.append((int(numbers[0]), int(numbers[1])))
        return found


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the sweep, and what all of its rows say."""

    target: Model
    config: Config
    batch: int
    context: int
    measured_bandwidth: float | None

    def time(self, loops: Mapping[K, Loop]) -> dict[K, LoopTiming]:
        """Times loops side by side."""
        config = self.config
        steps = dict(short=config.short_steps, long=config.long_steps, repeats=config.repeats)
        return time_loops(loops, **steps, compile_threads=config.compile_threads)

    def loop(self, drafter: Drafter | None, drafter_params: Any, middle: Middle, cache: KVCache) -> Loop:
        """The library's own step with this drafter, or plain."""
        return decoding_loop(self.target.model, self.target.params, drafter, drafter_params, middle, cache=cache)

    def middle(self, num_speculative_tokens: int, margin: int) -> Middle:
        return Middle(
            batch=self.batch,
            context=self.context,
            num_steps=self.config.long_steps,
            num_speculative_tokens=num_speculative_tokens,
            margin=margin,
        )

    def floor_ms(self, model: Model, *, rows: int, passes: int = 1) -> float:
        """Weights and keys and values of `passes` forward passes of `rows` positions a sequence over the bandwidth."""
        return passes * self.bytes_per_pass(model, rows) / self.config.bandwidth_bytes_per_s * 1e3

    def bytes_per_pass(self, model: Model, rows: int) -> float:
        shape, itemsize = model.model.config, jnp.dtype(model.model.dtype).itemsize
        weights = weight_bytes_per_pass(model.params, shape, num_tokens=self.batch * rows)
        return weights + kv_bytes(shape, batch=self.batch, context=self.context, itemsize=itemsize)

    def row(self, rows: int, *, margin: int = 0) -> dict:
        return {
            "model": self.target.name,
            "weights": self.target.weights,
            "implementation": self.config.implementation,
            "synthetic": False,
            "dtype": self.config.dtype,
            "batch": self.batch,
            "context": self.context,
            "cache_capacity": self.middle(rows - 1, margin).capacity,
            "weight_bytes": weight_bytes_per_pass(self.target.params, self.target.model.config, num_tokens=self.batch * rows),
            "bandwidth_bytes_per_s": self.config.bandwidth_bytes_per_s,
            "copy_bandwidth_bytes_per_s": self.measured_bandwidth,
        }


def run(config: Config) -> Iterator[dict]:
    """One row a batch, context and number of rows (`decode`), or a batch and context (`speculative_step`)."""
    bandwidth = copy_bandwidth(config.copy_mib * 2**20)
    options: dict[str, Any] = {"dtype": config.dtype, "implementation": config.implementation, "cache_dir": config.cache_dir}

    def cases(name: str, mode: str) -> list[Case]:
        target = load_model(name, rng=jax.random.key(0), **options)
        return [Case(target, config, *sizes, bandwidth) for sizes in config.sizes(mode)]

    if {"decode", "executions"} & set(config.modes):
        alone = cases(config.model, "decode")
        if "decode" in config.modes:
            for case in alone:
                yield from decode_rows(case)
        if "executions" in config.modes:
            sizes = dict(batch=alone[0].batch, num_speculative_tokens=config.num_speculative_tokens)
            yield executions_row(alone[0].target, **sizes, implementation=config.implementation)
        case = alone = None  # the pair needs the memory
    if "speculative_step" in config.modes:
        pairs = cases(config.pair_target, "speculative_step")
        passes = config.num_speculative_tokens
        pair = Pair.of(config.pair_target, pairs[0].target, config.pair_drafter, passes=passes, **options)
        for case in pairs:
            yield speculative_row(case, pair)


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    shape = {"model": row["model"], "batch": row["batch"]}
    if row["mode"] == "executions":
        return shape | {"steps in one call": row["steps"], "executables run": row["executions"]}
    spread = f"{row['ms_per_step_min']:.3g} to {row['ms_per_step_max']:.3g}"
    times = {"ms a step": row["ms_per_step"], "spread": spread, "floor, ms": row["floor_ms"], "ratio": f"{row['ratio']:.2f}"}
    if row["mode"] == "decode":
        return shape | {"context": row["context"], "rows": row["rows"]} | times
    parts = {"proposing": row["propose_ms_per_step"], "verification": row["verification_ms_per_step"], "rest": row["rest_ms"]}
    if row.get("heads_ms") is not None:
        parts["proposing"] = f"{parts['proposing']:.3g}, of which heads {row['heads_ms']:.3g}"
    pair = {"drafter": row["drafter"], "G": row["num_speculative_tokens"], "context": row["context"]}
    return shape | pair | times | parts | {"break-even mean acceptance length": row["break_even_acceptance_length"]}


def plot(rows: list[dict], axes: Any) -> None:
    """Plain and verification steps beside their floor."""
    rows = [row for row in rows if row["mode"] == "decode"]
    places = range(len(rows))
    spread = [[row["ms_per_step"] - row["ms_per_step_min"] for row in rows], [row["ms_per_step_max"] - row["ms_per_step"] for row in rows]]
    axes.bar(places, [row["ms_per_step"] for row in rows], 0.6, yerr=spread, label="measured")
    axes.bar(places, [row["floor_ms"] for row in rows], 0.6, label="floor: bytes read / bandwidth", color="black", alpha=0.4)
    axes.set_xticks(places, [f"batch {row['batch']}\n{row['context']} tokens\n{row['rows']} rows" for row in rows], fontsize=7)
    axes.set_ylabel("ms a step")
    axes.legend()


def decode_rows(case: Case) -> Iterator[dict]:
    """Times steps of each number of positions, which emit one token, from one cache."""
    cache = case.middle(0, 0).target_cache(case.target.model, jax.random.key(1))
    loops = {rows: case.loop(None if rows == 1 else NoDraft(), None, case.middle(rows - 1, 0), cache) for rows in case.config.rows}
    for rows, timing in case.time(loops).items():
        floor_ms = case.floor_ms(case.target, rows=rows)
        yield {
            "mode": "decode",
            **case.row(rows),
            "rows": rows,
            **timing.as_row(),
            "floor_ms": floor_ms,
            "ratio": timing.median_ms / floor_ms,
            "reached_bytes_per_s": case.bytes_per_pass(case.target, rows) / timing.median_ms * 1e3,
        }


def speculative_row(case: Case, pair: Pair) -> dict:
    """Times a whole speculative step, its parts, and a plain step, from one state."""
    num_drafted, vocab_size = case.config.num_speculative_tokens, case.target.model.config.vocab_size
    margin = case.config.long_steps * num_drafted  # a step may commit that many tokens more than a plain one
    middle = case.middle(num_drafted, margin)
    cache = middle.target_cache(case.target.model, jax.random.key(1))

    def drafting(drafter: Drafter, params: Any) -> Loop:
        return drafting_loop(drafter, params, middle, vocab_size=vocab_size, feature_shape=pair.features)

    loops = {
        "whole": case.loop(pair.drafter, pair.params, middle, cache),
        "propose": drafting(pair.drafter, pair.params),
        "verification": case.loop(NoDraft(), None, middle, cache),
        "plain": case.loop(None, None, case.middle(0, margin), cache),
    }
    if pair.bodies is not None:
        loops["bodies"] = drafting(*pair.bodies)
    times = case.time(loops)
    whole, propose, verification, plain = (times[name] for name in ("whole", "propose", "verification", "plain"))
    verification_floor_ms = case.floor_ms(case.target, rows=num_drafted + 1)
    propose_floor_ms = pair.floor_bytes(case.batch, case.context) / case.config.bandwidth_bytes_per_s * 1e3
    floor_ms = verification_floor_ms + propose_floor_ms
    row = {
        "mode": "speculative_step",
        **case.row(num_drafted + 1, margin=margin),
        "drafter": pair.name,
        "drafter_weights": pair.weights,
        "num_speculative_tokens": num_drafted,
        **whole.as_row(),
        **propose.as_row("propose_"),
        **verification.as_row("verification_"),
        **plain.as_row("plain_"),
        "rest_ms": whole.median_ms - propose.median_ms - verification.median_ms,
        "propose_floor_ms": propose_floor_ms,
        "verification_floor_ms": verification_floor_ms,
        "floor_ms": floor_ms,
        "ratio": whole.median_ms / floor_ms,
        # With fewer tokens a step than this, speculation is slower than plain decoding.
        "break_even_acceptance_length": whole.median_ms / plain.median_ms,
    }
    if "bodies" in times:
        row |= times["bodies"].as_row("bodies_") | {"heads_ms": propose.median_ms - times["bodies"].median_ms}
    return row
