"""The five ways to decode that are compared: with or without a drafter, over all of the cache or a part, checked densely or not."""

from __future__ import annotations

import dataclasses

from experiments.experiment import ExperimentError
from specjax import Lossless, SparsityConfig


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        name: What rows call it.
        drafts: A drafter proposes tokens.
        sparse: Passes leave something out.
        checked: Dense passes check what sparse ones commit.
    """

    name: str
    drafts: bool
    sparse: bool
    checked: bool = False

    @property
    def lossless(self) -> bool:
        """Whether the output is the dense target's."""
        return not self.sparse or self.checked


PLAIN = Way("autoregressive, dense", drafts=False, sparse=False)
PLAIN_SPARSE = Way("autoregressive, sparse", drafts=False, sparse=True)
DENSE_VERIFICATION = Way("dense verification", drafts=True, sparse=False)
SPARSE_VERIFICATION = Way("sparse verification", drafts=True, sparse=True)
TWO_LEVELS = Way("two levels", drafts=True, sparse=True, checked=True)
WAYS = (PLAIN, PLAIN_SPARSE, DENSE_VERIFICATION, SPARSE_VERIFICATION, TWO_LEVELS)


def two_levels(sparsity: SparsityConfig, lossless: Lossless) -> SparsityConfig:
    """The sparsity of a way that is checked: its checks are refreshes too, and take their place."""
    return dataclasses.replace(sparsity, refresh_every=0, lossless=lossless)


def steady_rates(mean_acceptance_length: float, num_speculative_tokens: int) -> tuple[float, ...]:
    """Rates by which every step commits as many tokens as the mean says, but for its fraction.

    Raises:
        ExperimentError: A mean outside [1, G + 1].
    """
    if not 1 <= mean_acceptance_length <= num_speculative_tokens + 1:
        raise ExperimentError(
            f"mean_acceptance_length must be from 1 to {num_speculative_tokens + 1} for {num_speculative_tokens} draft tokens, "
            f"got {mean_acceptance_length}"
        )
    return tuple(min(max(mean_acceptance_length - 1 - position, 0.0), 1.0) for position in range(num_speculative_tokens))
