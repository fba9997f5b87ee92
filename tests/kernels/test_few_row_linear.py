"""A linear layer of few rows: the reference against NumPy, and the Triton kernel, interpreted, against the reference in float32."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.buckets import bucket
from specjax.kernels.few_row_linear import Normed, few_row_linear
from specjax.kernels.few_row_linear.triton_launch import LinearTuning, default_tuning
from specjax.kernels.shapes import LinearShape
from tests.kernels.interpreted_triton import interpreted, launches, needs_triton

# Relative to the largest result. float32: sums of up to 130 terms in another order. bfloat16: 8 bits of rows times scale, and of results.
TOLERANCES = {jnp.float32: 1e-5, jnp.bfloat16: 1.5e-2}
FULL = pytest.mark.full
EPSILON = 1e-5
# One part, and more parts of the inner sum than it has tiles.
CUTS = ("triton@32:16:4:2:1:1", "triton@16:32:4:2:8:1")


def draw(*size: int, dtype: Any = jnp.float32, seed: int = 0, mean: float = 0, spread: float = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *size]).normal(mean, spread, size), dtype)


def wide(x: Any) -> Any:
    """The same numbers in float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if isinstance(leaf, jax.Array) else leaf, x)


def cases(rows: int, inner: int, columns: tuple[int, ...], *, gated: bool, dtype: Any) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """With and without norm, bias and residual: first nothing, last everything."""
    x, weight = draw(rows, inner, dtype=dtype, spread=3), draw(inner, *columns, dtype=dtype, spread=inner**-0.5)
    result = (rows, *(columns[1:] if gated else columns))
    for normed, has_bias, has_residual in itertools.product((False, True), repeat=3):
        given = Normed(x, draw(inner, dtype=dtype, mean=1, spread=0.25), EPSILON) if normed else x
        bias = draw(*columns, dtype=dtype, seed=1) if has_bias else None
        yield (given, weight), dict(bias=bias, residual=draw(*result, dtype=dtype, seed=2) if has_residual else None, gated=gated)


@functools.partial(jax.jit, static_argnames="gated")
def reference(x: Any, weight: jax.Array, **options: Any) -> jax.Array:
    return few_row_linear(x, weight, **options, implementation="reference")


def check(arrays: tuple, options: dict[str, Any], implementation: str, dtype: Any) -> None:
    got = few_row_linear(*arrays, **options, implementation=implementation)
    expected = reference(*wide(arrays), **wide(options))
    assert got.dtype == dtype
    np.testing.assert_allclose(wide(got), expected, atol=TOLERANCES[dtype] * float(jnp.abs(expected).max()), rtol=0)


def test_the_reference_is_what_numpy_computes() -> None:
    for (x, weight), options in cases(3, 10, (2, 4), gated=True, dtype=jnp.float32):
        rows = np.asarray(x.x if isinstance(x, Normed) else x, np.float64)
        if isinstance(x, Normed):
            rows = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + EPSILON) * np.asarray(x.scale)
        both = np.einsum("md,dhn->mhn", rows, np.asarray(weight)) + (0 if options["bias"] is None else np.asarray(options["bias"]))
        expected = both[:, 0] / (1 + np.exp(-both[:, 0])) * both[:, 1] + (0 if options["residual"] is None else options["residual"])
        np.testing.assert_allclose(few_row_linear(x, weight, **options), expected, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "gated"),
    [
        (6, 50, (2, 37), True),
        pytest.param(1, 64, (32,), False, marks=FULL),
        pytest.param(16, 130, (3, 7, 2), False, marks=FULL),
        pytest.param(16, 64, (2, 32), True, marks=FULL),
        pytest.param(40, 64, (33,), False, marks=FULL),
    ],
)
def test_the_kernel_equals_the_reference(rows: int, inner: int, columns: tuple[int, ...], gated: bool, dtype: Any) -> None:
    with interpreted():
        (*_, (arrays, options)) = cases(rows, inner, columns, gated=gated, dtype=dtype)
        for cut in ("triton", *CUTS):
            check(arrays, options, cut, dtype)
        assert launches == ["multiply_strip"] * 3


@needs_triton
@pytest.mark.parametrize(
    ("columns", "gated", "dtype"),
    [
        ((2, 37), True, jnp.bfloat16),
        pytest.param((2, 37), True, jnp.float32, marks=FULL),
        pytest.param((40,), False, jnp.float32, marks=FULL),
        pytest.param((40,), False, jnp.bfloat16, marks=FULL),
    ],
)
def test_one_row_without_tensor_cores_equals_the_reference(columns: tuple[int, ...], gated: bool, dtype: Any) -> None:
    with interpreted():
        nothing, *_, everything = cases(1, 50, columns, gated=gated, dtype=dtype)
        # x a tile ahead, of one part and of more than there are tiles; and x with its tile.
        cuts = "triton@32:16:4:2:1:0", "triton@16:32:4:2:8:0", "triton@64:16:1:2:1:0"
        for cut, (arrays, options) in itertools.product(cuts, (nothing, everything)):
            check(arrays, options, cut, dtype)
        assert launches == ["multiply_strip"] * 6
        check(*everything, "triton", dtype)
        with pytest.raises(ValueError, match="without tensor cores is for one row, got 2 rows"):
            few_row_linear(draw(2, 16), draw(16, 16), implementation="triton@16:16:4:2:1:0")


@needs_triton
@FULL
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("columns", "gated"), [((2, 37), True), ((3, 7, 2), False)])
def test_the_kernel_equals_the_reference_whatever_stands_around_it(columns: tuple[int, ...], gated: bool, dtype: Any) -> None:
    with interpreted():
        for cut, (arrays, options) in itertools.product(CUTS, cases(6, 50, columns, gated=gated, dtype=dtype)):
            check(arrays, options, cut, dtype)


@needs_triton
@pytest.mark.parametrize("cut", CUTS)
def test_it_repeats_bit_for_bit_and_a_row_does_not_depend_on_the_others(cut: str) -> None:
    (x, weight), options = list(cases(6, 50, (40,), gated=False, dtype=jnp.float32))[-1]
    with interpreted():
        first, again = (few_row_linear(x, weight, **options, implementation=cut) for _ in range(2))
        options["residual"] = options["residual"][2:3]
        alone = few_row_linear(Normed(x.x[2:3], x.scale, EPSILON), weight, **options, implementation=cut)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[2:3], alone)


@needs_triton
def test_rows_stand_in_any_number_of_axes_and_the_derivative_is_the_references() -> None:
    x, weight, residual = draw(2, 3, 20), draw(20, 2, 5, 4), draw(2, 3, 2, 5, 4)

    def loss(implementation: str) -> Any:
        def of(x: Any, scale: Any, weight: Any, residual: Any) -> jax.Array:
            return (few_row_linear(Normed(x, scale, EPSILON), weight, residual=residual, implementation=implementation) ** 2).sum()

        return of

    arrays = x, draw(20, mean=1, spread=0.25), weight, residual
    with interpreted():
        value, gradients = jax.block_until_ready(jax.jit(jax.value_and_grad(loss("triton"), argnums=(0, 1, 2, 3)))(*arrays))
        assert launches == ["multiply_strip"]
    expected, expected_gradients = jax.jit(jax.value_and_grad(loss("reference"), argnums=(0, 1, 2, 3)))(*arrays)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-3, rtol=1e-4)


@needs_triton
def test_not_finite_rows_stay_so_and_leave_the_others_alone() -> None:
    x = draw(4, 32).at[1, 5].set(jnp.nan).at[2, 7].set(jnp.inf)
    with interpreted():
        for given in (x, Normed(x, jnp.ones(32), EPSILON)):
            got = few_row_linear(given, draw(32, 16), implementation="triton")
            np.testing.assert_array_equal(jnp.isfinite(got).all(axis=1), [True, False, False, True])


@needs_triton
def test_more_rows_than_the_kernel_is_for_are_the_references() -> None:
    x, weight = draw(65, 16), draw(16, 16)
    with interpreted():
        got = few_row_linear(x, weight, implementation="triton")
        assert launches == []
    np.testing.assert_array_equal(got, few_row_linear(x, weight, implementation="reference"))


@needs_triton
def test_what_the_kernel_was_not_written_for_is_refused_and_auto_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specjax.kernels.measured.fastest", lambda shape, dtype: "triton")
    x, weight = draw(2, 16), draw(16, 16)
    for other in (jnp.bfloat16, jnp.float16):
        with interpreted(), pytest.raises(ValueError, match=f"both of bfloat16 or of float32, got {jnp.dtype(other).name} and float32"):
            few_row_linear(x.astype(other), weight, implementation="triton")
        few_row_linear(x.astype(other), weight, implementation="auto")


def test_the_cut_that_was_measured_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = []

    def kernel(x: Any, weight: Any, bias: Any, residual: Any, *, gated: bool, tuning: LinearTuning | None) -> jax.Array:
        cuts.append(tuning)
        return jnp.zeros((x.shape[0], weight.shape[-1]))

    monkeypatch.setattr("specjax.kernels.few_row_linear.few_row_linear_triton", kernel)
    x, weight = draw(2, 16), draw(16, 16)
    for choice, implementation, expected in (
        ("triton@64:32:4:3:1:1", "auto", LinearTuning(64, 32, 4, 3, 1, 1)),
        ("triton@64:32:4:3:1:1", "triton", LinearTuning(64, 32, 4, 3, 1, 1)),
        ("reference", "triton", None),
        ("triton", "auto", None),
        ("triton", "triton@16:16:4:3:2:1", LinearTuning(16, 16, 4, 3, 2, 1)),
    ):
        monkeypatch.setattr("specjax.kernels.measured.fastest", lambda shape, dtype, choice=choice: choice)
        jax.eval_shape(lambda implementation=implementation: few_row_linear(x, weight, implementation=implementation))
        assert cuts.pop() == expected
    monkeypatch.setattr("specjax.kernels.measured.fastest", lambda shape, dtype: "reference")
    few_row_linear(x, weight)
    assert not cuts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(weight=draw(5, 4)), r"expected x \[..., D\] and weight \[D, ...\], got \(2, 6\) and \(5, 4\)"),
        (dict(gated=True), r"weight \[D,2,N\], got \(2, 6\) and \(6, 4\)"),
        (dict(bias=draw(3)), r"a bias of shape \(4,\), got \(3,\)"),
        (dict(residual=draw(4)), r"a residual of shape \(2, 4\), got \(4,\)"),
        (dict(residual=draw(2, 4, dtype=jnp.bfloat16)), "a residual of float32, as the rows are, got bfloat16"),
        (dict(implementation="cutlass"), "implementation must be one of .*got 'cutlass'"),
        (dict(implementation="reference@1:2"), "got 'reference@1:2'"),
        (
            dict(implementation="triton@1:2"),
            "expected triton@BLOCK_D:BLOCK_N:.*:PARTS:TENSOR_CORES, got '1:2' behind the @",
        ),
        (dict(implementation="triton@64:48:4:3:1:1"), "LinearTuning.block_n must be a power of two from 16 to 256, got 48"),
        (dict(implementation="triton@64:64:4:9:1:1"), "LinearTuning.num_stages must be an int from 1 to 8, got 9"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        few_row_linear(draw(2, 6), **dict(weight=draw(6, 4)) | options)


def test_a_program_has_tiles_of_eight_kilobytes_and_of_sixteen_where_one_row_has_few_columns() -> None:
    for rows, columns, itemsize, gated in itertools.product((1, 6), (512, 4096, 14336, 28672), (2, 4), (False, True)):
        tuning = default_tuning(num_rows=rows, inner=4096, num_columns=columns, itemsize=itemsize, gated=gated)
        is_deep = rows == 1 and columns < 64 * 132 and not gated
        assert tuning.block_d * tuning.block_n * itemsize * (2 if gated else 1) == (16384 if is_deep else 8192)
        assert LinearTuning.of_text(":".join(map(str, dataclasses.astuple(tuning)))) == tuning
    sizes = dict(num_rows=1, num_columns=4096, itemsize=2, gated=False)
    assert default_tuning(inner=4096, **sizes) == LinearTuning(256, 32, 4, 5, 1, 0)
    assert default_tuning(inner=896, **sizes).block_d == 128  # which divides it


def test_a_measurement_stands_for_as_many_rows_as_are_padded_alike_and_for_weights_a_half_step_smaller() -> None:
    shape = LinearShape(rows=6, inner=4096, columns=6144, normed=True)
    for rows, inner, columns in ((2, 4096, 6144), (8, 3100, 5000)):
        assert bucket(LinearShape(rows=rows, inner=inner, columns=columns, normed=True)) == bucket(shape)
    for change in (dict(rows=1), dict(rows=9), dict(inner=3072), dict(columns=6145), dict(normed=False), dict(gated=True)):
        assert bucket(LinearShape(**dict(rows=6, inner=4096, columns=6144, normed=True) | change)) != bucket(shape)
