"""Counts of calls add up past 2^31, and nothing that is said of them wraps around; within a traced function they stay what they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import SparseAttention, Statistics
from specjax.checks import require_seed
from specjax.counts import added, ratio, total
from specjax.sparsity.agreement import Agreement
from specjax.sparsity.attention_reads import AttentionReads
from specjax.sparsity.histogram import histogram
from specjax.two_level.level_counts import LevelCounts

BILLION = 1_000_000_000


def statistics(**more: Any) -> Statistics:
    """Of two rows, each with a billion steps that accept one of two drafted tokens and a billion that accept both."""
    counts = jnp.full((2, 3), BILLION, jnp.int32)
    return Statistics(accepted_counts=counts.at[:, 0].set(0), drafted_counts=counts.at[:, :2].set(0), **more)


def test_statistics_count_past_the_range_of_int32() -> None:
    one = statistics()
    assert (int(one.num_steps), int(one.num_accepted_tokens), int(one.num_draft_tokens)) == (4 * BILLION, 6 * BILLION, 4 * BILLION)
    whole = one + one + one
    summary = whole.summary()
    assert summary["steps"] == 12 * BILLION
    assert summary["num_accepted_tokens"] == 18 * BILLION
    assert summary["num_draft_tokens"] == 12 * BILLION
    assert summary["acceptance_histogram"] == [0, 6 * BILLION, 6 * BILLION]
    assert summary["mean_acceptance_length"] == 2.5
    assert summary["acceptance_rate_per_position"] == [1.0, 0.5]
    assert float(whole.draft_acceptance_rate) == 1.5


def test_sparse_reads_and_two_levels_count_past_the_range_of_int32_and_the_digits_of_float32() -> None:
    blocks = jnp.full((2, 1), 2.0**24)
    reads = AttentionReads(blocks, blocks, 4 * blocks, jnp.full((2,), BILLION), block_bytes=3 << 30, summary_bytes=1 << 31)
    one_more = AttentionReads.zeros(1, 1, block_bytes=3 << 30, summary_bytes=1 << 31) + AttentionReads(
        *(jnp.ones((1, 1)) for _ in range(3)), jnp.ones((1,), jnp.int32), block_bytes=3 << 30, summary_bytes=1 << 31
    )
    whole = reads.total() + reads.total() + one_more
    assert float(whole.blocks_read[0, 0]) == 2**26 + 1  # the one is lost in float32
    assert int(total(whole.num_passes)) == 4 * BILLION + 1
    assert float(reads.kv_bytes_per_pass) == 2**25 * ((3 << 30) + (1 << 31)) / (2 * BILLION)
    assert float(reads.dense_kv_bytes_per_pass) == 2**27 * (3 << 30) / (2 * BILLION)
    assert whole.summary()["keep_ratio"] == pytest.approx(0.25)

    levels = LevelCounts(*(jnp.full((2,), BILLION) for _ in range(6)), jnp.full((2,), 5e8))
    summary = (levels.total() + levels.total()).summary()
    assert summary["provisional"] == summary["dense_passes"] == 4 * BILLION
    assert summary["dense_acceptance_rate"] == 1.0
    assert summary["step_cost"] == 0.5


def test_agreements_add_up_past_the_range_of_int32() -> None:
    sums = dict(kl_sum=jnp.float32(1), dense_nll_sum=jnp.float32(2), sparse_nll_sum=jnp.float32(3), attention_reads=None, pass_counts=None)
    one = Agreement(num_tokens=jnp.int32(2 * BILLION), num_equal=jnp.int32(BILLION), **sums, num_rows=2)
    whole = one + one
    assert whole.summary()["num_tokens"] == 4 * BILLION
    assert whole.token_agreement == 0.5


def test_counts_of_a_traced_function_add_up_in_it() -> None:
    @jax.jit
    def both(ours: Statistics, theirs: Statistics) -> tuple[Statistics, jax.Array, jax.Array]:
        whole = ours + theirs
        return whole, whole.mean_acceptance_length, whole.acceptance_rate_per_position

    small = Statistics(accepted_counts=jnp.array([[0, 3, 1], [2, 0, 0]]), drafted_counts=jnp.array([[0, 0, 4], [0, 2, 0]]))
    whole, length, by_position = both(small, small)
    expected = small + small
    jax.tree.map(np.testing.assert_array_equal, whole, expected)
    assert float(length) == pytest.approx(float(expected.mean_acceptance_length))
    np.testing.assert_allclose(by_position, expected.acceptance_rate_per_position, rtol=1e-6)
    assert expected.accepted_counts.dtype == np.int64
    assert added(jnp.float32(1), jnp.float32(2)).dtype == np.float64
    assert ratio(jnp.int32(0), jnp.int32(0), otherwise=7.0) == 7.0


def test_more_values_than_int32_counts_are_refused_by_a_histogram() -> None:
    values = jax.ShapeDtypeStruct((1 << 16, 1 << 15), jnp.float32)
    with pytest.raises(ValueError, match=r"counts in int32: take fewer than 2\^31 values at a time, .* got 2147483648"):
        jax.eval_shape(histogram, values)


@pytest.mark.parametrize("seed", [-1, 1 << 32, True, 0.5])
def test_a_seed_of_which_bits_would_be_dropped_is_refused(seed: Any) -> None:
    assert jax.random.key(1 << 32) == jax.random.key(0)  # which is why
    with pytest.raises(ValueError, match=r"SparseAttention.seed must be an int from 0 to 2\^32 - 1, got"):
        SparseAttention(seed=seed)
    require_seed("any", (1 << 32) - 1)
