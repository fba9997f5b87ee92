"""`"auto"`: the table of measurements, what it is keyed by, and what is taken where it says nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.capacity import rounded_capacity
from specjax.kernels.cases import takes
from specjax.kernels.few_row_linear import LinearTuning
from specjax.kernels.measured import dispatch, fastest, read_table
from specjax.kernels.shape_lists import SHAPES
from specjax.kernels.shapes import AttentionShape, ExpertShape, LinearShape, LowRankShape, SelectionShape, bucket

SHAPE = AttentionShape(batch=1, rows=6, kv_heads=8, group=4, head_dim=128, slots=16384)


def row(of: Any = SHAPE, **changes: Any) -> dict[str, Any]:
    values = dict(device="GPU X", op=of.op, dtype="bfloat16", shape=dataclasses.asdict(of))
    return values | dict(implementation="triton", us=1.0, reference_us=2.0) | changes


def table(tmp_path: Path, *rows: Any) -> Any:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(rows))
    return read_table(path)


def on_device(monkeypatch: pytest.MonkeyPatch, kind: str, *, number: int = 1, missing: str | None = None) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [type("Device", (), {"device_kind": kind})] * number)
    monkeypatch.setattr("specjax.kernels.measured.what_is_missing", lambda: missing)


def test_a_measurement_stands_for_shapes_of_the_same_powers_of_two_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = table(tmp_path, row(), row(dataclasses.replace(SHAPE, rows=1), implementation="reference"))
    on_device(monkeypatch, "GPU X")
    assert fastest(SHAPE, jnp.bfloat16, table=measured) == "triton"
    assert fastest(dataclasses.replace(SHAPE, rows=5, slots=12000), jnp.bfloat16, table=measured) == "triton"
    for change in (dict(rows=9), dict(rows=1), dict(slots=8192), dict(batch=2), dict(kept_slots=2048)):
        assert fastest(dataclasses.replace(SHAPE, **change), jnp.bfloat16, table=measured) == "reference"
    assert fastest(SHAPE, jnp.float32, table=measured) == "reference"


def test_an_unknown_device_several_devices_or_a_missing_package_take_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = table(tmp_path, row())
    on_device(monkeypatch, "GPU Y")
    assert fastest(SHAPE, jnp.bfloat16, table=measured) == "reference"
    on_device(monkeypatch, "GPU X", number=2)
    assert fastest(SHAPE, jnp.bfloat16, table=measured) == "reference"
    on_device(monkeypatch, "GPU X", missing="jax-triton is not there")
    assert fastest(SHAPE, jnp.bfloat16, table=measured) == "reference"


def test_the_table_that_comes_along_can_be_read_and_a_rewritten_one_is_read_again(tmp_path: Path) -> None:
    read_table()
    assert len(table(tmp_path, row())) == 1
    assert len(table(tmp_path, row(), row(dtype="float32"))) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(more=1), "a row must have the keys"),
        (dict(op="matmul"), "op must be one of .*got 'matmul'"),
        (dict(implementation="pallas"), "implementation must be 'reference' or 'triton', got 'pallas'"),
        (dict(shape={"rows": 1}), "is no shape of cached_attention"),
    ],
)
def test_a_wrong_row_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        table(tmp_path, row(**changes))


def test_auto_runs_the_reference_in_the_kernels_place_on_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specjax.kernels.measured.fastest", lambda shape, dtype: "triton")

    def triton(x: jax.Array) -> jax.Array:
        return x + 100

    call = jax.jit(lambda x: dispatch("auto", SHAPE, x.dtype, triton=triton, reference=lambda x: x + 1, arrays=(x,)))
    np.testing.assert_array_equal(call(jnp.ones(2)), [2, 2])  # compiled for a CPU


@pytest.mark.parametrize(("implementation", "expected"), [("auto", 2), ("reference", 2), ("triton", 101)])
def test_what_was_asked_for_runs_and_has_the_references_derivative(implementation: str, expected: int) -> None:
    def call(x: jax.Array) -> jax.Array:
        functions = dict(triton=lambda x: x + 100, reference=lambda x: 1 + x**2)
        return dispatch(implementation, SHAPE, x.dtype, **functions, arrays=(x,))

    assert call(jnp.float32(1)) == expected
    assert jax.grad(call)(jnp.float32(3)) == 6
    assert jax.jvp(call, (jnp.float32(3),), (jnp.float32(1),))[1] == 6


def test_where_vmap_maps_a_kernel_the_reference_runs_in_its_place() -> None:
    def kernel(x: jax.Array, add: jax.Array | None) -> jax.Array:  # as a Triton kernel, `vmap` cannot map it
        return jax.pure_callback(lambda x: x * 3, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def run(x: jax.Array, add: jax.Array | None) -> jax.Array:
        return dispatch("triton", SHAPE, x.dtype, triton=kernel, reference=lambda x, add: x * 2, arrays=(x, add))

    x = jnp.ones((4, 3))
    np.testing.assert_array_equal(run(x, None), 3 * x)
    for add, axis in ((None, None), (jnp.ones(3), None), (x, 0)):
        np.testing.assert_array_equal(jax.jit(jax.vmap(run, in_axes=(0, axis)))(x, add), 2 * x)
    np.testing.assert_array_equal(jax.grad(lambda x: jax.vmap(run, in_axes=(0, None))(x, None).sum())(x), 2 * x)


def test_a_kernel_is_given_its_cut_and_the_reference_is_not() -> None:
    def kernel(x: jax.Array, tuning: LinearTuning | None = None) -> jax.Array:
        return x * (3 if tuning is None else tuning.block_d)

    def run(x: jax.Array, implementation: str) -> jax.Array:
        functions: dict[str, Any] = dict(triton=kernel, tuning=LinearTuning, reference=lambda x: x * 2)
        return dispatch(implementation, SHAPE, x.dtype, **functions, arrays=(x,))

    for name, factor in (("triton", 3), ("triton@64:32:4:5:1:1", 64)):
        value, gradient = jax.value_and_grad(run)(jnp.float32(1), name)
        assert (float(value), float(gradient)) == (factor, 2)


def test_the_shapes_that_are_measured_do_not_stand_for_one_another() -> None:
    assert len({(shape.op, bucket(shape)) for shape in SHAPES}) == len(SHAPES)


def test_a_measured_context_stands_for_the_somewhat_larger_cache_that_a_call_allocates() -> None:
    heads = dict(kv_heads=8, group=4, head_dim=128)
    for context in (4096, 16384, 32768, 131072):
        measured = AttentionShape(batch=1, rows=6, slots=context, **heads)
        called = AttentionShape(batch=1, rows=6, slots=rounded_capacity(context + 700, 64), **heads)
        assert called.slots > context
        assert bucket(called) == bucket(measured)
        assert bucket(dataclasses.replace(called, slots=context * 3 // 2)) != bucket(measured)
        listed = dataclasses.replace(measured, kept_slots=context // 8)
        assert bucket(dataclasses.replace(called, kept_slots=context * 5 // 32)) == bucket(listed) != bucket(measured)
        assert bucket(dataclasses.replace(called, rows=5)) == bucket(measured) != bucket(dataclasses.replace(called, rows=9))
    blocks = [SelectionShape(batch=1, blocks=number, chosen=number // 8, **heads) for number in (2048, 2112)]
    assert bucket(blocks[0]) == bucket(blocks[1])


def test_a_cut_is_for_the_operation_whose_numbers_it_has() -> None:
    linear, experts = LinearShape(rows=6, inner=64, columns=64), ExpertShape(rows=6, choices=2, experts=4, hidden=64, ffn=64)
    cuts = {SHAPE: "triton@2:64:4:3:128", linear: "triton@64:32:4:5:1:1", experts: "triton@32:64:64:4:4"}
    for shape in cuts:
        assert [takes(shape, cut) for cut in cuts.values()] == [cut == cuts[shape] for cut in cuts.values()]
        assert takes(shape, "triton")
    without_tensor_cores = "triton@64:32:4:5:1:0"
    assert not takes(linear, without_tensor_cores)
    assert takes(dataclasses.replace(linear, rows=1), without_tensor_cores)


def test_bytes_that_must_move_are_those_of_the_arrays() -> None:
    assert SHAPE.moved_bytes(2) == 2 * 2 * 8 * 128 * 16384 + 2 * 2 * 6 * 32 * 128
    assert dataclasses.replace(SHAPE, kept_slots=2048).moved_bytes(2) == 2 * 2 * 8 * 128 * 2048 + 2 * 2 * 6 * 32 * 128
    assert LowRankShape(rows=2, hidden=8, rank=4, vocab=10).moved_bytes(4) == 4 * (4 * 8 + 10 * 4 + 2 * 8)
