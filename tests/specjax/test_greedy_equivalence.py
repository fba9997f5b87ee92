"""Greedy speculative decoding emits what greedy plain decoding emits, token for token in float32, whatever the drafter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import DraftModel, GenerateConfig, MoEConfig, NoDraft, PromptLookup, RopeConfig, generate, speculative_generate
from specjax.sampling import SamplingParams
from specjax.state import Draft
from specjax.verification.rejection_sampling import RejectionSampling
from specjax.verification.verify import verify
from tests.helpers import (
    NUM_TOKENS,
    ReplayDrafter,
    greedy_text,
    random_model,
    random_prompts,
    recorded,
    tiny_config,
    tiny_draft_model,
    tiny_target,
)

# Windows shorter than the prompts, so that every draft and rollback crosses them.
GPT_OSS = dict(
    layer_windows=(6, None),
    attention_sinks=True,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    activation="clamped_swiglu",
    rope=RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, truncate=False, attention_factor=1.2),
    moe=MoEConfig(num_experts=6, num_experts_per_token=2, intermediate_size=24, router_bias=True),
)
PROMPTS = random_prompts()
LENGTHS = [len(prompt) for prompt in PROMPTS]


def drafters() -> dict[str, tuple[Any, Any]]:
    draft_model, draft_params = tiny_draft_model()
    target, target_params = tiny_target()
    return {
        "a draft model": (DraftModel(draft_model), draft_params),
        "the target as its own draft model": (DraftModel(target), target_params),
        "prompt lookup": (PromptLookup(), None),
        "long prompt lookup": (PromptLookup(max_ngram=4, min_ngram=2), None),
        "no draft": (NoDraft(), None),
    }


def assert_equals_plain(drafter: Any, drafter_params: Any, prompts: list[list[int]], num_speculative_tokens: int) -> Any:
    target, params = tiny_target()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=num_speculative_tokens)
    output = speculative_generate(target, params, drafter, drafter_params, prompts, config=config)
    np.testing.assert_array_equal(output.tokens, greedy_text(prompts))
    assert output.lengths.tolist() == [NUM_TOKENS] * len(prompts)
    return output


def test_greedy_speculative_equals_plain_with_right_wrong_and_half_right_drafts(full_grid: bool) -> None:
    for num_speculative_tokens in range(1, 9) if full_grid else (1, 4):
        params = recorded(greedy_text(PROMPTS), LENGTHS, flip_at=[100, 0, 1, 2, 3])
        output = assert_equals_plain(ReplayDrafter(), params, PROMPTS, num_speculative_tokens)
        assert output.continuation.drafter_state.tolist() == [NUM_TOKENS] * 5, "commit reported another number of tokens than was emitted"
        # Row 0 accepts everything, row 1 nothing: both ends are really reached.
        assert output.statistics.accepted_counts[0, num_speculative_tokens] >= NUM_TOKENS // (num_speculative_tokens + 1) - 1
        assert output.statistics.accepted_counts[1, 1:].sum() == 0


def test_greedy_speculative_equals_plain_for_every_flip_position_at_batch_size_one(full_grid: bool) -> None:
    for num_speculative_tokens in range(1, 9) if full_grid else (8,):
        for prompt in PROMPTS[:2] if full_grid else PROMPTS[:1]:
            for flip_at in range(num_speculative_tokens + 1):
                params = recorded(greedy_text([prompt]), [len(prompt)], flip_at=flip_at)
                output = assert_equals_plain(ReplayDrafter(), params, [prompt], num_speculative_tokens)
                assert output.statistics.accepted_counts[0, flip_at] > 0


def test_greedy_speculative_equals_plain_when_every_step_accepts_another_number(full_grid: bool) -> None:
    for num_speculative_tokens in range(1, 9) if full_grid else (4,):
        output = assert_equals_plain(
            ReplayDrafter(random_flips=True), recorded(greedy_text(PROMPTS), LENGTHS), PROMPTS, num_speculative_tokens
        )
        # Some forty steps: not every number need occur among nine, but most must.
        assert (output.statistics.acceptance_histogram > 0).sum() > (num_speculative_tokens + 1) / 2


@pytest.mark.parametrize(
    ("name", "usual_draft_length"),
    [
        ("a draft model", 3),
        pytest.param("the target as its own draft model", 2, marks=pytest.mark.full),
        ("prompt lookup", 5),
        pytest.param("long prompt lookup", 8, marks=pytest.mark.full),
        ("no draft", 4),
    ],
)
def test_greedy_speculative_equals_plain_with_real_drafters(name: str, usual_draft_length: int, full_grid: bool) -> None:
    drafter, params = drafters()[name]
    for num_speculative_tokens in range(1, 9) if full_grid else (usual_draft_length,):
        output = assert_equals_plain(drafter, params, PROMPTS, num_speculative_tokens)
        if name == "no draft":
            assert output.statistics.num_draft_tokens == 0
        else:
            assert output.statistics.num_accepted_tokens > 0
        if name == "the target as its own draft model":
            assert output.statistics.draft_acceptance_rate == 1.0
        if full_grid:
            assert_equals_plain(drafter, params, PROMPTS[:1], num_speculative_tokens)


def test_greedy_equivalence_holds_for_every_family_of_decoder(full_grid: bool) -> None:
    families = [
        dict(qk_norm="head", qkv_bias=True, tie_word_embeddings=True, num_kv_heads=1),
        dict(qk_norm="head"),
        dict(qkv_bias=True, num_kv_heads=4),
        dict(tie_word_embeddings=True, num_layers=3),
        dict(qk_norm="projection", clip_qkv=1.0, moe=MoEConfig(num_experts=6, num_experts_per_token=2, intermediate_size=24)),
        dict(rope=RopeConfig(rope_type="dynamic", factor=4.0, original_max_position_embeddings=16)),
        GPT_OSS,
    ]
    for family in families if full_grid else (families[0], GPT_OSS):
        model = random_model(tiny_config(**family), seed=5)
        text = greedy_text(PROMPTS, model=model)
        config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=4)
        output = speculative_generate(*model, ReplayDrafter(random_flips=True), recorded(text, LENGTHS), PROMPTS, config=config)
        np.testing.assert_array_equal(output.tokens, text)


def test_in_bfloat16_the_no_draft_drafter_gives_the_speculative_text_token_for_token() -> None:
    target, params = random_model(tiny_config(num_layers=1), seed=1, dtype=jnp.bfloat16)
    config = GenerateConfig(max_new_tokens=48, num_speculative_tokens=4)
    plain = speculative_generate(target, params, NoDraft(), None, PROMPTS[:2], config=config)
    drafter_params = recorded(plain.tokens, LENGTHS[:2])
    output = speculative_generate(target, params, ReplayDrafter(random_flips=True), drafter_params, PROMPTS[:2], config=config)
    np.testing.assert_array_equal(output.tokens, plain.tokens)
    assert output.statistics.num_accepted_tokens > 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_plausible_draft_token_that_is_not_the_arg_max_is_rejected_at_temperature_zero(do_sample: bool) -> None:
    # Target: p(a) = .3, p(b) = .5; the draft's arg-max is a, with q(a) = .2 only: min(1, p/q) would accept it.
    target_logits = jnp.log(jnp.array([[[0.3, 0.5, 0.2, 1e-9]] * 2]))
    draft_probs = jnp.array([[[0.2, 0.1, 0.1, 0.6]]])
    draft = Draft(tokens=jnp.array([[0]]), num_drafted=jnp.array([1]), probs=draft_probs if do_sample else None)
    sampling = SamplingParams(temperature=0.0).broadcast(1)
    keys = jax.random.split(jax.random.key(0), 1)
    checked = verify(RejectionSampling(), draft, target_logits, sampling, keys, do_sample=do_sample)
    assert checked.verification.num_accepted.tolist() == [0]
    assert checked.verification.tokens[0, 0] == 1


def test_sampling_at_temperature_zero_equals_greedy() -> None:
    target, params = tiny_target()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, do_sample=True)
    arguments = dict(config=config, sampling=SamplingParams(0.0), rng=jax.random.key(0))
    output = speculative_generate(target, params, PromptLookup(), None, PROMPTS, **arguments)
    np.testing.assert_array_equal(output.tokens, greedy_text(PROMPTS))


def test_plain_generate_ignores_the_draft_length_and_the_rule() -> None:
    target, params = tiny_target()
    first = generate(target, params, PROMPTS, config=GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=7))
    np.testing.assert_array_equal(first.tokens, greedy_text(PROMPTS))
    assert first.statistics.num_draft_tokens == 0
    assert first.statistics.mean_acceptance_length == 1.0
