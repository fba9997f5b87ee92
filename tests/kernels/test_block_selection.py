"""Choosing blocks: the reference against NumPy, and the Triton kernel, in Triton's interpreter, against the reference."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.block_selection import block_selection, top_blocks
from specjax.kernels.block_selection.triton_launch import block_selection_triton
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


@needs_triton
@pytest.mark.parametrize("group", ["mean", "max"])
def test_blocks_whose_mean_key_is_nan_are_chosen_so_that_the_fault_shows(group: str) -> None:
    query, means, first_tail, there, kept = case(num_blocks=40, group=2)
    means = means.at[2, 0, 11, 5].set(jnp.nan).at[2, 1, 38, 0].set(jnp.nan)
    options = dict(head_blocks=HEAD_BLOCKS, max_chosen=15, group=group)
    with interpreted():
        got = as_lists(block_selection(query, means, first_tail, there, kept, **options, implementation="triton"))
        faulty = query.at[2, 0].set(jnp.nan)  # of one head of two
        of_query = as_lists(block_selection(faulty, means, first_tail, there, kept, **options, implementation="triton"))
    assert got == as_lists(block_selection(query, means, first_tail, there, kept, **options, implementation="reference"))
    assert 11 in got[2][0]
    assert 38 in got[2][1]
    assert of_query[2] == [[*range(11), 38, 39], got[2][1]]  # all alike, behind those that are always kept


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_of_either_sign_stands_behind_the_blocks_that_are_always_kept_and_before_all_others(sign: float) -> None:
    scores = jnp.array([[[[9.0, 8.0, 7.0, jnp.copysign(jnp.nan, sign), 6.0, 5.0]]]])
    options = dict(first_tail=jnp.array([5]), num_there=jnp.array([6]), head_blocks=1, max_chosen=4)
    assert top_blocks(scores, num_kept=jnp.array([2]), **options).tolist() == [[[[0, 5, 6, 6]]]]
    assert top_blocks(scores, num_kept=jnp.array([3]), **options).tolist() == [[[[0, 3, 5, 6]]]]


def test_what_the_kernel_was_not_written_for_is_refused_and_auto_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specjax.kernels.measured.fastest", lambda shape, dtype: "triton")
    options = dict(head_blocks=1, max_chosen=5)
    for group, head_dim, message in ((2, 8, "H from 16 to 256.* got 8, 9 and 2"), (17, 16, "up to 16 query heads .* got 16, 9 and 17")):
        arrays = case(num_blocks=9, group=group, head_dim=head_dim)
        with pytest.raises(ValueError, match=message):
            block_selection(*arrays, **options, implementation="triton")
        traced = jax.jit(lambda arrays=arrays: block_selection(*arrays, **options)).trace()
        assert "triton" not in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("capability", "dtype", "num_blocks", "stages"),
    [
        ("9.0", jnp.bfloat16, 2048, 8),
        ("9.0", jnp.bfloat16, 256, 5),
        ("9.0", jnp.float32, 2048, 7),
        ("8.9", jnp.bfloat16, 2048, 5),
        ("7.5", jnp.float32, 2048, 2),
    ],
)
def test_as_many_tiles_are_in_flight_as_there_are_and_fit(
    capability: str, dtype: Any, num_blocks: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[dict[str, Any]] = []

    def launch(*_: Any, out_shapes: Any, **options: Any) -> list[jax.Array]:
        launched.append(options)
        return [jnp.zeros(shape.shape, shape.dtype) for shape in out_shapes]

    monkeypatch.setattr("specjax.kernels.block_selection.triton_launch.triton_call", launch)
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(compute_capability=capability)])
    arrays = jnp.zeros((1, 32, 128), dtype), jnp.zeros((1, 8, num_blocks, 128), dtype), *(jnp.zeros(1, jnp.int32) for _ in range(3))
    jax.eval_shape(lambda: block_selection_triton(*arrays, head_blocks=1, max_chosen=32, group="mean"))
    assert [options["num_stages"] for options in launched] == [stages]


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
