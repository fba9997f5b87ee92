"""Layers that see a window only, and rotary frequencies that depend on the length: under rollback, in batches, in continuations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import GenerateConfig, RopeConfig, generate, speculative_generate
from tests.helpers import FLOAT32_TOLERANCE, ReplayDrafter, greedy_text, random_model, random_prompts, recorded, tiny_config

PROMPTS = random_prompts()
LENGTHS = [len(prompt) for prompt in PROMPTS]
DYNAMIC = RopeConfig(rope_type="dynamic", factor=4.0, original_max_position_embeddings=16)
LONGROPE = RopeConfig(
    rope_type="longrope",
    original_max_position_embeddings=16,
    short_factor=(1.0,) * 4,
    long_factor=(1.0, 2.0, 4.0, 8.0),
    attention_factor=1.1,
)


@pytest.mark.full
def test_windowed_layers_survive_forty_tokens_of_rejected_drafts() -> None:
    model = random_model(tiny_config(layer_windows=(8, 8)), seed=3)
    plain = generate(*model, PROMPTS, config=GenerateConfig(max_new_tokens=40))
    wrong = recorded(plain.tokens, LENGTHS, flip_at=0)
    output = speculative_generate(
        *model, ReplayDrafter(), wrong, PROMPTS, config=GenerateConfig(max_new_tokens=40, num_speculative_tokens=4)
    )
    assert output.statistics.num_accepted_tokens == 0
    np.testing.assert_array_equal(output.tokens, plain.tokens)
    # The window matters: with all layers seeing everything the text is another one.
    everything = random_model(tiny_config(), seed=3)
    assert (np.asarray(generate(*everything, PROMPTS, config=GenerateConfig(max_new_tokens=40)).tokens) != plain.tokens).any()


def test_a_windowed_layer_sees_what_a_fresh_pass_over_the_window_sees() -> None:
    # One layer: its output at a position depends on the last `window` tokens alone.
    model, params = random_model(tiny_config(num_layers=1, layer_windows=(5,)), seed=3)
    text = jnp.asarray(np.random.default_rng(0).integers(64, size=(1, 30)), jnp.int32)
    apply = jax.jit(model.apply)
    whole = apply({"params": params}, text, model.init_cache(batch_size=1, capacity=30)).hidden
    for end in (5, 17, 30):
        # Rotary attention is relative: the window may stand anywhere.
        part = apply({"params": params}, text[:, end - 5 : end], model.init_cache(batch_size=1, capacity=5)).hidden
        np.testing.assert_allclose(part[0, -1], whole[0, end - 1], atol=10 * FLOAT32_TOLERANCE)


@pytest.mark.parametrize("rope", [pytest.param(DYNAMIC, id="dynamic"), pytest.param(LONGROPE, id="longrope", marks=pytest.mark.full)])
@pytest.mark.full
def test_each_row_has_the_frequencies_of_its_own_length(rope: RopeConfig) -> None:
    model = random_model(tiny_config(rope=rope), seed=3)
    config = GenerateConfig(max_new_tokens=10)
    # 1 + 10 and 5 + 10 tokens stay within the original 16, 17 + 10 and 33 + 10 do not.
    together = generate(*model, PROMPTS, config=config)
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_array_equal(generate(*model, [prompt], config=config).tokens[0], together.tokens[row])
    limits = together.continuation.target_cache.context_limit
    assert limits.tolist() == [length + 10 for length in LENGTHS]
    # A row may be given fewer tokens than the call's most.
    fewer = generate(*model, PROMPTS, config=config, max_new_tokens=[3] * 5)
    assert fewer.continuation.target_cache.context_limit.tolist() == [length + 3 for length in LENGTHS]


@pytest.mark.full
def test_the_frequencies_do_not_depend_on_chunks_or_drafts() -> None:
    model = random_model(tiny_config(rope=DYNAMIC), seed=3)
    text = greedy_text(PROMPTS, model=model)
    for chunk in (4, 512):
        config = GenerateConfig(max_new_tokens=text.shape[1], num_speculative_tokens=3, prefill_chunk_size=chunk)
        output = speculative_generate(*model, ReplayDrafter(random_flips=True), recorded(text, LENGTHS), PROMPTS, config=config)
        np.testing.assert_array_equal(output.tokens, text)


@pytest.mark.full
def test_a_continuation_beyond_the_planned_length_is_refused_and_a_capacity_plans_for_it() -> None:
    model = random_model(tiny_config(rope=DYNAMIC), seed=3)
    first = generate(*model, [PROMPTS[0]], config=GenerateConfig(max_new_tokens=20))
    more = GenerateConfig(max_new_tokens=8)
    with pytest.raises(ValueError, match=r"row 0: this call may reach 34 tokens, but the rotary frequencies \('dynamic'\).*chosen for 25"):
        generate(*model, [[1]], config=more, continue_from=first.continuation)
    roomy = GenerateConfig(max_new_tokens=20, cache_capacity=128)
    first = generate(*model, [PROMPTS[0]], config=roomy)
    assert first.continuation.target_cache.context_limit.tolist() == [128]
    second = generate(*model, [[1]], config=more, continue_from=first.continuation)
    whole = [*PROMPTS[0], *first.tokens[0].tolist(), 1]
    again = generate(*model, [whole], config=GenerateConfig(max_new_tokens=8, cache_capacity=128))
    np.testing.assert_array_equal(second.tokens, again.tokens)


def test_models_whose_frequencies_are_fixed_carry_no_limit() -> None:
    model = random_model(tiny_config(), seed=3)
    assert generate(*model, PROMPTS, config=GenerateConfig(max_new_tokens=4)).continuation.target_cache.context_limit is None
