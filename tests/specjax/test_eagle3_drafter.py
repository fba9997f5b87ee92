"""EAGLE-3 as a drafter: greedy and sampled output is the target's, and its cache is that of a fresh prefill on the emitted text."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import BlockVerification, GenerateConfig, SamplingParams, speculative_generate
from specjax.drafting.eagle3_drafter import Eagle3Drafter
from specjax.drafting.heads import TrimmedHead
from specjax.state import Commit, Context
from tests.drafters import LAYERS, REJECTION, Replayed, all_features, eagle3, emitted_p_value, fresh_state, small_target
from tests.helpers import (
    FLOAT32_TOLERANCE,
    MIN_P_VALUE,
    NUM_TOKENS,
    VOCAB_SIZE,
    greedy_text,
    random_model,
    random_prompts,
    recorded,
    tiny_config,
    tiny_target,
)

PROMPTS = random_prompts()
LENGTHS = [len(prompt) for prompt in PROMPTS]
NETWORKS: dict[str, dict[str, Any]] = {
    "full head": {},
    "own embedding, norms": dict(own_embedding=True, fc_norm=True, norm_output=True, norm_before_residual=True),
}


@pytest.mark.parametrize("name", [pytest.param("full head", marks=pytest.mark.full), "own embedding, norms"])
def test_greedy_speculative_equals_plain_with_eagle3(name: str, full_grid: bool) -> None:
    target, target_params = tiny_target()
    drafter, params = eagle3(target, target_params, **NETWORKS[name])
    for num_speculative_tokens in range(1, 9) if full_grid else (3,):
        config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=num_speculative_tokens)
        output = speculative_generate(target, target_params, drafter, params, PROMPTS, config=config)
        np.testing.assert_array_equal(output.tokens, greedy_text(PROMPTS))
        assert output.statistics.num_draft_tokens > 0


@pytest.mark.parametrize("name", ["own embedding, norms", pytest.param("full head", marks=pytest.mark.full)])
def test_after_any_acceptance_the_cache_is_that_of_a_prefill_on_the_emitted_text(name: str) -> None:
    target, target_params = tiny_target()
    drafter, params = eagle3(target, target_params, **NETWORKS[name])
    replayed_params = {"drafter": params, "recorded": recorded(greedy_text(PROMPTS), LENGTHS)}
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=4, prefill_chunk_size=8)
    output = speculative_generate(target, target_params, Replayed(drafter), replayed_params, PROMPTS, config=config)
    assert (output.statistics.acceptance_histogram > 0).sum() >= 4
    state, context = output.continuation.drafter_state, output.continuation.context
    np.testing.assert_array_equal(state.cache.length, context.length - 1)
    texts = [[*prompt, *row.tolist()] for prompt, row in zip(PROMPTS, greedy_text(PROMPTS), strict=True)]
    fresh = fresh_state(target, target_params, drafter, params, texts)
    for ours, theirs in zip(state.cache.keys + state.cache.values, fresh.cache.keys + fresh.cache.values, strict=True):
        for row, text in enumerate(texts):
            np.testing.assert_allclose(ours[row, :, : len(text) - 1], theirs[row, :, : len(text) - 1], atol=10 * FLOAT32_TOLERANCE)
    # What the next draft starts from.
    np.testing.assert_allclose(state.hidden, fresh.hidden, atol=20 * FLOAT32_TOLERANCE)
    np.testing.assert_allclose(state.next_state, fresh.next_state, atol=20 * FLOAT32_TOLERANCE)


@pytest.mark.full
def test_a_commit_may_go_back_several_steps_and_replace_features() -> None:
    # What a later, dense pass may do to tokens that an approximate one had committed.
    target, target_params = tiny_target()
    drafter, params = eagle3(target, target_params)
    text = [*PROMPTS[1], *greedy_text(PROMPTS)[1].tolist()]
    tokens = jnp.asarray([text], jnp.int32)
    state = fresh_state(target, target_params, drafter, params, [text])
    spoilt = dataclasses.replace(state.cache, keys=tuple(keys.at[:, :, 20:].add(7.0) for keys in state.cache.keys))
    state = dataclasses.replace(state, cache=spoilt, hidden=state.hidden + 1)
    features = all_features(target, target_params, tokens, LAYERS)
    # Of the tokens up to 25, those from 21 on are committed anew: rows 20 ... 24.
    back = Commit(
        context=Context(tokens=tokens, length=jnp.array([26], jnp.int32)), num_committed=jnp.array([5]), features=features[:, 20:28]
    )
    state = jax.jit(drafter.commit)(params, state, back)
    expected = fresh_state(target, target_params, drafter, params, [text[:26]])
    np.testing.assert_allclose(state.cache.keys[0][:, :, :25], expected.cache.keys[0][:, :, :25], atol=10 * FLOAT32_TOLERANCE)
    np.testing.assert_allclose(state.next_state, expected.next_state, atol=20 * FLOAT32_TOLERANCE)
    assert state.cache.length.tolist() == [25]


@pytest.mark.full
def test_a_continuation_drafts_as_one_call_would() -> None:
    target, target_params = tiny_target()
    drafter, params = eagle3(target, target_params)
    whole = GenerateConfig(max_new_tokens=16, num_speculative_tokens=3)
    half = GenerateConfig(max_new_tokens=8, num_speculative_tokens=3)
    first = speculative_generate(target, target_params, drafter, params, PROMPTS, config=half)
    second = speculative_generate(target, target_params, drafter, params, [[]] * 5, config=half, continue_from=first.continuation)
    expected = speculative_generate(target, target_params, drafter, params, PROMPTS, config=whole)
    np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens], axis=1), expected.tokens)
    np.testing.assert_allclose(
        second.continuation.drafter_state.hidden, expected.continuation.drafter_state.hidden, atol=20 * FLOAT32_TOLERANCE
    )


@pytest.mark.parametrize("rule", [REJECTION, pytest.param(BlockVerification(), marks=pytest.mark.full)], ids=["rejection", "block"])
def test_sampled_text_follows_the_exact_law_of_the_target(rule: Any) -> None:
    drafter, params = eagle3(*small_target(), head=TrimmedHead(num_tokens=3))
    p_value, acceptance_rate = emitted_p_value(drafter, params, setting=(0.8, 4, 0.9), rule=rule)
    assert p_value > MIN_P_VALUE
    assert 0.05 < acceptance_rate < 0.95


@pytest.mark.full
def test_the_recorded_distribution_lies_over_the_targets_vocabulary() -> None:
    target, target_params = tiny_target()
    drafter, params = eagle3(target, target_params, head=TrimmedHead(num_tokens=24))
    state = fresh_state(target, target_params, drafter, params, [PROMPTS[1]])
    context = Context(tokens=jnp.asarray([PROMPTS[1]], jnp.int32), length=jnp.array([len(PROMPTS[1])], jnp.int32))
    keys = jax.random.split(jax.random.key(0), 1)
    draft, _ = drafter.propose(params, state, context, num_speculative_tokens=3, sampling=SamplingParams(1.0).broadcast(1), row_keys=keys)
    assert draft.probs.shape == (1, 3, VOCAB_SIZE)
    known = np.asarray(params["network"]["draft_head"]["token_ids"])
    unknown = np.setdiff1d(np.arange(VOCAB_SIZE), known)
    np.testing.assert_allclose(draft.probs.sum(-1), 1.0, rtol=1e-5)
    assert (draft.probs[..., unknown] == 0).all()
    assert np.isin(draft.tokens, known).all()


def test_what_does_not_fit_is_refused_before_compiling() -> None:
    target, target_params = tiny_target()
    drafter, params = eagle3(target, target_params)
    config = GenerateConfig(max_new_tokens=4)
    other = random_model(tiny_config(hidden_size=64))
    with pytest.raises(ValueError, match="target of width 32, this one has 64"):
        speculative_generate(*other, drafter, params, PROMPTS, config=config)
    with pytest.raises(ValueError, match=r"must have network, target_embedding, got embedding.*: make them with eagle3_params"):
        speculative_generate(target, target_params, drafter, target_params, PROMPTS, config=config)
    network, head = params["network"], params["network"]["draft_head"]
    for broken, message in (
        ({}, r"FullHead: draft_head.lm_head should have shape \[64, 32\], it is missing"),
        (dict(draft_head={"lm_head": head["lm_head"][:5]}), r"draft_head.lm_head should have shape \[64, 32\], it has shape \[5, 32\]"),
    ):
        kept = {name: leaf for name, leaf in network.items() if name != "draft_head"}
        with pytest.raises(ValueError, match=message):
            speculative_generate(target, target_params, drafter, params | {"network": kept | broken}, PROMPTS, config=config)
    unsettled = Eagle3Drafter(drafter.model.clone(config=dataclasses.replace(drafter.model.config, feature_layers=None)))
    with pytest.raises(ValueError, match="use Eagle3Drafter.for_target"):
        speculative_generate(target, target_params, unsettled, params, PROMPTS, config=config)
    deep = tiny_config(num_layers=5)
    assert Eagle3Drafter.for_target(unsettled.model, deep).feature_layers == (2, 3, 4)


def test_a_context_beyond_the_drafters_window_is_a_warning() -> None:
    target, target_params = tiny_target()
    drafter, params = eagle3(target, target_params)
    short = dataclasses.replace(drafter.model.config.decoder, max_position_embeddings=16)
    drafter = Eagle3Drafter(drafter.model.clone(config=dataclasses.replace(drafter.model.config, decoder=short)))
    with pytest.warns(UserWarning, match="may reach 37 tokens, the drafter was made for 16"):
        drafter.check(params, target=target.config, max_length=37)
