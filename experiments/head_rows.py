"""What one batch size and one temperature say of every draft head: each drafter decodes the prompts, its step's parts are timed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.acceptance import end_of_text
from experiments.bootstrap import Rate, rate_ratio_interval
from experiments.compiling import compile_all, say
from experiments.decoding import Decoded, Decoder
from experiments.draft_heads import FULL, bytes_read, describe
from experiments.drafters import Candidates, ready, sizes_of
from experiments.experiment import ExperimentError
from experiments.head_quality_config import Config
from experiments.mid_decode import Middle
from experiments.models import Model
from experiments.step_costs import MeasuredCosts, measure_costs
from specjax import GenerateConfig
from specjax.capacity import bucket
from specjax.cost_model import throughput_ratio
from specjax.drafting.heads.draft_head import TOKEN_IDS
from specjax.training.token_counts import share_outside

# Below this mean acceptance length of the full head a drafter has learned too little for its heads to differ as finished ones would.
LEAST_FULL_LENGTH = 2.3


@dataclasses.dataclass(frozen=True)
class Setting:
    """One batch size and temperature: every way of decoding, compiled, and what the parts of a step take.

    Attributes:
        config: Settings.
        target: The target.
        families: The drafters, by kind.
        batch: Prompts decoded together.
        temperature: 0 is greedy.
        decoders: By kind and drafter.
        plain: Without one.
        costs: Of the parts of a step, by kind.
    """

    config: Config
    target: Model
    families: Mapping[str, Candidates]
    batch: int
    temperature: float
    decoders: dict[tuple[str, str], Decoder]
    plain: Decoder
    costs: dict[str, MeasuredCosts]

    @classmethod
    def build(
        cls,
        config: Config,
        target: Model,
        families: Mapping[str, Candidates],
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

        def decoder(key: tuple[str, str] | None) -> Decoder:
            drafter, params = None, None
            if key is not None:
                network, own = families[key[0]].trained[key[1]]
                drafter, params = ready(network, own, target.model.config, target.params)
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

        keys = [(family, name) for family, candidates in families.items() for name in candidates.trained]
        keys.sort(key=lambda key: key[1] != FULL)  # one with all the products that programs share is compiled first
        say(f"batch {batch}, temperature {temperature:g}: {len(keys)} drafters")
        jobs: dict[Any, Any] = {key: (" ".join(key), functools.partial(decoder, key)) for key in keys}
        jobs[None] = "plain decoding", functools.partial(decoder, None)
        decoders: dict[Any, Decoder] = compile_all(jobs, threads=config.compile_threads, first=1)
        plain = decoders.pop(None)
        middle = Middle(
            batch=batch,
            context=config.context,
            num_steps=config.long_steps,
            num_speculative_tokens=config.num_speculative_tokens,
            do_sample=temperature > 0,
        )
        costs = {
            family: measure_costs(
                target,
                candidates.network,
                candidates.params,
                candidates.heads,
                middle,
                verification_rows=(),
                short_steps=config.short_steps,
                repeats=config.loop_repeats,
                compile_threads=config.compile_threads,
                tuned=True,
            )
            for family, candidates in families.items()
        }
        for measured in costs.values():
            lost = {name: us for name, us in measured.head_us.items() if us <= 0}
            if lost:
                raise ExperimentError(f"the times of heads are lost in the noise: {lost} us; use longer loops or more repeats")
        return cls(config, target, families, batch, temperature, decoders, plain, costs)

    def rows(self, prompts: Mapping[str, list[list[int]]]) -> Iterator[dict]:
        """Decodes every set with every drafter."""
        plain = {dataset: self.decode(self.plain, tokens) for dataset, tokens in prompts.items()}
        for family, candidates in self.families.items():
            # The full head first, then by size: heads of equal bytes stand side by side.
            names = sorted(candidates.trained, key=lambda name: (name != FULL, -self.head_bytes(family, name)))
            # Set by set: what slows the device for a while slows all heads alike.
            decoded = {
                dataset: {name: self.decode(self.decoders[family, name], tokens) for name in names} for dataset, tokens in prompts.items()
            }
            by_drafter = {
                name: [
                    self.row(family, name, dataset, decoded[dataset][name], decoded[dataset][FULL], plain[dataset]) for dataset in prompts
                ]
                for name in names
            }
            full_length = np.mean([row["mean_acceptance_length"] for row in by_drafter[FULL]])
            undertrained = {"undertrained": bool(full_length < LEAST_FULL_LENGTH)}
            for rows in by_drafter.values():
                yield from (row | undertrained for row in rows)
            for name, rows in by_drafter.items():
                ours, full = ([decoded[dataset][one] for dataset in prompts] for one in (name, FULL))
                yield self.mean_row(family, name, rows, by_drafter[FULL]) | self._intervals(ours, full) | undertrained

    def head_bytes(self, family: str, name: str) -> int:
        """Weights that a head reads for one draft token of each row."""
        candidates = self.families[family]
        itemsize = jnp.dtype(self.config.dtype).itemsize
        return bytes_read(candidates.heads[name][0], **sizes_of(candidates.network), itemsize=itemsize, batch=self.batch)

    def decode(self, decoder: Decoder, prompts: list[list[int]]) -> Decoded:
        """The prompts' texts; the time is that behind the first token of each."""
        decoded = decoder(prompts, repeats=self.config.repeats)
        prefills = decoder.prefill_seconds_by_call(prompts, repeats=self.config.repeats)
        if sum(prefills) >= decoded.seconds:
            raise ExperimentError(f"{decoded.num_tokens} tokens took no longer than the prefill: decode more with new_tokens")
        calls = zip(decoded.calls, prefills, strict=True)
        behind = tuple(dataclasses.replace(call, seconds=call.seconds - prefill) for call, prefill in calls)
        return dataclasses.replace(decoded, seconds=decoded.seconds - sum(prefills), calls=behind)

    def row(self, family: str, name: str, dataset: str, ours: Decoded, full: Decoded, plain: Decoded) -> dict:
        """What a set says of one drafter."""
        counts = ours.statistics.summary()
        full_length = full.statistics.summary()["mean_acceptance_length"]
        head, head_params = self.families[family].heads[name]
        outside = None
        if TOKEN_IDS in head_params:
            vocab_size = self.target.model.config.vocab_size
            text = np.bincount([token for row in plain.tokens for token in row], minlength=vocab_size)
            outside = share_outside(text, np.asarray(head_params[TOKEN_IDS]))
        row = {
            "target": self.target.name,
            "drafter": family,
            **describe(head, self.target.model.config.vocab_size),
            **self._training(family, name),
            "head_bytes": self.head_bytes(family, name),
            "dataset": dataset,
            "prompts": len(ours.tokens),
            "num_speculative_tokens": self.config.num_speculative_tokens,
            "batch": self.batch,
            "temperature": self.temperature,
            "weights": self.target.weights,
            "implementation": self.config.implementation,
            "synthetic": False,
            "mean_acceptance_length": counts["mean_acceptance_length"],
            "acceptance_rate_per_position": counts["acceptance_rate_per_position"],
            "share_outside": outside,
            "tokens_per_call_step": tokens_per_call_step(ours),
            **self._rates(*(sum(tokens) / sum(seconds) for tokens, seconds in map(speed, (ours, full, plain)))),
            **self._ratios(
                family, name, counts["mean_acceptance_length"] / full_length, tokens_per_call_step(ours) / tokens_per_call_step(full)
            ),
            **self._intervals([ours], [full]),
        }
        return row | self._prediction_error(row)

    def _intervals(self, ours: list[Decoded], full: list[Decoded]) -> dict[str, Any]:
        """How sure the two ratios to the full head are, by drawing prompts anew; batches of several prompts are too few to draw from."""
        ratios = {"rho_tau_interval": acceptance_length, "speedup_over_full_interval": speed if self.batch == 1 else None}
        return {
            key: rate and list(rate_ratio_interval([rate(one) for one in full], [rate(one) for one in ours]))
            for key, rate in ratios.items()
        }

    @staticmethod
    def _rates(ours: float, full: float, plain: float) -> dict[str, float]:
        return {
            "tokens_per_s": ours,
            "tokens_per_s_autoregressive": plain,
            "speedup_over_full": ours / full,
            "speedup_over_autoregressive": ours / plain,
        }

    @staticmethod
    def _prediction_error(row: Mapping[str, Any]) -> dict[str, float]:
        return {"predicted_gain_error": row["predicted_speedup_over_full"] / row["speedup_over_full"] - 1}

    def mean_row(self, family: str, name: str, rows: list[dict], full_rows: list[dict]) -> dict:
        """The unweighted mean over the sets; ratios are those of the means."""

        def mean(key: str, rows: list[dict]) -> float:
            return float(np.mean([row[key] for row in rows]))

        length, ours, plain = (mean(key, rows) for key in ("mean_acceptance_length", "tokens_per_s", "tokens_per_s_autoregressive"))
        row = rows[0] | {
            "dataset": "mean",
            "prompts": sum(row["prompts"] for row in rows),
            "mean_acceptance_length": length,
            "acceptance_rate_per_position": np.mean([row["acceptance_rate_per_position"] for row in rows], axis=0).tolist(),
            "share_outside": None if rows[0]["share_outside"] is None else mean("share_outside", rows),
            "tokens_per_call_step": mean("tokens_per_call_step", rows),
            **self._rates(ours, mean("tokens_per_s", full_rows), plain),
            **self._ratios(
                family,
                name,
                length / mean("mean_acceptance_length", full_rows),
                mean("tokens_per_call_step", rows) / mean("tokens_per_call_step", full_rows),
            ),
        }
        return row | self._prediction_error(row)

    def _ratios(self, family: str, name: str, rho_tau: float, call_ratio: float) -> dict[str, float]:
        """The cost model's numbers, and what it says of the gain: from the rows' acceptance, and from that of whole batches."""
        num_drafted, measured = self.config.num_speculative_tokens, self.costs[family]
        head_us, rest_us = measured.head_us, measured.costs.without_heads_us(num_drafted)
        kappa, nu = num_drafted * head_us[FULL] / rest_us, head_us[name] / head_us[FULL]
        return {
            "rho_tau": rho_tau,
            "kappa": kappa,
            "nu": nu,
            "head_us": head_us[name],
            "without_heads_us": rest_us,
            "predicted_speedup_over_full": throughput_ratio(acceptance_ratio=rho_tau, kappa=kappa, nu=nu),
            "predicted_with_slowest_rows": throughput_ratio(acceptance_ratio=call_ratio, kappa=kappa, nu=nu),
        }

    def _training(self, family: str, name: str) -> dict[str, Any]:
        """How the drafter was trained, as its checkpoint remembers."""
        record = self.families[family].metadata[name].get("training", {})
        variant = next(iter(record.get("variants", [])), {})
        return {
            "loss": variant.get("loss", {}).get("kind"),
            "init": variant.get("init"),
            "train_tokens": record.get("last_report", {}).get("loss_tokens"),
        }


def acceptance_length(decoded: Decoded) -> Rate:
    """Tokens over steps, prompt by prompt."""
    pairs = [pair for call in decoded.calls for pair in zip(call.steps, call.accepted, strict=True)]
    return [steps + accepted for steps, accepted in pairs], [steps for steps, _ in pairs]


def speed(decoded: Decoded) -> Rate:
    """Tokens behind the first of each prompt over seconds, batch by batch."""
    return [sum(call.tokens) - len(call.tokens) for call in decoded.calls], [call.seconds for call in decoded.calls]


def tokens_per_call_step(decoded: Decoded) -> float:
    """Tokens that a row receives in a step of its batch: the mean acceptance length, less what rows lose that wait for the slowest one."""
    received, _ = speed(decoded)
    return sum(received) / sum(max(call.steps) * len(call.steps) for call in decoded.calls)
