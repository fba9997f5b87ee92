"""Streaming yields, piece by piece, exactly what one call returns."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from specjax import GenerateConfig, PromptLookup, SamplingParams, speculative_generate, stream_generate
from tests.helpers import NUM_TOKENS, greedy_text, random_prompts, tiny_target

PROMPTS = random_prompts()
CONFIG = GenerateConfig(max_new_tokens=NUM_TOKENS, do_sample=True)


def models() -> tuple[Any, ...]:
    return (*tiny_target(), PromptLookup(), None)


@pytest.mark.parametrize("steps_per_update", [pytest.param(1, marks=pytest.mark.full), 5])
def test_all_updates_together_equal_one_call(steps_per_update: int) -> None:
    eos = int(greedy_text(PROMPTS)[0, 9])
    arguments = dict(
        config=CONFIG,
        sampling=SamplingParams(temperature=np.array([0.0, 0.5, 0.0, 1.0, 2.0])),
        rng=jax.random.key(0),
        eos_token_ids=eos,
        max_new_tokens=[24, 24, 5, 0, 20],
    )
    expected = speculative_generate(*models(), PROMPTS, **arguments)
    streamed: list[list[int]] = [[] for _ in PROMPTS]
    updates = list(stream_generate(*models(), PROMPTS, steps_per_update=steps_per_update, **arguments))
    for update in updates:
        for row, tokens in zip(streamed, update.new_tokens, strict=True):
            row.extend(tokens)
    assert [update.output is None for update in updates] == [True] * (len(updates) - 1) + [False]
    output = updates[-1].output
    assert output is not None
    assert streamed == [expected.tokens[row, : expected.lengths[row]].tolist() for row in range(5)]
    jax.tree.map(np.testing.assert_array_equal, output, expected)


@pytest.mark.full
def test_a_stream_leaves_the_continuation_that_it_starts_from_usable() -> None:
    first = speculative_generate(*models(), PROMPTS, config=CONFIG, rng=jax.random.key(0))
    more = random_prompts((3,) * 5, seed=8)
    arguments = dict(config=CONFIG, sampling=SamplingParams(0.0), rng=jax.random.key(1), continue_from=first.continuation)
    runs = [list(stream_generate(*models(), more, steps_per_update=5, **arguments))[-1].output for _ in range(2)]
    expected = speculative_generate(*models(), more, **arguments)
    for output in runs:
        assert output is not None
        np.testing.assert_array_equal(output.tokens, expected.tokens)


def test_bad_input_is_refused_at_the_call_and_not_at_the_first_update() -> None:
    with pytest.raises(ValueError, match="steps_per_update must be at least 1, got 0"):
        stream_generate(*models(), PROMPTS, config=CONFIG, steps_per_update=0, rng=jax.random.key(0))
    with pytest.raises(ValueError, match="prompt lengths must be from 1"):
        stream_generate(*models(), [[]], config=CONFIG, rng=jax.random.key(0))
