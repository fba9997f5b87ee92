"""What checking sparse steps with a dense pass is worth: the tokens that it accepts against the time that both take.

A cycle is N sparse steps of tau tokens each, and one dense pass over these n = N tau tokens. Where each of them is accepted with the chance
a, the cycle settles `1 + a + ... + a^n = (1 - a^(n + 1)) / (1 - a)` tokens, the recovered or bonus token included. In the time of one dense
step, which settles tau, a sparse step takes c and the dense pass d:

```
speed-up over dense verification = (1 - a^(n + 1)) / (1 - a) / (tau (N c + d))
```
"""

from __future__ import annotations

from typing import Any

from specjax.checks import require_positive


def two_level_speedup(*, num_steps: float, tokens_per_step: float, acceptance: float, step_cost: float, check_cost: float = 1.0) -> float:
    """Tokens a second with two levels over those with dense verification alone; below 1 the latter is faster.

    Args:
        num_steps: N, sparse steps before each dense pass.
        tokens_per_step: tau, a step's mean acceptance length; taken to be the same in sparse and dense verification.
        acceptance: a, the chance of a token that sparse steps committed to be accepted by the dense pass, if all before it were.
        step_cost: c, time of a sparse step over that of a dense step, drafting included in both.
        check_cost: d, time of the dense pass over that of a dense step.

    Raises:
        ValueError: A number that is not positive and finite, or an acceptance outside [0, 1].

    Example:
        >>> two_level_speedup(num_steps=4, tokens_per_step=3.0, acceptance=0.99, step_cost=0.53)  # 1.31, if a check is a step
    """
    require_positive(num_steps=num_steps, tokens_per_step=tokens_per_step, step_cost=step_cost, check_cost=check_cost)
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance must be from 0 to 1, got {acceptance!r}")
    settled = 1 + num_steps * tokens_per_step if acceptance == 1 else expected_settled(acceptance, num_steps * tokens_per_step)
    return settled / (tokens_per_step * (num_steps * step_cost + check_cost))


def break_even_dense_acceptance(*, num_steps: float, tokens_per_step: float, step_cost: float, check_cost: float = 1.0) -> float | None:
    """The acceptance at which `two_level_speedup` is 1; `None` where it is below 1 even if every token is accepted.

    Args:
        num_steps: As `two_level_speedup`, and so the others.
        tokens_per_step: tau.
        step_cost: c.
        check_cost: d.

    Raises:
        ValueError: As `two_level_speedup`.
    """
    sizes = dict(num_steps=num_steps, tokens_per_step=tokens_per_step, step_cost=step_cost, check_cost=check_cost)
    if two_level_speedup(acceptance=1.0, **sizes) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection to well below float precision; the speed-up rises with the acceptance
        middle = (low + high) / 2
        low, high = (low, middle) if two_level_speedup(acceptance=middle, **sizes) >= 1 else (middle, high)
    return high


def expected_settled(acceptance: Any, num_tokens: Any) -> Any:
    """`(1 - a^(n + 1)) / (1 - a)` for an acceptance below 1; of numbers or arrays, unchecked."""
    return (1 - acceptance ** (num_tokens + 1)) / (1 - acceptance)
