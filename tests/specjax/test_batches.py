"""Rows of a batch are independent: of their neighbours, of their padding, of when the others finish."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import DraftModel, GenerateConfig, GenerateOutput, generate, left_align, speculative_generate, stream_generate
from tests.helpers import (
    NUM_TOKENS,
    ReplayDrafter,
    greedy_text,
    numpy_forward,
    random_prompts,
    recorded,
    replay,
    tiny_draft_model,
    tiny_target,
)

PROMPTS = random_prompts((1, 3, 16, 40), seed=2)


def run(prompts: object, **arguments: object) -> GenerateOutput:
    target, params = tiny_target()
    draft_model, draft_params = tiny_draft_model()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=3)
    return speculative_generate(target, params, DraftModel(draft_model), draft_params, prompts, config=config, **arguments)


def test_every_row_equals_its_run_alone_in_text_and_in_acceptance() -> None:
    batch = run(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        alone = run([prompt])
        np.testing.assert_array_equal(batch.tokens[row], alone.tokens[0])
        # Equal acceptance: the drafter, too, saw this row's own text and none of its padding.
        np.testing.assert_array_equal(batch.statistics.accepted_counts[row], alone.statistics.accepted_counts[0])
    assert (batch.statistics.accepted_counts[:, 1:].sum(1) > 0).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("library", [np, jnp])
def test_left_and_right_padded_batches_give_the_text_of_the_lists(side: str, library: Any) -> None:
    width = max(len(prompt) for prompt in PROMPTS)
    tokens, mask = np.full((4, width), 59), np.zeros((4, width), int)
    for row, prompt in enumerate(PROMPTS):
        where = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        tokens[row, where], mask[row, where] = prompt, 1
    aligned, lengths = left_align(library.asarray(tokens), library.asarray(mask))
    assert lengths.tolist() == [len(prompt) for prompt in PROMPTS]
    for row, prompt in enumerate(PROMPTS):
        assert aligned[row, : len(prompt)].tolist() == prompt
    output, expected = run(aligned, prompt_lengths=lengths), run(PROMPTS)
    np.testing.assert_array_equal(output.tokens, expected.tokens)
    np.testing.assert_array_equal(output.statistics.accepted_counts, expected.statistics.accepted_counts)


def test_left_align_keeps_the_order_of_tokens_between_holes() -> None:
    tokens, lengths = left_align(np.array([[5, 9, 6, 9, 7]]), np.array([[1, 0, 1, 0, 1]]))
    assert tokens[0, :3].tolist() == [5, 6, 7]
    assert lengths.tolist() == [3]


def test_rows_advance_by_what_each_accepts_and_the_slowest_decides_the_number_of_steps() -> None:
    target, params = tiny_target()
    prompts = random_prompts()
    drafter_params = recorded(greedy_text(prompts), [len(prompt) for prompt in prompts], flip_at=[100, 0, 1, 2, 3])
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=4)
    updates = list(stream_generate(target, params, ReplayDrafter(), drafter_params, prompts, config=config))
    advances = [[len(tokens) for tokens in update.new_tokens] for update in updates]
    assert advances[0] == [1] * 5  # the prefill
    assert advances[1] == advances[2] == [5, 1, 2, 3, 4]
    assert len(updates) == 1 + 23, "the row that accepts nothing needs 23 steps"
    assert advances[-1] == [0, 1, 0, 0, 0], "finished rows stand still"
    output = updates[-1].output
    assert output is not None
    assert output.statistics.accepted_counts.sum(1).tolist() == [5, 23, 12, 8, 6]


def test_a_finished_row_does_not_change_whatever_the_others_do() -> None:
    everyone = replay([100, 0, 1, 2, 3], max_new_tokens=[3, 24, 24, 24, 24])
    together = replay([100, 0, 1, 2, 3], max_new_tokens=3)
    cache, expected = everyone.continuation.target_cache, together.continuation.target_cache
    assert cache.length[0] == expected.length[0] == 5 + 3 - 1
    np.testing.assert_array_equal(everyone.tokens[0], together.tokens[0])
    for got, want in zip(cache.keys + cache.values, expected.keys + expected.values, strict=True):
        np.testing.assert_array_equal(got[0, :, :7], want[0, :, :7])


def test_a_pad_id_that_is_an_eos_id_or_stands_in_prompts_means_nothing() -> None:
    target, params = tiny_target()
    text = greedy_text(random_prompts())
    pad = int(text[0, 3])
    prompts = random_prompts()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, pad_token_id=pad)
    output = generate(target, params, prompts, config=config, eos_token_ids=pad)
    assert output.lengths[0] == np.flatnonzero(text[0] == pad)[0] + 1
    assert (output.tokens[0, output.lengths[0] :] == pad).all()
    assert output.tokens[0, output.lengths[0] - 1] == pad
    # Pad ids inside a prompt are tokens like any other.
    for tokens in ([0, 0, 0], [7, 0, 0], [0, 0, 7], [pad, 7, pad]):
        first = greedy_text([tokens, tokens[:1]])[0, 0]
        assert first == numpy_forward(target.config, params, tokens)[-1].argmax()
