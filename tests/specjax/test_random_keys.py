"""Random keys: every kind of key, no key used twice, rows that draw independently."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    BlockVerification,
    DraftModel,
    GenerateConfig,
    GenerateOutput,
    Lossless,
    PromptLookup,
    RejectionSampling,
    SamplingParams,
    SparseAttention,
    SparsityConfig,
    SyntheticAcceptance,
    TypicalAcceptance,
    speculative_generate,
)
from specjax.requests import row_keys
from tests.helpers import NUM_TOKENS, random_model, random_prompts, tiny_config

PROMPTS = random_prompts()


def sample(rng: Any, prompts: Any = PROMPTS, **arguments: Any) -> GenerateOutput:
    model, params = random_model(tiny_config(num_layers=1), seed=2)
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, do_sample=True)
    return speculative_generate(model, params, PromptLookup(), None, prompts, config=config, rng=rng, **arguments)


def test_the_same_key_gives_the_same_text_and_another_key_another() -> None:
    first, second, other = sample(jax.random.key(0)), sample(jax.random.key(0)), sample(jax.random.key(1))
    np.testing.assert_array_equal(first.tokens, second.tokens)
    assert (np.asarray(first.tokens) != np.asarray(other.tokens)).any(axis=1).all()


def test_typed_and_legacy_keys_give_the_same_text() -> None:
    np.testing.assert_array_equal(sample(jax.random.key(5)).tokens, sample(jax.random.PRNGKey(5)).tokens)
    legacy_rows = jnp.stack([jax.random.PRNGKey(seed) for seed in range(5)])
    typed_rows = jnp.stack([jax.random.key(seed) for seed in range(5)])
    assert (row_keys(legacy_rows, 5) == typed_rows).all()


def test_row_b_of_a_single_key_draws_by_fold_in_of_b() -> None:
    rng = jax.random.key(3)
    keys = jnp.stack([jax.random.fold_in(rng, row) for row in range(5)])
    np.testing.assert_array_equal(sample(rng).tokens, sample(keys).tokens)
    np.testing.assert_array_equal(jax.random.key_data(row_keys(rng, 5)), jax.random.key_data(keys))


def test_a_row_draws_the_same_tokens_whatever_its_neighbours_are() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    together = sample(keys, sampling=SamplingParams(2.0))
    others = [PROMPTS[0], [9], [8], PROMPTS[3], [7]]
    apart = sample(keys, others, sampling=SamplingParams(2.0), max_new_tokens=[24, 3, 0, 24, 9])
    for row in (0, 3):
        np.testing.assert_array_equal(together.tokens[row], apart.tokens[row])


def test_rows_of_one_prompt_draw_different_texts() -> None:
    tokens = np.asarray(sample(jax.random.key(0), [PROMPTS[1]] * 5, sampling=SamplingParams(2.0)).tokens)
    assert len({tuple(row) for row in tokens.tolist()}) == 5


@pytest.mark.parametrize(
    "rule",
    [
        RejectionSampling(),
        BlockVerification(),
        pytest.param(TypicalAcceptance(), marks=pytest.mark.full),
        pytest.param(SyntheticAcceptance(rates=(0.5, 0.5)), marks=pytest.mark.full),
    ],
    ids=lambda rule: type(rule).__name__,
)
@pytest.mark.full
def test_no_key_is_used_twice(rule: Any) -> None:
    model, params = random_model(tiny_config(num_layers=1), seed=2)
    config = GenerateConfig(max_new_tokens=8, num_speculative_tokens=2, do_sample=True, verification=rule)
    with jax.debug_key_reuse(True):
        output = speculative_generate(model, params, DraftModel(model), params, [[1, 2]], config=config, rng=jax.random.key(0))
    assert output.lengths.tolist() == [8]


@pytest.mark.full
def test_sparse_steps_and_the_dense_passes_that_check_them_share_no_key() -> None:
    model, params = random_model(tiny_config(num_layers=1), seed=2)
    attention = SparseAttention(block_size=2, keep=0.0, dense_below=0)
    sparsity = SparsityConfig(attention=attention, lossless=Lossless(max_steps=2, step_cost=0.2))
    config = GenerateConfig(max_new_tokens=8, num_speculative_tokens=2, do_sample=True, sparsity=sparsity)
    with jax.debug_key_reuse(True):
        output = speculative_generate(model, params, DraftModel(model), params, [[1, 2]], config=config, rng=jax.random.key(0))
    assert output.lengths.tolist() == [8]


def test_key_reuse_would_have_been_noticed() -> None:
    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        jax.jit(lambda key: jax.random.uniform(key) + jax.random.normal(key))(jax.random.key(0))


@pytest.mark.parametrize("rng", [0, 0.5, "seed", np.uint32(7), np.zeros(3, np.uint32), np.zeros(2, np.int32)])
def test_what_is_not_a_key_is_refused_with_an_example_of_one(rng: Any) -> None:
    with pytest.raises(TypeError, match=r"rng must be a key such as jax.random.key\(0\), .*got"):
        sample(rng)


def test_sampling_without_a_key_and_another_number_of_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"do_sample=True needs rng, a key from jax.random.key\(seed\)"):
        sample(None)
    with pytest.raises(ValueError, match=r"one key or 5 of them, one for each row, got shape \(3,\)"):
        sample(jax.random.split(jax.random.key(0), 3))
