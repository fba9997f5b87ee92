"""Losses against float64 NumPy versions of their formulas, and their gradients against differences."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafting.heads import HeadScores
from specjax.training.losses import LOSS_KINDS, DraftLoss, position_losses
from tests.helpers import numpy_log_softmax

NUM_POSITIONS, VOCAB = 7, 50
# float32 sums of 50 terms whose logarithms are below 10: a few ulp of 10.
TOLERANCE = 1e-5
# Central differences in float64 of width 1e-6: what is left is the float32 gradient's own rounding.
GRADIENT_TOLERANCE = 1e-6


def drawn(num_tokens: int = VOCAB, scale: float = 3.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=scale, size=(NUM_POSITIONS, num_tokens)).astype(np.float32)


def numpy_losses(loss: DraftLoss, target: np.ndarray, draft: np.ndarray, ids: np.ndarray, *, alpha: Any = None) -> tuple[Any, Any]:
    """Position by position, in float64; `alpha` is what lambda is made of, if it is to be kept fixed."""
    log_p_all = numpy_log_softmax(target.astype(np.float64))
    losses, acceptances = [], []
    for row, (log_p, logits) in enumerate(zip(log_p_all, draft.astype(np.float64), strict=True)):
        log_q = numpy_log_softmax(logits)
        p, q = np.exp(log_p[ids]), np.exp(log_q)
        accepted = sum(min(a, b) for a, b in zip(p, q, strict=True))
        renormalised = p / p.sum()
        kl = sum(a * (np.log(a) - b) for a, b in zip(renormalised, log_q, strict=True))
        share = np.exp(-loss.eta * (accepted if alpha is None else alpha[row]))
        losses.append({"forward_kl": kl, "lk_alpha": -np.log(accepted), "lk_lambda": share * kl + (1 - share) * (1 - accepted)}[loss.kind])
        acceptances.append(accepted)
    return np.asarray(losses), np.asarray(acceptances)


CASES = {"all tokens": None, "a part of the tokens": np.random.default_rng(3).permutation(VOCAB)[:20]}


@pytest.mark.parametrize("kind", LOSS_KINDS)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_acceptance_equal_their_formulas(kind: str, case: str) -> None:
    loss, ids = DraftLoss(kind=kind, eta=2.0), CASES[case]
    target, draft = drawn(), drawn(VOCAB if ids is None else len(ids), seed=1)
    found = position_losses(loss, jnp.asarray(target), HeadScores(jnp.asarray(draft), None if ids is None else jnp.asarray(ids)))
    expected = numpy_losses(loss, target, draft, np.arange(VOCAB) if ids is None else ids)
    np.testing.assert_allclose(found.loss, expected[0], atol=TOLERANCE)
    np.testing.assert_allclose(found.acceptance, expected[1], atol=TOLERANCE)


@pytest.mark.parametrize("kind", LOSS_KINDS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_differences(kind: str, case: str) -> None:
    loss, ids = DraftLoss(kind=kind), CASES[case]
    columns = np.arange(VOCAB) if ids is None else ids
    target, draft = drawn(), drawn(len(columns), seed=1)

    def total(logits: jax.Array, target: jax.Array) -> jax.Array:
        return position_losses(loss, target, HeadScores(logits, None if ids is None else jnp.asarray(ids))).loss.sum()

    gradient, of_target = jax.grad(total, argnums=(0, 1))(jnp.asarray(draft), jnp.asarray(target))
    assert not np.any(of_target)
    alpha, step = numpy_losses(loss, target, draft, columns)[1], 1e-6
    for row, column in [(0, 0), (1, 5), (2, 11), (3, 19), (6, int(np.argmax(draft[6])))]:
        moved = [draft.astype(np.float64) for _ in range(2)]
        moved[0][row, column] += step
        moved[1][row, column] -= step
        high, low = (numpy_losses(loss, target, one, columns, alpha=alpha)[0][row] for one in moved)
        np.testing.assert_allclose(gradient[row, column], (high - low) / (2 * step), atol=GRADIENT_TOLERANCE)


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_the_loss_of_the_targets_own_distribution_is_zero(kind: str) -> None:
    found = position_losses(DraftLoss(kind=kind), jnp.asarray(drawn()), HeadScores(jnp.asarray(drawn()) + 5.0))
    np.testing.assert_allclose(found.loss, 0.0, atol=TOLERANCE)
    np.testing.assert_allclose(found.acceptance, 1.0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_distributions_that_hardly_meet_have_finite_losses_and_gradients(kind: str) -> None:
    target, draft = jnp.asarray([[300.0, 0.0, -jnp.inf]]), jnp.asarray([[0.0, 250.0, 0.0]])

    def total(logits: jax.Array) -> jax.Array:
        return position_losses(DraftLoss(kind=kind), target, HeadScores(logits)).loss.sum()

    value, gradient = jax.value_and_grad(total)(draft)
    assert 200 < value < 400
    assert np.isfinite(gradient).all()
    assert gradient[0, 0] < -0.5  # alpha is below what float32 holds, and still it says where to go


def test_every_position_may_have_its_own_tokens_and_steps_share_the_targets() -> None:
    target, ids = jnp.asarray(drawn()), jnp.asarray([np.random.default_rng(row).permutation(VOCAB)[:9] for row in range(NUM_POSITIONS)])
    draft = jnp.asarray(np.stack([drawn(9, seed=1), drawn(9, seed=2)]))
    loss = DraftLoss(kind="lk_lambda")
    found = position_losses(loss, target, HeadScores(draft, jnp.stack([ids, ids])))
    for step in range(2):
        for row in range(NUM_POSITIONS):
            here = slice(row, row + 1)
            expected = numpy_losses(loss, np.asarray(target)[here], np.asarray(draft)[step, here], np.asarray(ids)[row])
            np.testing.assert_allclose(found.loss[step, row], expected[0][0], atol=TOLERANCE)
            np.testing.assert_allclose(found.acceptance[step, row], expected[1][0], atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["lk_alpha", "lk_lambda"])
def test_following_an_lk_loss_raises_the_acceptance(kind: str) -> None:
    target, draft = jnp.asarray(drawn()), jnp.asarray(drawn(seed=1))

    @functools.partial(jax.jit, static_argnames="loss")
    def step(draft: jax.Array, loss: DraftLoss) -> tuple[jax.Array, jax.Array, jax.Array]:
        def mean(draft: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = position_losses(loss, target, HeadScores(draft))
            return found.loss.mean(), found.acceptance.mean()

        (value, acceptance), gradient = jax.value_and_grad(mean, has_aux=True)(draft)
        return draft - 20.0 * gradient, value, acceptance

    history = []
    for _ in range(100):
        draft, *values = step(draft, DraftLoss(kind=kind))
        history.append(values)
    (first_loss, first_acceptance), (last_loss, last_acceptance) = history[0], history[-1]
    assert last_loss < 0.5 * first_loss
    assert first_acceptance < 0.4
    assert last_acceptance > first_acceptance + 0.3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(kind="kl"), r"DraftLoss.kind must be one of .*got 'kl'"),
        (dict(eta=-1.0), "eta must be at least 0, got -1.0"),
        (dict(decay=0.0), "decay must be above 0 and at most 1, got 0.0"),
    ],
)
def test_impossible_losses_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftLoss(**changes)


def test_each_step_of_the_chain_counts_less() -> None:
    np.testing.assert_allclose(DraftLoss(decay=0.5).step_weights(4), [1, 0.5, 0.25, 0.125])
