"""Lossless sparse verification: how often one dense pass checks what sparse passes committed. As TriForce's hierarchy, arXiv:2404.11912."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lossless:
    """Two levels: sparse passes verify drafts, and after a few of them one dense pass verifies all that they committed.

    Greedy output is then that of dense verification, token for token in float32; sampled output follows the dense target's distribution.
    What it costs is one dense pass for each `max_steps` steps at most, and the tokens behind the first one that it rejects. It pays where a
    sparse pass is much cheaper than a dense one, in long contexts and large batches; `specjax.two_level.two_level_cost` is the arithmetic.

    Attributes:
        max_steps: Most sparse steps before a dense pass. It is over `max_steps * (G + 1) + 1` rows whatever the steps committed, the cache
            has room for them, and logits of so many rows are formed at once.
        adapt: Before each cycle choose the number of sparse steps, up to `max_steps`, that has committed fastest by the model, from what
            dense passes accepted so far; verify densely where none beats that. `False`: always `max_steps`.
        step_cost: Time of a sparse step over that of a dense one, as measured. `None`: from the bytes of weights and caches, which leaves
            out drafting, and the sparsity of anything but attention (where attention is dense `adapt` needs a number). Read by `adapt` and
            by the statistics.
        check_cost: Time of the checking pass over that of a dense step, as measured; like `step_cost` otherwise. It reads what a dense step
            reads, but computes more rows.

    Raises:
        ValueError: `max_steps` that is not a positive int, `adapt` that is not a bool, or a cost that is not positive.
    """

    max_steps: int = 8
    adapt: bool = True
    step_cost: float | None = None
    check_cost: float = 1.0

    def __post_init__(self) -> None:
        steps = self.max_steps
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"Lossless.max_steps must be a positive int, got {steps!r}")
        if not isinstance(self.adapt, bool):
            raise ValueError(f"Lossless.adapt must be a bool, got {self.adapt!r}")
        if self.step_cost is not None and not _is_positive(self.step_cost):
            raise ValueError(f"Lossless.step_cost must be None or a positive number, got {self.step_cost!r}")
        if not _is_positive(self.check_cost):
            raise ValueError(f"Lossless.check_cost must be a positive number, got {self.check_cost!r}")

    def max_provisional(self, draft_length: int) -> int:
        """Most tokens that wait for a dense pass, with drafts of G = `draft_length` tokens."""
        return self.max_steps * (draft_length + 1)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
