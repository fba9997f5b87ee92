"""Going on from a finished call equals one long call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specjax import DraftModel, FinishReason, GenerateConfig, GenerateOutput, PromptLookup, generate, speculative_generate
from tests.helpers import NUM_TOKENS, greedy_text, random_prompts, tiny_target

PROMPTS = random_prompts()
EMPTY: list[list[int]] = [[] for _ in PROMPTS]


def run(prompts: Any, **arguments: Any) -> GenerateOutput:
    target, params = tiny_target()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=2)
    return speculative_generate(target, params, DraftModel(target), params, prompts, config=config, **arguments)


def test_two_calls_equal_one_long_call() -> None:
    text = greedy_text(PROMPTS)
    for cut in (1, 10, 23):
        first = run(PROMPTS, max_new_tokens=cut)
        second = run(EMPTY, max_new_tokens=NUM_TOKENS - cut, continue_from=first.continuation)
        joined = np.concatenate([first.tokens[:, :cut], second.tokens[:, : NUM_TOKENS - cut]], axis=1)
        np.testing.assert_array_equal(joined, text)
        assert second.lengths.tolist() == [NUM_TOKENS - cut] * 5


def test_a_new_prompt_after_an_answer_equals_one_prompt_that_holds_both() -> None:
    limits = [24, 3, 0, 7, 1]  # row 2 has not emitted anything: its prompt's only token is pending
    first = run(PROMPTS, max_new_tokens=limits)
    more = random_prompts((3, 2, 4, 0, 5), seed=9)  # row 3 just goes on
    second = run(more, continue_from=first.continuation)
    joined = [prompt + first.tokens[row, : limits[row]].tolist() + more[row] for row, prompt in enumerate(PROMPTS)]
    np.testing.assert_array_equal(second.tokens, greedy_text(joined))
    assert second.statistics.draft_acceptance_rate == 1.0, "the draft model lost part of its context"
    for row, prompt in enumerate(joined):
        length = second.continuation.context.length[row]
        assert second.continuation.context.tokens[row, :length].tolist() == prompt + second.tokens[row].tolist()


def test_rows_that_ended_at_an_eos_go_on_behind_it() -> None:
    text = greedy_text(PROMPTS)
    eos = int(text[0, 5])
    first = run(PROMPTS, eos_token_ids=eos)
    assert first.finish_reason[0] == FinishReason.EOS
    second = run(EMPTY, continue_from=first.continuation)
    length = int(first.lengths[0])
    np.testing.assert_array_equal(second.tokens[0, : NUM_TOKENS - length], text[0, length:])


@pytest.mark.full
def test_prompt_lookup_and_plain_decoding_continue_too() -> None:
    target, params = tiny_target()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS)
    text = greedy_text(PROMPTS)
    first = generate(target, params, PROMPTS, config=config, max_new_tokens=8)
    # The other drafter needs no state of its own: it may take over.
    second = speculative_generate(
        target, params, PromptLookup(), None, EMPTY, config=config, max_new_tokens=8, continue_from=first.continuation
    )
    third = generate(target, params, EMPTY, config=config, max_new_tokens=8, continue_from=second.continuation)
    np.testing.assert_array_equal(np.concatenate([x.tokens[:, :8] for x in (first, second, third)], axis=1), text)


def test_room_reserved_by_cache_capacity_is_used_by_the_next_call() -> None:
    target, params = tiny_target()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, cache_capacity=200)
    first = generate(target, params, PROMPTS, config=config, max_new_tokens=8)
    assert first.continuation.target_cache.capacity == 200
    second = generate(target, params, EMPTY, config=config, max_new_tokens=16, continue_from=first.continuation)
    assert second.continuation.target_cache.capacity == 200
    np.testing.assert_array_equal(second.tokens[:, :16], greedy_text(PROMPTS)[:, 8:])


def test_a_continuation_of_another_batch_size_or_beyond_the_window_is_refused() -> None:
    first = run(PROMPTS)
    with pytest.raises(ValueError, match="continue_from holds 5 rows, prompt_tokens 2"):
        run([[1], [2]], continue_from=first.continuation)
    with pytest.raises(ValueError, match="row 3: a prompt of 450 tokens after 57 earlier ones and up to 24 new ones exceed .* 512"):
        run([[1], [1], [1], [1] * 450, [1]], continue_from=first.continuation)
