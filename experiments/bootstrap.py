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


# Numerators and denominators, one a prompt: a set's rate is the sum of the ones over the sum of the others.
Rate = tuple[Sequence[float], Sequence[float]]


def rate_ratio_interval(
    first: Sequence[Rate], second: Sequence[Rate], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """The interval of the second's mean rate over the first's, prompts drawn anew within each set, both rates of a prompt together.

    Such as tokens over steps, or tokens over seconds, of two drafters on the same prompts; sets count alike in the mean.

    Args:
        first: A rate a set.
        second: Of the same sets and prompts in the same order.
        level: Share of the resampled ratios inside, as many left out on either side.
        resamples: How many are drawn.
        seed: Of the draws.

    Returns:
        Its two ends.

    Raises:
        ValueError: No sets or no prompts, other prompts in the second, a level outside (0, 1), or a rate of nothing.

    Reference: as `paired_interval`.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    sizes = [[len(part) for rate in rates for part in rate] for rates in (first, second)]
    if not sizes[0] == sizes[1] or min(sizes[0], default=0) < 1:
        raise ValueError(f"a ratio of rates needs the same sets of prompts in both, at least one, got sizes {sizes[0]} and {sizes[1]}")
    generator = np.random.default_rng(seed)
    draws = [generator.integers(0, len(above), (resamples, len(above))) for above, _ in first]

    def mean_rates(rates: Sequence[Rate]) -> np.ndarray:
        sums = ([np.asarray(part, np.float64)[drawn].sum(axis=1) for part in rate] for rate, drawn in zip(rates, draws, strict=True))
        return np.sum([np.where(below > 0, above, np.nan) / np.where(below > 0, below, 1) for above, below in sums], axis=0)

    before, after = mean_rates(first), mean_rates(second)
    known = (before > 0) & (after > 0)  # not where only prompts were drawn that ended with their first token
    if not known.any():
        raise ValueError("a ratio of rates needs numerators and denominators above 0")
    low, high = np.quantile(after[known] / before[known], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
