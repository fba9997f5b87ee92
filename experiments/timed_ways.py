"""The five ways at a model's shape with random weights: the library's own steps in the middle of a decode. SYNTHETIC acceptance.

A way's time is what a step adds to a loop, all ways in turn over one cache; with two levels a step is a whole cycle. First the ways without
checks and cycles of the most sparse steps are timed: from these come the costs by which two levels then choose how many steps to take,
or to verify densely. Steps commit as many tokens as is asked for, each as many as the others; of what sparse steps commit dense passes keep
each token with the assumed chance, by a coin. For a cycle's tokens the expectation of that coin counts, over as many as there were to keep:
its own luck would need thousands of cycles.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import jax

from experiments.drafters import EAGLE3, random_candidates, with_head
from experiments.experiment import ExperimentError
from experiments.mid_decode import Middle, decoding_loop, does_not_fit
from experiments.models import PROMPT_LOOKUP, LoadedDrafter, Model, load_drafter
from experiments.sparse_settings import DENSE, NamedSparsity, laid_out_for
from experiments.timing import Loop, LoopTiming, time_loops
from experiments.ways import DENSE_VERIFICATION, PLAIN, PLAIN_SPARSE, SPARSE_VERIFICATION, TWO_LEVELS, Way, steady_rates, two_levels
from experiments.ways_config import Config
from specjax import Lossless, SyntheticAcceptance
from specjax.two_level.measured_costs import CostsUnknown, TwoLevelCosts
from specjax.two_level.two_level_cost import expected_settled

# The head of the EAGLE-3 drafter: by time and acceptance the best that has been measured.
_HEAD = "low_rank:8"
# Short and long loops of cycles from which a check's time is known.
_CHECK_CYCLES = (1, 4)


def timed_ways(config: Config, target: Model, settings: list[NamedSparsity]) -> Iterator[dict]:
    """A row a way, and for the sparse ones a row a setting; with two levels one for each assumed acceptance of the dense level.

    Raises:
        ExperimentError: A drafter that drafts nothing from random tokens.
    """
    drafter = _drafter(config, target)
    for batch in config.batches:
        for context in config.contexts:
            layouts = 2 if config.ffn or config.hybrid else 1
            reason = does_not_fit(target, batch=batch, context=context, layouts=layouts)
            if reason:
                print(f"batch {batch}, context {context}: left out, {reason}", file=sys.stderr)
                continue
            yield from Case(config=config, target=target, drafter=drafter, batch=batch, context=context).rows(settings)


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch and context."""

    config: Config
    target: Model
    drafter: LoadedDrafter
    batch: int
    context: int
    made: dict[str, Model] = dataclasses.field(default_factory=dict)  # weights in another layout, once they are needed

    @property
    def middle(self) -> Middle:
        """One for all ways: with room for the longest loop of cycles, were every token accepted."""
        config, num_rows = self.config, self.config.num_speculative_tokens + 1
        most = config.lossless().max_provisional(config.num_speculative_tokens)  # that wait for a check
        longest = max(_CHECK_CYCLES[1], config.long_cycles) * (most + 1)
        room = max(longest, config.long_steps * num_rows) + most + num_rows
        return Middle(
            batch=self.batch,
            context=self.context,
            num_steps=config.long_steps,
            num_speculative_tokens=config.num_speculative_tokens,
            margin=room,
            block_size=config.block_size,
        )

    def rows(self, settings: list[NamedSparsity]) -> Iterator[dict]:
        """Times what is not checked, and then what is."""
        config = self.config
        middle = self.middle
        cache = middle.target_cache(self.target.model, jax.random.key(1))
        context_rng, state_rng = jax.random.split(jax.random.key(2))
        tokens = middle.context_tokens(context_rng, self.target.model.config.vocab_size)
        shared = {"cache": cache, "drafter_state": middle.drafter_state(self.drafter.drafter, self.drafter.params, tokens, state_rng)}
        dense_loop = self.loop(DENSE_VERIFICATION, None, shared)
        loops = {(DENSE_VERIFICATION, None): dense_loop, (PLAIN, None): self.loop(PLAIN, None, shared)}
        loops |= {(way, named): self.loop(way, named, shared) for named in settings for way in (PLAIN_SPARSE, SPARSE_VERIFICATION)}
        fixed, all_kept = config.lossless(), 1.0
        loops |= {(TWO_LEVELS, named): self.loop(TWO_LEVELS, named, shared, fixed, all_kept, num_steps=_CHECK_CYCLES) for named in settings}
        times = self._time(loops)
        costs = {named: found for named in settings if (found := self._costs(times, named)) is not None}
        plain, dense = (self._speed(times[way, None], way) for way in (PLAIN, DENSE_VERIFICATION))
        for (way, named), timing in sorted(times.items(), key=lambda item: item[0][0].lossless, reverse=True):
            if not way.checked:
                yield self.row(way, named, timing, plain, dense)
        checked: dict[Any, Loop] = {
            (named, acceptance): self.loop(
                TWO_LEVELS,
                named,
                shared,
                costs[named].lossless(adapt=config.adapt),
                acceptance,
                num_steps=(config.short_cycles, config.long_cycles),
            )
            for named in costs
            for acceptance in config.dense_acceptances
        }
        if not checked:
            return
        times = self._time({None: dense_loop} | checked)
        dense = self._speed(times[None], DENSE_VERIFICATION)
        for named, acceptance in checked:
            yield self.row(TWO_LEVELS, named, times[named, acceptance], plain, dense, acceptance, costs[named])

    def loop(
        self,
        way: Way,
        named: NamedSparsity | None,
        shared: dict[str, Any],
        lossless: Lossless | None = None,
        acceptance: float | None = None,
        num_steps: tuple[int, int] | None = None,
    ) -> Loop:
        """The steps of a way."""
        sparsity = DENSE if named is None else named.sparsity if lossless is None else two_levels(named.sparsity, lossless)
        params = laid_out_for(self.target, sparsity, self.made).params
        if not way.drafts:
            place = dataclasses.replace(self.middle, num_speculative_tokens=0)
            return decoding_loop(self.target.model, params, None, None, place, sparsity=sparsity, cache=shared["cache"])
        rates = steady_rates(self.config.mean_acceptance_length, self.config.num_speculative_tokens)
        return decoding_loop(
            self.target.model,
            params,
            self.drafter.drafter,
            self.drafter.params,
            self.middle,
            sparsity=sparsity,
            verification=SyntheticAcceptance(rates=rates, dense_rate=acceptance),
            num_steps=num_steps,
            **shared,
        )

    def _time(self, loops: dict[Any, Loop]) -> dict[Any, LoopTiming]:
        config = self.config
        options: dict[str, Any] = {"repeats": config.repeats, "compile_threads": config.compile_threads}
        return time_loops(loops, short=config.short_steps, long=config.long_steps, **options)

    def _costs(self, times: dict[Any, LoopTiming], named: NamedSparsity) -> TwoLevelCosts | None:
        """What two levels decide by; `None` where that was lost in noise, which is said."""
        sparse_ms, cycle_ms = (times[way, named].median_ms for way in (SPARSE_VERIFICATION, TWO_LEVELS))
        dense_ms = times[DENSE_VERIFICATION, None].median_ms
        try:
            measured: dict[str, float] = dict(dense_ms=dense_ms, sparse_ms=sparse_ms, cycle_ms=cycle_ms)
            _, cycle_steps, _ = tokens_of_cycles(times[TWO_LEVELS, named], self.config.mean_acceptance_length, 1.0)
            assert cycle_steps is not None, "such cycles all have a check"
            limits: dict[str, Any] = dict(lossless=self.config.lossless(), draft_length=self.config.num_speculative_tokens)
            costs = TwoLevelCosts.of_times(**measured, cycle_steps=cycle_steps, **limits)
        except CostsUnknown as error:
            print(f"{named.name}: two levels are left out, {error}; use longer loops", file=sys.stderr)
            return None
        print(f"{named.name}: {costs.describe(tokens_per_step=self.config.mean_acceptance_length)}", file=sys.stderr)
        return costs

    def _speed(self, timing: LoopTiming, way: Way) -> float | None:
        """Tokens a second of the whole batch."""
        tokens = self.config.mean_acceptance_length if way.drafts else 1.0
        return 1e3 * self.batch * tokens / timing.median_ms if timing.median_ms > 0 else None

    def row(
        self,
        way: Way,
        named: NamedSparsity | None,
        timing: LoopTiming,
        plain: float | None,
        dense: float | None,
        acceptance: float | None = None,
        costs: TwoLevelCosts | None = None,
    ) -> dict[str, Any]:
        """What one way came to."""
        assert timing.counts is not None
        counts = timing.counts[1].summary()
        tokens_per_step = self.config.mean_acceptance_length if way.drafts else 1.0
        speed, steps_between, shares = self._speed(timing, way), None, None
        if costs is not None:
            assert acceptance is not None
            tokens, steps_between, shares = tokens_of_cycles(timing, tokens_per_step, acceptance)
            speed = 1e3 * tokens / timing.median_ms if timing.median_ms > 0 else None
        return {
            "target": self.target.name,
            "drafter": self.drafter.name if way.drafts else "none",
            "weights": self.target.weights,
            "implementation": self.config.implementation,
            "synthetic": way.drafts,
            "way": way.name,
            "lossless": way.lossless,
            "method": "" if named is None else named.name,
            "context": self.context,
            "batch": self.batch,
            "rows": self.config.num_speculative_tokens + 1 if way.drafts else 1,
            "mean_acceptance_length": tokens_per_step,
            "keep_ratio": counts["sparse_attention"]["keep_ratio"] if "sparse_attention" in counts else None,
            "assumed_dense_acceptance": acceptance,
            "break_even_dense_acceptance": None if costs is None else costs.break_even(tokens_per_step=tokens_per_step),
            "step_cost": None if costs is None else costs.step_cost,
            "check_cost": None if costs is None else costs.check_cost,
            "steps_between_dense": steps_between,
            "dense_step_share": shares,
            "ms_per_step": timing.median_ms,
            "raw_short_ms": timing.raw_short_ms,
            "raw_long_ms": timing.raw_long_ms,
            "tokens_per_s": speed,
            "ms_per_token": None if speed is None else 1e3 / speed,
            "speedup_over_autoregressive": _ratio(speed, plain),
            "speedup_over_dense_verification": _ratio(speed, dense),
        }


def tokens_of_cycles(timing: LoopTiming, tokens_per_step: float, acceptance: float) -> tuple[float, float | None, float]:
    """What the cycles that the long loop has beyond the short one came to.

    Args:
        timing: Of cycles, with their statistics.
        tokens_per_step: Of a step of dense verification.
        acceptance: The assumed chance of a token to be kept by a dense pass, below 1 or 1.

    Returns:
        Tokens a cycle of the whole batch, expected; sparse steps a dense pass, `None` where there was none; and the share of the cycles
        that were a step of dense verification.
    """
    assert timing.counts is not None
    first, last = (counts.levels for counts in timing.counts)
    names = ("sparse_steps", "dense_passes", "dense_steps", "provisional")
    sparse_steps, passes, dense_steps, provisional = (int(getattr(last, name).sum() - getattr(first, name).sum()) for name in names)
    waiting = provisional / passes if passes else 0.0
    settled = 1 + waiting if acceptance == 1 else expected_settled(acceptance, waiting)
    rows = passes + dense_steps  # cycles, each counted once a row of the batch
    batch = last.dense_passes.shape[0]
    tokens = batch * (passes * settled + dense_steps * tokens_per_step) / rows
    return float(tokens), sparse_steps / passes if passes else None, dense_steps / rows


def _drafter(config: Config, target: Model) -> LoadedDrafter:
    if config.drafter == PROMPT_LOOKUP:
        raise ExperimentError("prompt lookup finds nothing in random tokens: give a preset drafter=eagle3, or another preset")
    options: dict[str, Any] = {"dtype": config.dtype, "implementation": config.implementation}
    if config.drafter != EAGLE3:
        return load_drafter(config.drafter, target, cache_dir=config.cache_dir, **options)
    candidates = random_candidates(target.name, (_HEAD,), **options)
    head = candidates.heads[_HEAD]
    drafter, params = with_head(candidates.network, candidates.params, *head, target.model.config, target.params)
    return LoadedDrafter(f"{EAGLE3}, {_HEAD}", drafter, params, "random")


def _ratio(speed: float | None, other: float | None) -> float | None:
    return None if speed is None or other is None else speed / other
