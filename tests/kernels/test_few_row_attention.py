"""The Triton kernels of few-row attention, in Triton's interpreter, against the references; and the rules around them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.block_sparse_attention import block_sparse_attention
from specjax.kernels.cached_attention import cached_attention
from specjax.kernels.few_row_attention import ListedBlocks, TuningConfig, default_tuning, few_row_attention, serves
from tests.kernels.interpreted_triton import interpreted, launches, needs_triton

# Sums of up to 256 terms of order 1 in another order, in float32; in bfloat16 weights of 8 bits besides, which sum to 1.
TOLERANCES = {jnp.float32: 2e-6, jnp.bfloat16: 2e-2}
FULL = pytest.mark.full
# Rows 1 and 2 of the tree are siblings under row 0; rows 3 and 4 are children of row 2.
TREE = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 0, 1]], bool)


def case(
    lengths: list[int], *, rows: int, group: int, head_dim: int, kv_heads: int = 1, slots: int = 128, dtype: Any = jnp.float32
) -> tuple:
    """Arrays whose keys and values are NaN, or huge, where no row may look."""
    rng = np.random.default_rng(rows * 1000 + group * 100 + head_dim)
    batch, length = len(lengths), jnp.asarray(lengths, jnp.int32)
    query = jnp.asarray(rng.normal(size=(batch, rows, kv_heads * group, head_dim)), dtype)
    keys, values = (jnp.asarray(rng.normal(size=(batch, kv_heads, slots, head_dim)), dtype) for _ in range(2))
    beyond = (jnp.arange(slots) >= length[:, None] + rows)[:, None, :, None]
    return query, jnp.where(beyond, jnp.nan, keys), jnp.where(beyond, jnp.asarray(1e30, dtype), values), length


def assert_close(got: jax.Array, expected: jax.Array) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    atol = TOLERANCES[got.dtype.type]
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), atol=atol)


def check_dense(arrays: tuple, **options: Any) -> None:
    scale = arrays[0].shape[-1] ** -0.5
    with interpreted():
        got = cached_attention(*arrays, scale=scale, **options, implementation="triton")
        assert launches[0] == "attend_part"
    assert_close(got, cached_attention(*arrays, scale=scale, **options, implementation="reference"))


@needs_triton
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "group", "head_dim"),
    [
        (1, 1, 64),
        (5, 4, 64),
        pytest.param(6, 7, 128, marks=FULL),
        pytest.param(16, 4, 64, marks=FULL),
        pytest.param(16, 7, 128, marks=FULL),
        pytest.param(5, 1, 128, marks=FULL),
        pytest.param(1, 7, 64, marks=FULL),
        pytest.param(6, 4, 80, marks=FULL),  # not a power of two
    ],
)
def test_dense_attention_equals_the_reference(rows: int, group: int, head_dim: int, dtype: Any) -> None:
    check_dense(case([0, 1, 63, 64, 65, 97], rows=rows, group=group, head_dim=head_dim, dtype=dtype))


@needs_triton
@pytest.mark.parametrize("window", [1, 33, pytest.param(64, marks=FULL), pytest.param(500, marks=FULL)])
def test_windows_and_sinks_equal_the_reference(window: int) -> None:
    rng = np.random.default_rng(0)
    sinks = jnp.asarray(rng.normal(size=4), jnp.float32)
    for rows, lengths, options in ((5, [0, 31, 100], dict(sinks=sinks)), (1, [0, 100], {})):
        query, keys, values, length = case(lengths, rows=rows, group=2, head_dim=16, kv_heads=2)
        before = (jnp.arange(keys.shape[2]) < length[:, None] + 1 - window)[:, None, :, None]
        check_dense((query, jnp.where(before, jnp.nan, keys), values, length), window=window, **options)


@needs_triton
def test_a_sink_so_large_that_nothing_else_counts_gives_zeros() -> None:
    check_dense(case([3], rows=1, group=1, head_dim=16), sinks=jnp.asarray([1e4]))


@needs_triton
def test_a_tree_among_the_new_rows_equals_the_reference() -> None:
    arrays = case([0, 62, 100], rows=5, group=2, head_dim=16)
    check_dense(arrays, step_mask=TREE)
    check_dense(arrays, step_mask=jnp.asarray(TREE), window=3)


@needs_triton
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_any_number_of_parts_gives_the_same_and_repeats_bit_for_bit(parts: int) -> None:
    arrays = case([0, 70], rows=2, group=2, head_dim=16)
    sinks, tuning = jnp.asarray([0.5, -1.0]), TuningConfig(parts=parts, block_slots=16)
    with interpreted():
        first, second = (few_row_attention(*arrays, scale=0.25, sinks=sinks, tuning=tuning) for _ in range(2))
        assert launches == (["attend_part"] if parts == 1 else ["attend_part", "merge_parts"]) * 2
    np.testing.assert_array_equal(first, second)
    assert_close(first, cached_attention(*arrays, scale=0.25, sinks=sinks))


@needs_triton
def test_a_row_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    query, keys, values, length = case([5, 90], rows=2, group=2, head_dim=16)
    options = dict(scale=0.25, tuning=TuningConfig(parts=2, block_slots=16))
    with interpreted():
        both = few_row_attention(query, keys, values, length, **options)
        alone = few_row_attention(query[1:], keys[1:], values[1:], length[1:], **options)
    np.testing.assert_array_equal(both[1:], alone)


def listed(arrays: tuple, kept: list[list[int]], *, block_size: int, width: int, with_row_mask: bool) -> tuple[tuple, jax.Array | None]:
    """Those blocks for every key/value head, and after them entries that do not count."""
    query, keys, _, _ = arrays
    batch, kv_heads = keys.shape[:2]
    ids = np.zeros((batch, kv_heads, width), np.int32)  # block 0, which every row may see, and must not see twice
    for row, blocks in enumerate(kept):
        ids[row, :, : len(blocks)] = blocks
    counts = np.broadcast_to(np.array([len(blocks) for blocks in kept], np.int32)[:, None], (batch, kv_heads))
    row_mask = None
    if with_row_mask:
        row_mask = np.random.default_rng(1).random((batch, kv_heads, query.shape[1], width)) < 0.5
        for row, blocks in enumerate(kept):
            row_mask[row, :, :, len(blocks) - 1] = True  # its own block
        row_mask = jnp.asarray(row_mask)
    return (*arrays, jnp.asarray(ids), jnp.asarray(counts)), row_mask


def check_sparse(arrays: tuple, **options: Any) -> None:
    scale = arrays[0].shape[-1] ** -0.5
    with interpreted():
        got = block_sparse_attention(*arrays, scale=scale, **options, implementation="triton")
        assert launches[0] == "attend_part"
    assert_close(got, block_sparse_attention(*arrays, scale=scale, **options, implementation="reference"))


@needs_triton
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("block_size", "lengths", "kept", "width"),
    [
        (16, [0, 63, 97], [[0], [0, 2, 3, 4], [1, 5, 6]], 8),
        pytest.param(64, [0, 64, 120], [[0], [1], [0, 1]], 2, marks=FULL),
        pytest.param(8, [1, 65, 111], [[0], [0, 3, 7, 8], [13, 14]], 5, marks=FULL),
        pytest.param(32, [0, 31, 64], [[0], [0, 1], [2]], 3, marks=FULL),
    ],
)
def test_attention_over_listed_blocks_equals_the_reference(block_size: int, lengths: list, kept: list, width: int, dtype: Any) -> None:
    arrays = case(lengths, rows=6 if block_size == 8 else 5, group=2, head_dim=64, kv_heads=2, dtype=dtype)
    for with_row_mask in (False, True):
        given, row_mask = listed(arrays, kept, block_size=block_size, width=width, with_row_mask=with_row_mask)
        step_mask = TREE if with_row_mask and block_size != 8 else None
        check_sparse(given, block_size=block_size, row_mask=row_mask, step_mask=step_mask)


@needs_triton
def test_all_blocks_listed_equals_dense_bit_for_bit() -> None:
    arrays = case([0, 63, 97], rows=5, group=2, head_dim=16)
    ids = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (3, 1, 8))
    counts = -(-(arrays[3] + 5) // 16)[:, None]
    options = dict(scale=0.25, implementation="triton")
    with interpreted():
        sparse = block_sparse_attention(*arrays, ids, counts, block_size=16, **options)
        dense = cached_attention(*arrays, **options)
    np.testing.assert_array_equal(sparse, dense)


@needs_triton
def test_the_kernel_runs_inside_jit_and_has_the_derivative_of_the_reference() -> None:
    query, keys, values, length = case([9], rows=2, group=2, head_dim=16)
    keys, values = (jnp.where(jnp.abs(x) < 100, x, 0.0) for x in (keys, values))

    def loss(implementation: str) -> Any:
        return lambda query, values: (cached_attention(query, keys, values, length, scale=1.0, implementation=implementation) ** 2).sum()

    with interpreted():
        value, gradients = jax.jit(jax.value_and_grad(loss("triton"), argnums=(0, 1)))(query, values)
        jax.block_until_ready(gradients)
        assert "attend_part" in launches
    expected, expected_gradients = jax.value_and_grad(loss("reference"), argnums=(0, 1))(query, values)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)


@needs_triton
def test_sparse_attention_has_the_derivative_of_the_reference_too() -> None:
    query, keys, values, length = case([30], rows=2, group=2, head_dim=16)
    keys, values = (jnp.where(jnp.abs(x) < 100, x, 0.0) for x in (keys, values))
    (*_, ids, counts), row_mask = listed((query, keys, values, length), [[0, 1, 2]], block_size=16, width=4, with_row_mask=True)
    options = dict(block_size=16, scale=1.0, row_mask=row_mask)

    def loss(implementation: str) -> Any:
        return lambda *x: (block_sparse_attention(*x, length, ids, counts, **options, implementation=implementation) ** 2).sum()

    with interpreted():
        gradients = jax.block_until_ready(jax.grad(loss("triton"), argnums=(0, 1, 2))(query, keys, values))
        assert "attend_part" in launches
    for got, wanted in zip(gradients, jax.grad(loss("reference"), argnums=(0, 1, 2))(query, keys, values), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)


@needs_triton
@pytest.mark.parametrize(
    ("rows", "group", "block_rows"),
    [
        (33, 1, 16),
        pytest.param(32, 2, 16, marks=FULL),
        pytest.param(49, 4, 64, marks=FULL),
        pytest.param(64, 1, 16, marks=FULL),
        pytest.param(17, 7, 128, marks=FULL),
    ],
)
def test_rows_of_several_programs_equal_the_reference(rows: int, group: int, block_rows: int) -> None:
    tree = np.tril(np.random.default_rng(0).random((rows, rows)) < 0.5) | np.eye(rows, dtype=bool)
    for mask in (None, tree):
        arrays = case([0, 63, 128 - rows], rows=rows, group=group, head_dim=16, kv_heads=2)
        tuning = TuningConfig(parts=2, block_slots=16, block_rows=block_rows)
        with interpreted():
            got, again = (few_row_attention(*arrays, scale=0.25, step_mask=mask, tuning=tuning) for _ in range(2))
        assert_close(got, cached_attention(*arrays, scale=0.25, step_mask=mask))
        np.testing.assert_array_equal(got, again)


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("parts", [1, 4])
def test_rows_of_several_programs_with_windows_sinks_and_blocks_equal_the_reference(parts: int) -> None:
    sinks, tuning = jnp.asarray([0.5, -1.0, 0.0, 2.0]), TuningConfig(parts=parts, block_slots=16, block_rows=16)
    query, keys, values, length = arrays = case([0, 63, 100], rows=20, group=2, head_dim=16, kv_heads=2)
    with interpreted():
        got = few_row_attention(*arrays, scale=0.25, window=9, sinks=sinks, tuning=tuning)
    assert_close(got, cached_attention(*arrays, scale=0.25, window=9, sinks=sinks))
    given, row_mask = listed(arrays, [[0, 1], [0, 3, 4, 5], [6, 7]], block_size=16, width=5, with_row_mask=True)
    blocks = ListedBlocks(block_ids=given[4], num_blocks=given[5], row_mask=row_mask, block_size=16)
    with interpreted():
        got = few_row_attention(query, keys, values, length, scale=0.25, listed=blocks, tuning=tuning)
    assert_close(got, block_sparse_attention(*given, block_size=16, scale=0.25, row_mask=row_mask))


@needs_triton
def test_more_rows_than_the_kernel_is_meant_for_are_the_references() -> None:
    arrays = case([0], rows=65, group=1, head_dim=16, slots=192)
    with interpreted():
        got = cached_attention(*arrays, scale=0.25, implementation="triton")
        assert launches == []
    np.testing.assert_array_equal(got, cached_attention(*arrays, scale=0.25))


@pytest.mark.parametrize(
    ("dtypes", "head_dim", "message"),
    [
        ((jnp.bfloat16, jnp.float32, jnp.float32), 16, "one dtype, of bfloat16, float16, float32; got bfloat16, float32 and float32"),
        ((jnp.float32, jnp.bfloat16, jnp.bfloat16), 16, "got float32, bfloat16 and bfloat16"),
        ((jnp.float32, jnp.float32, jnp.bfloat16), 16, "got float32, float32 and bfloat16"),
        ((jnp.float32, jnp.float32, jnp.float32), 8, "a head size H from 16 to 256, got 8"),
    ],
)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "listed"])
def test_what_the_kernel_was_not_written_for_is_refused_and_auto_takes_the_reference(
    sparse: bool, dtypes: tuple[Any, ...], head_dim: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, keys, values, length = case([3], rows=1, group=1, head_dim=head_dim, slots=16)
    arrays = *(x.astype(dtype) for x, dtype in zip((query, keys, values), dtypes, strict=True)), length

    def run(implementation: str) -> jax.Array:
        if sparse:
            lists = jnp.zeros((1, 1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32)
            return block_sparse_attention(*arrays, *lists, block_size=16, scale=1.0, implementation=implementation)
        return cached_attention(*arrays, scale=1.0, implementation=implementation)

    monkeypatch.setattr("specjax.kernels.measured.fastest", lambda shape, dtype: "triton")
    with pytest.raises(ValueError, match=message):
        run("triton")
    traced = jax.jit(lambda: run("auto")).trace()
    assert "triton" not in traced.lower(lowering_platforms=("cuda",)).as_text()
    np.testing.assert_array_equal(run("auto"), run("reference"))


def test_few_rows_are_up_to_64_and_512_with_their_query_heads() -> None:
    assert serves((1, 64, 64, 128), 8)
    assert not serves((1, 65, 8, 128), 8)
    assert serves((9, 32, 128, 128), 8)
    assert not serves((9, 33, 128, 128), 8)


def test_the_parts_fill_the_device_and_are_never_more_than_the_tiles() -> None:
    def parts(num_heads: int, num_slots: int) -> int:
        return default_tuning(packed_rows=24, num_heads=num_heads, num_slots=num_slots, head_dim=128, itemsize=2, is_listed=False).parts

    assert parts(8, 16384) == 32
    assert parts(64, 32768) == 4
    assert parts(512, 2048) == 1
    assert parts(8, 128) == 2
    assert parts(1, 10**6) == 128
    check = default_tuning(packed_rows=49 * 4, num_heads=8, num_slots=131072, head_dim=128, itemsize=2, is_listed=False)
    assert (check.parts, check.block_rows, check.num_warps) == (16, 128, 8)  # two programs a part


@pytest.mark.parametrize(("head_dim", "block_slots"), [(64, 64), (128, 32), (256, 16)])
def test_float32_is_cut_so_that_it_needs_no_more_registers_than_there_are(head_dim: int, block_slots: int) -> None:
    for packed_rows in (4, 24, 196):
        sizes = dict(packed_rows=packed_rows, num_heads=8, num_slots=131072, head_dim=head_dim)
        tuning = default_tuning(**sizes, itemsize=4, is_listed=False)
        assert (tuning.block_rows, tuning.block_slots, tuning.num_warps) == (16, block_slots, 8)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(parts=3), "parts must be a power of two from 1 to 128, got 3"),
        (dict(parts=1, block_slots=8), "block_slots must be a power of two from 16 to 256, got 8"),
        (dict(parts=1, num_warps=0), "num_warps must be a power of two from 1 to 16, got 0"),
        (dict(parts=1, num_stages=9), "num_stages must be an int from 1 to 8, got 9"),
        (dict(parts=1, block_rows=8), "block_rows must be a power of two from 16 to 256, got 8"),
    ],
)
def test_a_tuning_that_cannot_be_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TuningConfig(**sizes)
