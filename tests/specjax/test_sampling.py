"""Temperature, top-k and top-p: against NumPy, against transformers, and at the edges."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import GenerateConfig, SamplingParams, generate
from specjax.sampling import filtered_probs as eager_filtered_probs
from specjax.sampling import sample_from_probs, split_row_keys
from tests.helpers import MIN_P_VALUE, chi_square_p_value, numpy_filtered_probs, random_prompts, tiny_target

# float32 softmax and cumulative sums over a few dozen entries.
TOLERANCE = 1e-6

filtered_probs = jax.jit(eager_filtered_probs)


def one_row(temperature: float, top_k: int, top_p: float) -> SamplingParams:
    return SamplingParams(np.float32([temperature]), np.int32([top_k]), np.float32([top_p]))


def probs_of(logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """`filtered_probs` of one row `[V]`."""
    return np.asarray(filtered_probs(np.float32(logits)[None, None], one_row(temperature, top_k, top_p)))[0, 0]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**16),
    temperature=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.8, 1.0, 1.7, 50.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 15, 16, 17, 1000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.99, 1.0]),
)
def test_filtered_probs_equal_the_numpy_version(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, 16).astype(np.float32)
    expected = numpy_filtered_probs(logits.astype(np.float64), temperature, top_k, top_p)
    np.testing.assert_allclose(probs_of(logits, temperature, top_k, top_p), expected, atol=TOLERANCE)


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (3, None), (None, 0.7)])
def test_what_is_not_given_filters_nothing_and_without_either_there_is_no_branch(top_k: int | None, top_p: float | None) -> None:
    logits, temperatures = np.random.default_rng(5).normal(0, 2, (3, 1, 16)).astype(np.float32), (0.0, 0.7, 2.0)
    sampling = SamplingParams(np.float32(temperatures), top_k, top_p).broadcast(3)
    probs = filtered_probs(logits, sampling)
    for row, temperature in enumerate(temperatures):
        expected = numpy_filtered_probs(logits[row, 0].astype(np.float64), temperature, top_k or 0, 1.0 if top_p is None else top_p)
        np.testing.assert_allclose(probs[row, 0], expected, atol=TOLERANCE)
    branches = str(jax.make_jaxpr(eager_filtered_probs)(logits, sampling)).count("cond[")
    assert branches == (top_k is not None or top_p is not None)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.8, 3, 0.9), (1.0, 0, 0.5), (0.1, 5, 1.0), (1.5, 0, 1.0), (2.0, 10, 0.7)])
def test_filtered_probs_equal_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(3).normal(0, 2, (20, 16)).astype(np.float32)
    chain = [processors.TemperatureLogitsWarper(temperature)]
    chain += [processors.TopKLogitsWarper(top_k)] if top_k else []
    chain += [processors.TopPLogitsWarper(top_p)] if top_p < 1 else []
    scores = torch.tensor(logits)
    for processor in chain:
        scores = processor(None, scores)
    expected = torch.softmax(scores, dim=-1).numpy()
    sampling = SamplingParams(temperature, top_k, top_p).broadcast(20)
    np.testing.assert_allclose(filtered_probs(jnp.asarray(logits)[:, None], sampling)[:, 0], expected, atol=TOLERANCE)


def test_every_row_gets_its_own_temperature_top_k_and_top_p() -> None:
    logits = np.random.default_rng(0).normal(0, 2, (6, 3, 16)).astype(np.float32)
    rows = [(0.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 0, 1.0), (1.0, 2, 1.0), (0.7, 5, 0.6), (3.0, 0, 0.3)]
    temperature, top_k, top_p = (jnp.asarray(column) for column in zip(*rows, strict=True))
    probs = filtered_probs(jnp.asarray(logits), SamplingParams(temperature, top_k, top_p).broadcast(6))
    for row, settings_of_row in enumerate(rows):
        for position in range(3):
            expected = numpy_filtered_probs(logits[row, position].astype(np.float64), *settings_of_row)
            np.testing.assert_allclose(probs[row, position], expected, atol=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6, 9e-6])
def test_a_temperature_near_zero_is_greedy_without_a_division(temperature: float) -> None:
    assert probs_of(np.array([1e30, -1e30, 3e30, 0.0]), temperature).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1.0, 1e30])
def test_no_temperature_above_zero_overflows(temperature: float) -> None:
    probs = probs_of(np.array([1e4, -1e4, 9.9e3, 0.0]), temperature)
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs.sum(), 1.0, atol=TOLERANCE)


@pytest.mark.parametrize("top_k", [0, 4, 5, 2**31 - 1])
def test_top_k_of_zero_or_more_than_the_vocabulary_keeps_all(top_k: int) -> None:
    logits = np.array([2.0, 1.5, 1.0, 0.5])
    np.testing.assert_allclose(probs_of(logits, top_k=top_k), numpy_filtered_probs(logits), atol=TOLERANCE)


def test_top_p_of_one_keeps_even_the_least_likely_token() -> None:
    # The float32 cumulative sum reaches 1 before the last tokens: they must stay nevertheless.
    logits = np.array([10.0, -8.0, -8.5, -9.0])
    assert (probs_of(logits, top_p=1.0) > 0).all()
    assert (probs_of(logits, top_k=4, top_p=1.0) > 0).all()


def test_the_most_likely_token_survives_the_smallest_top_p() -> None:
    assert probs_of(np.array([1.0, 1.1, 0.9]), top_p=1e-9).tolist() == [0, 1, 0]


def test_tokens_tied_with_the_last_one_kept_stay() -> None:
    np.testing.assert_allclose(probs_of(np.array([1.0, 0.0, 0.0, -1.0]), top_k=2) > 0, [True, True, True, False])


def test_a_token_whose_logit_is_minus_infinity_is_never_kept() -> None:
    logits = np.array([1.0, -np.inf, 0.5, -np.inf])
    for top_k, top_p in [(0, 1.0), (3, 1.0), (3, 0.99), (0, 0.9999)]:
        probs = probs_of(logits, top_k=top_k, top_p=top_p)
        assert np.isfinite(probs).all()
        assert probs[[1, 3]].tolist() == [0, 0]


def test_sampled_tokens_follow_the_probabilities_and_never_have_probability_zero() -> None:
    probs = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    keys = jax.random.split(jax.random.key(1), 20_000)
    tokens = jax.jit(sample_from_probs)(keys, jnp.broadcast_to(probs * 7.0, (20_000, 5)))
    assert chi_square_p_value(np.bincount(tokens, minlength=5), probs) > MIN_P_VALUE
    assert chi_square_p_value(np.bincount(tokens, minlength=5), [0.5, 0.0, 0.27, 0.18, 0.05]) < MIN_P_VALUE, "the test can fail"


def test_split_keys_are_all_different() -> None:
    keys = split_row_keys(jax.random.split(jax.random.key(0), 4), 3)
    data = {tuple(row.tolist()) for key in keys for row in jax.random.key_data(key)}
    assert len(data) == 12


def test_rows_of_temperature_zero_are_greedy_beside_rows_that_sample() -> None:
    target, params = tiny_target()
    prompts = random_prompts()
    greedy = generate(target, params, prompts, config=GenerateConfig(max_new_tokens=24))
    config = GenerateConfig(max_new_tokens=24, do_sample=True)
    sampling = SamplingParams(temperature=np.array([0.0, 0.7, 1.0, 0.0, 5.0], np.float32))
    mixed = generate(target, params, prompts, config=config, sampling=sampling, rng=jax.random.key(0))
    is_equal = (np.asarray(mixed.tokens) == np.asarray(greedy.tokens)).all(axis=1)
    assert is_equal.tolist() == [True, False, False, True, False]
    for name, value in [("top_k", 1), ("top_p", 1e-9)]:
        narrow = dataclasses.replace(SamplingParams(), **{name: value})
        output = generate(target, params, prompts, config=config, sampling=narrow, rng=jax.random.key(0))
        np.testing.assert_array_equal(output.tokens, greedy.tokens)


def test_a_temperature_has_a_derivative_where_a_token_is_ruled_out() -> None:
    logits = jnp.array([[[0.0, 1.0, -jnp.inf]]])

    def second(temperature: jax.Array, logits: jax.Array) -> jax.Array:
        return filtered_probs(logits, SamplingParams(temperature).broadcast(1))[0, 0, 1]

    for wanted in (0, 1):
        found = jax.grad(second, argnums=wanted)(jnp.float32(0.7), logits)
        expected = jax.grad(second, argnums=wanted)(jnp.float32(0.7), logits[..., :2])
        np.testing.assert_allclose(jnp.ravel(found)[:2], jnp.ravel(expected), rtol=1e-6)
        assert jnp.isfinite(found).all()
