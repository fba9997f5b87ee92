"""One workload in five ways on a tiny pair: which of them are lossless, and what their rows say."""

from __future__ import annotations

import pytest

from experiments import five_ways
from experiments.experiment import parse_config

SMALL = (
    "block_size=8",
    "dense_below=16",
    "prompts=2",
    "new_tokens=12",
    "num_speculative_tokens=2",
    "dtype=float32",
    "max_prompt_tokens=150",
)


def run_five_ways(target, *settings):
    words = (f"target={target}", *SMALL, "attention=0", "repeats=1", *settings)
    return list(five_ways.run(parse_config(five_ways.Config, words)))


@pytest.mark.full
def test_five_ways_of_which_the_lossless_ones_give_one_text(target_path, drafter_path, task_data):
    rows = run_five_ways(target_path, f"drafter={drafter_path}", f"data={task_data}", "task=gsm8k", "max_sparse_steps=2", "adapt=false")
    assert [row["way"] for row in rows] == [way.name for way in five_ways.WAYS]
    assert [row["lossless"] for row in rows] == [True, False, True, False, True]
    assert all(row["same_text"] == 1.0 for row in rows if row["lossless"])
    assert all((row["keep_ratio"] < 1) == ("sparse" in row["way"] or row["way"] == "two levels") for row in rows)
    assert 0 <= rows[-1]["dense_acceptance_rate"] < 1
    assert 1 <= rows[-1]["steps_between_dense"] <= 2
    assert all(five_ways.columns(row) and five_ways.show(row) for row in rows)


@pytest.mark.full
def test_a_preset_has_made_up_acceptance_and_says_so():
    rows = run_five_ways("tiny", "drafter=tiny", "mean_acceptance_length=2")
    assert [row["synthetic"] for row in rows] == [False, False, True, True]
    assert all(row["same_text"] is None for row in rows if row["synthetic"])
    assert rows[2]["mean_acceptance_length"] == pytest.approx(2, abs=0.5)
