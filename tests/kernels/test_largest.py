"""The k largest are those of `jax.lax.top_k`, in the order in which they stand, and of equal ones the first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.largest import largest, reference
from specjax.kernels.largest.reference import chunked_largest, in_chunks, prefix_sums, radix_largest, selections, sorted_largest
from specjax.kernels.largest.triton_launch import serves
from tests.kernels.interpreted_triton import interpreted, launches, needs_triton

FULL = pytest.mark.full
V = 140  # three of the blocks in which prefix sums are taken


def cases() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(3, V)).astype(np.float32)
    special = normal.copy()
    special[0, ::7], special[1, ::5], special[2, ::3] = np.nan, np.inf, -np.inf
    special[0, 1] = -np.float32(np.nan)  # its sign bit is set
    zeros = np.where(rng.random((3, V)) < 0.5, np.float32(0.0), np.float32(-0.0))
    return {
        "spread over all magnitudes": (normal * 10.0 ** rng.integers(-44, 38, (3, V))).astype(np.float32),
        "many ties": rng.integers(-3, 4, (3, V)).astype(np.float32),
        "NaN and infinite": special,
        "all zero": zeros,
        "all minus infinity": np.full((3, V), -np.inf, np.float32),
        "negative": -np.abs(normal),
    }


def expected(values: np.ndarray, k: int) -> np.ndarray:
    """By a stable sort in NumPy: NaN first, then the largest, of equal ones the first."""
    keys = np.where(np.isnan(values), np.inf, values.astype(np.float64))
    return np.sort(np.stack([np.lexsort((-row, ~nan))[:k] for row, nan in zip(keys, np.isnan(values), strict=True)]), axis=-1)


@pytest.mark.parametrize("k", [1, 2, 33, V // 2, V - 1, V])
def test_the_k_largest_are_found(k: int) -> None:
    radix, chosen = (jax.jit(function, static_argnums=1) for function in (radix_largest, largest))
    for name, values in cases().items():
        wanted = expected(values, k)
        np.testing.assert_array_equal(radix(values, k), wanted, err_msg=name)
        np.testing.assert_array_equal(chosen(values, k), wanted, err_msg=name)


@pytest.mark.parametrize(("k", "chunk"), [(7, 4), (17, 8), *(pytest.param(*case, marks=FULL) for case in ((1, 8), (46, 3), (70, 2)))])
def test_the_k_largest_are_found_in_chunks(k: int, chunk: int) -> None:
    select = sorted_largest if k == 7 else radix_largest
    found = jax.jit(lambda values: chunked_largest(values, k, chunk=chunk, select=select))
    for name, values in cases().items():
        np.testing.assert_array_equal(found(values), expected(values, k), err_msg=name)


def test_chunks_are_taken_of_many_numbers_beside_which_k_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selections((64, 128256), 2048) == [(64, 16032), (64, 16384)]
    # Of sixteen, so that there are no more than a kernel finds at once, and of those that are chosen of four.
    assert selections((64, 151936), 2048) == [(64, 9496), (64, 8192), (64, 8192)]
    assert selections((64, 128256), 64) == [(64, 4008), (64, 2048)]
    for shape, k in (((8, 151936), 2048), ((256, 14336), 3584)):  # passes of hardly more than a launch; too many to choose
        assert selections(shape, k) == [shape]
    monkeypatch.setattr(reference, "_MANY_NUMBERS", 1)
    monkeypatch.setattr(reference, "_MOST_AT_ONCE", 16)
    values = jnp.asarray(cases()["many ties"])
    assert selections(values.shape, 2) == [(3, 9), (3, 8), (3, 8)]
    run = jax.jit(lambda values: largest(values, 2))
    text = run.trace(values).lower(lowering_platforms=("cuda",)).as_text()
    assert "3x9xui32" in text  # maxima of sixteen neighbours
    again = jax.jit(lambda values: in_chunks(values, 2, select=radix_largest))
    for name, values in cases().items():
        np.testing.assert_array_equal(again(values), expected(values, 2), err_msg=name)


@needs_triton
def test_the_kernel_finds_what_the_reference_finds() -> None:
    given = cases()
    values = np.concatenate(list(given.values()))
    for k in (1, 33, V - 1):
        with interpreted():
            got = largest(jnp.asarray(values).reshape(-1, 1, V), k, implementation="triton")
            assert launches == ["choose_largest"]
        np.testing.assert_array_equal(got[:, 0], expected(values, k), err_msg=f"{k=}, of {list(given)}")
    assert serves((1, 16384))
    assert not serves((1, 16385))  # the reference's


def test_a_forced_kernel_without_a_device_and_an_unknown_name_are_refused() -> None:
    with pytest.raises(ValueError, match="'triton' needs a CUDA device"):
        largest(jnp.zeros((1, 9)), 2, implementation="triton")
    with pytest.raises(ValueError, match="implementation must be one of .*, got 'sort'"):
        largest(jnp.zeros((1, 9)), 2, implementation="sort")


def test_as_a_set_they_are_those_of_jax() -> None:
    values = cases()["many ties"]
    np.testing.assert_array_equal(jax.jit(radix_largest, static_argnums=1)(values, 20), np.sort(jax.lax.top_k(values, 20)[1], axis=-1))


def test_any_number_of_leading_axes_is_allowed() -> None:
    values = jnp.asarray(cases()["negative"])
    for function in (largest, radix_largest):
        run = jax.jit(lambda values, function=function: function(values, 4))
        np.testing.assert_array_equal(run(values[0]), run(values)[0])
        np.testing.assert_array_equal(run(values.reshape(3, 1, V))[:, 0], run(values))
        np.testing.assert_array_equal(jax.jit(jax.vmap(run))(values), run(values))


@pytest.mark.parametrize("size", [1, 64, 65, 64 * 64 + 3])
def test_prefix_sums_are_numpys(size: int) -> None:
    values = np.random.default_rng(0).integers(-5, 6, (2, size)).astype(np.int32)
    np.testing.assert_array_equal(jax.jit(prefix_sums)(values), np.cumsum(values, axis=-1))


@pytest.mark.parametrize(
    ("values", "k", "message"),
    [
        (np.zeros((2, 3), np.float32), 0, "k must be from 1 to V = 3, got 0"),
        (np.zeros((2, 3), np.float32), 4, "k must be from 1 to V = 3, got 4"),
        (np.zeros((2, 3), np.int32), 1, r"values must be float32 \[..., V\], got int32 of shape \[2, 3\]"),
        (np.float32(1.0), 1, r"got float32 of shape \[\]"),
    ],
)
def test_what_cannot_be_selected_is_refused(values: np.ndarray, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        largest(jnp.asarray(values), k)
