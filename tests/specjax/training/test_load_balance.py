"""The load-balancing loss at its extremes, against its formula, and what its gradient does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training.load_balance import load_balance

# float32 sums of a few dozen numbers of order 1.
TOLERANCE = 1e-6


def test_the_loss_is_its_formula():
    probs = np.random.default_rng(0).dirichlet(np.ones(6), 9).astype(np.float32)
    found = load_balance(jnp.asarray(probs), num_experts_per_token=2)
    shares = np.bincount(np.argsort(probs, axis=1)[:, -2:].ravel(), minlength=6) / 18
    np.testing.assert_allclose(found.shares, shares, atol=TOLERANCE)
    np.testing.assert_allclose(found.loss, 6 * (shares * probs.mean(axis=0)).sum(), atol=TOLERANCE)


def test_the_loss_is_one_for_experts_used_alike_and_e_over_k_for_two_that_do_everything():
    even = np.full((8, 8), 0.01, np.float32) + 0.46 * (np.eye(8) + np.roll(np.eye(8), 1, axis=1)).astype(np.float32)
    assert load_balance(jnp.asarray(even), num_experts_per_token=2).loss == pytest.approx(1.0, abs=TOLERANCE)
    same = np.tile(np.eye(8, dtype=np.float32)[:2].mean(axis=0), (8, 1))
    assert load_balance(jnp.asarray(same), num_experts_per_token=2).loss == pytest.approx(4.0, abs=TOLERANCE)


def test_following_its_gradient_evens_the_use_out():
    scores = jnp.asarray(np.random.default_rng(1).normal([1.0, 0.5, 0.0, 0.0], 0.1, (256, 4)))
    loss = jax.jit(jax.value_and_grad(lambda x: load_balance(jax.nn.softmax(x), num_experts_per_token=1).loss))
    first, _ = loss(scores)
    shift = jnp.zeros((4,))
    for _ in range(200):
        shift -= 0.05 * loss(scores + shift)[1].sum(axis=0)
    last = load_balance(jax.nn.softmax(scores + shift), num_experts_per_token=1)
    assert first > 1.5
    assert last.loss < 1.1
    assert last.shares.min() > 0.1
