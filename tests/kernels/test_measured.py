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
from specjax.kernels.buckets import bucket
from specjax.kernels.cases import takes
from specjax.kernels.few_row_linear import LinearTuning
from specjax.kernels.measured import dispatch, fastest, read_table
from specjax.kernels.shape_lists import SHAPES
from specjax.kernels.shapes import AttentionShape, ExpertShape, LinearShape, LowRankShape, SelectionShape

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


def test_a_measurement_stands_for_shapes_of_the_same_rows_and_powers_of_two_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = table(tmp_path, row(), row(dataclasses.replace(SHAPE, rows=1), implementation="reference"))
    on_device(monkeypatch, "GPU X")
    assert fastest(SHAPE, jnp.bfloat16, table=measured) == "triton"
    for rows in range(2, 9):
        assert fastest(dataclasses.replace(SHAPE, rows=rows, slots=12000), jnp.bfloat16, table=measured) == "triton"
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


def test_of_shapes_that_are_rounded_alike_the_one_stands_whose_kernel_gains_the_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(monkeypatch, "GPU X")
    few, many = (dataclasses.replace(SHAPE, rows=rows) for rows in (25, 49))
    rows = row(few, implementation="triton@4:64:4:3:128"), row(many, us=1.5), row(dataclasses.replace(SHAPE, rows=33), us=0.5)
    for order in (rows, rows[::-1]):
        assert fastest(few, jnp.bfloat16, table=table(tmp_path, *order)) == "triton"
        slow = row(dataclasses.replace(SHAPE, rows=64), implementation="reference", us=2.0)
        assert fastest(few, jnp.bfloat16, table=table(tmp_path, *order, slow)) == "reference"
        assert fastest(few, jnp.bfloat16, table=table(tmp_path, slow, *order)) == "reference"


@pytest.mark.parametrize("axis", ["slots", "batch"])
def test_a_shape_between_two_that_were_measured_takes_what_both_agree_on(
    axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(monkeypatch, "GPU X")
    sizes = {"slots": (4096, 8192, 16384, 32768, 65536), "batch": (1, 2, 4, 8, 16)}[axis]
    least, between, middle, beyond, most = (dataclasses.replace(SHAPE, **{axis: size}) for size in sizes)

    def taken(*rows: Any, of: Any = between) -> str:
        return fastest(of, jnp.bfloat16, table=table(tmp_path, *rows))

    kernel, loses = row(most), row(least, implementation="reference")
    assert taken(row(least), kernel) == "triton"
    assert taken(row(least), kernel, of=beyond) == "triton"
    assert taken(loses, row(middle), kernel) == "reference"
    assert taken(loses, row(middle), kernel, of=beyond) == "triton"
    assert taken(row(least), row(middle, implementation="reference"), kernel) == "reference"
    assert taken(row(least)) == taken(kernel) == "reference"
    assert taken(row(least), row(dataclasses.replace(most, rows=1))) == "reference"
    cut = "triton@2:64:4:3:128"
    assert taken(row(least, implementation=cut), row(most, implementation=cut)) == cut
    assert taken(row(least, implementation=cut), kernel) == "triton"


def test_an_h200_takes_the_kernel_for_every_number_of_rows_that_a_measurement_speaks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch, "NVIDIA H200")

    def taken(**sizes: int) -> set[str]:
        """By rows from 2 to 8, as a verification has."""
        return {fastest(dataclasses.replace(SHAPE, **sizes, rows=rows), jnp.bfloat16) for rows in range(2, 9)}

    for slots in (16384, 32768, 65536, 131072):  # of which one lies between two that were measured
        assert taken(slots=slots) == {"triton"}
        assert taken(slots=slots, kept_slots=slots // 8) == ({"reference"} if slots == 32768 else {"triton"})
    assert taken(slots=4096) == {"reference"}
    assert taken(slots=32768, batch=8) == {"triton"}
    assert taken(slots=262144) == {"reference"}  # beyond all that was measured


def test_the_shapes_that_are_measured_do_not_stand_for_one_another_but_for_checks_of_several_steps() -> None:
    alike: dict[Any, list[Any]] = {}
    for shape in SHAPES:
        alike.setdefault((shape.op, bucket(shape)), []).append(shape)
    shared = [[(shape.op, shape.rows) for shape in shapes] for shapes in alike.values() if len(shapes) > 1]
    assert shared == [[("cached_attention", 25), ("cached_attention", 49)]] * 2


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
