"""The choice of experts: the reference against NumPy, and the Triton kernel, interpreted, against the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.expert_choice import expert_choice
from tests.kernels.interpreted_triton import interpreted, launches, needs_triton

# Probabilities in float32, from another exponential and sums in another order.
TOLERANCE = 1e-6


def scores(rows: int, experts: int) -> np.ndarray:
    return np.random.default_rng(rows + experts).normal(size=(rows, experts)).astype(np.float32) * 3


@pytest.mark.parametrize("normalise", [True, False])
def test_the_reference_takes_the_largest_of_the_softmax(normalise: bool) -> None:
    given = scores(4, 7)
    weights, experts = expert_choice(jnp.asarray(given), choices=3, normalise=normalise)
    probs = np.exp(given.astype(np.float64)) / np.exp(given.astype(np.float64)).sum(axis=1, keepdims=True)
    order = np.argsort(-probs, axis=1)[:, :3]
    expected = np.take_along_axis(probs, order, axis=1)
    np.testing.assert_array_equal(experts, order)
    np.testing.assert_allclose(weights, expected / expected.sum(axis=1, keepdims=True) if normalise else expected, atol=TOLERANCE)


@needs_triton
@pytest.mark.parametrize(
    ("experts", "choices", "normalise"),
    [(7, 3, True), (128, 8, False), *(pytest.param(*case, marks=pytest.mark.full) for case in ((5, 5, True), (300, 1, False)))],
)
def test_the_kernel_chooses_as_the_reference_does(experts: int, choices: int, normalise: bool) -> None:
    options = dict(choices=choices, normalise=normalise)
    given = scores(3, experts)
    given[1] = np.round(given[1])  # many are equal
    given[2, ::2] = -np.inf
    with interpreted():
        weights, chosen = expert_choice(jnp.asarray(given), **options, implementation="triton")
        assert launches == ["choose_experts"]
    expected_weights, expected = expert_choice(jnp.asarray(given), **options, implementation="reference")
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_allclose(weights, expected_weights, atol=TOLERANCE)


@needs_triton
def test_a_row_that_is_not_a_number_chooses_experts_that_exist_and_spoils_no_other() -> None:
    given = scores(2, 9)
    given[0, 4] = np.nan
    options = dict(choices=3, normalise=True)
    with interpreted():
        weights, chosen = expert_choice(jnp.asarray(given), **options, implementation="triton")
    expected_weights, expected = expert_choice(jnp.asarray(given), **options)
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_array_equal(np.isnan(weights), np.isnan(expected_weights))
    assert np.isnan(weights[0]).all()


def test_what_cannot_be_chosen_is_refused() -> None:
    with pytest.raises(ValueError, match=r"from 1 to E choices, got \(2, 9\) and 10"):
        expert_choice(jnp.zeros((2, 9)), choices=10, normalise=True)
    with pytest.raises(ValueError, match="implementation must be one of"):
        expert_choice(jnp.zeros((2, 9)), choices=1, normalise=True, implementation="sort")
    more = jnp.asarray(scores(1, 1025))  # the reference's, whatever was asked for
    options = dict(choices=2, normalise=True)
    jax.tree.map(np.testing.assert_array_equal, *(expert_choice(more, **options, implementation=name) for name in ("triton", "reference")))
