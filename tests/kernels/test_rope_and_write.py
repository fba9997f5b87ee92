"""Rotating new rows and writing them into the cache: the Triton kernel, interpreted, against the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.rope_and_write import Heads, rope_and_write
from specjax.model_config import RopeConfig
from specjax.models.rope import rotary_angles
from tests.kernels.interpreted_triton import interpreted, launches, needs_triton

# float32: a rotation is two products and a sum, which a device may fuse. bfloat16: a last bit that this turns over, in values up to 4.
TOLERANCES = {jnp.float32: 1e-6, jnp.bfloat16: 2**-6}
FULL = pytest.mark.full
SLOTS = 24


def case(start: list[int], *, rows: int, group: int, head_dim: int, norms: bool, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """Two key/value heads; the cache is full of numbers that must stay."""
    rng = np.random.default_rng(len(start) + rows + group)

    def draw(*size: int, mean: float = 0, spread: float = 1) -> jax.Array:
        return jnp.asarray(rng.normal(mean, spread, size), dtype)

    batch, positions = len(start), jnp.asarray(start, jnp.int32)[:, None] + jnp.arange(rows)
    cos, sin = rotary_angles(RopeConfig(), head_dim, positions)
    scales: dict[str, Any] = {}
    if norms:
        scales = {name: draw(head_dim, mean=1, spread=0.25) for name in ("query_scale", "key_scale")}
    heads = Heads(qkv=draw(batch, rows, 2, group + 2, head_dim), cos=cos, sin=sin, epsilon=1e-5, **scales)
    return heads, draw(batch, 2, SLOTS, head_dim), draw(batch, 2, SLOTS, head_dim), jnp.asarray(start, jnp.int32)


@jax.jit
def reference(*arrays: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    return rope_and_write(*arrays, implementation="reference")


def check(arrays: tuple[Any, ...], dtype: Any) -> None:
    got, expected = rope_and_write(*arrays, implementation="triton"), reference(*arrays)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == dtype
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    slots, start, num_rows = np.arange(SLOTS), np.asarray(arrays[3])[:, None], arrays[0].qkv.shape[1]
    beside = (slots < np.minimum(start, SLOTS - num_rows)) | (slots >= start + num_rows)
    for ours, old in zip(got[1:], arrays[1:3], strict=True):  # what was not written is what was there
        np.testing.assert_array_equal(*(np.asarray(x).swapaxes(1, 2)[beside] for x in (ours, old)))
    np.testing.assert_array_equal(got[2], expected[2])  # values are copied


@needs_triton
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("start", "rows", "group", "head_dim", "norms"),
    [
        pytest.param([3], 1, 4, 16, False, marks=FULL),
        ([0, 7, 18], 6, 3, 12, True),
        pytest.param([5, 0], 16, 1, 8, False, marks=FULL),
        pytest.param([2, 9], 2, 7, 64, True, marks=FULL),
    ],
)
def test_the_kernel_equals_the_reference(start: list[int], rows: int, group: int, head_dim: int, norms: bool, dtype: Any) -> None:
    arrays = case(start, rows=rows, group=group, head_dim=head_dim, norms=norms, dtype=dtype)
    with interpreted():
        check(arrays, dtype)
        assert launches == ["rotate_and_write"]


@needs_triton
def test_values_that_are_not_finite_become_zero_under_a_key_that_is_none() -> None:
    heads, keys, values, start = case([4], rows=2, group=2, head_dim=8, norms=False)
    qkv = heads.qkv.at[0, 0, 0, -1, 3].set(jnp.nan).at[0, 1, 1, -1, 6].set(-jnp.inf)
    with interpreted():
        _, new_keys, new_values = rope_and_write(dataclasses.replace(heads, qkv=qkv), keys, values, start, implementation="triton")
    assert jnp.isfinite(new_values).all()
    assert set(zip(*np.nonzero(np.isnan(new_keys)), strict=True)) == {(0, 0, 4, 3), (0, 1, 5, 6)}
    assert new_values[0, 0, 4, 3] == new_values[0, 1, 5, 6] == 0


@needs_triton
def test_a_write_over_the_end_is_shifted_back_as_the_references_is() -> None:
    arrays = case([SLOTS - 1, SLOTS - 2], rows=3, group=1, head_dim=8, norms=False)
    with interpreted():
        check(arrays, jnp.float32)


@needs_triton
def test_it_runs_inside_a_loop_and_has_the_derivative_of_the_reference() -> None:
    heads, keys, values, start = case([2, 5], rows=2, group=2, head_dim=8, norms=True)

    def loss(implementation: str) -> Any:
        def of(qkv: jax.Array, values: jax.Array) -> jax.Array:
            parts = rope_and_write(dataclasses.replace(heads, qkv=qkv), keys, values, start, implementation=implementation)
            return sum((part**2).sum() for part in parts)

        return of

    def looped(implementation: str) -> Any:
        def body(carry: tuple) -> tuple:
            step, keys, values = carry
            return step + 1, *rope_and_write(heads, keys, values, start + 2 * step, implementation=implementation)[1:]

        return jax.jit(lambda keys, values: jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, keys, values)))(keys, values)

    with interpreted():
        gradients = jax.block_until_ready(jax.jit(jax.grad(loss("triton"), argnums=(0, 1)))(heads.qkv, values))
        got = jax.block_until_ready(looped("triton"))
        assert launches == ["rotate_and_write"] * 4
    for ours, wanted in zip(gradients, jax.jit(jax.grad(loss("reference"), argnums=(0, 1)))(heads.qkv, values), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-5)
    for ours, wanted in zip(got, looped("reference"), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-6)


@needs_triton
@FULL
def test_more_rows_than_the_kernel_is_for_are_the_references() -> None:
    arrays = case([0] * 5, rows=13, group=1, head_dim=8, norms=False)
    with interpreted():
        got = rope_and_write(*arrays, implementation="triton")
        assert launches == []
    np.testing.assert_array_equal(got[1], rope_and_write(*arrays, implementation="reference")[1])


@pytest.mark.parametrize(
    ("changes", "cache_dtype", "message"),
    [
        (dict(clip=1.0), jnp.float32, "'triton' does not clip"),
        (
            dict(query_scale=jnp.ones(32), key_scale=jnp.ones(16)),
            jnp.float32,
            "'triton' norms each head by itself, not all of them together",
        ),
        ({}, jnp.bfloat16, "one dtype, bfloat16 or float32, got float32, bfloat16 and bfloat16"),
    ],
)
def test_what_the_kernel_was_not_written_for_is_refused_and_auto_takes_the_reference(
    changes: dict[str, Any], cache_dtype: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, keys, values, start = case([0], rows=1, group=2, head_dim=8, norms=False)
    arrays = dataclasses.replace(heads, **changes), keys.astype(cache_dtype), values.astype(cache_dtype), start
    with pytest.raises(ValueError, match=message):
        rope_and_write(*arrays, implementation="triton")
    monkeypatch.setattr("specjax.kernels.measured.fastest", lambda shape, dtype: "triton")
    jax.tree.map(np.testing.assert_array_equal, rope_and_write(*arrays), rope_and_write(*arrays, implementation="reference"))


@pytest.mark.parametrize("implementation", ["auto", "reference", "triton"])
def test_more_new_rows_than_slots_are_refused(implementation: str) -> None:
    heads, keys, values, start = case([0], rows=3, group=1, head_dim=8, norms=False)
    with pytest.raises(ValueError, match="3 new rows do not fit a cache of 2 slots"):
        rope_and_write(heads, keys[:, :, :2], values[:, :, :2], start, implementation=implementation)


@needs_triton
def test_as_many_new_rows_as_slots_fill_the_cache() -> None:
    heads, keys, values, start = case([0], rows=SLOTS, group=1, head_dim=8, norms=False)
    with interpreted():
        check((heads, keys, values, start), jnp.float32)


def test_a_cache_of_another_shape_is_refused() -> None:
    heads, keys, values, start = case([0], rows=1, group=2, head_dim=8, norms=False)
    with pytest.raises(ValueError, match=r"qkv .* = \(1, 1, 2, 4, 8\) does not fit caches \(1, 1, 24, 8\)"):
        rope_and_write(heads, keys[:, :1], values, start)
    with pytest.raises(ValueError, match="implementation must be one of"):
        rope_and_write(heads, keys, values, start, implementation="triton@1")
