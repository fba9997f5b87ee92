"""Draft heads made from a finished LM head: exact at full size, the best of their rank below it, and what cannot be is refused by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafting.heads import FullHead, LowRankHead, ScreenedHead, TrimmedHead
from specjax.drafting.heads import from_full_head as fit
from specjax.drafting.heads.draft_head import check_head
from specjax.drafting.heads.from_full_head import frequent_tokens, low_rank_from, screened_from, trimmed_from

VOCAB_SIZE, WIDTH = 60, 16
# Log probabilities of order 1 after float32 products of matrices that were rounded to float32.
TOLERANCE = 1e-4


def lm_head(seed: int = 0) -> np.ndarray:
    """Singular values that fall slowly, and a mean row that is far from zero."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(VOCAB_SIZE, WIDTH)) @ np.diag(0.9 ** np.arange(WIDTH)) + rng.normal(size=WIDTH)).astype(np.float32)


def hidden_states(num: int = 400) -> np.ndarray:
    """Directions whose variances differ by a factor of 10,000, and are not those of the axes."""
    rng = np.random.default_rng(1)
    axes, _ = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))
    return (rng.normal(size=(num, WIDTH)) * np.geomspace(1e-2, 1, WIDTH) @ axes).astype(np.float32)


def covariance_of(hidden: np.ndarray) -> np.ndarray:
    return hidden.T @ hidden / len(hidden)


def log_probs(head: Any, params: dict, hidden: np.ndarray) -> jax.Array:
    check_head(head, params, hidden_size=WIDTH, vocab_size=VOCAB_SIZE)
    return jax.nn.log_softmax(head.scores(params, jnp.asarray(hidden)).logits)


def error(up: np.ndarray, down: np.ndarray, hidden: np.ndarray) -> float:
    """Mean square of the scores' error, but for a number that all scores of a position share."""
    wrong = hidden.astype(np.float64) @ (lm_head().astype(np.float64) - np.asarray(up, np.float64) @ np.asarray(down, np.float64)).T
    return float(((wrong - wrong.mean(axis=1, keepdims=True)) ** 2).mean())


@pytest.mark.parametrize("weighted", [False, True])
def test_at_full_rank_the_distributions_are_those_of_the_full_head(weighted: bool) -> None:
    hidden = hidden_states()
    covariance = covariance_of(hidden) if weighted else None
    fitted = low_rank_from(lm_head(), WIDTH, covariance)
    assert fitted.head == LowRankHead(rank=WIDTH)
    # In directions that no hidden state went, too.
    for states in (hidden, np.random.default_rng(2).normal(size=(20, WIDTH))):
        expected = log_probs(FullHead(), {"lm_head": jnp.asarray(lm_head())}, states)
        assert float(expected.std()) > 0.5
        np.testing.assert_allclose(log_probs(fitted.head, fitted.params, states), expected, atol=TOLERANCE)


@pytest.mark.parametrize("rank", [1, 4, 12])
def test_the_error_is_that_of_the_truncated_decomposition_and_below_that_of_random_factors(rank: int) -> None:
    params = low_rank_from(lm_head(), rank).params
    np.testing.assert_allclose(np.linalg.norm(params["down"], axis=1), 1, rtol=1e-5)
    everywhere = np.eye(WIDTH) * WIDTH**0.5
    found = error(params["up"], params["down"], everywhere)
    centred = lm_head().astype(np.float64) - lm_head().mean(axis=0, dtype=np.float64)
    assert found == pytest.approx((np.linalg.svd(centred, compute_uv=False)[rank:] ** 2).sum() / VOCAB_SIZE, rel=1e-4)
    rng = np.random.default_rng(3)
    for _ in range(20):
        down = rng.normal(size=(rank, WIDTH))
        # The best `up` for these rows of `down`.
        assert found < error(centred @ np.linalg.pinv(down), down, everywhere)


def test_weighted_factors_are_better_where_the_hidden_states_are_and_worse_elsewhere() -> None:
    hidden, everywhere = hidden_states(), np.eye(WIDTH) * WIDTH**0.5
    plain, weighted = (low_rank_from(lm_head(), 4, covariance).params for covariance in (None, covariance_of(hidden)))
    by_where = {
        where: [error(p["up"], p["down"], states) for p in (plain, weighted)] for where, states in (("here", hidden), ("all", everywhere))
    }
    assert by_where["here"][1] < 0.7 * by_where["here"][0]
    assert by_where["all"][0] < by_where["all"][1]
    # By definition of the best: a decomposition of W C^{1/2} by another route.
    root = np.linalg.cholesky(covariance_of(hidden).astype(np.float64))
    centred = lm_head().astype(np.float64) - lm_head().mean(axis=0, dtype=np.float64)
    least = (np.linalg.svd(centred @ root, compute_uv=False)[4:] ** 2).sum() / VOCAB_SIZE
    assert by_where["here"][1] == pytest.approx(least, rel=1e-3)


def test_a_covariance_of_few_hidden_states_still_gives_finite_factors() -> None:
    hidden = hidden_states(3)
    for states in (hidden, hidden * 1e3):  # its scale does not matter
        params = low_rank_from(lm_head(), 8, covariance_of(states)).params
        assert all(np.isfinite(leaf).all() for leaf in params.values())
        assert error(params["up"], params["down"], hidden) < 1e-6


def test_a_head_larger_than_a_chunk_gives_the_same_factors_in_its_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = low_rank_from(lm_head(), 4).params
    monkeypatch.setattr(fit, "_ROWS_AT_ONCE", 16)
    chunks = low_rank_from(jnp.asarray(lm_head()), 4).params
    np.testing.assert_allclose(chunks["up"] @ chunks["down"], whole["up"] @ whole["down"], atol=TOLERANCE)
    rounded = low_rank_from(jnp.asarray(lm_head(), jnp.bfloat16), 4).params
    assert {str(leaf.dtype) for leaf in rounded.values()} == {"bfloat16"}


def test_screening_by_the_best_factors_recalls_more_than_screening_by_random_ones() -> None:
    fitted, hidden = screened_from(lm_head(), 6, 8), np.random.default_rng(2).normal(size=(200, WIDTH))
    assert fitted.head == ScreenedHead(rank=6, num_candidates=8)
    shared = screened_from(lm_head(), 6, 8, shared=True)
    assert shared.head.shared
    assert shared.params.keys() == {"down", "up"}
    full = hidden @ lm_head().T
    random = LowRankHead(rank=6).init_params(jax.random.key(0), hidden_size=WIDTH, vocab_size=VOCAB_SIZE, dtype=jnp.float32)
    recalls = []
    for params in (fitted.params, random | {"lm_head": fitted.params["lm_head"]}):
        check_head(fitted.head, params, hidden_size=WIDTH, vocab_size=VOCAB_SIZE)
        scores = fitted.head.scores(params, jnp.asarray(hidden, jnp.float32))
        recalls.append((np.asarray(scores.token_ids) == full.argmax(axis=1)[:, None]).any(axis=1).mean())
    assert recalls[0] > 0.8 > 0.5 > recalls[1]


def test_a_trimmed_head_has_the_rows_of_its_tokens() -> None:
    fitted, hidden = trimmed_from(lm_head(), [7, 3, 59]), hidden_states(5)
    assert fitted.head == TrimmedHead(num_tokens=3)
    check_head(fitted.head, fitted.params, hidden_size=WIDTH, vocab_size=VOCAB_SIZE)
    scores = fitted.head.scores(fitted.params, jnp.asarray(hidden))
    np.testing.assert_allclose(scores.logits, (hidden @ lm_head().T)[:, [7, 3, 59]], atol=TOLERANCE)
    assert scores.token_ids.tolist() == [7, 3, 59]


def test_frequent_tokens_are_the_first_by_count_then_by_id_and_what_is_always_kept() -> None:
    counts = np.array([5, 0, 9, 5, 1, 5, 0])
    for num_tokens, expected in ((1, [2]), (2, [0, 2]), (3, [0, 2, 3]), (5, [0, 2, 3, 4, 5]), (7, list(range(7)))):
        found = frequent_tokens(counts, num_tokens)
        assert found.tolist() == expected
        assert found.dtype == np.int32
    assert frequent_tokens(counts, 3, always=(6,)).tolist() == [0, 2, 6]
    assert frequent_tokens(counts, 2, always=[1, 6]).tolist() == [1, 6]
    assert frequent_tokens(counts / 7, 3, always=[2]).tolist() == [0, 2, 3]


def with_nan() -> np.ndarray:
    head = lm_head()
    head[3, 4] = np.nan
    return head


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: low_rank_from(lm_head(), 17), "LowRankHead.rank must be at most hidden_size = 16, got 17"),
        (lambda: low_rank_from(lm_head(), 0), "LowRankHead.rank must be a positive int, got 0"),
        (
            lambda: low_rank_from(lm_head()[0], 4),
            r"lm_head must be a matrix \[V,D\] of floating-point numbers, got float32 of shape \(16,\)",
        ),
        (lambda: low_rank_from(np.ones((4, 4), np.int8), 4), "lm_head must be a matrix .*, got int8"),
        (lambda: low_rank_from([[1.0]], 1), "lm_head must be a matrix .*, got None of shape None"),
        (lambda: low_rank_from(with_nan(), 4), "lm_head must hold finite numbers, got NaN or infinity"),
        (lambda: low_rank_from(lm_head(), 4, np.eye(15)), r"covariance should have shape \[16, 16\], .*, got \[15, 15\]"),
        (lambda: low_rank_from(lm_head(), 4, np.zeros((16, 16))), "covariance must be .*: finite, symmetric and not zero"),
        (lambda: low_rank_from(lm_head(), 4, np.eye(16) * np.nan), "covariance must be .*: finite, symmetric and not zero"),
        (lambda: low_rank_from(lm_head(), 4, np.triu(np.ones((16, 16)))), "covariance must be .*: finite, symmetric and not zero"),
        (lambda: low_rank_from(lm_head(), 4, np.diag([-1.0] + [1.0] * 15)), "has no negative eigenvalues; the least is -1"),
        (lambda: screened_from(lm_head(), 4, 61), "ScreenedHead.num_candidates must be at most vocab_size = 60, got 61"),
        (lambda: trimmed_from(lm_head(), [3, 60]), "token_ids must be tokens from 0 to 59, got 60"),
        (lambda: trimmed_from(lm_head(), [3, 5, 3]), "token_ids must be different tokens, 3 is there 2 times"),
        (lambda: trimmed_from(lm_head(), []), "token_ids must be a list of token ids, got float64"),
        (lambda: trimmed_from(lm_head(), np.zeros(0, np.int32)), "TrimmedHead.num_tokens must be a positive int, got 0"),
        (lambda: frequent_tokens([3, -1], 1), "counts must be numbers of at least 0"),
        (lambda: frequent_tokens([3.0, np.nan], 1), "counts must be numbers of at least 0"),
        (lambda: frequent_tokens([[3, 1]], 1), r"counts must be numbers of at least 0, one a token, got int64 of shape \[1, 2\]"),
        (lambda: frequent_tokens([3, 1], 3), "num_tokens must be at most the length of counts = 2, got 3"),
        (lambda: frequent_tokens([3, 1], 1, always=[0, 1]), "num_tokens must leave room for the 2 tokens of always, got 1"),
        (lambda: frequent_tokens([3, 1], 1, always=[2]), "always must be tokens from 0 to 1, got 2"),
    ],
)
def test_what_cannot_be_fitted_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
