"""The five ways on real prompts: all decode them greedily, and go on from one dense prefill."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from experiments.compiling import compile_all
from experiments.decoding import Decoded, Decoder, Prefilled
from experiments.models import LoadedDrafter, Model
from experiments.sparse_pair import PADDING
from experiments.sparse_settings import DENSE, NamedSparsity, laid_out_for
from experiments.speeds import Timed, keep_ratio, ratio
from experiments.ways import DENSE_VERIFICATION, PLAIN, WAYS, Way, two_levels
from experiments.ways_config import Config
from specjax import GenerateConfig
from specjax.capacity import bucket, rounded_capacity, whole_chunks
from specjax.two_level.measured_costs import CostsUnknown, TwoLevelCosts, measure_costs


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is decoded, and by whom."""

    config: Config
    target: Model
    drafter: LoadedDrafter
    prompts: list[list[int]]
    batch: int
    made: dict[str, Model] = dataclasses.field(default_factory=dict)  # weights in another layout, once they are needed

    def rows(self, settings: list[NamedSparsity]) -> Iterator[dict]:
        """Way by way."""
        plain: Decoded | None = None
        dense: Decoded | None = None
        prefilled = self.prefilled()
        unchecked = self.unchecked(settings, prefilled)
        for way in WAYS:
            for named in settings if way.sparse else [None]:
                costs = None
                if way.checked and named is not None and self.config.measured_costs:
                    costs = self.costs(named, capacity=prefilled.batches[0].target_cache.capacity)
                    if self.undecided(named, costs):
                        continue
                    assert dense is not None, "dense verification stands before two levels"
                    if costs is not None:
                        tokens = float(dense.statistics.mean_acceptance_length)
                        print(f"{named.name}: {costs.describe(tokens_per_step=tokens)}", file=sys.stderr)
                decoder = unchecked.get((way, named)) or self.decoder(way, named, costs, prefilled)
                decoded = decoder(self.prompts, repeats=self.config.repeats)
                if way == PLAIN:
                    plain = decoded
                if way == DENSE_VERIFICATION:
                    dense = decoded
                assert plain is not None, "the first way, which the others are held against"
                yield self.row(way, named, costs, decoded, plain, dense)

    def unchecked(self, settings: list[NamedSparsity], prefilled: Prefilled) -> dict[Any, Decoder]:
        """Decoders of the ways that wait for no measured costs, by way and setting, compiled side by side."""
        for named in settings:
            laid_out_for(self.target, named.sparsity, self.made)  # here, not by several threads at once
        ways = sorted((way for way in WAYS if not way.checked), key=lambda way: way != DENSE_VERIFICATION)  # has the products of all
        jobs: dict[Any, tuple[str, Callable[[], Decoder]]] = {}
        for way in ways:
            for named in settings if way.sparse else [None]:
                name = " ".join(filter(None, [way.name, named and named.name]))
                jobs[way, named] = name, functools.partial(self.decoder, way, named, None, prefilled)
        return compile_all(jobs, threads=self.config.compile_threads, first=1)

    def prefilled(self) -> Prefilled:
        """The prompts taken in, with room for what follows them and all that may wait for a dense pass."""
        config, num_rows, width = self.config, self.config.num_speculative_tokens + 1, bucket(max(map(len, self.prompts)))
        behind = config.new_tokens + config.lossless().max_provisional(config.num_speculative_tokens) + num_rows + PADDING
        static = self.static(DENSE)
        slots = whole_chunks(width, static.prefill_chunk_size) + behind
        static = dataclasses.replace(static, cache_capacity=rounded_capacity(slots, config.block_size))
        sizes: dict[str, Any] = dict(config=static, batch=self.batch, width=width)
        return Prefilled.of(self.target, self.drafter.drafter, self.drafter.params, self.prompts, **sizes)

    def undecided(self, named: NamedSparsity, costs: TwoLevelCosts | None) -> bool:
        """Whether two levels have nothing to choose by: bytes tell of attention alone."""
        return self.config.adapt and costs is None and named.sparsity.attention is None

    def typical(self) -> list[list[int]]:
        """One batch of the prompts, of lengths about the median."""
        by_length = sorted(self.prompts, key=len)
        first = max(len(by_length) - self.batch, 0) // 2
        return (by_length[first:] * self.batch)[: self.batch]

    def costs(self, named: NamedSparsity, *, capacity: int) -> TwoLevelCosts | None:
        """Times of steps and checks behind typical prompts, over caches of the capacity that all ways decode with.

        `None`, and a line on standard error, where they are lost in noise or the target's window has no room for the loops.
        """
        target = laid_out_for(self.target, named.sparsity, self.made)
        static = self.static(two_levels(named.sparsity, self.config.lossless()))
        try:
            return measure_costs(
                target.model,
                target.params,
                self.drafter.drafter,
                self.drafter.params,
                self.typical(),
                config=dataclasses.replace(static, cache_capacity=capacity),
                repeats=self.config.repeats,
            )
        except CostsUnknown as error:
            instead = "are left out" if self.undecided(named, None) else "decide by bytes" if self.config.adapt else "do without costs"
            print(f"{named.name}: two levels {instead}, their costs are not known: {error}", file=sys.stderr)
            return None

    def static(self, sparsity: Any) -> GenerateConfig:
        """A way's static choices."""
        sizes: dict[str, Any] = dict(max_new_tokens=self.config.new_tokens, num_speculative_tokens=self.config.num_speculative_tokens)
        return GenerateConfig(**sizes, sparsity=sparsity)

    def decoder(self, way: Way, named: NamedSparsity | None, costs: TwoLevelCosts | None, prefilled: Prefilled) -> Decoder:
        """Compiles one way."""
        config = self.config
        sparsity = DENSE if named is None else named.sparsity
        if way.checked:
            by_bytes = costs is None
            lossless = config.lossless(adapt=config.adapt) if by_bytes else costs.lossless(adapt=config.adapt)
            sparsity = two_levels(sparsity, lossless)
        drafter, params = (self.drafter.drafter, self.drafter.params) if way.drafts else (None, None)
        width = bucket(max(map(len, self.prompts)))
        # No EOS: every way writes as much, and so over contexts as long.
        target = laid_out_for(self.target, sparsity, self.made)
        static = dataclasses.replace(self.static(sparsity), cache_capacity=prefilled.batches[0].target_cache.capacity)
        sizes: dict[str, Any] = dict(config=static, batch=self.batch, width=width)
        return Decoder(target, drafter, params, eos_token_ids=(), prefilled=prefilled, **sizes)

    def row(
        self,
        way: Way,
        named: NamedSparsity | None,
        costs: TwoLevelCosts | None,
        decoded: Decoded,
        plain: Decoded,
        dense: Decoded | None,
    ) -> dict[str, Any]:
        """What one way came to."""
        counts = decoded.statistics.summary()
        levels: dict[str, Any] = counts.get("two_level", {})
        speed, plain_speed = Timed(decoded).tokens_per_s, Timed(plain).tokens_per_s
        dense_speed = None if dense is None else Timed(dense).tokens_per_s
        same = [ours == theirs for ours, theirs in zip(decoded.tokens, plain.tokens, strict=True)]
        least = levels.get("break_even_dense_acceptance")
        if costs is not None:
            least = costs.break_even(tokens_per_step=counts["mean_acceptance_length"])
        cycles = levels.get("dense_passes", 0) + levels.get("dense_steps", 0)
        return {
            "target": self.target.name,
            "drafter": self.drafter.name if way.drafts else "none",
            "weights": self.target.weights,
            "implementation": self.config.implementation,
            "synthetic": False,
            "way": way.name,
            "lossless": way.lossless,
            "method": "" if named is None else named.name,
            "context": float(np.mean([len(prompt) for prompt in self.prompts])) + self.config.new_tokens,
            "batch": self.batch,
            "prompts": len(self.prompts),
            "new_tokens": self.config.new_tokens,
            "mean_acceptance_length": counts["mean_acceptance_length"],
            "keep_ratio": keep_ratio(counts),
            "dense_acceptance_rate": levels.get("dense_acceptance_rate"),
            "break_even_dense_acceptance": least,
            "step_cost": levels.get("step_cost") if costs is None else costs.step_cost,
            "check_cost": None if costs is None else costs.check_cost,
            "steps_between_dense": levels["sparse_steps"] / levels["dense_passes"] if levels.get("dense_passes") else None,
            "dense_step_share": levels["dense_steps"] / cycles if cycles else None,
            "same_text": float(np.mean(same)),
            "tokens_per_s": speed,
            "ms_per_token": None if speed is None else 1e3 / speed,
            "speedup_over_autoregressive": ratio(speed, plain_speed),
            "speedup_over_dense_verification": ratio(speed, dense_speed),
        }
