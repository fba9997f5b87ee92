"""How much faster is a sparse verification than a dense one, by context, batch and share kept, and what of it do dense checks leave?

Command: python -m experiments.run sparse_latency --record
Hardware: one H200
Time: 6 minutes on an H200 for 5 contexts and batches; most of it is compilation
Result: see "Sparse verification, measured" in the README, made from results/sparse_latency.json

The library's own steps of `rows` positions a sequence (target, head, greedy sampling, commit), dense and sparse over one cache of random
keys and values, timed in turn in one process: marginal costs inside a `while_loop`, medians. Weights are random, so what is sparse is not
good for any text here, and reads as much as it would on one.

A row without `steps_between_dense` is lossy verification: nothing is checked, and its speed-up is `measured`. The others are lossless, two
levels: after so many sparse steps a dense pass over all that they committed, timed likewise, which accepts each token with the assumed
chance. Their speed-up is `computed` from these three times by `specjax.two_level.two_level_cost`; `five_ways` runs whole cycles. A step
commits `mean_acceptance_length` tokens, assumed too, and the same in both. Drafting is left out.
`keep_ratio` is the share of blocks read, of channels or of experts, and `floor_ms` what a sparse pass must read over the bandwidth.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.experiment import ExperimentError, local_field, path_field
from experiments.mid_decode import Middle, decoding_loop, does_not_fit
from experiments.models import Model, load_model
from experiments.sparse_settings import DENSE, NamedSparsity, SparseWords, block_size_of, laid_out_for, named_settings
from experiments.timing import time_loops
from specjax import NoDraft
from specjax.models.kv_cache import KVCache
from specjax.sparsity.calibration import MLPSamples, sample_mlp
from specjax.sparsity.work import Kept, pass_work
from specjax.two_level.two_level_cost import two_level_speedup


@dataclasses.dataclass(frozen=True)
class Config(SparseWords):
    """Settings, and those of `SparseWords`.

    Attributes:
        model: A preset's name or a checkpoint's path.
        contexts: Tokens in the cache when a loop ends, the last pass's rows included.
        batches: Sequences in a batch.
        rows: New positions a pass, G + 1.
        steps_between_dense: Sparse steps before a dense pass over all that they committed.
        dense_acceptances: Assumed chances of a token to be accepted by that pass.
        mean_acceptance_length: Tokens that a step commits, assumed; at most `rows`.
        dtype: Compute dtype, and that of random weights.
        implementation: Of the kernels; see `Kernels.of`.
        bandwidth_bytes_per_s: What the floor divides by.
        short_steps: Steps of the short loops.
        long_steps: Steps of the long loops.
        repeats: Pairs of loops.
        compile_threads: Programs to compile at a time.
        cache_dir: Where converted checkpoints are kept; `none` is the user's cache folder.
    """

    attention: tuple[float, ...] = (0.25, 0.125, 0.0625)
    reuse: tuple[str, ...] = ("tokens", "both")
    controls: tuple[str, ...] = ()
    model: str = path_field("llama31_8b")
    contexts: tuple[int, ...] = (8192, 32768, 131072)
    batches: tuple[int, ...] = (1, 8)
    rows: tuple[int, ...] = (6,)
    steps_between_dense: tuple[int, ...] = (4, 8)
    dense_acceptances: tuple[float, ...] = (0.97, 0.99)
    mean_acceptance_length: float = 3.0
    dtype: str = "bfloat16"
    implementation: str = "auto"
    bandwidth_bytes_per_s: float = 4.3e12
    short_steps: int = 8
    long_steps: int = 32
    repeats: int = 5
    compile_threads: int = 8
    cache_dir: str | None = local_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mean_acceptance_length >= 1:
            raise ExperimentError(f"mean_acceptance_length must be at least 1, got {self.mean_acceptance_length}")


def run(config: Config) -> Iterator[dict]:
    """Rows of one context, batch and number of rows at a time; what does not fit is named on standard error and left out."""
    target = load_model(
        config.model, dtype=config.dtype, implementation=config.implementation, cache_dir=config.cache_dir, rng=jax.random.key(0)
    )
    settings = named_settings(config, target.model.config, _samples(config, target))
    if not settings:
        raise ExperimentError("there is nothing to time: give attention=, ffn=, moe= or hybrid=")
    for batch in config.batches:
        for context in config.contexts:
            layouts = 2 if config.ffn or config.hybrid else 1  # of feed-forward networks
            reason = does_not_fit(target, batch=batch, context=context, layouts=layouts)
            if reason:
                print(f"batch {batch}, context {context}: left out, {reason}", file=sys.stderr)
                continue
            for rows in config.rows:
                yield from _case(config, target, settings, batch=batch, context=context, rows=rows)


def _case(config: Config, target: Model, settings: list[NamedSparsity], *, batch: int, context: int, rows: int) -> Iterator[dict]:
    """Dense and sparse steps over one cache."""
    made: dict[str, Model] = {}
    middle = Middle(
        batch=batch, context=context, num_steps=config.long_steps, num_speculative_tokens=rows - 1, block_size=block_size_of(settings)
    )
    cache = middle.target_cache(target.model, jax.random.key(1))

    def loop(num_rows: int, named: NamedSparsity | None = None) -> Any:
        place = dataclasses.replace(middle, num_speculative_tokens=num_rows - 1)
        drafter = None if num_rows == 1 else NoDraft()
        sparsity = DENSE if named is None else named.sparsity
        params = laid_out_for(target, sparsity, made).params
        return decoding_loop(target.model, params, drafter, None, place, cache=cache, sparsity=sparsity)

    checked = {steps: steps * rows + 1 for steps in config.steps_between_dense}
    loops: dict[Any, Any] = {None: loop(rows)}
    loops |= {steps: loop(num_rows) for steps, num_rows in checked.items()}
    loops |= {named.name: loop(rows, named) for named in settings}
    timings = time_loops(
        loops, short=config.short_steps, long=config.long_steps, repeats=config.repeats, compile_threads=config.compile_threads
    )
    times = {name: timing.median_ms for name, timing in timings.items()}
    for named in settings:
        kept = kept_shares(named, target, cache, context=context, rows=rows)
        common = {
            "model": target.name,
            "weights": target.weights,
            "implementation": config.implementation,
            "synthetic": False,
            "context": context,
            "batch": batch,
            "rows": rows,
            "method": named.name,
            "keep_ratio": _keep_ratio(named, kept, target),
        }
        floor_ms = floor_bytes(named, kept, target, cache, context=context, rows=rows) / config.bandwidth_bytes_per_s * 1e3
        yield common | costs(config, times, named.name, rows=rows) | {"floor_ms": floor_ms}
        for steps in checked:
            for acceptance in config.dense_acceptances:
                yield common | costs(config, times, named.name, rows=rows, steps=steps, acceptance=acceptance) | {"floor_ms": floor_ms}


def costs(
    config: Config, times: dict[Any, float], name: str, *, rows: int, steps: int | None = None, acceptance: float | None = None
) -> dict[str, Any]:
    """What a step and a token take, without checks or with one dense pass every so many steps.

    Args:
        config: Settings.
        times: Milliseconds: of dense steps under `None`, of sparse ones by name, of checks by their number of steps.
        name: Of the sparse steps.
        rows: Rows of a step.
        steps: Sparse steps before a check.
        acceptance: The assumed chance of a token to pass it.

    Returns:
        Columns of a row; `None` for what is lost in noise, which a time that is not positive tells.
    """
    dense, sparse, check = times[None], times[name], 0.0 if steps is None else times[steps]
    tokens, speedup = min(config.mean_acceptance_length, rows), None
    if min(dense, sparse) > 0 and (steps is None or check > 0):
        speedup = dense / sparse
        if steps is not None:
            assert acceptance is not None
            ratios = dict(step_cost=sparse / dense, check_cost=check / dense)
            speedup = two_level_speedup(num_steps=steps, tokens_per_step=tokens, acceptance=acceptance, **ratios)
    return {
        "steps_between_dense": steps,
        "assumed_dense_acceptance": acceptance,
        "ms_dense": dense,
        "ms_sparse": sparse,
        "ms_check": None if steps is None else check,
        "speedup_is": "measured" if steps is None else "computed",
        "ms_per_token_dense": dense / tokens,
        "ms_per_token_sparse": None if speedup is None else dense / tokens / speedup,
        "speedup": speedup,
    }


def kept_shares(named: NamedSparsity, target: Model, cache: KVCache, *, context: int, rows: int) -> Kept:
    """What a sparse pass that ends at `context` keeps, by its settings; of skipped experts what medians come to."""
    sparsity, model = named.sparsity, target.model.config
    keys, channels, experts = 1.0, 1.0, None
    if sparsity.attention is not None:
        settings, there = sparsity.attention, -(-context // sparsity.attention.block_size)
        most = min(settings.max_read(capacity=cache.capacity, num_rows=rows), there)
        keys = min(max(settings.budget_blocks(context), settings.max_forced(rows)), most) / there
    if sparsity.ffn is not None:
        channels = sparsity.ffn.keep
    if sparsity.moe is not None and model.moe is not None:
        experts = model.moe.num_experts_per_token - sparsity.moe.max_skipped / 2
    return Kept(keys=keys, channels=channels, experts_per_token=experts)


def floor_bytes(named: NamedSparsity, kept: Kept, target: Model, cache: KVCache, *, context: int, rows: int) -> float:
    """Bytes that a sparse pass must read: weights, what it keeps of the cache, and the summaries that it chooses by."""
    batch, itemsize = cache.length.shape[0], cache.keys[0].dtype.itemsize
    sizes = dict(batch_size=batch, num_tokens=rows, context=context - rows, weight_bytes=itemsize, cache_bytes=itemsize)
    total = pass_work(target.model.config, kept=kept, **sizes).total.moved_bytes
    settings = named.sparsity.attention
    if settings is not None and settings.scores_queries:
        choosing = len(named.sparsity.choosing_layers(target.model.config))
        vectors = 2 if settings.score == "bounds" else 1
        width = target.model.config.num_kv_heads * target.model.config.head_dim * itemsize
        total += choosing * batch * (context // settings.block_size) * vectors * width
    return total


def _keep_ratio(named: NamedSparsity, kept: Kept, target: Model) -> float:
    """Of what the method leaves out; of a hybrid the share of the cache."""
    moe = target.model.config.moe
    if named.sparsity.attention is not None:
        return kept.keys
    if named.sparsity.moe is not None and moe is not None and kept.experts_per_token is not None:
        return kept.experts_per_token / moe.num_experts_per_token
    return kept.channels


def _samples(config: Config, target: Model) -> MLPSamples | None:
    """Of random tokens: random weights know no better ones."""
    if not config.needs_samples(target.model.config):
        return None
    tokens = np.random.default_rng(0).integers(0, target.model.config.vocab_size, (1, 256))
    return sample_mlp(target.model, target.params, [(jnp.asarray(tokens, jnp.int32), None)])


def show(row: dict) -> str:
    """A row's main figures on one line."""
    text = f"context {row['context']:6}  batch {row['batch']:2}  rows {row['rows']}  {row['method']:44} "
    text += f"keeps {row['keep_ratio']:.3f}  {row['ms_sparse']:.3f} ms (floor {row['floor_ms']:.3f}), dense {row['ms_dense']:.3f}  "
    checks = "no checks"
    if row["steps_between_dense"] is not None:
        checks = f"checked every {row['steps_between_dense']} steps, {row['assumed_dense_acceptance']:.2f} accepted"
    if row["speedup"] is None:
        return f"{text}{checks}: lost in noise, use longer loops or more repeats"
    return text + f"{checks}: {row['speedup']:.2f} x" + ("" if row["speedup"] > 1 else " (loses)")


def table_rows(rows: list[dict]) -> list[dict]:
    """What was measured, and of what dense checks leave of it the best of each context and batch."""
    computed = [row for row in rows if row["steps_between_dense"] is not None and row["speedup"] is not None]
    best: dict[tuple, dict] = {}
    for row in sorted(computed, key=lambda row: row["speedup"]):
        best[row["context"], row["batch"], row["rows"]] = row
    return [row for row in rows if row["steps_between_dense"] is None or any(row is found for found in best.values())]


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    return {
        "model": row["model"],
        "context": row["context"],
        "batch": row["batch"],
        "rows": row["rows"],
        "method": row["method"],
        "kept": row["keep_ratio"],
        "dense, ms": row["ms_dense"],
        "sparse, ms": row["ms_sparse"],
        "its floor, ms": row["floor_ms"],
        "steps before a dense pass": row["steps_between_dense"],
        "accepted by it (assumed)": row["assumed_dense_acceptance"],
        "speed-up": None if row["speedup"] is None else f"{row['speedup']:.2f} ×",
        "which is": row["speedup_is"],
    }


def plot(rows: list[dict], axes: Any) -> None:
    """Speed-up against context, a line for each method and batch, without checks."""
    lossy = [row for row in rows if row["steps_between_dense"] is None and row["speedup"] is not None]
    lines: dict[tuple, list[dict]] = {}
    for row in lossy:
        lines.setdefault((row["method"], row["batch"], row["rows"]), []).append(row)
    for (method, batch, num_rows), line in lines.items():
        line = sorted(line, key=lambda row: row["context"])
        label = f"{method}, batch {batch}, {num_rows} rows"
        axes.plot([row["context"] for row in line], [row["speedup"] for row in line], marker="o", label=label)
    axes.axhline(1, color="gray", linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("dense time / sparse time of a verification")
    axes.legend(fontsize=6)
