"""Where a row ends: EOS anywhere in a block, several EOS ids, rows that ignore it, limits."""

from __future__ import annotations

import numpy as np

from specjax import FinishReason, GenerateConfig, GenerateOutput, generate
from tests.helpers import NUM_TOKENS, VOCAB_SIZE, greedy_text, plain, random_prompts, replay, tiny_target

FLIPS = [100, 0, 1, 2, 3]


def assert_ends_where_plain_text_does(output: GenerateOutput, eos: list[int], *, limit: int = NUM_TOKENS) -> None:
    """The text up to the first EOS and the limit, then padding; with the reason."""
    text = greedy_text(random_prompts())
    for row in range(len(text)):
        positions = np.flatnonzero(np.isin(text[row, :limit], eos))
        length = positions[0] + 1 if positions.size else limit
        reason = FinishReason.EOS if positions.size else FinishReason.LENGTH
        assert output.lengths[row] == length
        assert output.finish_reason[row] == reason
        np.testing.assert_array_equal(output.tokens[row, :length], text[row, :length])
        assert (output.tokens[row, length:] == 0).all()


def test_an_eos_at_every_offset_of_a_block_and_as_the_bonus_token_ends_the_row() -> None:
    # Row 0 accepts whole blocks: tokens 1 to 4 are the first block's drafts, token 5 its bonus token, and so on.
    text = greedy_text(random_prompts())[0]
    assert len(set(text[:6].tolist())) == 6
    for position in range(7):
        output = replay(FLIPS, eos_token_ids=int(text[position]))
        assert output.lengths[0] == position + 1
        assert_ends_where_plain_text_does(output, [text[position]])


def test_any_token_declared_to_be_eos_ends_speculative_and_plain_text_alike() -> None:
    for eos in range(0, VOCAB_SIZE, 5):
        assert_ends_where_plain_text_does(replay(FLIPS, eos_token_ids=eos), [eos])
        assert_ends_where_plain_text_does(plain(eos_token_ids=eos), [eos])


def test_an_eos_that_is_only_drafted_ends_nothing() -> None:
    text = greedy_text(random_prompts())
    # An always-wrong drafter proposes token + 1.
    drafted_only = sorted(set(((text + 1) % VOCAB_SIZE).ravel().tolist()) - set(text.ravel().tolist()))
    assert drafted_only
    output = replay(0, eos_token_ids=drafted_only[:8])
    np.testing.assert_array_equal(output.tokens, text)
    assert (np.asarray(output.finish_reason) == FinishReason.LENGTH).all()


def test_any_of_several_eos_ids_ends_a_row_and_rows_end_independently() -> None:
    text = greedy_text(random_prompts())
    eos = [int(text[0, 4]), int(text[3, 9]), int(text[1, 2])]
    output = replay(FLIPS, eos_token_ids=eos)
    assert_ends_where_plain_text_does(output, eos)
    assert len(set(output.lengths.tolist())) > 2


def test_rows_that_ignore_eos_run_to_their_limit() -> None:
    text = greedy_text(random_prompts())
    eos = [int(text[row, 3]) for row in range(5)]
    everyone = replay(FLIPS, eos_token_ids=eos)
    some = replay(FLIPS, eos_token_ids=eos, ignore_eos=np.array([False, True, False, False, True]))
    assert (np.asarray(everyone.lengths) <= 4).all()
    for row, ignores in enumerate([False, True, False, False, True]):
        assert some.lengths[row] == (NUM_TOKENS if ignores else everyone.lengths[row])
        assert some.finish_reason[row] == (FinishReason.LENGTH if ignores else FinishReason.EOS)
        np.testing.assert_array_equal(some.tokens[row, : some.lengths[row]], text[row, : some.lengths[row]])


def test_an_eos_in_the_prompt_ends_nothing() -> None:
    prompts = random_prompts()
    eos = next(token for token in prompts[3] if token not in greedy_text(prompts)[3])
    assert_ends_where_plain_text_does(replay(FLIPS, eos_token_ids=eos), [eos])


def test_the_last_token_allowed_may_be_the_eos() -> None:
    text = greedy_text(random_prompts())[0]
    output = replay(eos_token_ids=int(text[4]), max_new_tokens=5)
    assert output.lengths[0] == 5
    assert output.finish_reason[0] == FinishReason.EOS


def test_exactly_as_many_tokens_are_delivered_as_were_asked_for() -> None:
    for limit in [*range(1, 10), NUM_TOKENS]:
        assert_ends_where_plain_text_does(replay(FLIPS, max_new_tokens=limit), [], limit=limit)


def test_every_row_may_have_its_own_limit() -> None:
    limits = np.array([7, 0, 24, 1, 3])
    for output in (replay(FLIPS, max_new_tokens=limits), plain(max_new_tokens=limits)):
        assert output.lengths.tolist() == limits.tolist()
        assert (np.asarray(output.finish_reason) == FinishReason.LENGTH).all()
        text = greedy_text(random_prompts())
        for row, limit in enumerate(limits):
            np.testing.assert_array_equal(output.tokens[row], [*text[row, :limit], *[0] * (NUM_TOKENS - limit)])


def test_the_output_is_as_wide_as_the_configured_limit_not_as_its_bucket() -> None:
    target, params = tiny_target()
    text = greedy_text(random_prompts())
    for limit in (17, 19, 24):
        output = generate(target, params, random_prompts(), config=GenerateConfig(max_new_tokens=limit))
        np.testing.assert_array_equal(output.tokens, text[:, :limit])


def test_no_new_tokens_gives_an_empty_result() -> None:
    target, params = tiny_target()
    output = generate(target, params, [[1, 2], [3]], config=GenerateConfig(max_new_tokens=0))
    assert output.tokens.shape == (2, 0)
    assert output.lengths.tolist() == [0, 0]
    assert output.finish_reason.tolist() == [FinishReason.LENGTH] * 2
