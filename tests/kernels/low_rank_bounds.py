"""What the best of a low-rank head's scores may be: the inner product is rounded, and sums in another order may round to a neighbour.

A float32 sum misses the exact one by an error e, and so the rounded inner product lies from round(exact - e) to round(exact + e), since
rounding never changes an order. For most of the R numbers both ends are one; where an edge lies between, a whole unit of the dtype's last
place goes into the scores, times a weight of `up`. That unit, not the float32 sums, is what two right answers may differ by.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

# Of a float32 sum, times the norms of its two factors: sixteen times what one rounding of the largest possible sum may miss.
SUM_ERROR = 2.0**-20
_TOKENS_AT_ONCE = 16384


def check_best(arrays: tuple[jax.Array, ...], *found: tuple[Any, Any]) -> None:
    """That each row's token may be the best, and that its score is one that it may have.

    Args:
        arrays: Hidden `[M,D]`, down `[R,D]`, up `[V,R]`.
        *found: Pairs of tokens `[M]` and scores `[M]`.
    """
    hidden, down = (np.asarray(array, np.float64) for array in arrays[:2])
    dtype, up = arrays[0].dtype, np.asarray(arrays[2])
    exact = hidden @ down.T
    error = SUM_ERROR * np.linalg.norm(hidden, axis=1)[:, None] * np.linalg.norm(down, axis=1)
    least, greatest = ((exact + sign * error).astype(dtype).astype(np.float64) for sign in (-1, 1))
    middle, half = (least + greatest) / 2, (greatest - least) / 2

    def bounds(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights = weights.astype(np.float64)
        slack = half @ np.abs(weights).T + SUM_ERROR * np.linalg.norm(middle, axis=1)[:, None] * np.linalg.norm(weights, axis=1)
        return middle @ weights.T - slack, middle @ weights.T + slack

    starts = range(0, len(up), _TOKENS_AT_ONCE)
    reached = np.max([bounds(up[start : start + _TOKENS_AT_ONCE])[0].max(axis=1) for start in starts], axis=0)
    for tokens, scores in found:
        lower, upper = (np.diagonal(bound) for bound in bounds(up[np.asarray(tokens)]))
        assert (upper >= reached).all(), f"tokens {tokens} score at most {upper}, others at least {reached}"
        assert ((lower <= scores) & (scores <= upper)).all(), f"scores {scores} are not from {lower} to {upper}"
