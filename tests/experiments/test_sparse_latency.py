"""Times of sparse verification on a tiny shape: that they are taken, and what is made of them. The numbers mean nothing here."""

from __future__ import annotations

import pytest

from experiments import mid_decode, sparse_latency
from experiments.experiment import ExperimentError, parse_config
from experiments.record import ROW_KEYS

BLOCKS = ("block_size=8", "dense_below=16")
LATENCY = "model context batch rows method keep_ratio steps_between_dense assumed_dense_acceptance ms_dense ms_sparse ms_check speedup_is "
LATENCY += "ms_per_token_dense ms_per_token_sparse speedup floor_ms"


def run_latency(*settings):
    words = ("model=tiny", "batches=1", "rows=3", *BLOCKS, "dtype=float32", "short_steps=1", "long_steps=3", "repeats=3")
    return list(sparse_latency.run(parse_config(sparse_latency.Config, (*words, "compile_threads=1", *settings))))


def test_every_setting_has_a_row_without_checks_and_one_for_each_of_them():
    rows = run_latency("contexts=128", "attention=0.25", "reuse=tokens", "steps_between_dense=2", "dense_acceptances=0.9,1", "ffn=0.5")
    assert all(set(row) == {*LATENCY.split(), *ROW_KEYS} for row in rows)
    assert [row["method"] for row in rows] == ["attention 0.25 (reuse: draft tokens)"] * 3 + ["ffn 0.5"] * 3
    assert [(row["steps_between_dense"], row["assumed_dense_acceptance"]) for row in rows[:3]] == [(None, None), (2, 0.9), (2, 1.0)]
    # 128 tokens are 16 blocks; of 16 + 0.25 * 112 = 44 tokens 6 blocks are kept.
    assert [row["speedup_is"] for row in rows[:3]] == ["measured", "computed", "computed"]
    assert [row["keep_ratio"] for row in rows] == [6 / 16] * 3 + [0.5] * 3
    # Both of one process and one cache: what a pass must read falls by what it leaves out.
    assert 0 < rows[0]["floor_ms"] != rows[3]["floor_ms"] > 0
    assert all(sparse_latency.columns(row) and sparse_latency.show(row) for row in rows)


def test_the_table_shows_what_was_measured_and_the_best_that_checks_leave():
    common = {"batch": 1, "rows": 6}
    names = ("context", "steps_between_dense", "speedup")
    found = [(8, None, 2.0), (8, 4, 0.9), (8, 8, 1.1), (9, None, None), (9, 4, None), (9, 8, 0.5)]
    rows = [common | dict(zip(names, row, strict=True)) for row in found]
    assert [tuple(row[name] for name in names) for row in sparse_latency.table_rows(rows)] == [found[n] for n in (0, 2, 3, 5)]


def test_a_step_costs_what_was_measured_and_checks_cost_what_the_arithmetic_says():
    config, times = sparse_latency.Config(mean_acceptance_length=3.0), {None: 6.0, "half": 3.0, 4: 9.0, "lost": -0.1}
    lossy = sparse_latency.costs(config, times, "half", rows=6)
    assert (lossy["speedup"], lossy["ms_per_token_dense"], lossy["ms_per_token_sparse"]) == (2.0, 2.0, 1.0)
    # All accepted: 4 steps and a check take 4 * 3 + 9 ms, and settle 4 * 3 + 1 tokens.
    checked = sparse_latency.costs(config, times, "half", rows=6, steps=4, acceptance=1.0)
    assert checked["ms_per_token_sparse"] == pytest.approx(21 / 13)
    # A step of two rows commits two tokens at most.
    assert sparse_latency.costs(config, times, "half", rows=2)["ms_per_token_sparse"] == 1.5
    assert sparse_latency.costs(config, times, "lost", rows=6)["speedup"] is None


def test_what_does_not_fit_the_device_or_the_window_is_named_and_left_out(capsys, monkeypatch):
    assert run_latency("contexts=8192", "attention=0.25") == []
    assert "context 8192: left out, the model's window has 4096 tokens" in capsys.readouterr().err
    monkeypatch.setattr(mid_decode, "device", lambda: {"memory_bytes": 2e9})
    assert run_latency("contexts=128", "attention=0.25") == []
    assert "it needs about 4 GB, the device has 2 GB" in capsys.readouterr().err
    with pytest.raises(ExperimentError, match="nothing to time"):
        run_latency("attention=")
