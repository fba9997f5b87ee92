"""Which part of drafting does the LM head cost, and what does a low-rank head save?

Command: python -m experiments.run head_latency --record
Hardware: one H200 (any device works; `models=tiny heads=low_rank:8 batches=1` on a CPU)
Time: 6 minutes
Result: at batch 1 a full head is 57 to 71 % of drafting; rank D/8 takes 0.16 to 0.23 of its time with arg-max, 0.28 to 0.37 sampling

A head's time is what it adds to a chain of drafts: EAGLE-3 proposes G tokens and commits one, as in the library's own step, with the head
and with the token given; the difference over G is the head's (the scores, and picking a token from them). nu is that over the full head's,
measured in turn with it. The drafters have the published shapes: their bodies' weights, 210 MB and more a draft token, pass through an
H200's L2 cache of 60 MB between two heads, so that each head reads its own from memory.

`floor_us` is the time that the head's weights take to read (of a screened head: of the factors, and each row's candidates) and, with
`pick=sample`, the probabilities `[B,V]` in float32 to write, which verification will read. Scores may stay on the chip, and do not count.
`bodies_us` is a step with the tokens given: no shorter than its own floor, so nothing was left out of it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.draft_heads import FULL, GivenToken, bytes_read, describe, label
from experiments.drafters import Candidates, random_candidates, with_head
from experiments.experiment import ExperimentError
from experiments.mid_decode import Middle, drafting_loop
from experiments.presets import PRESETS, kv_bytes, random_array
from experiments.timing import Loop, LoopTiming, time_loops
from specjax import ModelConfig
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.heads import DraftHead

PICKS = ("argmax", "sample")
GIVEN, EMPTY = "given", "empty"


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        models: Presets for whose shape an EAGLE-3 drafter is published.
        batches: Sequences in a batch.
        picks: How a token is picked: "argmax", "sample" (temperature 1).
        heads: Besides the full one: low_rank:DIVISOR, trimmed:TOKENS, screened:DIVISOR:CANDIDATES.
        num_speculative_tokens: G.
        context: Tokens that the drafter has seen when the loop ends.
        dtype: Of weights and compute.
        implementation: Of the kernels; see `Kernels.of`.
        bandwidth_bytes_per_s: What the floors divide by.
        short_steps: Steps of the short loop.
        long_steps: Steps of the long loop.
        repeats: Pairs of loops.
        compile_threads: Programs to compile at a time.
    """

    models: tuple[str, ...] = ("llama31_8b", "gpt_oss_20b", "qwen3_30b_a3b")
    batches: tuple[int, ...] = (1, 8, 64)
    picks: tuple[str, ...] = PICKS
    heads: tuple[str, ...] = ("low_rank:8", "low_rank:16", "trimmed:65536", "trimmed:32768", "screened:8:2048")
    num_speculative_tokens: int = 5
    context: int = 1024
    dtype: str = "bfloat16"
    implementation: str = "auto"
    bandwidth_bytes_per_s: float = 4.3e12
    short_steps: int = 4
    long_steps: int = 28
    repeats: int = 5
    compile_threads: int = 8

    def __post_init__(self) -> None:
        if not self.picks or set(self.picks) - set(PICKS):
            raise ExperimentError(f"picks must be some of {', '.join(PICKS)}, got {', '.join(self.picks) or 'none'}")


def run(config: Config) -> Iterator[dict]:
    """One row a model, batch, pick and head."""
    for name in config.models:
        bench = Bench.of(name, config)
        for batch in config.batches:
            yield from bench.rows(batch)


@dataclasses.dataclass(frozen=True)
class Bench:
    """One model's drafter with its heads.

    Attributes:
        name: The preset's.
        config: Settings.
        candidates: The drafter and the heads.
        target_params: The target's embedding.
    """

    name: str
    config: Config
    candidates: Candidates
    target_params: dict

    @classmethod
    def of(cls, name: str, config: Config) -> Bench:
        """Random weights of the published shape."""
        candidates = random_candidates(name, config.heads, dtype=config.dtype, implementation=config.implementation)
        decoder = candidates.network.config.decoder
        embedding = random_array(jax.random.key(5), (decoder.vocab_size, decoder.hidden_size), jnp.dtype(config.dtype), 0.02)
        return cls(name=name, config=config, candidates=candidates, target_params={"embedding": embedding})

    @property
    def target(self) -> ModelConfig:
        """The target's shape."""
        return PRESETS[self.name]()

    def rows(self, batch: int) -> Iterator[dict]:
        """Times every head with every pick, beside the full one, and the chain without a head, all in turn."""
        config = self.config
        loops = {(GIVEN, ""): self.loop(GivenToken(vocab_size=self.target.vocab_size), {}, batch, sample=False)}
        loops |= {
            (name, pick): self.loop(*head, batch, sample=pick == "sample")
            for pick in config.picks
            for name, head in self.candidates.heads.items()
        }
        loops[EMPTY, ""] = Loop(lambda _, state: state + 1, None, jnp.int32(0))
        times = time_loops(
            loops, short=config.short_steps, long=config.long_steps, repeats=config.repeats, compile_threads=config.compile_threads
        )
        for pick in config.picks:
            for name in self.candidates.heads:
                yield self.row(name, pick, batch, times)

    def loop(self, head: DraftHead, head_params: Mapping[str, jax.Array], batch: int, *, sample: bool) -> Loop:
        config = self.config
        middle = Middle(
            batch=batch,
            context=config.context,
            num_steps=config.long_steps,
            num_speculative_tokens=config.num_speculative_tokens,
            do_sample=sample,
        )
        network, params = self.candidates.network, self.candidates.params
        drafter, params = with_head(network, params, head, head_params, self.target, self.target_params)
        assert isinstance(network, Eagle3)
        width = network.config.num_features * self.target.hidden_size
        return drafting_loop(drafter, params, middle, vocab_size=self.target.vocab_size, feature_shape=(width, jnp.dtype(config.dtype)))

    def row(self, name: str, pick: str, batch: int, times: dict[tuple[str, str], LoopTiming]) -> dict:
        """What the timings of a batch say of one head."""
        config, (head, _), timing = self.config, self.candidates.heads[name], times[name, pick]
        num_drafted = config.num_speculative_tokens
        given, loop_us = times[GIVEN, ""], 1e3 * times[EMPTY, ""].median_ms
        us, full_us = (marginal_us(measured, given, num_drafted) for measured in (timing, times[FULL, pick]))
        nus = [ours / full for ours, full in zip(us, full_us, strict=True)]
        floor_us = self.floor_us(head, pick, batch)
        drafting_us, median_us = 1e3 * timing.median_ms - loop_us, statistics.median(us)
        return {
            "model": self.name,
            **describe(head, self.target.vocab_size),
            "name": name,
            "pick": pick,
            "batch": batch,
            "num_speculative_tokens": num_drafted,
            "context": config.context,
            "us": median_us,
            "us_min": min(us),
            "us_max": max(us),
            "floor_us": floor_us,
            "ratio_to_floor": median_us / floor_us,
            "us_full": statistics.median(full_us),
            "nu": statistics.median(nus),
            "nu_min": min(nus),
            "nu_max": max(nus),
            "drafting_us": drafting_us,
            "share_of_drafting": num_drafted * median_us / drafting_us,
            "bodies_us": 1e3 * given.median_ms - loop_us,
            "bodies_floor_us": self.bodies_floor_us(batch),
            "loop_us": loop_us,
            "weights": "random",
            "implementation": config.implementation,
            "synthetic": False,
            "dtype": config.dtype,
            "bandwidth_bytes_per_s": config.bandwidth_bytes_per_s,
            "raw_us": us,
            **timing.as_row(),
        }

    def floor_us(self, head: DraftHead, pick: str, batch: int) -> float:
        """See the module's docstring."""
        target, itemsize = self.target, jnp.dtype(self.config.dtype).itemsize
        moved = bytes_read(head, hidden_size=target.hidden_size, vocab_size=target.vocab_size, itemsize=itemsize, batch=batch)
        moved += 4 * batch * target.vocab_size if pick == "sample" else 0
        return moved / self.config.bandwidth_bytes_per_s * 1e6

    def bodies_floor_us(self, batch: int) -> float:
        """G passes of the drafter's layers, one of which is that over the committed tokens, and the fusion of those tokens' features."""
        config, decoder = self.config, self.candidates.network.config.decoder
        weights = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(value)) for name, value in self.candidates.params.items()}
        cache = kv_bytes(decoder, batch=batch, context=config.context, itemsize=jnp.dtype(config.dtype).itemsize)
        fusion = weights.pop("fc")
        passes = config.num_speculative_tokens * (sum(weights.values()) + cache)
        return (fusion + passes) / config.bandwidth_bytes_per_s * 1e6


def marginal_us(timing: LoopTiming, given: LoopTiming, num_drafted: int) -> list[float]:
    """A head's time in each repeat: what a step with it takes more than one with the tokens given, over the G heads in it."""
    return [1e3 * (ours - base) / num_drafted for ours, base in zip(timing.ms_per_step, given.ms_per_step, strict=True)]


def show(row: dict) -> str:
    """A row's main figures on one line."""
    return (
        f"{row['model']:14} batch {row['batch']:<3} {row['pick']:7} {label(row):22} {row['us']:7.1f} us a token"
        f"  {row['ratio_to_floor']:4.2f} x its floor  nu {row['nu']:5.3f} ({row['nu_min']:.3f} to {row['nu_max']:.3f})"
        f"  {row['share_of_drafting']:4.0%} of drafting"
    )


def table_rows(rows: list[dict]) -> list[dict]:
    """The smallest batch, where heads weigh most."""
    smallest = min(row["batch"] for row in rows)
    return [row for row in rows if row["batch"] == smallest]


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    return {
        "model": row["model"],
        "batch": row["batch"],
        "pick": row["pick"],
        "head": label(row),
        "µs a token": row["us"],
        "floor, µs": row["floor_us"],
        "ratio": f"{row['ratio_to_floor']:.2f}",
        "nu": row["nu"],
        "nu, spread": f"{row['nu_min']:.3f} to {row['nu_max']:.3f}",
        "share of drafting": f"{row['share_of_drafting']:.0%}",
    }


def plot(rows: Sequence[dict], axes: Any) -> None:
    """nu of the heads at batch 1, by model, with the nu of the floors."""
    rows = [row for row in rows if row["batch"] == 1 and row["pick"] == "argmax" and row["name"] != FULL]
    floors = [row["floor_us"] / row["us_full"] for row in rows]
    axes.bar(range(len(rows)), [row["nu"] for row in rows], 0.6, label="measured")
    axes.bar(range(len(rows)), floors, 0.6, label="floor: bytes read / bandwidth", color="black", alpha=0.4)
    axes.set_xticks(range(len(rows)), [f"{row['model']}\n{label(row)}" for row in rows], fontsize=6, rotation=90)
    axes.set_ylabel("a head's time over the full head's")
    axes.legend()
