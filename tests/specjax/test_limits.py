"""Up to the last token of the window and the last slot of the cache, and not beyond."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import GenerateConfig, generate, speculative_generate
from specjax.capacity import bucket
from specjax.models.rope import rotary_angles
from specjax.requests import prepare
from tests.helpers import ReplayDrafter, greedy_text, random_model, random_prompts, recorded, tiny_config, tiny_target

FULL_PROMPT = random_prompts((60,), seed=4)


def test_a_prompt_and_output_that_just_fit_the_window_are_served_whatever_the_draft_length() -> None:
    model = random_model(tiny_config(max_position_embeddings=64), seed=1)
    expected = greedy_text(FULL_PROMPT, 4, model=model)
    config = GenerateConfig(max_new_tokens=4, num_speculative_tokens=8)
    for flip_at in (0, 1, 8):
        drafter_params = recorded(np.pad(expected, ((0, 0), (0, 20))), [60], flip_at=flip_at)
        output = speculative_generate(*model, ReplayDrafter(), drafter_params, FULL_PROMPT, config=config)
        np.testing.assert_array_equal(output.tokens, expected)
        assert output.lengths.tolist() == [4]


def test_one_token_beyond_the_window_is_refused_with_all_three_numbers() -> None:
    model = random_model(tiny_config(max_position_embeddings=64), seed=1)
    message = "row 0: a prompt of 60 tokens and up to 5 new ones exceed the model's window of 64 tokens"
    with pytest.raises(ValueError, match=message):
        generate(*model, FULL_PROMPT, config=GenerateConfig(max_new_tokens=5))
    # A limit of the call, not the capacity of the config, is what counts.
    fits = GenerateConfig(max_new_tokens=16)
    assert generate(*model, FULL_PROMPT, config=fits, max_new_tokens=4).lengths.tolist() == [4]


def test_a_prompt_longer_than_the_window_is_refused_without_a_negative_number() -> None:
    model = random_model(tiny_config(max_position_embeddings=16), seed=1)
    with pytest.raises(ValueError, match="a prompt of 60 tokens and up to 1 new ones exceed the model's window of 16 tokens") as caught:
        generate(*model, FULL_PROMPT, config=GenerateConfig(max_new_tokens=1))
    assert "-" not in str(caught.value)


@pytest.mark.parametrize("flip_at", [0, 8])
def test_a_cache_without_a_slot_to_spare_gives_the_same_text(flip_at: int) -> None:
    target, params = tiny_target()
    prompts = random_prompts((48, 48), seed=4)
    expected = greedy_text(prompts, 16)
    drafter_params = recorded(np.pad(expected, ((0, 0), (0, 20))), [48, 48], flip_at=flip_at)
    exact = 48 + 16 + 8 + 1
    config = GenerateConfig(max_new_tokens=16, num_speculative_tokens=8, cache_capacity=exact)
    output = speculative_generate(target, params, ReplayDrafter(), drafter_params, prompts, config=config)
    assert output.continuation.target_cache.capacity == exact
    np.testing.assert_array_equal(output.tokens, expected)
    config = GenerateConfig(max_new_tokens=16, num_speculative_tokens=8, cache_capacity=exact - 1)
    with pytest.raises(ValueError, match=f"cache_capacity = {exact - 1} slots are too few: this call needs {exact}"):
        speculative_generate(target, params, ReplayDrafter(), drafter_params, prompts, config=config)


def test_the_cache_always_holds_the_context_the_last_draft_and_the_padding_of_the_last_chunk() -> None:
    for prompt_length in (1, 15, 16, 17, 63, 64, 100, 200):
        for num_new in (1, 16, 23, 100):
            for draft_length in (0, 1, 8):
                for chunk in (1, 7, 64, 512):
                    config = GenerateConfig(max_new_tokens=num_new, prefill_chunk_size=chunk)
                    prompt = np.zeros((1, prompt_length), np.int32)
                    request, static = prepare(tiny_config(), prompt, draft_length=draft_length, config=config)
                    width = request.prompt_tokens.shape[1]
                    assert width == bucket(prompt_length)
                    assert static.max_new_tokens >= num_new
                    assert static.cache_capacity >= prompt_length + num_new + draft_length + 1
                    chunk = min(chunk, width)
                    assert static.cache_capacity >= -(-width // chunk) * chunk
                    assert static.cache_capacity % 64 == 0


def test_buckets_waste_at_most_a_third_and_are_few() -> None:
    sizes = {bucket(size) for size in range(1, 4097)}
    assert len(sizes) <= 2 * 8 + 1
    assert all(bucket(size) >= size for size in range(1, 4097))
    assert all(bucket(size) <= size * 3 / 2 for size in range(16, 4097))
    assert all(bucket(size) == size for size in sizes)


def test_positions_of_a_bfloat16_model_are_exact_far_beyond_256() -> None:
    # The same keys at positions 300 and 2100 apart from rounding of bfloat16 itself: a bfloat16 position would be off by up to 8.
    model, params = random_model(tiny_config(num_layers=1, max_position_embeddings=4096), seed=1, dtype=jnp.bfloat16)
    tokens = jnp.asarray(random_prompts((8,), seed=2), jnp.int32)
    run = jax.jit(
        lambda start: model.apply({"params": params}, tokens, model.init_cache(batch_size=1, capacity=2300).with_length(start)).cache
    )
    for start in (0, 300, 2100):
        cache = run(jnp.array([start]))
        cos, sin = rotary_angles(model.config.rope, 8, start + jnp.arange(8)[None])
        reference = run(jnp.array([0]))
        unrotated = rotate_back(
            np.asarray(reference.keys[0], np.float32)[0, :, :8], *rotary_angles(model.config.rope, 8, jnp.arange(8)[None])
        )
        expected = rotate_back(unrotated, cos, -sin)
        got = np.asarray(cache.keys[0], np.float32)[0, :, start : start + 8]
        # Two roundings to bfloat16 of values up to 8.
        np.testing.assert_allclose(got, expected, atol=2 * 8 * 2**-8)
    off_by_one = np.asarray(run(jnp.array([2101])).keys[0], np.float32)[0, :, 2101:2109]
    assert np.abs(off_by_one - expected).max() > 1.0, "a position that is off by one must show"


def rotate_back(x: np.ndarray, cos: jax.Array, sin: jax.Array) -> np.ndarray:
    """`[K,T,H]` rotated by minus the angles."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.asarray(cos), np.asarray(sin)
    return np.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)
