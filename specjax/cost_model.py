"""What a draft LM head is worth: the acceptance that it keeps against the time that it takes. SlimSpec's model, arXiv:2605.10453.

```
rho_TPS = rho_tau (1 + kappa) / (1 + nu kappa)
```

Their rho_TPS is our throughput ratio and their rho_tau our acceptance ratio: tokens a second, and tokens a step, each over the full head's.
Their nu is `head_us` over the full head's, each what one draft token more costs in a chain of drafts; their kappa is a step's G full heads
over all else in that step. So kappa grows with G, and with a target that is quick to verify.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence

from specjax.checks import require_positive


def throughput_ratio(*, acceptance_ratio: float, kappa: float, nu: float) -> float:
    """Tokens a second with a head over those with the full head, at the same draft length.

    Args:
        acceptance_ratio: rho_tau, mean acceptance length with the head over that with the full one.
        kappa: All full heads of a step over the rest of that step.
        nu: A head's time over the full head's.

    Raises:
        ValueError: A number that is not positive and finite.

    Example:
        >>> throughput_ratio(acceptance_ratio=0.99, kappa=0.25, nu=0.21)  # Llama-3.1-8B, rank D/8: 1.176
    """
    require_positive(acceptance_ratio=acceptance_ratio)
    return acceptance_ratio / break_even_acceptance_ratio(kappa=kappa, nu=nu)


def break_even_acceptance_ratio(*, kappa: float, nu: float) -> float:
    """The acceptance ratio below which the full head is faster: `(1 + nu kappa) / (1 + kappa)`. See `throughput_ratio`."""
    require_positive(kappa=kappa, nu=nu)
    return (1 + nu * kappa) / (1 + kappa)


def conditional_acceptance(acceptance_rate_per_position: Sequence[float]) -> tuple[float, ...]:
    """The chance of each draft position to be accepted if all before it were, from the unconditional rates of `Statistics`.

    Args:
        acceptance_rate_per_position: `[G]` shares of all steps; they do not rise.

    Returns:
        `[G]`; 0 behind a position that was never accepted.

    Raises:
        ValueError: No rates, a rate outside [0, 1], or one above the rate before it.
    """
    rates = _checked_rates("acceptance_rate_per_position", acceptance_rate_per_position)
    for position, (before, rate) in enumerate(itertools.pairwise(rates), start=1):
        if rate > before:
            raise ValueError(
                "acceptance_rate_per_position must not rise: a position is accepted only if all before it are; "
                f"position {position - 1} has {before}, position {position} has {rate}"
            )
    return tuple(rate / before if before > 0 else 0.0 for before, rate in itertools.pairwise((1.0, *rates)))


def expected_tokens(conditional: Sequence[float], num_speculative_tokens: int) -> float:
    """Mean acceptance length of a chain: `1 + sum_g prod_{j <= g} alpha_j`, the recovered or bonus token included.

    Args:
        conditional: `[at least G]` conditional acceptance rates.
        num_speculative_tokens: G, at least 0.

    Raises:
        ValueError: A rate outside [0, 1], or a G for which no rate was measured.
    """
    rates = _checked_rates("conditional", conditional)
    _require_length(num_speculative_tokens, len(rates), "acceptance rates are known", least=0)
    return 1 + math.fsum(itertools.accumulate(rates[:num_speculative_tokens], operator.mul))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What a step takes whatever the draft head is, on one device, at one batch size and context.

    Attributes:
        plain_us: A step of plain decoding, one token a row.
        drafter_us: All that drafting one token takes but its head: the drafter's body, its share of the pass over committed tokens.
        verification_rows: Rows of the passes below, ascending; G + 1 for a draft of G tokens.
        verification_us: A step of so many rows less all drafting: the target's pass and its head, the verification rule, the commit.
            Between two measured numbers of rows it is taken to grow linearly.

    Raises:
        ValueError: A time that is not positive and finite, rows that do not ascend, or another number of times than of rows.
    """

    plain_us: float
    drafter_us: float
    verification_rows: tuple[int, ...]
    verification_us: tuple[float, ...]

    def __post_init__(self) -> None:
        require_positive(plain_us=self.plain_us, drafter_us=self.drafter_us)
        rows, times = self.verification_rows, self.verification_us
        if not rows or len(rows) != len(times):
            raise ValueError(f"StepCosts needs one verification_us for each of verification_rows, got {rows} and {times}")
        if rows[0] < 1 or any(a >= b for a, b in itertools.pairwise(rows)):
            raise ValueError(f"StepCosts.verification_rows must ascend from at least 1, got {rows}")
        for time in times:
            require_positive(verification_us=time)

    @property
    def longest_draft(self) -> int:
        """The largest G whose verification was measured."""
        return self.verification_rows[-1] - 1

    def without_heads_us(self, num_speculative_tokens: int) -> float:
        """A step that drafts G tokens, less its G heads.

        Raises:
            ValueError: G + 1 rows lie outside those that were measured.
        """
        rows = num_speculative_tokens + 1
        if not self.verification_rows[0] <= rows <= self.verification_rows[-1]:
            raise ValueError(f"verification was measured for {self.verification_rows} rows, a draft of {rows - 1} tokens needs {rows}")
        return self._verification_us(rows) + num_speculative_tokens * self.drafter_us

    def kappa(self, full_head_us: float, num_speculative_tokens: int) -> float:
        """kappa: G full heads over the rest of the step.

        Args:
            full_head_us: Time of one full head, marginal in the chain.
            num_speculative_tokens: G, at least 1.

        Raises:
            ValueError: As `without_heads_us`.
        """
        require_positive(full_head_us=full_head_us)
        return num_speculative_tokens * full_head_us / self.without_heads_us(num_speculative_tokens)

    def _verification_us(self, rows: int) -> float:
        points = list(zip(self.verification_rows, self.verification_us, strict=True))
        for (low, low_us), (high, high_us) in itertools.pairwise(points):
            if low <= rows <= high:
                return low_us + (high_us - low_us) * (rows - low) / (high - low)
        return points[0][1]  # only one was measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadCandidate:
    """A draft head that might be used.

    Attributes:
        name: What the result calls it.
        rank: R, or `None`.
        head_us: Time of one draft token's head, marginal in the chain.
        conditional_acceptance: `[G]` chance of each draft position to be accepted if all before it were, with this head.

    Raises:
        ValueError: A time that is not positive and finite, no rates, or a rate outside [0, 1].
    """

    name: str
    rank: int | None = None
    head_us: float
    conditional_acceptance: tuple[float, ...]

    def __post_init__(self) -> None:
        require_positive(head_us=self.head_us)
        _checked_rates("conditional_acceptance", self.conditional_acceptance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A head at a draft length, and what the model expects of it.

    Attributes:
        name: The head's.
        rank: Likewise.
        num_speculative_tokens: G.
        tokens_per_step: A row's mean acceptance length.
        step_us: Time of a speculative step.
        tokens_per_s: Over all rows of the batch.
        speed_up: Over plain decoding; below 1 that is faster.
    """

    name: str
    rank: int | None
    num_speculative_tokens: int
    tokens_per_step: float
    step_us: float
    tokens_per_s: float
    speed_up: float


def expect(costs: StepCosts, head: HeadCandidate, num_speculative_tokens: int, *, batch_size: int = 1) -> Choice:
    """What one head at one draft length comes to.

    Args:
        costs: What does not depend on the head, measured with `batch_size` rows.
        head: The head.
        num_speculative_tokens: G, at least 1; acceptance and verification must have been measured as far.
        batch_size: B; its rows step together, each committing tokens of its own.

    Raises:
        ValueError: A G beyond what was measured, or a batch size below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    _require_length(num_speculative_tokens, _longest(costs, head), "acceptance and verification were measured", least=1)
    step_us = costs.without_heads_us(num_speculative_tokens) + num_speculative_tokens * head.head_us
    tokens = expected_tokens(head.conditional_acceptance, num_speculative_tokens)
    return Choice(
        name=head.name,
        rank=head.rank,
        num_speculative_tokens=num_speculative_tokens,
        tokens_per_step=tokens,
        step_us=step_us,
        tokens_per_s=batch_size * tokens / step_us * 1e6,
        speed_up=tokens * costs.plain_us / step_us,
    )


def recommend(costs: StepCosts, heads: Sequence[HeadCandidate], *, batch_size: int = 1) -> tuple[Choice, ...]:
    """All heads at all draft lengths that were measured, the fastest first; of two that are equally fast the shorter draft.

    A first choice with a `speed_up` below 1 says that plain decoding is faster than any of them.

    Args:
        costs: What does not depend on the head.
        heads: The candidates.
        batch_size: B, that of `costs`.

    Raises:
        ValueError: No head, or a draft length of which verification was not measured at all.

    Example:
        >>> costs = StepCosts(plain_us=4300, drafter_us=120, verification_rows=(2, 8), verification_us=(4300, 4350))
        >>> slim = HeadCandidate(name="low_rank", rank=512, head_us=45, conditional_acceptance=(0.8, 0.75, 0.7, 0.68, 0.65))
        >>> recommend(costs, [slim])[0].num_speculative_tokens
    """
    choices = [
        expect(costs, head, length, batch_size=batch_size)
        for head in heads
        for length in range(max(costs.verification_rows[0] - 1, 1), _longest(costs, head) + 1)
    ]
    if not choices:
        raise ValueError(f"recommend needs heads with acceptance rates of drafts whose verification was measured, got {list(heads)}")
    return tuple(sorted(choices, key=lambda choice: (-choice.tokens_per_s, choice.num_speculative_tokens)))


def _longest(costs: StepCosts, head: HeadCandidate) -> int:
    return min(costs.longest_draft, len(head.conditional_acceptance))


def _checked_rates(what: str, rates: Sequence[float]) -> tuple[float, ...]:
    if len(rates) == 0 or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"{what} must be rates from 0 to 1, at least one, got {list(rates)}")
    return tuple(rates)


def _require_length(num_speculative_tokens: int, most: int, known: str, *, least: int) -> None:
    if not least <= num_speculative_tokens <= most:
        raise ValueError(f"num_speculative_tokens must be from {least} to {most}, for which {known}, got {num_speculative_tokens}")
