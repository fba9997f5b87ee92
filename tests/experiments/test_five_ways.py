"""One workload in five ways on a tiny pair: which of them are lossless, and what their rows say."""

from __future__ import annotations

import dataclasses

import pytest

from experiments import decoded_ways, five_ways
from experiments.experiment import parse_config
from experiments.models import load_drafter, load_model
from experiments.sparse_settings import named_settings
from experiments.ways import WAYS
from specjax.two_level.level_counts import LevelCounts
from specjax.two_level.measured_costs import TwoLevelCosts

SMALL = (
    "block_size=8",
    "dense_below=16",
    "prompts=2",
    "new_tokens=12",
    "num_speculative_tokens=2",
    "dtype=float32",
    "max_prompt_tokens=150",
)
COSTS = TwoLevelCosts(dense_ms=4.0, sparse_ms=1.0, check_ms=5.0, max_steps=2)


@pytest.mark.full
def test_five_ways_of_which_the_lossless_ones_give_one_text(target_path, drafter_path, task_data, monkeypatch):
    # Times of a few tiny steps are noise; the costs are what those of a large target may be.
    monkeypatch.setattr(decoded_ways, "measure_costs", lambda *models, **settings: COSTS)
    words = (f"target={target_path}", *SMALL, "attention=0", "repeats=1", f"drafter={drafter_path}", f"data={task_data}", "task=gsm8k")
    rows = list(five_ways.run(parse_config(five_ways.Config, (*words, "max_sparse_steps=2", "adapt=false"))))
    assert [row["way"] for row in rows] == [way.name for way in WAYS]
    assert [row["lossless"] for row in rows] == [True, False, True, False, True]
    assert all(row["same_text"] == 1.0 for row in rows if row["lossless"])
    assert all((row["keep_ratio"] < 1) == ("sparse" in row["way"] or row["way"] == "two levels") for row in rows)
    assert 0 <= rows[-1]["dense_acceptance_rate"] < 1
    assert 1 <= rows[-1]["steps_between_dense"] <= 2
    assert (rows[-1]["step_cost"], rows[-1]["check_cost"]) == (0.25, 1.25)
    assert [row["speedup_over_dense_verification"] is None for row in rows] == [True, True, False, False, False]
    assert all(five_ways.columns(row) and five_ways.show(row) for row in rows)


def test_a_row_whose_dense_level_checked_nothing_says_so_and_shows_no_rate():
    row = dict(way="two levels", method="attention 0.1", lossless=True, context=4096.0, batch=1, synthetic=False, same_text=1.0)
    row |= dict(mean_acceptance_length=2.0, tokens_per_s=100.0, ms_per_token=10.0, keep_ratio=None, steps_between_dense=None)
    row |= dict(speedup_over_autoregressive=1.5, speedup_over_dense_verification=0.9, break_even_dense_acceptance=None)
    row |= dict(dense_acceptance_rate=LevelCounts.zeros(1).summary()["dense_acceptance_rate"], dense_step_share=1.0)
    assert "dense level checked nothing, never pays, 100% of its cycles dense" in five_ways.show(row)
    assert five_ways.columns(row)["accepted by dense passes"] is None


def workload(*words, prompts=((1, 2, 3),)):
    target = load_model("tiny", dtype="float32", implementation="auto", cache_dir=None)
    drafter = load_drafter("prompt_lookup", target, dtype="float32", implementation="auto", cache_dir=None)
    config = parse_config(five_ways.Config, ("target=tiny", *SMALL, *words))
    return decoded_ways.Workload(config=config, target=target, drafter=drafter, prompts=list(map(list, prompts)), batch=1)


def test_costs_are_measured_behind_typical_prompts_over_caches_of_the_capacity_that_is_decoded_with(monkeypatch):
    seen = []

    def costs(target, params, drafter, drafter_params, prompts, *, config, repeats):
        seen.append(([len(prompt) for prompt in prompts], config.cache_capacity))
        return COSTS

    monkeypatch.setattr(decoded_ways, "measure_costs", costs)
    prompts = [[1] * length for length in (90, 3, 40, 5, 30)]
    work = workload(prompts=prompts)
    named = named_settings(work.config, work.target.model.config)[0]
    for batch in (1, 2, 7):
        assert dataclasses.replace(work, batch=batch).costs(named, capacity=512) == COSTS
    assert seen == [([30], 512), ([5, 30], 512), ([3, 5, 30, 40, 90, 3, 5], 512)]
