"""What the parts of a speculative step take with a target and a drafter: verification, the drafter's body, and each draft head."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from experiments.draft_heads import GivenToken
from experiments.drafters import feature_shape, with_head
from experiments.experiment import ExperimentError
from experiments.mid_decode import Middle, decoding_loop, drafting_loop
from experiments.models import Model
from experiments.timing import Loop, LoopTiming, time_loops
from specjax import NoDraft
from specjax.cost_model import StepCosts
from specjax.drafting.heads import DraftHead


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Times on the device at hand, for `specjax.cost_model`.

    Attributes:
        costs: What does not depend on the head.
        head_us: By name, what one draft token's head takes: its scores, and picking a token from them.
        timings: Everything that was timed, by name.
    """

    costs: StepCosts
    head_us: dict[str, float]
    timings: dict[str, LoopTiming]


def measure_costs(
    target: Model,
    network: Any,
    params: Mapping[str, Any],
    heads: Mapping[str, tuple[DraftHead, Mapping[str, Any]]],
    middle: Middle,
    *,
    verification_rows: tuple[int, ...],
    short_steps: int,
    repeats: int,
    compile_threads: int = 1,
    tuned: bool = False,
) -> MeasuredCosts:
    """Times the library's own steps, all in turn.

    - A plain step, and steps of `NoDraft` for every number of rows: with their sampling and commit, `plain_us` and `verification_us`.
    - Drafting alone with each head, and with the token given: the difference over G is the head.
    - A whole speculative step with the first head: what it takes beyond a verification of its G + 1 rows and its G heads is, over G, the
      drafter's body: so a step of the first head at that G is reproduced exactly, and nothing is counted twice.

    Args:
        target: The target, of any kind.
        network: The drafter, an `Eagle3` or a `DraftModelNetwork`.
        params: Its params.
        heads: Heads and their arrays, by name; of an EAGLE-3 drafter none is shared.
        middle: Batch size, context, steps of the long loops, and G; its margin is settled here.
        verification_rows: At least 2 each; 2 and G + 1 are added.
        short_steps: Steps of the short loops.
        repeats: Pairs of loops.
        compile_threads: Programs to compile at a time.
        tuned: Programs with all of these products, those of each head among them, were compiled before in this process.

    Raises:
        ExperimentError: Times too short to tell apart, or a context that is too short.
    """
    num_drafted, vocab_size = middle.num_speculative_tokens, target.model.config.vocab_size
    if not heads or num_drafted < 1:
        raise ExperimentError(f"costs are measured with at least one head and one draft token, got {len(heads)} and {num_drafted}")

    def drafter(head: DraftHead, head_params: Mapping[str, Any]) -> tuple[Any, Any]:
        return with_head(network, params, head, head_params, target.model.config, target.params)

    def decoding(drafter: Any, drafter_params: Any, num_speculative_tokens: int) -> Loop:
        place = dataclasses.replace(middle, num_speculative_tokens=num_speculative_tokens)
        return decoding_loop(target.model, target.params, drafter, drafter_params, place)

    def drafting(head: DraftHead, head_params: Mapping[str, Any], *, do_sample: bool) -> Loop:
        place = dataclasses.replace(middle, do_sample=do_sample)
        features = feature_shape(network, target.model.config)
        return drafting_loop(*drafter(head, head_params), place, vocab_size=vocab_size, feature_shape=features)

    # The caches of all have as many slots: attention reads them all.
    middle = dataclasses.replace(middle, margin=middle.num_steps * num_drafted)
    rows = tuple(sorted({2, *verification_rows, num_drafted + 1}))
    first = next(iter(heads))
    loops = {f"verification of {count} rows": decoding(NoDraft(), None, count - 1) for count in reversed(rows)}
    loops = {"given": drafting(GivenToken(vocab_size=vocab_size), {}, do_sample=False)} | loops
    loops |= {f"head {name}": drafting(*head, do_sample=middle.do_sample) for name, head in heads.items()}
    loops |= {"plain": decoding(None, None, 0), "step": decoding(*drafter(*heads[first]), num_drafted)}
    times = time_loops(
        loops,
        short=short_steps,
        long=middle.num_steps,
        repeats=repeats,
        compile_threads=compile_threads,
        compile_first=0 if tuned else 2,  # the drafter's body and the pass over G + 1 rows: the others contain them
    )

    def us(name: str, less: str | None = None) -> float:
        base = (0.0,) * repeats if less is None else times[less].ms_per_step
        return 1e3 * statistics.median(ours - other for ours, other in zip(times[name].ms_per_step, base, strict=True))

    head_us = {name: us(f"head {name}", "given") / num_drafted for name in heads}
    drafter_us = us("step", f"verification of {num_drafted + 1} rows") / num_drafted - head_us[first]
    try:
        costs = StepCosts(
            plain_us=us("plain"),
            drafter_us=drafter_us,
            verification_rows=rows,
            verification_us=tuple(us(f"verification of {count} rows") for count in rows),
        )
    except ValueError as error:
        raise ExperimentError(f"the times are lost in the noise: {error}; use longer loops or more repeats") from None
    return MeasuredCosts(costs=costs, head_us=head_us, timings=times)
