"""How sure a difference of two mean scores on the same prompts is: a paired bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def paired_interval(
    first: Sequence[float], second: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """The interval of `mean(second) - mean(first)` over prompts drawn anew with replacement, both scores of a prompt together.

    Args:
        first: A score a prompt.
        second: Of the same prompts in the same order.
        level: Share of the resampled differences inside, as many left out on either side.
        resamples: How many are drawn.
        seed: Of the draws.

    Returns:
        Its two ends.

    Raises:
        ValueError: No prompts, another number of scores, or a level outside (0, 1).

    Reference: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, the percentile interval.
    """
    if not len(first) == len(second) > 0:
        raise ValueError(f"a paired interval needs as many scores of both kinds, at least one, got {len(first)} and {len(second)}")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    differences = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(differences), (resamples, len(differences)))
    low, high = np.quantile(differences[drawn].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
