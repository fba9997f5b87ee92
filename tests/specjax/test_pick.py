"""One draft token from scores: the arg-max, and scores from which none can be picked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import SamplingParams
from specjax.drafting.heads import HeadScores
from specjax.drafting.pick import pick

INF, NAN = np.inf, np.nan
LOGITS = np.array(
    [[1.0, 3.0, 3.0, -INF], [-2.0, NAN, 5.0, 1.0], [NAN, 0.0, 0.0, INF], [-INF] * 4, [0.0, INF, 1.0, 2.0], [-INF, -INF, -9.0, -INF]],
    np.float32,
)
USABLE = [True, False, False, False, False, True]


@pytest.mark.parametrize("sampled", [False, True])
def test_scores_that_are_not_finite_at_their_largest_cannot_be_used(sampled):
    rows = len(LOGITS)
    sampling = SamplingParams(temperature=0.0).broadcast(rows) if sampled else None
    ids = jnp.array([5, 3, 2, 7], jnp.int32)
    keys = jax.random.split(jax.random.key(0), rows)
    picked = pick(HeadScores(jnp.asarray(LOGITS), ids), sampling, keys, vocab_size=9)
    np.testing.assert_array_equal(picked.usable, USABLE)
    # Of two that are equal the first; where none can be picked, the token of the first column stands in.
    np.testing.assert_array_equal(np.asarray(picked.tokens)[[0, 5]], [3, 2])
    assert set(np.asarray(picked.tokens).tolist()) <= {5, 3, 2, 7}
    if sampled:
        expected = np.zeros((2, 9))
        expected[[0, 1], [3, 2]] = 1.0
        np.testing.assert_array_equal(np.asarray(picked.probs)[[0, 5]], expected)
        assert np.isfinite(picked.probs).all()
    else:
        assert picked.probs is None
        np.testing.assert_array_equal(np.asarray(picked.tokens)[[1, 2, 3, 4]], 5)
