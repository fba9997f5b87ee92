"""Acceptance statistics count what was delivered, under vLLM's names."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    GenerateConfig,
    Lossless,
    NoDraft,
    PromptLookup,
    SparseAttention,
    SparseFFN,
    SparsityConfig,
    Statistics,
    speculative_generate,
)
from tests.helpers import NUM_TOKENS, greedy_text, random_prompts, replay, tiny_target


def steps_of(output_row: np.ndarray) -> int:
    return int(np.asarray(output_row).sum())


def test_counts_of_right_wrong_and_half_right_drafters_are_what_they_must_be() -> None:
    # 24 tokens: one from the prefill, 23 in steps of 5, 1, 2, 3 and 4. The last step may be cut.
    statistics = replay([100, 0, 1, 2, 3]).statistics
    assert statistics.accepted_counts.tolist() == [
        [0, 0, 0, 1, 4],  # 4 steps of 4 + 1, then 3 of the last draft
        [23, 0, 0, 0, 0],
        [0, 12, 0, 0, 0],  # 11 steps of 1 + 1, then one whose recovered token did not fit
        [0, 0, 8, 0, 0],
        [0, 0, 0, 6, 0],
    ]
    assert statistics.drafted_counts[0].tolist() == [0, 0, 0, 1, 4]
    assert statistics.drafted_counts[2].tolist() == [0, 1, 0, 1, 10]  # the recording ends: the last two drafts are of 3 and 1 tokens


def test_tokens_delivered_are_prefill_plus_accepted_plus_one_a_whole_step() -> None:
    output = replay([100, 0, 1, 2, 3])
    for row in range(5):
        counts = np.asarray(output.statistics.accepted_counts[row])
        accepted = (counts * np.arange(5)).sum()
        assert output.lengths[row] - 1 - accepted in (counts.sum(), counts.sum() - 1)


@pytest.mark.parametrize(("position", "expected"), [(0, 0), (1, 1), (3, 3), (4, 4), (5, 4), (6, 5)])
def test_counts_stop_at_an_eos(position: int, expected: int) -> None:
    text = greedy_text(random_prompts())[0]
    output = replay(eos_token_ids=int(text[position]))
    counts = output.statistics.accepted_counts[0]
    assert (counts * jnp.arange(5)).sum() == expected
    assert (output.statistics.drafted_counts[0] * jnp.arange(5)).sum() == expected, "drafts behind the EOS must not count as drafted"
    assert steps_of(counts) == -(-position // 5)


def test_one_token_of_budget_counts_one_draft_token_at_most() -> None:
    output = replay([100, 0, 1, 2, 3], max_new_tokens=2)
    assert output.statistics.accepted_counts.sum(1).tolist() == [1] * 5
    assert output.statistics.accepted_counts[:, 0].tolist() == [0, 1, 0, 0, 0]
    assert (output.statistics.drafted_counts * jnp.arange(5)).sum(1).tolist() == [1, 4, 1, 1, 1]


def test_finished_rows_do_not_count() -> None:
    output = replay([100, 0, 1, 2, 3], max_new_tokens=[24, 3, 24, 0, 1])
    assert output.statistics.accepted_counts.sum(1).tolist() == [5, 2, 12, 0, 0]


def test_rates_have_their_documented_formulas() -> None:
    counts = jnp.array([[1, 2, 0, 3], [0, 0, 1, 0]])
    drafted = jnp.array([[0, 0, 2, 4], [0, 0, 0, 1]])
    statistics = Statistics(accepted_counts=counts, drafted_counts=drafted)
    assert statistics.num_steps == 7
    assert statistics.num_accepted_tokens == 2 + 9 + 2
    assert statistics.num_draft_tokens == 4 + 12 + 3
    assert statistics.draft_acceptance_rate == pytest.approx(13 / 19)
    assert statistics.mean_acceptance_length == pytest.approx(1 + 13 / 7)  # the bonus token included
    assert statistics.acceptance_histogram.tolist() == [1, 2, 1, 3]
    np.testing.assert_allclose(statistics.acceptance_rate_per_position, [6 / 7, 4 / 7, 3 / 7], rtol=1e-6)


def test_summary_is_plain_numbers_under_vllms_names() -> None:
    summary = replay([100, 0, 1, 2, 3]).statistics.summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary.keys() >= {
        "num_draft_tokens",
        "num_accepted_tokens",
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
    }
    assert summary["steps"] == 5 + 23 + 12 + 8 + 6
    assert not summary["synthetic"]


def test_statistics_add_over_batches() -> None:
    first, second = replay(100).statistics, replay(0).statistics
    total = first + second
    assert total.num_steps == first.num_steps + second.num_steps
    assert total.num_accepted_tokens == first.num_accepted_tokens
    assert total.num_draft_tokens == first.num_draft_tokens + second.num_draft_tokens
    with pytest.raises(ValueError, match="different draft lengths do not add: 4 and 2"):
        first + Statistics.zeros(5, 2)


def test_nothing_drafted_gives_rates_without_a_division_by_zero() -> None:
    target, params = tiny_target()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=4)
    statistics = speculative_generate(target, params, NoDraft(), None, random_prompts(), config=config).statistics
    assert statistics.num_draft_tokens == 0
    assert statistics.draft_acceptance_rate == 0
    assert statistics.mean_acceptance_length == 1
    assert Statistics.zeros(1, 4).mean_acceptance_length == 1


@pytest.mark.parametrize("sparse", [False, pytest.param(True, marks=pytest.mark.full)])
def test_calls_of_a_vmap_count_as_all_of_their_rows(sparse: bool) -> None:
    target, params = tiny_target()
    lossless = Lossless(max_steps=2, step_cost=0.5)
    settings = dict(attention=SparseAttention(block_size=4, keep=0.0, dense_below=0), ffn=SparseFFN(keep=0.5), lossless=lossless)
    sparsity = SparsityConfig(**settings) if sparse else SparsityConfig()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=4, sparsity=sparsity)
    prompts = jnp.array([[5, 6, 5, 6], [7, 7, 7, 7], [1, 2, 3, 4]])

    def statistics(prompt: jax.Array) -> Statistics:
        return speculative_generate(target, params, PromptLookup(), None, prompt[None], config=config).statistics

    first, second, third = map(statistics, prompts)
    together = jax.jit(jax.vmap(statistics))(prompts)
    assert together.accepted_counts.shape == (3, 1, 5)
    wanted = (first + second + third).summary()
    assert wanted["mean_acceptance_length"] > 1
    assert jax.tree.map(pytest.approx, together.summary()) == wanted
    assert together.steps_per_row.tolist() == [[int(x.num_steps)] for x in (first, second, third)]
    assert (together + first).summary()["steps"] == wanted["steps"] + int(first.num_steps)
    assert jax.tree.map(lambda x: x[0], together).summary() == first.summary(), "a single row may have lost its axis"
