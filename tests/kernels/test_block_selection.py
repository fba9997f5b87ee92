"""Choosing blocks: the reference against NumPy, and the Triton kernel, in Triton's interpreter, against the reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.block_selection import block_selection
from tests.kernels.interpreted_triton import interpreted, launches, needs_triton

HEAD_BLOCKS = 1
FULL = pytest.mark.full


def case(*, num_blocks: int, group: int, head_dim: int = 16, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """Rows with one block, some, and all. Numbers are small integers, so scores are exact in any order of summing, and many are equal."""
    rng = np.random.default_rng(num_blocks + group)
    there = np.array([1, num_blocks // 2 + 1, num_blocks])
    query = rng.integers(-1, 2, size=(3, 2 * group, head_dim))
    means = rng.integers(-1, 2, size=(3, 2, num_blocks, head_dim)).astype(np.float32)
    means[np.broadcast_to((np.arange(num_blocks) >= there[:, None])[:, None], means.shape[:3])] = np.nan
    first_tail = np.maximum(there - 2, 0)
    forced = [len({*range(min(HEAD_BLOCKS, count)), *range(first, count)}) for count, first in zip(there, first_tail, strict=True)]
    num_kept = np.minimum(np.maximum(forced, num_blocks // 3), there)
    return jnp.asarray(query, dtype), jnp.asarray(means, dtype), *(jnp.asarray(x, jnp.int32) for x in (first_tail, there, num_kept))


def numpy_selection(arrays: tuple[jax.Array, ...], group: str) -> list[list[list[int]]]:
    """Row by row: a stable sort of what competes."""
    query, means, first_tail, num_there, num_kept = (np.asarray(x, np.float64) for x in arrays)
    found: list[list[list[int]]] = []
    for row in range(query.shape[0]):
        found.append([])
        for head in range(means.shape[1]):
            members = query[row].reshape(means.shape[1], -1, query.shape[2])[head]
            per_member = members @ means[row, head, : int(num_there[row])].T
            scores = per_member.mean(axis=0) if group == "mean" else per_member.max(axis=0)
            scores[:HEAD_BLOCKS] = scores[int(first_tail[row]) :] = np.inf
            found[-1].append(sorted(np.argsort(-scores, kind="stable")[: int(num_kept[row])].tolist()))
    return found


def as_lists(selection: tuple[jax.Array, jax.Array]) -> list[list[list[int]]]:
    """What counts; what does not is zero."""
    ids, counts = (np.asarray(x) for x in selection)
    assert ids.dtype == counts.dtype == np.int32
    assert (ids[np.arange(ids.shape[2]) >= counts[..., None]] == 0).all()
    return [[ids[row, head, : counts[row, head]].tolist() for head in range(ids.shape[1])] for row in range(ids.shape[0])]


@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize("num_blocks", [9, 40])
def test_the_reference_equals_a_stable_sort(num_blocks: int, group: str) -> None:
    arrays = case(num_blocks=num_blocks, group=2)
    options = dict(head_blocks=HEAD_BLOCKS, max_chosen=num_blocks // 3 + 2, group=group)
    assert as_lists(block_selection(*arrays, **options)) == numpy_selection(arrays, group)


@needs_triton
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("score_group", ["mean", "max"])
@pytest.mark.parametrize(("num_blocks", "group", "head_dim"), [(9, 1, 16), (70, 4, 64), pytest.param(300, 7, 128, marks=FULL)])
def test_the_kernel_chooses_what_a_stable_sort_does(num_blocks: int, group: int, head_dim: int, score_group: str, dtype: Any) -> None:
    arrays = case(num_blocks=num_blocks, group=group, head_dim=head_dim, dtype=dtype)
    options = dict(head_blocks=HEAD_BLOCKS, max_chosen=num_blocks // 3 + 2, group=score_group)
    with interpreted():
        got = block_selection(*arrays, **options, implementation="triton")
        assert launches == ["score_and_choose"]
    assert as_lists(got) == numpy_selection(arrays, score_group)
    for ours, reference in zip(got, block_selection(*arrays, **options, implementation="reference"), strict=True):
        np.testing.assert_array_equal(ours, reference)


@needs_triton
def test_every_block_kept_is_every_block_in_order() -> None:
    query, means, first_tail, there, _ = case(num_blocks=20, group=2)
    with interpreted():
        got = block_selection(query, means, first_tail, there, there, head_blocks=0, max_chosen=20, implementation="triton")
    assert as_lists(got) == [[list(range(count))] * 2 for count in there.tolist()]


@needs_triton
def test_infinite_and_negative_scores_are_ordered_too() -> None:
    means = jnp.asarray([-jnp.inf, -3.0, 2.0, -1.0, jnp.inf, 1e-30, -0.5, 0.0])[None, None, :, None] * jnp.eye(16)[0]
    means = jnp.where(jnp.isnan(means), 0.0, means)
    query = jnp.zeros((1, 1, 16)).at[..., 0].set(1.0)
    for kept, expected in ((1, [4]), (2, [2, 4]), (3, [2, 4, 5]), (6, [2, 3, 4, 5, 6, 7])):
        sizes = (jnp.asarray([size], jnp.int32) for size in (8, 8, kept))
        with interpreted():
            got = block_selection(query, means, *sizes, head_blocks=0, max_chosen=6, implementation="triton")
        assert as_lists(got) == [[expected]]


def test_wrong_shapes_and_sizes_are_refused() -> None:
    query, means, *rest = case(num_blocks=9, group=2)
    options = dict(head_blocks=1, max_chosen=5)
    with pytest.raises(ValueError, match="K divide N"):
        block_selection(query[:, :3], means, *rest, **options)
    with pytest.raises(ValueError, match="from 1 to the 9 blocks, got 10"):
        block_selection(query, means, *rest, head_blocks=1, max_chosen=10)
    with pytest.raises(ValueError, match="group must be one of"):
        block_selection(query, means, *rest, **options, group="sum")
    with pytest.raises(ValueError, match="implementation must be one of"):
        block_selection(query, means, *rest, **options, implementation="pallas")
    with pytest.raises(ValueError, match="'triton'"):
        block_selection(query[..., :8], means[..., :8], *rest, **options, implementation="triton")
