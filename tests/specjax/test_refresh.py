"""Refreshes: every step dense is dense decoding, and what sparse steps wrote becomes what a dense pass would have written."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from specjax import (
    FinishReason,
    GenerateConfig,
    SparseAttention,
    SparseFFN,
    SparsityConfig,
    generate,
    speculative_generate,
    stream_generate,
)
from tests.helpers import FLOAT32_TOLERANCE, ReplayDrafter, greedy_text, random_prompts, recorded, tiny_target

NUM_TOKENS, NUM_DRAFTS, CAPACITY = 24, 3, 80
PROMPTS = random_prompts((40, 50))
ATTENTION = SparseAttention(block_size=8, keep=0.0, dense_below=16, head_blocks=1, tail_blocks=0)
# Rows whose drafts flip at random spots commit different numbers of tokens.
DRAFTER = ReplayDrafter(random_flips=True)


def sparse(refresh_every: int) -> SparsityConfig:
    return SparsityConfig(attention=ATTENTION, refresh_every=refresh_every)


def run(sparsity: SparsityConfig, *, call: Any = speculative_generate, prompts: Any = None, **arguments: Any) -> Any:
    target, params = tiny_target()
    config = GenerateConfig(
        max_new_tokens=NUM_TOKENS, num_speculative_tokens=NUM_DRAFTS, cache_capacity=CAPACITY, prefill_chunk_size=64, sparsity=sparsity
    )
    answers = recorded(greedy_text(PROMPTS), [len(prompt) for prompt in PROMPTS])
    return call(target, params, DRAFTER, answers, PROMPTS if prompts is None else prompts, config=config, **arguments)


@functools.cache
def run_once(refresh_every: int) -> Any:
    return run(sparse(refresh_every))


def keys_differ(output: Any, row: int) -> np.ndarray:
    """For each position of a row's cache, how far the keys of the last layer are from those of a dense prefill of the same text."""
    target, params = tiny_target()
    context, cache = output.continuation.context, output.continuation.target_cache
    clean = target.apply({"params": params}, context.tokens, target.init_cache(batch_size=2, capacity=CAPACITY)).cache
    length = int(cache.length[row])
    return np.abs(np.asarray(cache.keys[1] - clean.keys[1])[row, :, :length]).max(axis=(0, 2))


@pytest.mark.full
def test_a_refresh_at_every_step_is_dense_decoding() -> None:
    output = run_once(1)
    np.testing.assert_array_equal(output.tokens, greedy_text(PROMPTS))
    assert output.statistics.attention_reads.keep_ratio == 1
    assert (run_once(0).tokens != greedy_text(PROMPTS)).any(), "nothing was left out that matters"


@pytest.mark.full
def test_a_refresh_makes_the_cache_dense_up_to_where_it_stood_and_the_next_call_does_the_rest() -> None:
    output = run_once(3)
    dense_length = np.asarray(output.continuation.dense_length)
    length = np.asarray(output.continuation.target_cache.length)
    assert (dense_length > [len(prompt) for prompt in PROMPTS]).all()
    assert (dense_length < length).any()
    for row in range(2):
        differ = keys_differ(output, row)
        # float32 sums over another number of rows, of keys of order 1
        assert (differ[: dense_length[row]] < 10 * FLOAT32_TOLERANCE).all()
    assert max(keys_differ(output, row)[dense_length[row] :].max(initial=0) for row in range(2)) > 0.01
    spoiled = keys_differ(run_once(0), 0)
    assert (spoiled[len(PROMPTS[0]) + 4 :] > 0.01).any()
    target, params = tiny_target()
    config = GenerateConfig(max_new_tokens=1, cache_capacity=CAPACITY)
    healed = generate(target, params, [[], []], config=config, continue_from=output.continuation)
    assert max(keys_differ(healed, row).max() for row in range(2)) < 10 * FLOAT32_TOLERANCE


@pytest.mark.parametrize("limits", [pytest.param([NUM_TOKENS, NUM_TOKENS], marks=pytest.mark.full), [3, 0]])
def test_a_call_stands_on_a_dense_context_where_the_one_before_never_refreshed(limits: list[int]) -> None:
    first = run(sparse(0), max_new_tokens=limits)
    target, params = tiny_target()
    # Smaller than what is behind: it takes several passes, of which the last would exceed the capacity.
    config = GenerateConfig(max_new_tokens=1, cache_capacity=CAPACITY, prefill_chunk_size=7)
    healed = generate(target, params, [[], []], config=config, continue_from=first.continuation)
    # float32 sums over another number of rows, of keys of order 1
    assert max(keys_differ(healed, row).max() for row in range(2)) < 10 * FLOAT32_TOLERANCE


@pytest.mark.full
def test_refreshes_are_counted_as_the_dense_passes_they_are() -> None:
    never, some = (run_once(every).statistics for every in (0, 3))
    assert never.attention_reads.keep_ratio < some.attention_reads.keep_ratio < 1
    assert some.attention_reads.num_passes.sum() == some.num_steps
    tokens = float(some.pass_counts.tokens.sum()) / float(some.pass_counts.num_passes.sum())
    assert NUM_DRAFTS + 1 < tokens < 3 * (NUM_DRAFTS + 1)  # a mean of G + 1 and 3 (G + 1) rows
    work = some.summary()["step_work"]["feed_forward"]
    assert work["flops"] / work["dense_flops"] == pytest.approx(tokens / (NUM_DRAFTS + 1), rel=1e-5)


@pytest.mark.full
def test_streaming_refreshes_at_the_same_steps() -> None:
    *_, last = run(sparse(3), call=stream_generate, steps_per_update=2)
    np.testing.assert_array_equal(last.output.tokens, run_once(3).tokens)


@pytest.mark.full
def test_a_row_that_is_not_a_number_leaves_the_others_alone_and_a_callers_jit_changes_nothing() -> None:
    target, params = tiny_target()
    sparsity = dataclasses.replace(sparse(3), ffn=SparseFFN(keep=0.5))
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=NUM_DRAFTS, cache_capacity=CAPACITY, sparsity=sparsity)
    answers = recorded(greedy_text(PROMPTS), [len(prompt) for prompt in PROMPTS], flip_at=2)

    def tokens(params: dict, prompts: Any) -> Any:
        return speculative_generate(target, params, ReplayDrafter(), answers, prompts, config=config, prompt_lengths=[40, 50])

    prompts = np.array([prompt + [0] * (50 - len(prompt)) for prompt in PROMPTS])
    expected = tokens(params, prompts)
    np.testing.assert_array_equal(jax.jit(tokens)(params, prompts).tokens, expected.tokens)
    emitted = expected.tokens[1].tolist()
    token = next(token for token in PROMPTS[0] if token not in PROMPTS[1] + emitted + answers["tokens"][1].tolist())
    spoiled = params | {"embedding": params["embedding"].at[token].set(np.nan)}
    output = tokens(spoiled, prompts)
    assert output.finish_reason.tolist() == [FinishReason.NONFINITE_LOGITS, FinishReason.LENGTH]
    np.testing.assert_array_equal(output.tokens[1], expected.tokens[1])


def test_refreshes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="SparsityConfig.refresh_every = 4 needs something sparse to refresh"):
        SparsityConfig(refresh_every=4)
    with pytest.raises(ValueError, match="SparsityConfig.refresh_every must be an int of at least 0, got -1"):
        SparsityConfig(attention=ATTENTION, refresh_every=-1)
    with pytest.raises(ValueError, match="cache_capacity = 80 slots are too few: this call needs 84"):
        run(sparse(21))
    assert dataclasses.replace(sparse(3), refresh_every=0) == sparse(0)
