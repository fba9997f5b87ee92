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
from experiments.models import Model, load_model
from experiments.presets import kv_bytes, random_array, weight_bytes_per_pass
from experiments.timing import LoopTiming, copy_bandwidth, count_executions, time_loop
from specjax import DraftModel, GenerateConfig, NoDraft, PromptLookup, speculative_generate
from specjax.drafting.drafter import Drafter
from specjax.generate import decode_step, prepare_call
from specjax.requests import Request, row_keys
from specjax.state import Commit, Context, DecodeState, FinishReason
from specjax.statistics import Statistics

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
        implementation: Attention implementation.
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

    def state(self, drafter: Drafter | None, drafter_params: Any, *, steps_margin: int) -> tuple[Request, GenerateConfig, DecodeState]:
        """A decode in the middle: random tokens, keys and values, `long_steps` before the last pass's rows end at `context`."""
        draft_length = 0 if drafter is None else self.config.num_speculative_tokens
        start = self.context - self.config.long_steps - draft_length - 1
        if start < 2:
            raise ExperimentError(f"a context of {self.context} tokens is too short for loops of {self.config.long_steps} steps")
        capacity = -(-(self.context + steps_margin) // 64) * 64
        static = GenerateConfig(
            max_new_tokens=capacity - start - draft_length - 1,
            num_speculative_tokens=max(draft_length, 1),
            cache_capacity=capacity + 128,  # room for the check's rounding; the cache below has `capacity`
        )
        model = self.target.model
        prompt = np.zeros((self.batch, 1), np.int32)
        request, static = prepare_call(model, drafter, drafter_params, prompt, config=static, ignore_eos=True)
        static = dataclasses.replace(static, cache_capacity=capacity)

        rng = jax.random.key(1)
        token_rng, cache_rng, drafter_rng = jax.random.split(rng, 3)
        tokens = jax.random.randint(token_rng, (self.batch, capacity), 0, model.config.vocab_size, jnp.int32)
        context = Context(tokens=tokens, length=jnp.full((self.batch,), start + 1, jnp.int32))
        drafter_state = None
        if drafter is not None:
            drafter_state = _randomised(drafter.init(drafter_params, batch_size=self.batch, capacity=capacity), drafter_rng)
            begun = Commit(context=context, num_committed=jnp.ones((self.batch,), jnp.int32), features=None)
            drafter_state = drafter.commit(drafter_params, drafter_state, begun)
        cache = _randomised(model.init_cache(batch_size=self.batch, capacity=capacity), cache_rng)
        state = DecodeState(
            context=context,
            num_generated=jnp.zeros((self.batch,), jnp.int32),
            finish_reason=jnp.full((self.batch,), FinishReason.RUNNING, jnp.int32),
            target_cache=cache.with_length(context.length - 1),
            drafter_state=drafter_state,
            row_keys=row_keys(request.rng, self.batch),
            log_probs=jnp.zeros((self.batch, 0), jnp.float32),
            statistics=Statistics.zeros(self.batch, draft_length),
        )
        return request, static, state

    def time(self, step: Any, params: Any, state: Any) -> LoopTiming:
        config = self.config
        return time_loop(step, params, state, short=config.short_steps, long=config.long_steps, repeats=config.repeats)

    def floor_ms(self, model: Model, *, rows: int, passes: int = 1) -> float:
        """Weights and keys and values of `passes` forward passes of `rows` positions a sequence over the bandwidth."""
        return passes * self.bytes_per_pass(model, rows) / self.config.bandwidth_bytes_per_s * 1e3

    def bytes_per_pass(self, model: Model, rows: int) -> float:
        shape, itemsize = model.model.config, jnp.dtype(model.model.dtype).itemsize
        weights = weight_bytes_per_pass(model.params, shape, num_tokens=self.batch * rows)
        return weights + kv_bytes(shape, batch=self.batch, context=self.context, itemsize=itemsize)

    def row(self, state: DecodeState, rows: int) -> dict:
        return {
            "model": self.target.name,
            "weights": self.target.weights,
            "implementation": self.config.implementation,
            "synthetic": False,
            "dtype": self.config.dtype,
            "batch": self.batch,
            "context": self.context,
            "cache_capacity": state.target_cache.capacity,
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
    request, static, state = case.state(drafter, None, steps_margin=0)
    timing = case.time(_whole_step(case.target, drafter, static, request), (case.target.params, None), state)
    floor_ms = case.floor_ms(case.target, rows=rows)
    return {
        "mode": "decode",
        **case.row(state, rows),
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
    request, static, state = case.state(drafter, drafter_params, steps_margin=margin)
    params = (case.target.params, drafter_params)
    whole = case.time(_whole_step(case.target, drafter, static, request), params, state)
    propose = case.time(_propose_step(case.target, drafter, static, request), params, state)
    without = dataclasses.replace(state, drafter_state=None)
    verification = case.time(_whole_step(case.target, NoDraft(), static, request), (case.target.params, None), without)
    without = dataclasses.replace(without, statistics=Statistics.zeros(case.batch, 0))
    plain = case.time(_whole_step(case.target, None, static, request), (case.target.params, None), without)
    floor_ms = case.floor_ms(case.target, rows=num_drafted + 1)
    floor_ms += 0.0 if draft_model is None else case.floor_ms(draft_model, rows=1, passes=num_drafted)
    return {
        "mode": "speculative_step",
        **case.row(state, num_drafted + 1),
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


def _whole_step(target: Model, drafter: Drafter | None, static: GenerateConfig, request: Request):
    def step(params, state):
        return decode_step(target.model, drafter, static, params[0], params[1], request, state)

    return step


def _propose_step(target: Model, drafter: Drafter, static: GenerateConfig, request: Request):
    """Proposes, then commits the first draft token alone, without a target."""
    num_drafted = static.num_speculative_tokens

    def step(params, state):
        draft, drafter_state = drafter.propose(
            params[1],
            state.drafter_state,
            state.context,
            num_speculative_tokens=num_drafted,
            sampling=None,
            row_keys=state.row_keys,
        )
        context = state.context
        rows = jnp.arange(context.length.shape[0])
        tokens = context.tokens.at[rows, context.length].set(draft.tokens[:, 0])
        context = Context(tokens=tokens, length=context.length + 1)
        features = _random_features(target, drafter, num_drafted + 1, context)
        commit = Commit(context=context, num_committed=jnp.ones_like(context.length), features=features)
        return dataclasses.replace(state, context=context, drafter_state=drafter.commit(params[1], drafter_state, commit))

    return step


def _random_features(target: Model, drafter: Drafter, num_rows: int, context: Context) -> jax.Array | None:
    if not drafter.feature_layers:
        return None
    width = len(drafter.feature_layers) * target.model.config.hidden_size
    shape = (context.length.shape[0], num_rows, width)
    return jax.random.normal(jax.random.key(3), shape, target.model.dtype)


def _randomised(tree: Any, rng: jax.Array) -> Any:
    """Random normal values in every array of floats."""
    leaves, treedef = jax.tree.flatten(tree)
    filled = [
        random_array(jax.random.fold_in(rng, index), leaf.shape, leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        for index, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, filled)
