"""Which draft head, of which rank, at which draft length is the fastest for this target on this device?

Command: python -m experiments.run recommend_head target=llama31_8b acceptance=experiments/results/head_quality.json
Hardware: what the target shall run on (`target=tiny` on a CPU)
Time: 2 minutes for an 8B target on an H200
Result: kappa, every head's nu and break-even, and the heads and draft lengths with the most tokens a second to expect

Costs are measured here, with the library's own steps. Acceptance comes from `drafters` (EAGLE-3 checkpoints that share a body's shape, each
with a head of its own, or a draft model with other heads than its own) decoding the prompts of `data_dir`; or from `acceptance`, a JSON
file of rows as `head_quality` writes them (`head`, `rank`, `acceptance_rate_per_position`, and perhaps `drafter`, `rows` and
`temperature`), of which a head's are averaged; or from `rates`, as in `rates=full=0.75/0.55/0.4,low_rank:8=0.74/0.54/0.4`: such rates are
assumptions, and the rows say `synthetic`. Without `drafters` it is the shape published for the target with random weights, and each of
`heads` in turn. Of a head whose acceptance is not known, only the costs are shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.acceptance import end_of_text
from experiments.decoding import Decoder
from experiments.draft_heads import FULL, describe, label
from experiments.drafters import Candidates, Network, load_candidates, random_candidates, ready
from experiments.experiment import ExperimentError, local_field, path_field
from experiments.known_acceptance import assumed_rates, recorded_rates
from experiments.mid_decode import Middle
from experiments.models import Model, load_model
from experiments.prompts import encode, load_prompts
from experiments.step_costs import MeasuredCosts, measure_costs
from specjax import GenerateConfig
from specjax.capacity import bucket
from specjax.cost_model import (
    HeadCandidate,
    break_even_acceptance_ratio,
    conditional_acceptance,
    expected_tokens,
    recommend,
    throughput_ratio,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        target: A preset's name or a checkpoint's path.
        drafters: Checkpoints of EAGLE-3 drafters, or of draft models; none: the shape published for the preset, with `heads`.
        heads: Besides the full one: low_rank:DIVISOR, trimmed:TOKENS, screened:DIVISOR:CANDIDATES.
        acceptance: A JSON file of rows.
        rates: HEAD=RATE/RATE/..., the acceptance rate of each draft position over all steps.
        data_dir: Folder of prompt sets, to decode with `drafters`.
        sets: Their names.
        prompts_per_set: Spread evenly over the set.
        new_tokens: Limit a prompt.
        chat_template: As in `acceptance`.
        num_speculative_tokens: The longest G; shorter ones follow from it.
        verification_rows: Numbers of rows whose verification is timed, besides 2 and G + 1.
        pick: "argmax" or "sample" (temperature 1).
        batch: Sequences in a batch.
        context: Tokens in the cache.
        top: Choices to show.
        dtype: Of compute, and of random weights.
        implementation: Of the kernels; see `Kernels.of`.
        short_steps: Steps of the short loops.
        long_steps: Steps of the long loops.
        repeats: Pairs of loops.
        compile_threads: Programs to compile at a time.
        cache_dir: Where converted checkpoints are kept; `None` is the user's cache folder.
    """

    target: str = path_field("llama31_8b")
    drafters: tuple[str, ...] = path_field(())
    heads: tuple[str, ...] = ("low_rank:8", "low_rank:16", "trimmed:65536", "trimmed:32768", "screened:8:2048")
    acceptance: str | None = path_field(None)
    rates: tuple[str, ...] = ()
    data_dir: str = path_field("")
    sets: tuple[str, ...] = ("humaneval", "gsm8k", "mt_bench")
    prompts_per_set: int | None = 6
    new_tokens: int = 128
    chat_template: bool = True
    num_speculative_tokens: int = 7
    verification_rows: tuple[int, ...] = (4,)
    pick: str = "argmax"
    batch: int = 1
    context: int = 1024
    top: int = 10
    dtype: str = "bfloat16"
    implementation: str = "auto"
    short_steps: int = 4
    long_steps: int = 28
    repeats: int = 5
    compile_threads: int = 8
    cache_dir: str | None = local_field()

    def __post_init__(self) -> None:
        if self.pick not in ("argmax", "sample"):
            raise ExperimentError(f"pick must be argmax or sample, got {self.pick!r}")
        if self.num_speculative_tokens < 1 or min(self.verification_rows, default=2) < 2:
            raise ExperimentError(
                "num_speculative_tokens must be at least 1 and verification_rows at least 2, "
                f"got {self.num_speculative_tokens} and {self.verification_rows}"
            )
        if (self.acceptance is not None) + bool(self.rates) + bool(self.data_dir) > 1:
            raise ExperimentError("acceptance comes from one source: give acceptance, rates or data_dir")
        if self.data_dir and not self.drafters:
            raise ExperimentError("data_dir needs drafters: random weights accept nothing")


def run(config: Config) -> Iterator[dict]:
    """One row a head with its costs, then one a choice, the fastest first."""
    compute: dict[str, Any] = {"dtype": config.dtype, "implementation": config.implementation}
    if config.drafters:
        candidates = load_candidates(config.drafters, **compute, cache_dir=config.cache_dir)
    else:
        candidates = random_candidates(config.target, config.heads, **compute)
    target = load_model(config.target, **compute, cache_dir=config.cache_dir)
    described = {name: describe(head, target.model.config.vocab_size) for name, (head, _) in candidates.heads.items()}
    rates, synthetic = acceptance_rates(config, target, candidates, described)
    try:
        chains = {name: conditional_acceptance(found) for name, found in rates.items()}
    except ValueError as error:
        raise ExperimentError(f"the acceptance of a head: {error}") from None
    middle = Middle(
        batch=config.batch,
        context=config.context,
        num_steps=config.long_steps,
        num_speculative_tokens=config.num_speculative_tokens,
        do_sample=config.pick == "sample",
    )
    measured = measure_costs(
        target,
        candidates.network,
        candidates.params,
        candidates.heads,
        middle,
        verification_rows=tuple(rows for rows in config.verification_rows if rows <= config.num_speculative_tokens),
        short_steps=config.short_steps,
        repeats=config.repeats,
        compile_threads=config.compile_threads,
    )
    common = {
        "target": target.name,
        "weights": target.weights,
        "implementation": config.implementation,
        "synthetic": synthetic,
        "acceptance": "assumed" if config.rates else Path(config.acceptance).name if config.acceptance else "measured" if rates else None,
        "batch": config.batch,
        "context": config.context,
        "pick": config.pick,
    }
    costs, raw = dataclasses.asdict(measured.costs), {name: timing.as_row() for name, timing in measured.timings.items()}
    yield {**common, "mode": "costs", "num_speculative_tokens": config.num_speculative_tokens, **costs, "raw": raw}
    for name in candidates.heads:
        yield {**common, **described[name], **head_row(name, config.num_speculative_tokens, measured, chains)}
    ranked = [
        HeadCandidate(name=name, rank=described[name]["rank"], head_us=measured.head_us[name], conditional_acceptance=chain)
        for name, chain in chains.items()
    ]
    if ranked:
        for place, choice in enumerate(recommend(measured.costs, ranked, batch_size=config.batch)[: config.top], start=1):
            yield {**common, **described[choice.name], "mode": "choice", "place": place, **dataclasses.asdict(choice)}


def head_row(name: str, longest: int, measured: MeasuredCosts, chains: Mapping[str, tuple[float, ...]]) -> dict:
    """A head's costs at the longest draft, and what the model makes of them where acceptance is known of it and of the full head."""
    full_us, costs = measured.head_us[FULL], measured.costs
    known = {key: chains[key] for key in (FULL, name) if key in chains}
    num_drafted = min([longest, *map(len, known.values())])
    tokens = {key: expected_tokens(chain, num_drafted) for key, chain in known.items()}
    ratio = tokens[name] / tokens[FULL] if FULL in tokens and name in tokens else None
    try:
        kappa, nu = costs.kappa(full_us, num_drafted), measured.head_us[name] / full_us
        break_even = break_even_acceptance_ratio(kappa=kappa, nu=nu)
    except ValueError as error:
        raise ExperimentError(f"the times are lost in the noise: {error}; use longer loops or more repeats") from None
    return {
        "mode": "head",
        "name": name,
        "num_speculative_tokens": num_drafted,
        "head_us": measured.head_us[name],
        "nu": nu,
        "kappa": kappa,
        "break_even_acceptance_ratio": break_even,
        "acceptance_ratio": ratio,
        "throughput_ratio": None if ratio is None else throughput_ratio(acceptance_ratio=ratio, kappa=kappa, nu=nu),
        "tokens_per_step": tokens.get(name),
    }


def acceptance_rates(
    config: Config, target: Model, candidates: Candidates, described: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, tuple[float, ...]], bool]:
    """Acceptance rates by position of the heads that they are known of, and whether they are assumptions."""
    if config.rates:
        return assumed_rates(config.rates, described), True
    if config.acceptance is not None:
        return recorded_rates(Path(config.acceptance), described, sampled=config.pick == "sample", drafter=candidates.family)
    if config.data_dir:
        return {name: measured_rates(config, target, *trained) for name, trained in candidates.trained.items()}, False
    return {}, False


def measured_rates(config: Config, target: Model, network: Network, params: Mapping[str, Any]) -> tuple[float, ...]:
    """What the target accepts of one drafter on the prompts."""
    if target.checkpoint is None:
        raise ExperimentError(f"data_dir needs a target with a tokenizer, {config.target!r} is a preset")
    texts = [text for name in config.sets for text in load_prompts(config.data_dir, name, config.prompts_per_set)]
    prompts = encode(target.checkpoint.tokenizer(), texts, chat_template=config.chat_template)
    drafter, drafter_params = ready(network, params, target.model.config, target.params)
    static = GenerateConfig(
        max_new_tokens=config.new_tokens, num_speculative_tokens=config.num_speculative_tokens, do_sample=config.pick == "sample"
    )
    decoder = Decoder(
        target,
        drafter,
        drafter_params,
        config=static,
        batch=config.batch,
        width=bucket(max(map(len, prompts))),
        eos_token_ids=end_of_text(target),
        temperature=float(config.pick == "sample"),
    )
    return tuple(decoder(prompts).statistics.summary()["acceptance_rate_per_position"])


def show(row: dict) -> str:
    """A row on one line."""
    if row["mode"] == "costs":
        passes = zip(row["verification_rows"], row["verification_us"], strict=True)
        verification = ", ".join(f"{rows} rows {us / 1e3:.2f} ms" for rows, us in passes)
        text = f"{row['target']}, batch {row['batch']}: plain step {row['plain_us'] / 1e3:.2f} ms; verification of {verification}"
        return f"{text}; drafter {row['drafter_us']:.1f} us a token"
    mark = "  SYNTHETIC: the acceptance is assumed" if row["synthetic"] else ""
    if row["mode"] == "choice":
        verdict = "" if row["speed_up"] > 1 else " (plain decoding is faster)"
        return (
            f"{row['place']:3}. {label(row):22} G {row['num_speculative_tokens']:<2} {row['tokens_per_step']:.2f} tokens in "
            f"{row['step_us'] / 1e3:.2f} ms: {row['tokens_per_s']:.0f} tokens/s, {row['speed_up']:.2f} x plain{verdict}{mark}"
        )
    text = f"{label(row):22} {row['head_us']:7.1f} us a token  nu {row['nu']:.3f}  kappa {row['kappa']:.3f} at G "
    text += f"{row['num_speculative_tokens']}: breaks even at {row['break_even_acceptance_ratio']:.3f} of the full head's acceptance length"
    if row["throughput_ratio"] is None:
        return text
    return f"{text}, keeps {row['acceptance_ratio']:.3f}: {row['throughput_ratio']:.3f} x the full head{mark}"


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    target, mark = {"target": row["target"], "batch": row["batch"]}, " (SYNTHETIC)" if row["synthetic"] else ""
    if row["mode"] == "costs":
        passes = zip(row["verification_rows"], row["verification_us"], strict=True)
        times = {f"verification of {rows} rows, ms": us / 1e3 for rows, us in passes}
        return target | {"plain step, ms": row["plain_us"] / 1e3} | times | {"drafter, µs a token": row["drafter_us"]}
    if row["mode"] == "choice":
        choice = {"place": row["place"], "head": label(row) + mark, "G": row["num_speculative_tokens"], "step, ms": row["step_us"] / 1e3}
        choice |= {"tokens a step": row["tokens_per_step"], "tokens/s": row["tokens_per_s"]}
        return target | choice | {"speed-up over plain": f"{row['speed_up']:.2f} ×"}
    model = {"nu": row["nu"], "kappa": row["kappa"], "break-even": row["break_even_acceptance_ratio"]}
    kept = {"acceptance kept": row["acceptance_ratio"], "tokens/s over the full head's": row["throughput_ratio"]}
    return target | {"head": label(row) + mark, "G": row["num_speculative_tokens"], "µs a token": row["head_us"]} | model | kept
