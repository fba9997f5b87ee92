"""How many draft tokens does a target accept, on which kind of text, and what does that gain?

Command: python -m experiments.run acceptance target=TARGET drafter=DRAFTER data_dir=PROMPTS --record
Hardware: one H200 for a 1.5B target in bfloat16 (a small pair runs on a CPU in float32)
Time: 5 minutes on an H200
Result: see "Acceptance" in the README, made from results/acceptance*.json

Every prompt is decoded plainly, with the drafter and with `NoDraft` (plain decoding in passes of the speculative run's shape: in reduced
precision that is the output which greedy speculation must equal), all through the same prefill and attention and in one process. Where
speculative and plain output part, the target's float32 logits say how nearly the two tokens were tied.

mean_acceptance_length is 1 + accepted / steps: the bonus or recovered token is counted, the prefill's token is not.
tokens_per_target_step_counting_prefill is llama.cpp's figure: emitted / (emitted - accepted).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from experiments.decoding import Decoded, Decoder, LogitGap, first_divergence
from experiments.experiment import FOLDER, ExperimentError, local_field, path_field
from experiments.models import PROMPT_LOOKUP, LoadedDrafter, Model, load_drafter, load_model
from experiments.prompts import encode, load_prompts
from specjax import GenerateConfig, NoDraft, RejectionSampling, SyntheticAcceptance
from specjax.capacity import bucket
from specjax.drafting.drafter import Drafter


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        target: A checkpoint's path (ours, a Hugging Face folder or a GGUF file).
        drafter: Likewise, of a draft model or an EAGLE-3, Medusa or Hydra drafter (ours, or as published); or "prompt_lookup".
        data_dir: Folder of prompt sets, `NAME.jsonl` with `turns`.
        sets: Their names.
        prompts_per_set: Spread evenly over the set; `none` takes all.
        new_tokens: Limit a prompt.
        num_speculative_tokens: G.
        temperature: 0 decodes greedily, and compares outputs.
        seed: For sampling.
        batch: Prompts decoded together.
        dtype: Compute dtype.
        implementation: Of the kernels; see `Kernels.of`.
        chat_template: Prompts are user messages in the tokenizer's own chat template; `false` takes them as bare text.
        ignore_eos: Every prompt runs to its limit.
        repeats: Timed runs a batch; the median counts.
        synthetic_acceptance_length: SYNTHETIC: keep draft tokens by a coin, to this mean length. For timing only.
        cache_dir: Where converted checkpoints are kept; `none` is the user's cache folder.
    """

    target: str = path_field("")
    drafter: str = path_field(PROMPT_LOOKUP)
    data_dir: str = path_field("")
    sets: tuple[str, ...] = ("humaneval", "gsm8k", "sum", "mt_bench", "alpaca", "qa")
    prompts_per_set: int | None = 6
    new_tokens: int = 128
    num_speculative_tokens: int = 5
    temperature: float = 0.0
    seed: int = 0
    batch: int = 1
    dtype: str = "bfloat16"
    implementation: str = "auto"
    chat_template: bool = True
    ignore_eos: bool = False
    repeats: int = 1
    synthetic_acceptance_length: float | None = None
    cache_dir: str | None = local_field()


def run(config: Config) -> Iterator[dict]:
    """One row a set, and one for their mean."""
    for key in ("target", "data_dir"):
        if not getattr(config, key):
            raise ExperimentError(f"acceptance needs {key}=PATH")
    options = {"dtype": config.dtype, "implementation": config.implementation, "cache_dir": config.cache_dir}
    target = load_model(config.target, **options)
    if target.checkpoint is None:
        raise ExperimentError(f"acceptance needs a target with a tokenizer, {config.target!r} is a preset")
    drafter = load_drafter(config.drafter, target, **options)
    tokenizer = target.checkpoint.tokenizer()
    sets = {name: load_prompts(config.data_dir, name, config.prompts_per_set) for name in config.sets}
    prompts = {name: encode(tokenizer, texts, chat_template=config.chat_template) for name, texts in sets.items()}
    comparison = Comparison.build(config, target, drafter, prompts)
    rows = []
    for name, tokens in prompts.items():
        rows.append(comparison.row(name, tokens))
        yield rows[-1]
    yield mean_row(rows)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The three ways of decoding, compiled, and what the rows say of the pair."""

    config: Config
    common: dict[str, Any]
    plain: Decoder
    speculative: Decoder
    padded: Decoder | None
    logit_gap: LogitGap

    @classmethod
    def build(cls, config: Config, target: Model, drafter: LoadedDrafter, prompts: dict[str, list[list[int]]]) -> Comparison:
        """Compiles one program for each way, for all sets."""
        width = bucket(max(len(tokens) for rows in prompts.values() for tokens in rows))
        synthetic = config.synthetic_acceptance_length is not None
        rule = RejectionSampling()
        if config.synthetic_acceptance_length is not None:
            rule = SyntheticAcceptance.from_mean_acceptance_length(config.synthetic_acceptance_length, config.num_speculative_tokens)
        static = GenerateConfig(
            max_new_tokens=config.new_tokens,
            num_speculative_tokens=config.num_speculative_tokens,
            do_sample=config.temperature > 0,
            verification=rule,
        )

        def decoder(drafter: Drafter | None, params: dict | None) -> Decoder:
            return Decoder(
                target,
                drafter,
                params,
                config=static,
                batch=config.batch,
                width=width,
                eos_token_ids=() if config.ignore_eos else end_of_text(target),
                temperature=config.temperature,
                seed=config.seed,
            )

        compares = config.temperature == 0 and not synthetic
        common = {
            "target": target.name,
            "drafter": drafter.name,
            "weights": target.weights,
            "drafter_weights": drafter.weights,
            "implementation": config.implementation,
            "synthetic": synthetic,
            "dtype": config.dtype,
            "batch": config.batch,
            "prompt_width": width,
        }
        return cls(
            config=config,
            common=common,
            plain=decoder(None, None),
            speculative=decoder(drafter.drafter, drafter.params),
            padded=decoder(NoDraft(), None) if compares else None,
            logit_gap=LogitGap(target, width + config.new_tokens),
        )

    def row(self, dataset: str, prompts: list[list[int]]) -> dict:
        """Decodes a set in every way."""
        config = self.config
        plain = self.plain(prompts, repeats=config.repeats)
        speculative = self.speculative(prompts, repeats=config.repeats)
        counts = speculative.statistics.summary()
        emitted, accepted = speculative.num_tokens, counts["num_accepted_tokens"]
        row = {
            "dataset": dataset,
            **self.common,
            "prompts": len(prompts),
            "new_tokens": config.new_tokens,
            "num_speculative_tokens": config.num_speculative_tokens,
            "temperature": config.temperature,
            "acceptance_rate": counts["draft_acceptance_rate"],
            **counts,
            "synthetic": self.common["synthetic"],
            "tokens_per_target_step_counting_prefill": emitted / max(emitted - accepted, 1),
            "tokens": emitted,
            "seconds": speculative.seconds,
            "tokens_per_s": speculative.tokens_per_s,
            "tokens_per_s_autoregressive": plain.tokens_per_s,
            "speedup": speculative.tokens_per_s / plain.tokens_per_s,
            "compile_s": self.speculative.compile_s,
        }
        row |= self._equality(prompts, plain, speculative)
        return row | reference(row, config)

    def _equality(self, prompts: list[list[int]], plain: Decoded, speculative: Decoded) -> dict:
        if self.padded is None:
            return {
                "greedy_equal_to_plain": None,
                "greedy_equal_to_padded_plain": None,
                "divergence_max_logit_gap": None,
                "divergences": [],
            }
        padded = self.padded(prompts, repeats=1)
        divergences = []
        for index, (prompt, ours, theirs) in enumerate(zip(prompts, speculative.tokens, plain.tokens, strict=True)):
            position = first_divergence(ours, theirs)
            if position is not None:
                gap = self.logit_gap([*prompt, *ours[:position]], ours[position], theirs[position])
                divergences.append({"prompt": index, "position": position, "logit_gap": gap})
        equal = sum(ours == theirs for ours, theirs in zip(speculative.tokens, padded.tokens, strict=True))
        return {
            "greedy_equal_to_plain": 1 - len(divergences) / len(prompts),
            "greedy_equal_to_padded_plain": equal / len(prompts),
            "divergence_max_logit_gap": max((found["logit_gap"] for found in divergences), default=None),
            "divergences": divergences,
        }


def show(row: dict) -> str:
    """A row's main figures on one line; says when speculation loses."""
    text = (
        f"{row['dataset']:10}  acceptance rate {row['acceptance_rate']:.3f}  mean acceptance length {row['mean_acceptance_length']:.2f}  "
    )
    text += f"{row['tokens_per_s']:.1f} tokens/s, {row['tokens_per_s_autoregressive']:.1f} without: {row['speedup']:.2f} x"
    text += "" if row["speedup"] > 1 else " (speculation loses)"
    if row["greedy_equal_to_plain"] is not None:
        text += f"  equal to plain {row['greedy_equal_to_plain']:.3f}, to padded plain {row['greedy_equal_to_padded_plain']:.3f}"
    return text + ("  SYNTHETIC" if row["synthetic"] else "")


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    gap = row["divergence_max_logit_gap"]
    return {
        "set": row["dataset"] + (" (SYNTHETIC)" if row["synthetic"] else ""),
        "prompts": row["prompts"],
        "acceptance rate": row["acceptance_rate"],
        "llama.cpp's": row["reference_acceptance_rate"],
        "mean acceptance length": row["mean_acceptance_length"],
        "tokens/s": row["tokens_per_s"],
        "tokens/s without": row["tokens_per_s_autoregressive"],
        "ms a step": None if "seconds" not in row else 1e3 * row["seconds"] / row["steps"],
        "ms a plain step": 1e3 / row["tokens_per_s_autoregressive"],
        "speed-up": f"{row['speedup']:.2f} ×",
        "equal to plain": row["greedy_equal_to_plain"],
        "equal to padded plain": row["greedy_equal_to_padded_plain"],
        "largest logit gap where they part": gap,
    }


def plot(rows: list[dict], axes: Any) -> None:
    """Acceptance rate by set, beside the reference."""
    names = [row["dataset"] for row in rows]
    axes.bar([x - 0.2 for x in range(len(rows))], [row["acceptance_rate"] for row in rows], 0.4, label="specjax")
    known = [(x + 0.2, row["reference_acceptance_rate"]) for x, row in enumerate(rows) if row["reference_acceptance_rate"] is not None]
    if known:
        axes.bar([x for x, _ in known], [rate for _, rate in known], 0.4, label="llama.cpp")
    axes.set_xticks(range(len(rows)), names)
    axes.set_ylabel("accepted / drafted")
    axes.legend()


def end_of_text(model: Model) -> tuple[int, ...]:
    """The ids that end a text: those that the checkpoint names, and the tokenizer's own."""
    assert model.checkpoint is not None
    own = model.checkpoint.tokenizer().eos_token_id
    return tuple(dict.fromkeys([*model.checkpoint.eos_token_ids(), *([] if own is None else [own])]))


def reference(row: dict, config: Config) -> dict:
    """The independent figure for this row and our difference from it; `None` where none was measured at these settings."""
    known = json.loads((FOLDER / "reference_acceptance.json").read_text(encoding="utf-8"))
    settings = ("new_tokens", "num_speculative_tokens", "temperature")  # more prompts than the reference's few are welcome
    same = all(getattr(config, key) == known[key] for key in settings) and config.chat_template and not row["synthetic"]
    same = same and row["target"].startswith(known["target"]) and row["drafter"].startswith(known["drafter"])
    figure = known["sets"].get(row["dataset"], {}).get("acceptance_rate") if same else None
    return {
        "reference_acceptance_rate": figure,
        "acceptance_rate_minus_reference": None if figure is None else row["acceptance_rate"] - figure,
        "reference": known["provenance"] if figure is not None else None,
    }


def mean_row(rows: list[dict]) -> dict:
    """The unweighted mean of the sets; of the divergences' gaps the largest."""
    averaged = (
        "acceptance_rate",
        "mean_acceptance_length",
        "tokens_per_target_step_counting_prefill",
        "tokens_per_s",
        "tokens_per_s_autoregressive",
        "speedup",
        "greedy_equal_to_plain",
        "greedy_equal_to_padded_plain",
        "reference_acceptance_rate",
        "acceptance_rate_minus_reference",
    )
    kept = ("target", "drafter", "weights", "drafter_weights", "implementation", "synthetic", "dtype", "batch", "new_tokens")
    kept += ("num_speculative_tokens", "temperature", "reference")
    gaps = [row["divergence_max_logit_gap"] for row in rows if row["divergence_max_logit_gap"] is not None]
    means = {key: None if any(row[key] is None for row in rows) else sum(row[key] for row in rows) / len(rows) for key in averaged}
    return {
        "dataset": "mean",
        **{key: rows[0][key] for key in kept},
        "prompts": sum(row["prompts"] for row in rows),
        **means,
        "divergence_max_logit_gap": max(gaps, default=None),
    }
