"""What two levels take here, by running them: a dense step, a sparse one, and the dense pass that checks sparse ones.

`Lossless` without these numbers takes the time of a sparse step from the bytes that it reads, and a checking pass for as long as a dense
step. Measured ones hold drafting, sampling and commit, and whatever this device makes of the shapes; the choice between two levels and
dense verification is then made from them.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.capacity import whole_blocks
from specjax.checks import is_int, require, require_positive
from specjax.drafting.drafter import Drafter
from specjax.generate import decode_step, prepare_call
from specjax.generate_config import GenerateConfig
from specjax.models.transformer import Transformer
from specjax.prefill import prefill
from specjax.sparsity.sparsity_config import SparsityConfig
from specjax.state import DecodeState
from specjax.two_level.level_counts import LevelCounts
from specjax.two_level.lossless import Lossless
from specjax.two_level.two_level_cost import break_even_dense_acceptance, two_level_speedup


class CostsUnknown(ValueError):
    """The loops have no room behind these prompts, or their times are lost in noise; whatever is wrong with the call itself is not this."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoLevelCosts:
    """Times of whole steps of one batch, in milliseconds.

    Attributes:
        dense_ms: A step of dense verification alone, whose cache keeps no summaries of blocks up.
        sparse_ms: A step of sparse verification.
        check_ms: The dense pass behind as many sparse steps as there may be, with what settles them.
        max_steps: Steps that it checks at most.
        draft_length: G.
        max_tokens: Tokens that it checks at most, as in `Lossless`.

    Raises:
        ValueError: A time that is not positive: it was lost in noise.
    """

    dense_ms: float
    sparse_ms: float
    check_ms: float
    max_steps: int
    draft_length: int
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        require_positive(dense_ms=self.dense_ms, sparse_ms=self.sparse_ms, check_ms=self.check_ms)

    @classmethod
    def of_times(
        cls, *, dense_ms: float, sparse_ms: float, cycle_ms: float, cycle_steps: float, lossless: Lossless, draft_length: int
    ) -> TwoLevelCosts:
        """From the time of a cycle: sparse steps and their check.

        Args:
            dense_ms: See `TwoLevelCosts`.
            sparse_ms: Likewise.
            cycle_ms: Of a cycle.
            cycle_steps: Sparse steps that it had, in the mean.
            lossless: How many it might have had.
            draft_length: G.

        Raises:
            CostsUnknown: A time, or what is left of a cycle for its check, is not positive.
        """
        try:
            return cls(
                dense_ms=dense_ms,
                sparse_ms=sparse_ms,
                check_ms=cycle_ms - cycle_steps * sparse_ms,
                max_steps=lossless.max_steps,
                draft_length=draft_length,
                max_tokens=lossless.max_tokens,
            )
        except ValueError as error:
            raise CostsUnknown(f"times are lost in noise: {error}") from None

    @property
    def step_cost(self) -> float:
        """A sparse step over a dense one."""
        return self.sparse_ms / self.dense_ms

    @property
    def check_cost(self) -> float:
        """A checking pass over a dense step."""
        return self.check_ms / self.dense_ms

    def lossless(self, *, adapt: bool = True) -> Lossless:
        """Settings that decide by these costs."""
        return Lossless(
            max_steps=self.max_steps, max_tokens=self.max_tokens, adapt=adapt, step_cost=self.step_cost, check_cost=self.check_cost
        )

    def _num_steps(self, tokens_per_step: float) -> range:
        """Sparse steps that a cycle may have."""
        most = self.lossless().most_steps(self.draft_length, tokens_per_step)
        return range(1, int(min(self.max_steps, most)) + 1)

    def speedup(self, *, tokens_per_step: float, acceptance: float) -> float:
        """What the best number of steps is worth over dense verification, by `two_level_speedup`; below 1 dense verification is faster."""
        return max(
            two_level_speedup(num_steps=steps, tokens_per_step=tokens_per_step, acceptance=acceptance, **self._costs)
            for steps in self._num_steps(tokens_per_step)
        )

    def break_even(self, *, tokens_per_step: float) -> float | None:
        """The least acceptance of the dense level at which any number of steps pays; `None` where none does even if all is accepted."""
        found = (
            break_even_dense_acceptance(num_steps=steps, tokens_per_step=tokens_per_step, **self._costs)
            for steps in self._num_steps(tokens_per_step)
        )
        return min((acceptance for acceptance in found if acceptance is not None), default=None)

    def describe(self, *, tokens_per_step: float) -> str:
        """One line: the times, and from which acceptance on two levels pay."""
        times = f"dense step {self.dense_ms:.3g} ms, sparse {self.sparse_ms:.3g} ms ({self.step_cost:.2f}), "
        times += f"check of up to {self.max_steps} steps {self.check_ms:.3g} ms ({self.check_cost:.2f}); "
        least = self.break_even(tokens_per_step=tokens_per_step)
        if least is None:
            return times + f"with {tokens_per_step:.2f} tokens a step two levels never pay"
        return times + f"with {tokens_per_step:.2f} tokens a step two levels pay where the dense level accepts more than {least:.3f}"

    @property
    def _costs(self) -> dict[str, float]:
        return {"step_cost": self.step_cost, "check_cost": self.check_cost}


def measure_costs(
    target: Transformer,
    target_params: Any,
    drafter: Drafter | None,
    drafter_params: Any,
    prompt_tokens: Any,
    *,
    config: GenerateConfig,
    num_steps: int = 16,
    repeats: int = 3,
    **arguments: Any,
) -> TwoLevelCosts:
    """Runs the loops that `speculative_generate` would run behind these prompts, and times them. Compiles four programs.

    A time is marginal: that of a loop of `num_steps` steps less that of one step, over the difference; likewise of one cycle and of
    as many as make so many steps, at least three, each of `max_steps` sparse steps and their check. Medians. Beside the caches of a call
    the memory of as many again is needed.

    Example:
        >>> costs = measure_costs(target, params, drafter, drafter_params, prompts, config=config)  # of a config with lossless sparsity
        >>> print(costs.describe(tokens_per_step=3.0))
        >>> sparsity = dataclasses.replace(config.sparsity, lossless=costs.lossless())

    Args:
        target: The target. Static.
        target_params: Its params.
        drafter: The drafter, or `None`. Static.
        drafter_params: Its params.
        prompt_tokens: As in `speculative_generate`: they settle the batch and the context.
        config: With lossless sparsity, whose `max_steps` counts; its `max_new_tokens` does not. The caches have its `cache_capacity`, as
            steps over more slots may take longer, and at least what the loops need.
        num_steps: Steps of the long loops.
        repeats: Loops of each kind and length to time, in turn.
        **arguments: `prompt_lengths`, `sampling` and `rng`, as in `speculative_generate`.

    Returns:
        The costs.

    Raises:
        CostsUnknown: Windows that have no room for the loops behind these prompts (fewer `num_steps` need less), or times that are lost in
            noise (more `num_steps` or `repeats` help).
        ValueError: Sparsity that is not lossless, too few steps, or what `speculative_generate` refuses.
    """
    lossless = config.sparsity.lossless
    if lossless is None:
        raise ValueError("measure_costs needs config.sparsity.lossless: without it nothing is checked")
    require(is_int(num_steps, 2) and is_int(repeats, 1), f"measure_costs needs num_steps >= 2 and repeats >= 1, got {num_steps}, {repeats}")
    models = (target, drafter, drafter_params, prompt_tokens)
    prepare_call(*models, config=dataclasses.replace(config, max_new_tokens=1, cache_capacity=None), **arguments)
    num_drafted = 0 if drafter is None else config.num_speculative_tokens
    num_cycles = _num_cycles(lossless, num_steps)
    given_capacity = config.cache_capacity or 0
    config = dataclasses.replace(
        config,
        max_new_tokens=room_for_loops(lossless, num_drafted, num_steps),
        cache_capacity=None,
        return_log_probs=False,
        sparsity=dataclasses.replace(config.sparsity, lossless=dataclasses.replace(lossless, adapt=False)),
    )
    try:
        request, checked = prepare_call(*models, config=config, ignore_eos=True, **arguments)
    except ValueError as error:  # with one new token the call was fine
        raise CostsUnknown(f"loops of steps have no room: {error}") from None
    capacity = max(whole_blocks(given_capacity, config.sparsity), checked.cache_capacity or 0)
    checked = dataclasses.replace(checked, cache_capacity=capacity)
    # The request is an argument too: of constants the compiler makes use, and drops from a step what a call's steps have.
    params: Any = (target_params, drafter_params, jax.device_put(request))
    state = jax.jit(lambda params: prefill(target, drafter, checked, params[0], params[1], params[2], None))(params)
    static = {
        "dense": dataclasses.replace(checked, sparsity=SparsityConfig()),
        "sparse": dataclasses.replace(checked, sparsity=dataclasses.replace(checked.sparsity, lossless=None)),
        "cycle": checked,
    }

    def loop(how: GenerateConfig) -> Callable[[Any, Any, Any], Any]:
        return _loop(lambda params, state: decode_step(target, drafter, how, params[0], params[1], params[2], state), how.sparsity)

    loops = {name: loop(how) for name, how in static.items()}
    times, levels = _times(loops, params, state, {"dense": num_steps, "sparse": num_steps, "cycle": num_cycles}, repeats)
    cycle_steps = float(levels.sparse_steps.sum() / levels.dense_passes.sum())
    measured: dict[str, float] = {f"{name}_ms": value for name, value in times.items()}
    return TwoLevelCosts.of_times(**measured, cycle_steps=cycle_steps, lossless=lossless, draft_length=num_drafted)


def room_for_loops(lossless: Lossless, draft_length: int, num_steps: int = 16) -> int:
    """Most new tokens that the loops of `measure_costs` may commit in a row.

    Args:
        lossless: As there.
        draft_length: G, 0 for plain decoding.
        num_steps: As there.
    """
    return max(num_steps * (draft_length + 1), _num_cycles(lossless, num_steps) * (lossless.max_provisional(draft_length) + 1))


def _num_cycles(lossless: Lossless, num_steps: int) -> int:
    """Of the long loop of cycles."""
    return 1 + max(2, num_steps // lossless.max_steps)


def _loop(step: Callable[[Any, Any], Any], sparsity: SparsityConfig) -> Callable[[Any, Any, Any], Any]:
    """So many steps, one program for any number of them."""

    def repeated(params: Any, state: Any, num_steps: Any) -> Any:
        if sparsity.is_dense:  # dense verification, where two levels are not used, has no summaries to keep up
            state = dataclasses.replace(state, target_cache=dataclasses.replace(state.target_cache, summaries=None))
        return lax.fori_loop(jnp.int32(0), num_steps, lambda _, state: step(params, state), state)

    return jax.jit(repeated)


def _times(
    loops: Mapping[str, Any], params: Any, state: Any, longest: Mapping[str, int], repeats: int
) -> tuple[dict[str, float], LevelCounts]:
    """Milliseconds that a step of each loop adds, all in turn, so that what drifts meets them alike; and what the cycles counted."""
    # Lowered here: what JAX's contexts say (of precision, of 64 bits) is this thread's.
    lowered = {name: loop.lower(params, state, np.int32(0)) for name, loop in loops.items()}
    first, *others = lowered
    programs = {first: lowered[first].compile()}  # alone: XLA then chooses the products that all share once
    pool = ThreadPoolExecutor()
    try:
        programs |= zip(others, pool.map(lambda name: lowered[name].compile(), others), strict=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupt does not wait for them

    def end(name: str, num_steps: int) -> DecodeState:
        return jax.block_until_ready(programs[name](params, state, np.int32(num_steps)))

    def wall_ms(name: str, num_steps: int) -> float:
        begin = time.perf_counter()
        end(name, num_steps)
        return 1e3 * (time.perf_counter() - begin)

    levels = {name: jax.device_get(end(name, longest[name]).statistics.levels) for name in loops}["cycle"]  # and all are warm
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(repeats):
        for name, values in found.items():
            first, last = wall_ms(name, 1), wall_ms(name, longest[name])
            values.append((last - first) / (longest[name] - 1))
    return {name: statistics.median(values) for name, values in found.items()}, levels
