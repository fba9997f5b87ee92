"""Lossless sparse verification: how often one dense pass checks what sparse passes committed. As TriForce's hierarchy, arXiv:2404.11912."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.checks import is_int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lossless:
    """Two levels: sparse passes verify drafts, and after a few of them one dense pass verifies all that they committed.

    Greedy output is then that of dense verification, token for token in float32; sampled output follows the dense target's distribution.
    What it costs is one dense pass for each `max_steps` steps at most, and the tokens behind the first one that it rejects. It pays where a
    sparse pass is much cheaper than a dense one, in long contexts and large batches; `specjax.two_level.two_level_cost` is the arithmetic.

    Attributes:
        max_steps: Most sparse steps before a dense pass.
        max_tokens: Most tokens of a row that may wait for a dense pass, at least G + 1. The pass is over `max_tokens + 1` rows whatever the
            steps committed, the cache has room for them, and logits of so many rows are formed at once; a sparse step is taken while it
            cannot exceed them. `None`: `max_steps * (G + 1)`, which steps seldom fill.
        adapt: Before each cycle choose the number of sparse steps, up to `max_steps`, that has committed fastest by the model, from what
            dense passes accepted so far; verify densely where none beats that. `False`: always `max_steps`.
        step_cost: Time of a sparse step over that of a dense one, as measured. `None`: from the bytes of weights and caches, which leaves
            out drafting, and the sparsity of anything but attention (where attention is dense `adapt` needs a number). Read by `adapt` and
            by the statistics.
        check_cost: Time of the checking pass over that of a dense step, as measured; like `step_cost` otherwise. It reads what a dense step
            reads, but computes more rows.

    Raises:
        ValueError: `max_steps` or `max_tokens` that is not a positive int, `adapt` that is not a bool, or a cost that is not positive.
    """

    max_steps: int = 8
    max_tokens: int | None = None
    adapt: bool = True
    step_cost: float | None = None
    check_cost: float = 1.0

    def __post_init__(self) -> None:
        if not is_int(self.max_steps, 1):
            raise ValueError(f"Lossless.max_steps must be a positive int, got {self.max_steps!r}")
        if self.max_tokens is not None and not is_int(self.max_tokens, 1):
            raise ValueError(f"Lossless.max_tokens must be None or a positive int, got {self.max_tokens!r}")
        if not isinstance(self.adapt, bool):
            raise ValueError(f"Lossless.adapt must be a bool, got {self.adapt!r}")
        if self.step_cost is not None and not _is_positive(self.step_cost):
            raise ValueError(f"Lossless.step_cost must be None or a positive number, got {self.step_cost!r}")
        if not _is_positive(self.check_cost):
            raise ValueError(f"Lossless.check_cost must be a positive number, got {self.check_cost!r}")

    def max_provisional(self, draft_length: int) -> int:
        """Most tokens that wait for a dense pass, with drafts of G = `draft_length` tokens.

        Raises:
            ValueError: `max_tokens` has no room for one step.
        """
        step = draft_length + 1
        if self.max_tokens is None:
            return self.max_steps * step
        if self.max_tokens < step:
            raise ValueError(
                f"Lossless.max_tokens = {self.max_tokens} has no room for a step of {draft_length} draft tokens: at least {step}"
            )
        return min(self.max_steps * step, self.max_tokens)

    def most_steps(self, draft_length: int, tokens_per_step: Any) -> Any:
        """Sparse steps of a mean acceptance length for whose tokens there is room, if no more than `max_steps`; of numbers or arrays."""
        room = self.max_provisional(draft_length) - (draft_length + 1)  # before the last of them
        return 1 + room // tokens_per_step


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
