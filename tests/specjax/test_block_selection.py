"""Which blocks are chosen: the budget, those always kept, the most relevant, and nothing that is not committed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import SparseAttention
from specjax.kernels.block_scores import block_scores
from specjax.kernels.block_sparse_attention import block_sparse_attention
from specjax.models.block_selection import Selection, select_blocks
from specjax.models.block_summaries import summarise

BLOCK, NUM_BLOCKS, HEAD_DIM, NUM_ROWS = 8, 16, 8, 4
CAPACITY = BLOCK * NUM_BLOCKS


def arrays(seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query of 4 heads, keys and values of 2, for 3 rows."""
    rng = np.random.default_rng(seed)
    shapes = (3, NUM_ROWS, 4, HEAD_DIM), (3, 2, CAPACITY, HEAD_DIM), (3, 2, CAPACITY, HEAD_DIM)
    query, keys, values = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return query, keys, values


def settings(**changes: Any) -> SparseAttention:
    return SparseAttention(**(dict(block_size=BLOCK, keep=0.25, dense_below=16, head_blocks=1, tail_blocks=1) | changes))


@functools.partial(jax.jit, static_argnums=0)
def select(chosen_by: SparseAttention, query: jax.Array, keys: jax.Array, length: jax.Array) -> Selection:
    summaries = () if chosen_by.summary is None else summarise(keys, chosen_by.summary, BLOCK)
    return select_blocks(chosen_by, query, keys, summaries, length, layer=0)


def sets(selection: Selection) -> list[list[list[int]]]:
    """The chosen blocks of each row and head."""
    ids, counts = np.asarray(selection.block_ids), np.asarray(selection.num_blocks)
    return [[ids[b, k, : counts[b, k]].tolist() for k in range(ids.shape[1])] for b in range(ids.shape[0])]


def always_kept(length: int, num_rows: int = NUM_ROWS) -> set[int]:
    first_open = length // BLOCK
    last = (length + num_rows - 1) // BLOCK
    return {0, max(first_open - 1, 0), *range(first_open, last + 1)}


@pytest.mark.parametrize("score", ["mean", "bounds", "window", "random", "oracle"])
def test_the_budget_is_met_exactly_with_what_is_always_kept_in_it_and_nothing_unwritten(score: str) -> None:
    query, keys, _ = arrays()
    chosen_by = settings(score=score)
    for length in (0, 1, 7, 8, 12, 13, 15, 16, 17, 40, 61, 64, 100, 123, 124):
        got = sets(select(chosen_by, query, keys, jnp.full((3,), length)))
        there, forced = -(-(length + NUM_ROWS) // BLOCK), always_kept(length)
        wanted = min(there, max(len(forced), chosen_by.budget_blocks(length + NUM_ROWS)))
        for blocks in (blocks for row in got for blocks in row):
            assert blocks == sorted(set(blocks)), "twice or out of order"
            assert len(blocks) == wanted
            assert forced <= set(blocks) <= set(range(there))
    assert wanted < there, "nothing was left out"


@pytest.mark.parametrize("score", ["mean", "bounds", "oracle"])
@pytest.mark.parametrize("poison", [np.nan, -1e30])
def test_what_stands_behind_the_committed_tokens_never_changes_the_choice(score: str, poison: float) -> None:
    query, keys, _ = arrays()
    length = jnp.array([60, 64, 71])
    behind = (jnp.arange(CAPACITY) >= length[:, None])[:, None, :, None]
    chosen_by = settings(score=score)
    expected = select(chosen_by, query, keys, length)
    got = select(chosen_by, query, jnp.where(behind, poison, keys), length)
    np.testing.assert_array_equal(got.block_ids, expected.block_ids)
    np.testing.assert_array_equal(got.num_blocks, expected.num_blocks)


def test_the_most_relevant_blocks_win_as_in_a_loop_over_heads() -> None:
    query, keys, _ = arrays()
    length = 100
    got = sets(select(settings(score="mean", group="max"), query, keys, jnp.full((3,), length)))
    num_kept = settings().budget_blocks(length + NUM_ROWS)
    for b, kv_head in np.ndindex(3, 2):
        means = np.asarray(keys)[b, kv_head].reshape(NUM_BLOCKS, BLOCK, HEAD_DIM).mean(axis=1)
        scores = (np.asarray(query)[b, 0, kv_head * 2 : kv_head * 2 + 2] @ means.T).max(axis=0)
        free = [block for block in np.argsort(-scores) if block < length // BLOCK and block not in always_kept(length)]
        assert set(got[b][kv_head]) == always_kept(length) | set(free[: num_kept - len(always_kept(length))])
    assert got[0][0] != got[0][1] or got[0][0] != got[1][0], "heads and rows choose for themselves"


@pytest.mark.parametrize("score", ["mean", pytest.param("bounds", marks=pytest.mark.full)])
def test_heads_that_share_a_budget_keep_the_largest_scores_of_all_of_them(score: str) -> None:
    query, keys, _ = arrays()
    keys = keys.at[:, 1].multiply(3.0)  # the second head's scores are larger on both sides, and so it takes more
    chosen_by = settings(score=score, budget="layer", head_limit=1.2)
    for length in (5, 61, 100, 124):
        got = sets(select(chosen_by, query, keys, jnp.full((3,), length)))
        there, forced = -(-(length + NUM_ROWS) // BLOCK), always_kept(length)
        share = min(there, max(len(forced), chosen_by.budget_blocks(length + NUM_ROWS)))
        most = min(there, chosen_by.max_chosen(capacity=CAPACITY, num_rows=NUM_ROWS))
        for b, row in enumerate(got):
            assert sum(map(len, row)) == 2 * share
            assert all(forced <= set(blocks) <= set(range(there)) and len(blocks) <= most for blocks in row)
            scores = np.asarray(block_scores(query[:, :1], summarise(keys, score, BLOCK), group="mean"))[b, :, 0]
            wanted: list[set[int]] = [set(forced), set(forced)]
            free = [(head, block) for head in range(2) for block in set(range(there)) - forced]
            for head, block in sorted(free, key=lambda place: -scores[place]):
                if sum(map(len, wanted)) < 2 * share and len(wanted[head]) < most:
                    wanted[head].add(block)
            assert [set(blocks) for blocks in row] == wanted
    assert {len(blocks) for row in got for blocks in row} > {8}, "some head is at its limit, and others have less"


@pytest.mark.parametrize(
    ("score", "changes"), [("mean", {}), ("bounds", {}), ("oracle", {}), ("window", {}), ("mean", dict(budget="layer", head_limit=1.5))]
)
def test_a_needle_far_back_is_found_by_retrieval_and_lost_by_a_window(score: str, changes: dict) -> None:
    query, keys, values = (np.array(x) for x in arrays())
    query[:] = 3 * query[:, :1, :1] / np.linalg.norm(query[:, :1, :1], axis=-1, keepdims=True)
    keys[:, :, 18] = 6 * query[:, :1, 0]  # in the third block
    length = np.full((3,), 110)
    selection = select(settings(score=score, **changes), query, keys, length)
    sparse = jax.jit(block_sparse_attention, static_argnames=("block_size", "scale"))(
        query, keys, values, length, selection.block_ids, selection.num_blocks, block_size=BLOCK, scale=HEAD_DIM**-0.5
    )
    needle = np.repeat(values[:, :, 18], 2, axis=1)[:, None]
    distance = np.abs(np.asarray(sparse) - needle).max()
    # The needle has nearly all of the attention; values are of order 1.
    assert distance > 1 if score == "window" else distance < 0.01


def test_first_ignores_what_the_draft_asks_for() -> None:
    query, keys, _ = arrays()
    length = jnp.full((3,), 100)
    other = query.at[:, 1:].multiply(-1)
    np.testing.assert_array_equal(select(settings(), query, keys, length).block_ids, select(settings(), other, keys, length).block_ids)
    mean = settings(rows="mean")
    assert (select(mean, query, keys, length).block_ids != select(mean, other, keys, length).block_ids).any()


@pytest.mark.parametrize("score", ["mean", pytest.param("bounds", marks=pytest.mark.full)])
def test_union_is_exactly_what_the_rows_choose_and_each_remembers_who_chose_what(score: str) -> None:
    query, keys, _ = arrays()
    for length in (5, 30, 61, 100):
        lengths = jnp.full((3,), length)
        # The same budget and the same always kept blocks for each row alone: it is asked as if it were the first.
        alone = [sets(select(settings(score=score), jnp.roll(query, -row, axis=1), keys, lengths)) for row in range(NUM_ROWS)]
        union = select(settings(score=score, rows="union"), query, keys, lengths)
        each = select(settings(score=score, rows="each"), query, keys, lengths)
        assert union.row_mask is None
        assert each.row_mask is not None
        for b, head in np.ndindex(3, 2):
            assert set(sets(union)[b][head]) == set().union(*(alone[row][b][head] for row in range(NUM_ROWS)))
            assert sets(each)[b][head] == sets(union)[b][head]
            for row in range(NUM_ROWS):
                read = [block for i, block in enumerate(sets(each)[b][head]) if each.row_mask[b, head, row, i]]
                assert read == alone[row][b][head]


def test_random_is_seeded_and_differs_between_rows_heads_and_lengths() -> None:
    query, keys, _ = arrays()
    lengths = jnp.full((3,), 100)
    one, again, other = (sets(select(settings(score="random", seed=seed), query, keys, lengths)) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert len({tuple(blocks) for row in one for blocks in row}) > 1
    assert one != sets(select(settings(score="random", seed=1), query, keys, lengths + 1))


def test_a_budget_of_more_blocks_than_there_are_keeps_them_all() -> None:
    query, keys, _ = arrays()
    for keep, dense_below, budget in ((1.0, 0, "head"), (0.1, 10_000, "head"), (0.9, 120, "head"), (0.9, 120, "layer")):
        got = sets(select(settings(keep=keep, dense_below=dense_below, budget=budget), query, keys, jnp.array([3, 40, 101])))
        assert [row[0] for row in got] == [list(range(-(-(length + NUM_ROWS) // BLOCK))) for length in (3, 40, 101)]


def test_no_budget_at_all_keeps_what_is_always_kept() -> None:
    query, keys, _ = arrays()
    for head_blocks, tail_blocks in ((0, 0), (2, 3)):
        nothing = settings(keep=0.0, dense_below=0, head_blocks=head_blocks, tail_blocks=tail_blocks)
        got = sets(select(nothing, query, keys, jnp.array([70, 77, 64])))
        for row, open_blocks in zip(got, ([8, 9], [9, 10], [8]), strict=True):
            assert row[0] == [*range(head_blocks), *range(open_blocks[0] - tail_blocks, open_blocks[0]), *open_blocks]
