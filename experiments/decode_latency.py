"""How far is a decode step from the time that reading its weights and cache takes?

Command: python -m experiments.run decode_latency --record
Hardware: one H200 (any device works; `model=tiny` on a CPU)
Time: 4 minutes on an H200
Result: see "Decode latency" in the README, made from results/decode_latency.json

`modes=decode` times the library's own step (target, head, greedy sampling, commit) with `rows` new positions a sequence: 1 is plain, more
is a verification pass of `NoDraft`. `modes=speculative_step` times a whole speculative step of a pair and, in the same process, its parts:
proposing alone, verification alone. Every time is a marginal cost inside a `while_loop`: (long loop - short loop) / steps between.
`modes=executions` counts the executables that one call of `speculative_generate` runs. Weights (unless `model` is a checkpoint), cache and
tokens are random.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.experiment import ExperimentError, local_field, path_field
from experiments.mid_decode import Middle, decoding_loop, drafting_loop
from experiments.models import Model, load_model
from experiments.presets import kv_bytes, weight_bytes_per_pass
from experiments.timing import Loop, LoopTiming, copy_bandwidth, count_executions, time_loop
from specjax import DraftModel, GenerateConfig, NoDraft, PromptLookup, speculative_generate
from specjax.drafting.drafter import Drafter

PROMPT_LOOKUP = "prompt_lookup"
MODES = ("decode", "speculative_step", "executions")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        model: `decode`, `executions`: a preset's name or a checkpoint's path.
        pair_target: `speculative_step`: the target, likewise.
        pair_drafter: `speculative_step`: the drafter, likewise, or "prompt_lookup".
        modes: What to time.
        batches: Sequences in a batch.
        contexts: Tokens in the cache when the loop ends, the last pass's rows included.
        rows: `decode`: new positions a pass.
        num_speculative_tokens: `speculative_step`: G.
        dtype: Compute dtype, and that of random weights.
        implementation: Of the kernels; see `Kernels.of`.
        bandwidth_bytes_per_s: What the floor divides by.
        copy_mib: Size of the array that the copy benchmark moves.
        short_steps: Steps of the short loop.
        long_steps: Steps of the long loop.
        repeats: Pairs of loops.
        cache_dir: Where converted checkpoints are kept; `None` is the user's cache folder.
    """

    model: str = path_field("llama31_8b")
    pair_target: str = path_field("qwen25_15b")
    pair_drafter: str = path_field("qwen25_05b")
    modes: tuple[str, ...] = MODES
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (1024, 16384)
    rows: tuple[int, ...] = (1, 6, 8)
    num_speculative_tokens: int = 5
    dtype: str = "bfloat16"
    implementation: str = "auto"
    bandwidth_bytes_per_s: float = 4.3e12
    copy_mib: int = 4096
    short_steps: int = 16
    long_steps: int = 64
    repeats: int = 9
    cache_dir: str | None = local_field()

    def __post_init__(self) -> None:
        unknown = set(self.modes) - set(MODES)
        if unknown or not self.modes:
            raise ExperimentError(f"modes must be some of {', '.join(MODES)}, got {', '.join(self.modes) or 'none'}")


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the sweep, and what all of its rows say."""

    target: Model
    config: Config
    batch: int
    context: int
    measured_bandwidth: float | None

    def time(self, drafter: Drafter | None, drafter_params: Any, *, margin: int = 0) -> LoopTiming:
        """Times the library's own step with this drafter, or plain."""
        middle = self.middle(0 if drafter is None else self.config.num_speculative_tokens, margin)
        return self.time_loop(decoding_loop(self.target.model, self.target.params, drafter, drafter_params, middle))

    def time_loop(self, loop: Loop) -> LoopTiming:
        config = self.config
        return time_loop(loop.step, loop.params, loop.state, short=config.short_steps, long=config.long_steps, repeats=config.repeats)

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

    def cases(name: str) -> list[Case]:
        target = load_model(name, rng=jax.random.key(0), **options)
        return [Case(target, config, batch, context, bandwidth) for batch in config.batches for context in config.contexts]

    if {"decode", "executions"} & set(config.modes):
        alone = cases(config.model)
        if "decode" in config.modes:
            for case in alone:
                for rows in config.rows:
                    yield decode_row(case, rows)
        if "executions" in config.modes:
            yield executions_row(alone[0])
        del alone  # the pair needs the memory
    if "speculative_step" in config.modes:
        draft_model = None if config.pair_drafter == PROMPT_LOOKUP else load_model(config.pair_drafter, rng=jax.random.key(2), **options)
        drafter = PromptLookup() if draft_model is None else DraftModel(draft_model.model)
        for case in cases(config.pair_target):
            yield speculative_row(case, drafter, draft_model)


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


def decode_row(case: Case, rows: int) -> dict:
    """Times steps of `rows` positions that emit one token."""
    case = dataclasses.replace(case, config=dataclasses.replace(case.config, num_speculative_tokens=max(rows - 1, 1)))
    drafter = None if rows == 1 else NoDraft()
    timing = case.time(drafter, None)
    floor_ms = case.floor_ms(case.target, rows=rows)
    return {
        "mode": "decode",
        **case.row(rows),
        "rows": rows,
        **timing.as_row(),
        "floor_ms": floor_ms,
        "ratio": timing.median_ms / floor_ms,
        "reached_bytes_per_s": case.bytes_per_pass(case.target, rows) / timing.median_ms * 1e3,
    }


def speculative_row(case: Case, drafter: Drafter, draft_model: Model | None) -> dict:
    """Times a whole speculative step, its parts, and a plain step, from one state."""
    num_drafted = case.config.num_speculative_tokens
    drafter_params = None if draft_model is None else draft_model.params
    margin = case.config.long_steps * num_drafted  # a step may commit that many tokens more than a plain one
    whole = case.time(drafter, drafter_params, margin=margin)
    middle, vocab_size = case.middle(num_drafted, margin), case.target.model.config.vocab_size
    propose = case.time_loop(drafting_loop(drafter, drafter_params, middle, vocab_size=vocab_size, feature_shape=None))
    verification = case.time(NoDraft(), None, margin=margin)
    plain = case.time(None, None, margin=margin)
    floor_ms = case.floor_ms(case.target, rows=num_drafted + 1)
    floor_ms += 0.0 if draft_model is None else case.floor_ms(draft_model, rows=1, passes=num_drafted)
    return {
        "mode": "speculative_step",
        **case.row(num_drafted + 1, margin=margin),
        "drafter": "prompt_lookup" if draft_model is None else draft_model.name,
        "drafter_weights": None if draft_model is None else draft_model.weights,
        "num_speculative_tokens": num_drafted,
        **whole.as_row(),
        **propose.as_row("propose_"),
        **verification.as_row("verification_"),
        **plain.as_row("plain_"),
        "rest_ms": whole.median_ms - propose.median_ms - verification.median_ms,
        "floor_ms": floor_ms,
        "ratio": whole.median_ms / floor_ms,
        # With fewer tokens a step than this, speculation is slower than plain decoding.
        "break_even_acceptance_length": whole.median_ms / plain.median_ms,
    }


def executions_row(case: Case) -> dict:
    """Counts what runs in one call whose limit fills its bucket."""
    target = case.target
    static = GenerateConfig(max_new_tokens=16, num_speculative_tokens=case.config.num_speculative_tokens)

    def call():
        prompt = np.ones((case.batch, 16), np.int32)
        return speculative_generate(target.model, target.params, PromptLookup(), None, prompt, config=static, ignore_eos=True)

    output = jax.block_until_ready(call())
    return {
        "mode": "executions",
        "model": target.name,
        "weights": target.weights,
        "implementation": case.config.implementation,
        "synthetic": False,
        "batch": case.batch,
        "steps": int(output.statistics.num_steps),
        "executions": count_executions(call),
    }
