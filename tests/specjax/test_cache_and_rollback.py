"""After any accepts and rejections the caches hold what a fresh prefill of the emitted text would write, and nothing stale is read."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import DraftModel, GenerateConfig, KVCache, SamplingParams, speculative_generate
from specjax.kernels.rope_and_write import write_layer
from specjax.state import Context
from tests.helpers import (
    FLOAT32_TOLERANCE,
    NUM_TOKENS,
    ReplayDrafter,
    greedy_text,
    random_prompts,
    recorded,
    tiny_draft_model,
    tiny_target,
)


@functools.partial(jax.jit, static_argnums=0)
def fresh_cache(model: Any, params: Any, tokens: jax.Array) -> KVCache:
    """One pass over whole contexts `[B,S]`; what lies beyond a row's length is not compared."""
    empty = model.init_cache(batch_size=tokens.shape[0], capacity=tokens.shape[1])
    return model.apply({"params": params}, tokens, empty).cache


def assert_cache_is_fresh(cache: KVCache, context: Context, model: Any, params: Any, *, missing: int) -> None:
    """All of the context but its last `missing` tokens stands in the cache as a fresh prefill writes it."""
    assert cache.length.tolist() == (context.length - missing).tolist()
    expected = fresh_cache(model, params, context.tokens)
    for name in ("keys", "values"):
        for got, want in zip(getattr(cache, name), getattr(expected, name), strict=True):
            for row, length in enumerate(cache.length.tolist()):
                np.testing.assert_allclose(got[row, :, :length], want[row, :, :length], atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)


def test_after_random_accepts_the_target_cache_equals_a_prefill_of_the_emitted_text() -> None:
    target, params = tiny_target()
    prompts = random_prompts()
    drafter_params = recorded(greedy_text(prompts), [len(prompt) for prompt in prompts])
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=4)
    output = speculative_generate(target, params, ReplayDrafter(random_flips=True), drafter_params, prompts, config=config)
    assert (output.statistics.acceptance_histogram > 0).all()
    after = output.continuation
    assert after.context.length.tolist() == [len(prompt) + NUM_TOKENS for prompt in prompts]
    for row, prompt in enumerate(prompts):
        assert after.context.tokens[row, : len(prompt)].tolist() == prompt
    assert_cache_is_fresh(after.target_cache, after.context, target, params, missing=1)


@pytest.mark.parametrize("do_sample", [False, True])
def test_after_accepts_and_rejections_the_draft_models_cache_equals_a_prefill_of_the_emitted_text(do_sample: bool) -> None:
    target, params = tiny_target()
    draft_model, draft_params = tiny_draft_model()
    prompts = random_prompts()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=3, do_sample=do_sample)
    arguments = dict(sampling=SamplingParams(1.5), rng=jax.random.key(0)) if do_sample else {}
    output = speculative_generate(target, params, DraftModel(draft_model), draft_params, prompts, config=config, **arguments)
    assert 0 < output.statistics.draft_acceptance_rate < 1
    after = output.continuation
    assert_cache_is_fresh(after.target_cache, after.context, target, params, missing=1)
    assert_cache_is_fresh(after.drafter_state, after.context, draft_model, draft_params, missing=2)


@pytest.mark.full
def test_the_draft_models_cache_stays_right_when_a_call_continues_another() -> None:
    target, params = tiny_target()
    prompts = random_prompts()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=2)
    drafter = DraftModel(target)  # accepts whole drafts, so that the cache ends two tokens short
    first = speculative_generate(target, params, drafter, params, prompts, config=config)
    second = speculative_generate(
        target, params, drafter, params, random_prompts((3, 2, 4, 1, 5), seed=9), config=config, continue_from=first.continuation
    )
    after = second.continuation
    assert_cache_is_fresh(after.target_cache, after.context, target, params, missing=1)
    assert_cache_is_fresh(after.drafter_state, after.context, target, params, missing=2)
    assert second.statistics.draft_acceptance_rate == 1.0


def test_drafter_and_target_caches_have_the_same_capacity() -> None:
    target, params = tiny_target()
    draft_model, draft_params = tiny_draft_model()
    for cache_capacity in (None, 200):
        config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=3, cache_capacity=cache_capacity)
        shapes = jax.eval_shape(
            lambda prompts, config=config: (
                speculative_generate(target, params, DraftModel(draft_model), draft_params, prompts, config=config).continuation
            ),
            jnp.zeros((2, 60), jnp.int32),
        )
        assert shapes.drafter_state.keys[0].shape[2] == shapes.target_cache.keys[0].shape[2] == shapes.context.tokens.shape[1]
        assert shapes.target_cache.capacity >= (cache_capacity or 60 + NUM_TOKENS + 4)


def poison(cache: KVCache, value: float) -> KVCache:
    """Fills all slots beyond each row's length."""
    beyond = (jnp.arange(cache.capacity) >= cache.length[:, None])[:, None, :, None]
    fill = lambda arrays: tuple(jnp.where(beyond, value, x) for x in arrays)
    return dataclasses.replace(cache, keys=fill(cache.keys), values=fill(cache.values))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_nothing_beyond_the_length_of_a_cache_is_ever_read(value: float) -> None:
    target, params = tiny_target()
    prompts, more = random_prompts(), random_prompts((3, 2, 4, 1, 5), seed=9)
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=2)
    drafter = DraftModel(target)
    clean = speculative_generate(target, params, drafter, params, prompts, config=config).continuation
    inside = jnp.arange(clean.context.tokens.shape[1]) < clean.context.length[:, None]
    dirty = dataclasses.replace(
        clean,
        context=dataclasses.replace(clean.context, tokens=jnp.where(inside, clean.context.tokens, 63)),
        target_cache=poison(clean.target_cache, value),
        drafter_state=poison(clean.drafter_state, value),
    )
    outputs = [
        speculative_generate(target, params, drafter, params, more, config=config, continue_from=continuation)
        for continuation in (clean, dirty)
    ]
    np.testing.assert_array_equal(outputs[0].tokens, outputs[1].tokens)
    np.testing.assert_array_equal(outputs[0].statistics.accepted_counts, outputs[1].statistics.accepted_counts)


@pytest.mark.parametrize("batch_size", [3, 12])  # below and above the number of rows up to which writes are unrolled
def test_a_write_up_to_the_last_slot_overwrites_no_earlier_row(batch_size: int) -> None:
    rng = np.random.default_rng(0)
    keys, values = (jnp.asarray(rng.normal(size=(batch_size, 2, 10, 4)), jnp.float32) for _ in range(2))
    new_keys, new_values = (jnp.asarray(rng.normal(size=(batch_size, 3, 2, 4)), jnp.float32) for _ in range(2))
    start = jnp.asarray([*rng.integers(0, 8, batch_size - 1), 7], jnp.int32)
    got = jax.jit(write_layer)(keys, values, new_keys, new_values, start)
    for before, new, after in zip((keys, values), (new_keys, new_values), got, strict=True):
        expected = np.array(before)
        for row, slot in enumerate(start.tolist()):
            expected[row, :, slot : slot + 3] = np.asarray(new)[row].swapaxes(0, 1)
        np.testing.assert_array_equal(after, expected)


def test_a_value_that_is_not_finite_is_stored_as_zero_behind_a_nan_key() -> None:
    keys = values = jnp.zeros((1, 1, 4, 2))
    new_values = jnp.array([[[[1.0, 2.0]], [[jnp.nan, 1.0]], [[3.0, jnp.inf]]]])
    keys, values = write_layer(keys, values, jnp.ones((1, 3, 1, 2)), new_values, jnp.array([1]))
    np.testing.assert_array_equal(values[0, 0], [[0, 0], [1, 2], [0, 1], [3, 0]])
    np.testing.assert_array_equal(jnp.isnan(keys[0, 0]).any(axis=1), [False, False, True, True])


def test_a_cache_that_grows_keeps_what_it_holds() -> None:
    target, _ = tiny_target()
    cache = target.init_cache(batch_size=2, capacity=8)
    cache = dataclasses.replace(cache, keys=tuple(x + 1 for x in cache.keys), length=jnp.array([3, 8]))
    grown = cache.grown(12)
    assert grown.capacity == 12
    np.testing.assert_array_equal(grown.keys[0][:, :, :8], cache.keys[0])
    assert grown.length.tolist() == [3, 8]
    assert cache.grown(4) is cache


def test_prefill_in_chunks_equals_prefill_in_one_piece() -> None:
    target, params = tiny_target()
    draft_model, draft_params = tiny_draft_model()
    prompts = random_prompts()  # lengths 5, 17, 1, 33, 8: rows end in different chunks
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=3, prefill_chunk_size=8)
    output = speculative_generate(target, params, DraftModel(draft_model), draft_params, prompts, config=config)
    np.testing.assert_array_equal(output.tokens, greedy_text(prompts))
    after = output.continuation
    assert_cache_is_fresh(after.target_cache, after.context, target, params, missing=1)
    assert_cache_is_fresh(after.drafter_state, after.context, draft_model, draft_params, missing=2)
