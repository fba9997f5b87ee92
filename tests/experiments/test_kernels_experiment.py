"""Timing and tuning kernels on tiny shapes: what the loops hold, what the rows say, and the table that comes of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import kernels, tune
from experiments.experiment import ExperimentError, parse_config
from experiments.record import check_row
from experiments.timing import LoopTiming
from specjax.kernels.measured import PATH, fastest, read_table
from specjax.kernels.shape_lists import SHAPES, TINY_SHAPES
from tests.kernels.interpreted_triton import interpreted, launches, needs_triton

SMALL = ("shapes=tiny", "implementations=reference", "l2_bytes=0", "short_steps=1", "long_steps=3", "repeats=1", "dtype=float32")
KEYS = {"op", "shape", "implementation", "us", "reference_us", "floor_us", "ratio_to_floor"}
EVERY_ROWS_KEYS = {"weights", "synthetic"}


def test_a_tiny_run_gives_a_row_for_each_operation() -> None:
    rows = list(kernels.run(parse_config(kernels.Config, SMALL)))
    assert [row["op"] for row in rows] == [shape.op for shape in TINY_SHAPES]
    for row, shape in zip(rows, TINY_SHAPES, strict=True):
        check_row(row)
        assert set(row) == KEYS | EVERY_ROWS_KEYS
        assert row["shape"] == dataclasses.asdict(shape)
        assert row["us"] == row["reference_us"]
        assert row["floor_us"] == shape.moved_bytes(4) / 4.3e12 * 1e6
        assert row["ratio_to_floor"] == row["us"] / row["floor_us"]
        assert row["op"] in kernels.show(row)
        assert kernels.columns(row)["operation"] == row["op"]


def test_every_call_of_a_step_counts_in_its_result() -> None:
    config, shape = dataclasses.replace(parse_config(kernels.Config, SMALL), l2_bytes=16_000), TINY_SHAPES[0]
    loop = kernels.loops(shape, config)["reference"]
    copies = loop.params["rest"]
    assert len(copies) == kernels.num_copies(shape, config) > 1
    step = jax.jit(loop.step)
    query, _ = step(loop.params, loop.state)
    for index, (keys, values, length) in enumerate(copies):
        changed = [*copies[:index], (keys, values * 3, length), *copies[index + 1 :]]
        assert not np.array_equal(query, step({**loop.params, "rest": changed}, loop.state)[0])


def test_the_arrays_of_a_step_exceed_the_cache_four_times_or_what_lacks_is_read_besides() -> None:
    config = kernels.Config()
    for shape in SHAPES:
        read = kernels.num_copies(shape, config) * shape.moved_bytes(2)
        assert read >= 4 * config.l2_bytes or kernels.num_copies(shape, config) == 32
    (small,) = (shape for shape in TINY_SHAPES if shape.op == "cached_attention")
    small_config = dataclasses.replace(parse_config(kernels.Config, SMALL), l2_bytes=1_000_000)
    loop = kernels.loops(small, small_config)["reference"]
    assert loop.params["lacking"].nbytes + 32 * small.moved_bytes(4) == pytest.approx(4_000_000, abs=4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shapes=huge"], "shapes must be one of full, tiny, got 'huge'"),
        (["ops=matmul"], "ops must be some of .*cached_attention.*, got matmul"),
        (["implementations=reference,triton@3:64:4:3:128"], "no operation that is measured can be cut as 'triton@3:64:4:3:128' says"),
        (["implementations=reference,triton@fast"], "no operation that is measured can be cut as 'triton@fast' says"),
        (["implementations=reference,triton@8:64:64:4:4"], "can be cut as 'triton@8:64:64:4:4' says"),
        (
            ["implementations=reference,triton@2:16:4:2:128", "ops=few_row_linear,expert_products"],
            "can be cut as 'triton@2:16:4:2:128' says",
        ),
        (["rows=7"], r"no shape of 'full' has these ops, rows and sizes: \(\), \(7,\)"),
        (["implementations=triton"], "implementations must be reference, and may be triton, got triton"),
    ],
)
def test_unknown_settings_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        parse_config(kernels.Config, words)


@needs_triton
def test_a_tuned_kernel_is_measured_beside_the_reference_where_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "what_is_missing", lambda: None)
    cuts = "triton@2:16:4:2:128,triton@16:16:4:2:2:1,triton@16:16:16:4:2"
    words = [word for word in SMALL if "implementations" not in word] + [f"implementations=reference,{cuts}"]
    with interpreted():
        ops = "cached_attention,low_rank_argmax,few_row_linear,expert_products"
        rows = list(kernels.run(parse_config(kernels.Config, [*words, f"ops={ops}"])))
        assert {"merge_parts", "multiply_strip", "weighted_down"} <= set(launches)
    assert [(row["op"], row["implementation"]) for row in rows] == [
        ("cached_attention", "reference"),
        ("cached_attention", "triton@2:16:4:2:128"),
        ("low_rank_argmax", "reference"),
        ("few_row_linear", "reference"),
        ("few_row_linear", "triton@16:16:4:2:2:1"),
        ("expert_products", "reference"),
        ("expert_products", "triton@16:16:16:4:2"),
    ]


def test_a_kernel_that_cannot_run_here_ends_the_run_with_a_reason() -> None:
    with pytest.raises(ExperimentError, match=r"needs a CUDA device.*; implementations=reference measures XLA alone"):
        list(kernels.run(parse_config(kernels.Config, ["shapes=tiny"])))
    with pytest.raises(ExperimentError, match="must name both"):
        parse_config(tune.Config, ["implementations=reference"])
    assert parse_config(tune.Config, []).table == str(PATH)


def test_tuning_fills_the_table_that_auto_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = TINY_SHAPES[:3]
    measured: list[Any] = [(first, dict(reference=2.0, triton=1.0)), (second, dict(reference=1.0, triton=0.98))]
    monkeypatch.setattr(kernels, "measure", lambda config: iter(measured))
    path = tmp_path / "table.json"
    others = dict(device="other", op=third.op, dtype="bfloat16", shape=dataclasses.asdict(third))
    path.write_text(json.dumps([others | dict(implementation="triton", us=1, reference_us=2)]))
    config = tune.Config(table=str(path))
    for row in tune.run(config):
        check_row(row)
        assert row["op"] in tune.show(row)
    monkeypatch.setattr("specjax.kernels.measured.what_is_missing", lambda: None)
    assert fastest(first, jnp.bfloat16, table=read_table(path)) == "triton"
    assert fastest(second, jnp.bfloat16, table=read_table(path)) == "reference"  # within the noise
    numbers = TINY_SHAPES[-1]
    measured[:] = [(numbers, dict(reference=2.0, triton=1.0))]
    list(tune.run(config))
    assert fastest(numbers, jnp.float32, table=read_table(path)) == "triton"  # whatever the dtype of the others
    measured[:] = [(second, dict(reference=1.0, triton=-0.1))]
    assert [row["implementation"] for row in tune.run(config)] == ["reference"]
    measured[:] = [(first, dict(reference=1.0, triton=2.0))]
    assert [row["implementation"] for row in tune.run(config)] == ["reference"]
    assert fastest(first, jnp.bfloat16, table=read_table(path)) == "reference"
    cut = "triton@2:16:4:2:128"
    measured[:] = [(first, {"reference": 2.0, "triton": 1.0, cut: 0.9}), (second, {"reference": 2.0, "triton": 1.0, cut: 0.98})]
    assert [row["implementation"] for row in tune.run(config)] == [cut, "triton"]
    assert fastest(first, jnp.bfloat16, table=read_table(path)) == cut
    assert [row["device"] for row in json.loads(path.read_text())].count("other") == 1
    assert len(json.loads(path.read_text())) == 4


def test_a_reference_that_is_lost_in_noise_is_not_written_and_an_earlier_row_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shape, other), path = TINY_SHAPES[:2], tmp_path / "table.json"
    measured: list[Any] = [(shape, dict(reference=2.0, triton=1.0))]
    monkeypatch.setattr(kernels, "measure", lambda config: iter(measured))
    config = tune.Config(table=str(path))
    list(tune.run(config))
    before = path.read_text()
    measured[:] = [(shape, dict(reference=-0.2, triton=1.5)), (other, dict(reference=0.0, triton=-1.0)), (other, dict(reference=-0.1))]
    rows = list(tune.run(config))
    assert path.read_text() == before
    assert [(row["implementation"], row["us"]) for row in rows] == [(None, None)] * 3
    for row in rows:
        check_row(row)
        assert "lost in noise and not written: use longer loops" in tune.show(row)


def test_shapes_that_are_compiled_together_have_their_own_times_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"cached_attention", "low_rank_argmax", "few_row_linear", "block_selection"}
    shapes, small = [shape for shape in TINY_SHAPES if shape.op in chosen], [*SMALL, f"ops={','.join(chosen)}"]

    def timed(loops: dict, **settings: Any) -> dict:
        """A shape's place is its time."""
        times = {key: 0.0 if key[1] == kernels.EMPTY else 1.0 + shapes.index(key[0]) for key in loops}
        return {key: LoopTiming(ms_per_step=(ms,), raw_short_ms=(), raw_long_ms=(), compile_s=0, temp_bytes=0) for key, ms in times.items()}

    monkeypatch.setattr(kernels, "time_loops", timed)
    one, three = (list(kernels.run(parse_config(kernels.Config, [*small, f"together={number}"]))) for number in (1, 3))
    assert three == one
    copies = [kernels.num_copies(shape, parse_config(kernels.Config, SMALL)) for shape in shapes]
    assert [row["us"] for row in one] == [1e3 * (1 + place) / number for place, number in enumerate(copies)]
    with pytest.raises(ExperimentError, match="together must be at least 1, got 0"):
        parse_config(kernels.Config, ["together=0"])


def test_a_recorded_result_fills_the_table_without_measuring_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = TINY_SHAPES[:3]
    times = [
        (first, {"reference": 2.0, "triton": 1.0}),
        (second, {"reference": 1.0, "triton": 2.0}),
        (third, {"reference": 2.0, "triton": 1.0}),
    ]
    monkeypatch.setattr(kernels, "measure", lambda config: iter(times))
    rows = list(kernels.run(parse_config(kernels.Config, SMALL)))
    result, table = tmp_path / "kernels.json", tmp_path / "table.json"
    result.write_text(json.dumps({"device": {"kind": "that one"}, "config": {"dtype": "float32"}, "rows": rows}))
    monkeypatch.setattr(kernels, "measure", lambda config: pytest.fail("nothing is to be measured"))
    config = tune.Config(table=str(table), times=str(result), ops=(first.op, second.op))
    kept = [row for row in tune.run(config)]
    assert [(row["device"], row["dtype"], row["implementation"]) for row in kept] == [
        ("that one", "float32", "triton" if shape in (first, third) else "reference")
        for shape in (first, second, third)
        if shape.op in config.ops
    ]
    assert [row["shape"] for row in json.loads(table.read_text())] == [row["shape"] for row in kept]
    others = parse_config(kernels.Config, [*SMALL, f"but_for={result}"]).chosen_shapes
    assert set(others) == set(parse_config(kernels.Config, SMALL).chosen_shapes) - {first, second, third}
    assert others
    with pytest.raises(ExperimentError, match="is no result of the experiment kernels"):
        list(tune.run(tune.Config(table=str(table), times=str(table))))
    references = [row for row in rows if row["implementation"] == "reference"]
    result.write_text(json.dumps({"device": {"kind": "that one"}, "config": {"dtype": "float32"}, "rows": references}))
    before = table.read_text()
    with pytest.raises(ExperimentError, match=r"kernels.json has no times of kernels beside the reference's"):
        list(tune.run(config))
    assert table.read_text() == before
    with pytest.raises(ExperimentError, match="nothing.json is no result of the experiment kernels"):
        list(tune.run(tune.Config(table=str(table), times="nothing.json")))


def test_the_table_shows_the_fastest_kernel_of_each_shape_beside_xla() -> None:
    first, second = (dict(op=shape.op, shape=dataclasses.asdict(shape), floor_us=1.0, reference_us=4.0) for shape in TINY_SHAPES[:2])
    times = [(first, "reference", 4.0), (first, "triton", 3.0), (first, "triton@2:16:4:2:128", 2.0), (second, "reference", 4.0)]
    rows = [row | dict(implementation=name, us=us, ratio_to_floor=us) for row, name, us in times]
    shown = [kernels.columns(row) for row in kernels.table_rows(rows)]
    assert [(row["kernel"], row["XLA, µs"], row["µs"], row["faster than XLA"]) for row in shown] == [
        ("triton@2:16:4:2:128", 4.0, 2.0, "2.00 ×"),
        ("reference", 4.0, 4.0, "1.00 ×"),
    ]
    slower = [rows[0], rows[1] | dict(us=5.0)]
    assert [row["implementation"] for row in kernels.table_rows(slower)] == ["triton"]  # what it lost by is shown too
