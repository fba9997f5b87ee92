"""Which draft LM head is worth most with a real target: what each keeps of the acceptance, and what that gains in tokens a second?

Command: python -m experiments.run head_quality target=TARGET drafters=FULL,LOW_RANK,TRIMMED,SCREENED data_dir=PROMPTS --record
Hardware: one H200 for a 1.5B target in bfloat16
Time: not measured on a GPU yet; most of it is compilation
Result: none on record yet

The drafters are checkpoints of `specjax train`: one body's shape, trained alike, one of them with the full head. Every prompt set is
decoded with each of them and plainly, at every batch size and temperature, in one process.

`rho_tau` is a drafter's mean acceptance length over the full head's, on the same prompts. `kappa` and `nu` are measured beforehand with the
library's own steps (see `recommend_head`), and with rho_tau make `predicted_speedup_over_full`: SlimSpec's model, arXiv:2605.10453.
`tokens_per_s` counts from each prompt's first token on: the prefill is the same for all. A batch takes as long as its slowest row, while
`rho_tau` is a mean over the rows: at larger batches the gain may differ from the prediction, which is that of a step.

`share_outside` is the part of the target's own text that a trimmed head can never draft: no training brings that back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from experiments.acceptance import end_of_text
from experiments.decoding import Decoded, Decoder
from experiments.draft_heads import FULL, describe, label
from experiments.drafters import Candidates, load_candidates
from experiments.experiment import ExperimentError, local_field, path_field
from experiments.mid_decode import Middle
from experiments.models import Model, load_model
from experiments.prompts import encode, load_prompts
from experiments.step_costs import MeasuredCosts, measure_costs
from specjax import GenerateConfig
from specjax.capacity import bucket
from specjax.cost_model import throughput_ratio
from specjax.drafting.eagle3_drafter import Eagle3Drafter, eagle3_params
from specjax.drafting.heads.draft_head import DRAFT_HEAD, TOKEN_IDS
from specjax.training.token_counts import share_outside

PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        target: A checkpoint's path (ours, a Hugging Face folder or a GGUF file).
        drafters: EAGLE-3 checkpoints with the same body's shape and a head of their own each; one has the full head.
        data_dir: Folder of prompt sets, `NAME.jsonl` with `turns`.
        sets: Their names.
        prompts_per_set: Spread evenly over the set, at least as many as are decoded together; `none` takes all.
        batches: Prompts decoded together.
        temperatures: 0 decodes greedily.
        new_tokens: Limit a prompt.
        num_speculative_tokens: G.
        context: Tokens in the cache where kappa and nu are measured.
        seed: For sampling.
        dtype: Compute dtype.
        implementation: Attention implementation.
        chat_template: Prompts are user messages in the tokenizer's own chat template; `false` takes them as bare text.
        repeats: Timed runs a batch; the median counts.
        short_steps: Steps of the short timing loops.
        long_steps: Steps of the long timing loops.
        loop_repeats: Pairs of timing loops.
        compile_threads: Programs to compile at a time.
        cache_dir: Where converted checkpoints are kept; `none` is the user's cache folder.
    """

    target: str = path_field("")
    drafters: tuple[str, ...] = path_field(())
    data_dir: str = path_field("")
    sets: tuple[str, ...] = ("mt_bench", "humaneval", "gsm8k")
    prompts_per_set: int | None = 8
    batches: tuple[int, ...] = (1, 64)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    new_tokens: int = 128
    num_speculative_tokens: int = 5
    context: int = 512
    seed: int = 0
    dtype: str = "bfloat16"
    implementation: str = "auto"
    chat_template: bool = True
    repeats: int = 1
    short_steps: int = 4
    long_steps: int = 24
    loop_repeats: int = 5
    compile_threads: int = 8
    cache_dir: str | None = local_field()


def run(config: Config) -> Iterator[dict]:
    """One row a set, drafter, batch size and temperature, and one for the mean of the sets."""
    if not config.target or not config.data_dir or not config.drafters:
        raise ExperimentError("head_quality needs target=PATH, drafters=PATH,PATH and data_dir=PATH")
    options: dict[str, Any] = {"dtype": config.dtype, "implementation": config.implementation, "cache_dir": config.cache_dir}
    target = load_model(config.target, **options)
    if target.checkpoint is None:
        raise ExperimentError(f"head_quality needs a target with a tokenizer, {config.target!r} is a preset")
    candidates = load_candidates(config.drafters, **options)
    if FULL not in candidates.trained:
        raise ExperimentError(f"one of the drafters must have the full head, got {', '.join(candidates.trained)}")
    tokenizer = target.checkpoint.tokenizer()
    for batch in config.batches:
        number = None if config.prompts_per_set is None else max(config.prompts_per_set, batch)
        texts = {name: load_prompts(config.data_dir, name, number) for name in config.sets}
        prompts = {name: encode(tokenizer, rows, chat_template=config.chat_template) for name, rows in texts.items()}
        for temperature in config.temperatures:
            yield from Setting.build(config, target, candidates, prompts, batch, temperature).rows(prompts)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One batch size and temperature: every way of decoding, compiled, and what the parts of a step take.

    Attributes:
        config: Settings.
        target: The target.
        candidates: The drafters.
        batch: Prompts decoded together.
        temperature: 0 is greedy.
        decoders: By drafter, and `PLAIN`.
        costs: Of the parts of a step.
    """

    config: Config
    target: Model
    candidates: Candidates
    batch: int
    temperature: float
    decoders: dict[str, Decoder]
    costs: MeasuredCosts

    @classmethod
    def build(
        cls,
        config: Config,
        target: Model,
        candidates: Candidates,
        prompts: Mapping[str, list[list[int]]],
        batch: int,
        temperature: float,
    ) -> Setting:
        """Compiles, several programs at a time, and measures the parts."""
        width = bucket(max(len(tokens) for rows in prompts.values() for tokens in rows))
        static = GenerateConfig(
            max_new_tokens=config.new_tokens, num_speculative_tokens=config.num_speculative_tokens, do_sample=temperature > 0
        )
        assert target.checkpoint is not None
        ends = end_of_text(target)

        def decoder(name: str) -> Decoder:
            drafter, params = None, None
            if name != PLAIN:
                network, own = candidates.trained[name]
                drafter = Eagle3Drafter.for_target(network, target.model.config)
                params = eagle3_params(drafter.model, own, target.model.config, target.params)
            return Decoder(
                target,
                drafter,
                params,
                config=static,
                batch=batch,
                width=width,
                eos_token_ids=ends,
                temperature=temperature,
                seed=config.seed,
            )

        names = [PLAIN, *candidates.trained]
        # The products that programs share are tuned once, for all alike, when one with all of them is compiled first.
        decoders = {FULL: decoder(FULL)}
        others = [name for name in names if name != FULL]
        with ThreadPoolExecutor(config.compile_threads) as pool:
            decoders |= dict(zip(others, pool.map(decoder, others), strict=True))
        middle = Middle(
            batch=batch,
            context=config.context,
            num_steps=config.long_steps,
            num_speculative_tokens=config.num_speculative_tokens,
            do_sample=temperature > 0,
        )
        costs = measure_costs(
            target,
            candidates.network,
            candidates.params,
            candidates.heads,
            middle,
            verification_rows=(),
            short_steps=config.short_steps,
            repeats=config.loop_repeats,
            compile_threads=config.compile_threads,
        )
        return cls(config, target, candidates, batch, temperature, decoders, costs)

    def rows(self, prompts: Mapping[str, list[list[int]]]) -> Iterator[dict]:
        """Decodes every set with every drafter."""
        by_drafter: dict[str, list[dict]] = {name: [] for name in self.candidates.trained}
        for dataset, tokens in prompts.items():
            decoded = {name: self.decode(decoder, tokens) for name, decoder in self.decoders.items()}
            full = decoded[FULL]
            for name in self.candidates.trained:
                row = self.row(name, dataset, len(tokens), decoded[name], full, decoded[PLAIN])
                by_drafter[name].append(row)
                yield row
        for name, rows in by_drafter.items():
            yield self.mean_row(name, rows, by_drafter[FULL])

    def decode(self, decoder: Decoder, prompts: list[list[int]]) -> Decoded:
        """The prompts' texts; the time is that behind the first token of each."""
        decoded = decoder(prompts, repeats=self.config.repeats)
        prefill_seconds = decoder.prefill_seconds(prompts, repeats=self.config.repeats)
        if prefill_seconds >= decoded.seconds:
            raise ExperimentError(f"{decoded.num_tokens} tokens took no longer than the prefill: decode more with new_tokens")
        return dataclasses.replace(decoded, seconds=decoded.seconds - prefill_seconds)

    def row(self, name: str, dataset: str, num_prompts: int, ours: Decoded, full: Decoded, plain: Decoded) -> dict:
        """What a set says of one drafter."""
        counts = ours.statistics.summary()
        full_length = full.statistics.summary()["mean_acceptance_length"]
        head_params = self.candidates.trained[name][1].get(DRAFT_HEAD, {})
        outside = None
        if TOKEN_IDS in head_params:
            vocab_size = self.target.model.config.vocab_size
            text = np.bincount([token for row in plain.tokens for token in row], minlength=vocab_size)
            outside = share_outside(text, np.asarray(head_params[TOKEN_IDS]))
        return {
            "target": self.target.name,
            "drafter": "eagle3",
            **describe(self.candidates.heads[name][0], self.target.model.config.vocab_size),
            **self._training(name),
            "dataset": dataset,
            "prompts": num_prompts,
            "num_speculative_tokens": self.config.num_speculative_tokens,
            "batch": self.batch,
            "temperature": self.temperature,
            "weights": self.target.weights,
            "implementation": self.config.implementation,
            "synthetic": False,
            "mean_acceptance_length": counts["mean_acceptance_length"],
            "acceptance_rate_per_position": counts["acceptance_rate_per_position"],
            "share_outside": outside,
            "tokens_per_s": self._rate(ours, num_prompts),
            "tokens_per_s_autoregressive": self._rate(plain, num_prompts),
            **self._ratios(name, counts["mean_acceptance_length"] / full_length),
            "speedup_over_full": self._rate(ours, num_prompts) / self._rate(full, num_prompts),
            "speedup_over_autoregressive": self._rate(ours, num_prompts) / self._rate(plain, num_prompts),
        }

    def _rate(self, decoded: Decoded, num_prompts: int) -> float:
        """Tokens a second behind the first of each prompt."""
        return (decoded.num_tokens - num_prompts) / decoded.seconds

    def mean_row(self, name: str, rows: list[dict], full_rows: list[dict]) -> dict:
        """The unweighted mean over the sets; ratios are those of the means."""

        def mean(key: str, rows: list[dict]) -> float:
            return float(np.mean([row[key] for row in rows]))

        length, tokens_per_s, plain = (mean(key, rows) for key in ("mean_acceptance_length", "tokens_per_s", "tokens_per_s_autoregressive"))
        return rows[0] | {
            "dataset": "mean",
            "prompts": sum(row["prompts"] for row in rows),
            "mean_acceptance_length": length,
            "acceptance_rate_per_position": np.mean([row["acceptance_rate_per_position"] for row in rows], axis=0).tolist(),
            "share_outside": None if rows[0]["share_outside"] is None else mean("share_outside", rows),
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_autoregressive": plain,
            **self._ratios(name, length / mean("mean_acceptance_length", full_rows)),
            "speedup_over_full": tokens_per_s / mean("tokens_per_s", full_rows),
            "speedup_over_autoregressive": tokens_per_s / plain,
        }

    def _ratios(self, name: str, rho_tau: float) -> dict[str, float]:
        """The cost model's numbers, and what it says of the gain."""
        num_drafted, head_us = self.config.num_speculative_tokens, self.costs.head_us
        rest_us = self.costs.costs.without_heads_us(num_drafted)
        kappa, nu = num_drafted * head_us[FULL] / rest_us, head_us[name] / head_us[FULL]
        return {
            "rho_tau": rho_tau,
            "kappa": kappa,
            "nu": nu,
            "head_us": head_us[name],
            "without_heads_us": rest_us,
            "predicted_speedup_over_full": throughput_ratio(acceptance_ratio=rho_tau, kappa=kappa, nu=nu),
        }

    def _training(self, name: str) -> dict[str, Any]:
        """How the drafter was trained, as its checkpoint remembers."""
        record = self.candidates.metadata[name].get("training", {})
        variant = next(iter(record.get("variants", [])), {})
        return {
            "loss": variant.get("loss", {}).get("kind"),
            "init": variant.get("init"),
            "train_tokens": record.get("last_report", {}).get("loss_tokens"),
        }


def show(row: dict) -> str:
    """A row's main figures on one line."""
    text = f"{row['dataset']:10} batch {row['batch']:2} T {row['temperature']:g}  {label(row):24}  "
    text += f"mean acceptance length {row['mean_acceptance_length']:.3f} (rho {row['rho_tau']:.3f})  "
    text += f"nu {row['nu']:.3f} kappa {row['kappa']:.3f}  "
    text += f"{row['tokens_per_s']:.0f} tokens/s: {row['speedup_over_autoregressive']:.2f} x, over full {row['speedup_over_full']:.3f} "
    text += f"(predicted {row['predicted_speedup_over_full']:.3f})"
    return text if row["share_outside"] is None else f"{text}  outside {row['share_outside']:.4f}"


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    return {
        "set": row["dataset"],
        "batch": row["batch"],
        "temperature": row["temperature"],
        "head": label(row),
        "mean acceptance length": row["mean_acceptance_length"],
        "ρ_τ": row["rho_tau"],
        "ν": row["nu"],
        "κ": row["kappa"],
        "tokens/s": row["tokens_per_s"],
        "over plain": f"{row['speedup_over_autoregressive']:.2f} ×",
        "over full": f"{row['speedup_over_full']:.3f} ×",
        "predicted": f"{row['predicted_speedup_over_full']:.3f} ×",
        "text outside": row["share_outside"],
    }
