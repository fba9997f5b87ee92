"""NaN and infinity: a fault ends the row that it concerns, by name, and no other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import DraftModel, FinishReason, GenerateConfig, GenerateOutput, PromptLookup, SamplingParams, speculative_generate
from specjax.sampling import SamplingParams as Params
from specjax.state import Draft
from specjax.verification.rejection_sampling import RejectionSampling
from specjax.verification.verify import verify
from tests.helpers import (
    NUM_TOKENS,
    VOCAB_SIZE,
    greedy_text,
    plain,
    random_prompts,
    replay,
    tiny_draft_model,
    tiny_target,
)

FLIPS = [100, 0, 1, 2, 3]


def poisoned(token: int, name: str = "embedding", value: float = np.nan) -> dict:
    _, params = tiny_target()
    return params | {name: params[name].at[token].set(value)}


def assert_stops_after(output: GenerateOutput, token: int) -> None:
    """Rows whose prompt holds the token emit nothing; rows that emit it stop behind it; the others do not change."""
    prompts = random_prompts()
    text = greedy_text(prompts)
    for row, prompt in enumerate(prompts):
        positions = np.flatnonzero(text[row] == token)
        length = 0 if token in prompt else positions[0] + 1 if positions.size else NUM_TOKENS
        assert output.lengths[row] == length
        expected_reason = FinishReason.NONFINITE_LOGITS if length < NUM_TOKENS else FinishReason.LENGTH
        assert output.finish_reason[row] == expected_reason
        np.testing.assert_array_equal(output.tokens[row, :length], text[row, :length])
        assert (output.tokens[row, length:] == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_meets_a_token_of_invalid_embedding_is_flagged_and_leaves_the_others_alone(value: float) -> None:
    prompts, text = random_prompts(), greedy_text(random_prompts())
    in_prompts = {token for prompt in prompts for token in prompt}
    in_one_prompt = next(token for token in prompts[1] if sum(token in prompt for prompt in prompts) == 1)
    only_emitted = next(token for token in text[0].tolist() if token not in in_prompts)
    for token in (0, in_one_prompt, only_emitted):  # 0 fills the padding of every prompt
        params = poisoned(token, value=value)
        assert_stops_after(replay(FLIPS, target_params=params), token)
        assert_stops_after(plain(target_params=params), token)


def test_a_nan_behind_a_token_that_is_drafted_but_never_emitted_changes_nothing() -> None:
    prompts, text = random_prompts(), greedy_text(random_prompts())
    seen = set(text.ravel().tolist()) | {token for prompt in prompts for token in prompt}
    drafted = ((text + 1) % VOCAB_SIZE)[1]  # row 1 drafts nothing but these
    tokens = [token for token in drafted.tolist() if token not in seen]
    assert tokens
    output = replay(FLIPS, target_params=poisoned(tokens[0]))
    np.testing.assert_array_equal(output.tokens, text)
    assert (np.asarray(output.finish_reason) == FinishReason.LENGTH).all()


def test_a_target_of_nothing_but_nan_terminates_and_flags_every_row() -> None:
    _, params = tiny_target()
    for output in (replay(FLIPS, target_params=jax.tree.map(lambda x: x * jnp.nan, params)), plain(target_params=poisoned(7, "lm_head"))):
        assert output.lengths.tolist() == [0] * 5
        assert output.finish_reason.tolist() == [FinishReason.NONFINITE_LOGITS] * 5
        assert (output.tokens == 0).all()


def test_sampling_beside_a_faulty_row_draws_the_same_tokens_inside_the_vocabulary() -> None:
    target, params = tiny_target()
    prompts = random_prompts()
    token = next(token for token in prompts[1] if sum(token in prompt for prompt in prompts) == 1)
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, do_sample=True)

    def run(params: Any) -> GenerateOutput:
        sampling = SamplingParams(temperature=0.5, top_k=3, top_p=0.9)
        return speculative_generate(target, params, PromptLookup(), None, prompts, config=config, sampling=sampling, rng=jax.random.key(0))

    clean, faulty = run(params), run(poisoned(token))
    assert faulty.finish_reason[1] == FinishReason.NONFINITE_LOGITS
    assert faulty.lengths[1] == 0
    assert ((faulty.tokens >= 0) & (faulty.tokens < VOCAB_SIZE)).all()
    for row in (0, 2, 3, 4):
        if token not in clean.tokens[row].tolist():
            np.testing.assert_array_equal(faulty.tokens[row], clean.tokens[row])
            assert faulty.finish_reason[row] == FinishReason.LENGTH


@pytest.mark.parametrize("fault", ["all NaN", "all -inf", "one token NaN"])
def test_a_draft_model_without_usable_logits_costs_drafts_and_never_text(fault: str) -> None:
    target, params = tiny_target()
    draft_model, draft_params = tiny_draft_model()
    prompts = random_prompts()
    if fault == "one token NaN":
        token = int(greedy_text(prompts)[0, 2])
        broken = draft_params | {"embedding": draft_params["embedding"].at[token].set(jnp.nan)}
    else:
        broken = draft_params | {"lm_head": jnp.full_like(draft_params["lm_head"], jnp.nan if fault == "all NaN" else -jnp.inf)}
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=3)
    output = speculative_generate(target, params, DraftModel(draft_model), broken, prompts, config=config)
    np.testing.assert_array_equal(output.tokens, greedy_text(prompts))
    assert (np.asarray(output.finish_reason) == FinishReason.LENGTH).all()
    if fault == "all NaN":
        assert output.statistics.num_draft_tokens == 0


def check(logits: np.ndarray, draft_tokens: list[int], *, do_sample: bool) -> tuple[list[int], bool]:
    draft = Draft(tokens=jnp.array([draft_tokens]), num_drafted=jnp.array([len(draft_tokens)]), probs=None)
    keys = jax.random.split(jax.random.key(0), 1)
    checked = verify(RejectionSampling(), draft, jnp.asarray(logits)[None], Params().broadcast(1), keys, do_sample=do_sample)
    count = int(checked.verification.num_accepted[0])
    return checked.verification.tokens[0, : count + 1].tolist(), bool(checked.nonfinite[0])


@pytest.mark.parametrize("do_sample", [False, True])
def test_tokens_accepted_before_an_invalid_row_of_logits_are_kept(do_sample: bool) -> None:
    logits = np.full((3, 4), -1e9, np.float32)
    logits[[0, 1, 2], [2, 3, 1]] = 0.0
    assert check(logits, [2, 3], do_sample=do_sample) == ([2, 3, 1], False)
    for fault in (np.nan, np.inf):
        broken = logits.copy()
        broken[1, 0] = fault
        tokens, nonfinite = check(broken, [2, 3], do_sample=do_sample)
        assert tokens[:1] == [2]
        assert len(tokens) == 2
        assert nonfinite
    # A draft that is wrong before the invalid row: the row was never needed.
    assert check(broken, [0, 3], do_sample=do_sample) == ([2], False)


@pytest.mark.parametrize("do_sample", [False, True])
def test_minus_infinity_for_some_tokens_is_a_mask_and_for_all_a_fault(do_sample: bool) -> None:
    logits = np.full((2, 4), -np.inf, np.float32)
    logits[:, 3] = 1.0
    assert check(logits, [3], do_sample=do_sample) == ([3, 3], False)
    logits[1] = -np.inf
    tokens, nonfinite = check(logits, [3], do_sample=do_sample)
    assert tokens[:1] == [3]
    assert nonfinite
