"""Times of sparse verification on a tiny shape: that they are taken, and what is made of them. The numbers mean nothing here."""

from __future__ import annotations

import pytest

from experiments import sparse_latency
from experiments.experiment import ExperimentError, parse_config
from experiments.record import ROW_KEYS
from specjax.two_level_cost import two_level_speedup

BLOCKS = ("block_size=8", "dense_below=16")
LATENCY = "model context batch rows method keep_ratio steps_between_dense assumed_dense_acceptance ms_dense ms_sparse ms_per_token_dense "
LATENCY += "ms_per_token_sparse speedup floor_ms"


def run_latency(*settings):
    words = ("model=tiny", "batches=1", "rows=3", *BLOCKS, "dtype=float32", "short_steps=1", "long_steps=3", "repeats=3")
    return list(sparse_latency.run(parse_config(sparse_latency.Config, (*words, "compile_threads=1", *settings))))


def test_latency_rows_have_a_time_each_and_the_arithmetic_of_two_levels():
    rows = run_latency("contexts=128", "attention=0.25", "reuse=tokens", "steps_between_dense=2", "dense_acceptances=0.9,1", "ffn=0.5")
    assert all(set(row) == {*LATENCY.split(), *ROW_KEYS} for row in rows)
    assert [row["assumed_dense_acceptance"] for row in rows] == [None, 0.9, 1.0] * 2
    lossy, checked, perfect = rows[:3]
    # 128 tokens are 16 blocks; of 16 + 0.25 * 112 = 44 tokens 6 blocks are kept.
    assert lossy["keep_ratio"] == 6 / 16
    assert rows[3]["keep_ratio"] == 0.5
    assert lossy["speedup"] == pytest.approx(lossy["ms_dense"] / lossy["ms_sparse"])
    assert lossy["ms_per_token_dense"] == pytest.approx(lossy["ms_dense"] / 3)
    assert checked["speedup"] < perfect["speedup"]
    assert perfect["ms_per_token_sparse"] == pytest.approx(perfect["ms_per_token_dense"] / perfect["speedup"])
    assert lossy["floor_ms"] > 0
    # Solved for the cost of the dense pass, both rows name the same one.
    costs = [_check_cost(row) for row in (checked, perfect)]
    assert costs[0] == pytest.approx(costs[1])
    assert all(sparse_latency.columns(row) and sparse_latency.show(row) for row in rows)


def _check_cost(row: dict) -> float:
    sizes = dict(num_steps=2, tokens_per_step=3, acceptance=row["assumed_dense_acceptance"], step_cost=row["ms_sparse"] / row["ms_dense"])
    one, two = (1 / two_level_speedup(**sizes, check_cost=cost) for cost in (1.0, 2.0))  # linear in the cost
    return 1 + (1 / row["speedup"] - one) / (two - one)


def test_what_does_not_fit_the_device_or_the_window_is_named_and_left_out(capsys, monkeypatch):
    assert run_latency("contexts=8192", "attention=0.25") == []
    assert "context 8192: left out, the model's window has 4096 tokens" in capsys.readouterr().err
    monkeypatch.setattr(sparse_latency, "device", lambda: {"memory_bytes": 2e9})
    assert run_latency("contexts=128", "attention=0.25") == []
    assert "it needs about 4 GB, the device has 2 GB" in capsys.readouterr().err
    with pytest.raises(ExperimentError, match="nothing to time"):
        run_latency("attention=")
