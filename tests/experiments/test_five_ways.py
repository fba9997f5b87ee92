"""One workload in five ways on a tiny pair: which of them are lossless, and what their rows say."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from experiments import decoded_ways, five_ways
from experiments.decoding import Call, Decoded, Prefilled
from experiments.experiment import ExperimentError, parse_config
from experiments.models import load_drafter, load_model
from experiments.sparse_settings import named_settings
from experiments.ways import TWO_LEVELS, WAYS
from specjax import Lossless, Statistics
from specjax.two_level.level_counts import LevelCounts
from specjax.two_level.measured_costs import CostsUnknown, TwoLevelCosts
from tests.helpers import tiny_config

SMALL = (
    "block_size=8",
    "dense_below=16",
    "prompts=2",
    "new_tokens=12",
    "num_speculative_tokens=2",
    "dtype=float32",
    "max_prompt_tokens=150",
)
COSTS = TwoLevelCosts(dense_ms=4.0, sparse_ms=1.0, check_ms=5.0, max_steps=2, draft_length=2)
# What costs are measured with, where up to three steps are asked for, and what is then decoded with.
LOSSLESS = (Lossless(max_steps=3, adapt=False), COSTS.lossless())


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


@pytest.fixture(scope="module")
def pair():
    target = load_model("tiny", dtype="float32", implementation="auto", cache_dir=None)
    return target, load_drafter("prompt_lookup", target, dtype="float32", implementation="auto", cache_dir=None)


def workload(pair, *words, prompts=((1, 2, 3),)):
    target, drafter = pair
    config = parse_config(five_ways.Config, ("target=tiny", *SMALL, *words))
    return decoded_ways.Workload(config=config, target=target, drafter=drafter, prompts=list(map(list, prompts)), batch=1)


def test_costs_are_measured_behind_typical_prompts_over_caches_of_the_capacity_that_is_decoded_with(pair, monkeypatch):
    seen = []

    def costs(target, params, drafter, drafter_params, prompts, *, config, repeats):
        seen.append(([len(prompt) for prompt in prompts], config.cache_capacity))
        return COSTS

    monkeypatch.setattr(decoded_ways, "measure_costs", costs)
    prompts = [[1] * length for length in (90, 3, 40, 5, 30)]
    work = workload(pair, prompts=prompts)
    named = named_settings(work.config, work.target.model.config)[0]
    for batch in (1, 2, 7):
        assert dataclasses.replace(work, batch=batch).costs(named, capacity=512) == COSTS
    assert seen == [([30], 512), ([5, 30], 512), ([3, 5, 30, 40, 90, 3, 5], 512)]


def test_settings_of_channels_and_with_refreshes_have_costs_and_are_checked_in_two_levels(pair, monkeypatch):
    seen = []

    def costs(*models, config, **settings):
        seen.append(config.sparsity)
        return COSTS

    monkeypatch.setattr(decoded_ways, "measure_costs", costs)
    monkeypatch.setattr(decoded_ways, "Decoder", lambda *models, config, **settings: seen.append(config.sparsity))
    work = workload(pair, "attention=0.5", "reuse=none", "controls=", "ffn=0.5", "refresh_every=4", "max_sparse_steps=3")
    settings = named_settings(work.config, work.target.model.config)
    assert [named.method for named in settings] == ["attention", "ffn"]
    prefilled = Prefilled([1], [SimpleNamespace(target_cache=SimpleNamespace(capacity=64))])
    for named in settings:
        work.decoder(TWO_LEVELS, named, work.costs(named, capacity=64), prefilled)
        checked = [dataclasses.replace(named.sparsity, refresh_every=0, lossless=lossless) for lossless in LOSSLESS]
        assert [seen.pop(0), seen.pop(0)] == checked


def test_where_costs_are_lost_two_levels_decide_by_bytes_or_are_left_out(pair, monkeypatch, capsys):
    def costs(*models, **settings):
        raise CostsUnknown("times are lost in noise")

    monkeypatch.setattr(decoded_ways, "measure_costs", costs)
    decoded = Decoded([[1]], 1.0, dataclasses.replace(Statistics.zeros(1, 2), levels=LevelCounts.zeros(1)), (Call(1.0, (1,), (1,), (0,)),))
    monkeypatch.setattr(decoded_ways, "Decoder", lambda *models, **settings: lambda prompts, **options: decoded)
    prefilled = Prefilled([1], [SimpleNamespace(target_cache=SimpleNamespace(capacity=64))])
    monkeypatch.setattr(decoded_ways.Prefilled, "of", lambda *models, **settings: prefilled)
    work = workload(pair, "attention=0.5", "reuse=none", "controls=", "ffn=0.5")
    rows = list(work.rows(named_settings(work.config, work.target.model.config)))
    assert [row["method"] for row in rows if row["way"] == "two levels"] == ["attention 0.5 (reuse: none)"]
    said = capsys.readouterr().err
    assert "attention 0.5 (reuse: none): two levels decide by bytes, their costs are not known: times are lost in noise" in said
    assert "ffn 0.5: two levels are left out, their costs are not known" in said
    monkeypatch.setattr(decoded_ways, "measure_costs", lambda *models, **settings: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(work.rows(named_settings(work.config, work.target.model.config)))


def test_two_levels_that_cannot_be_are_refused_before_anything_is_decoded():
    words = ("target=tiny", "drafter=eagle3", *SMALL, "attention=", "ffn=0.5")
    with pytest.raises(ExperimentError, match=r"two levels of ffn 0.5: Lossless.max_steps must be a positive int, got 0"):
        next(iter(five_ways.run(parse_config(five_ways.Config, (*words, "max_sparse_steps=0")))))
    drafted = next(word for word in SMALL if word.startswith("num_speculative_tokens=")).partition("=")[2]
    message = f"two levels of ffn 0.5: Lossless.max_tokens = 1 has no room for a step of {drafted} draft tokens"
    with pytest.raises(ExperimentError, match=message):
        next(iter(five_ways.run(parse_config(five_ways.Config, (*words, "max_waiting_tokens=1")))))
    config = parse_config(five_ways.Config, words)
    channels = named_settings(config, tiny_config())
    five_ways.check_two_levels(config, channels, measured=True)
    with pytest.raises(ExperimentError, match=r"two levels of ffn 0.5: .* needs a measured step_cost where attention is dense"):
        five_ways.check_two_levels(config, channels, measured=False)


@pytest.mark.full
def test_channels_with_refreshes_are_decoded_in_two_levels_that_adapt(target_path, task_data, monkeypatch):
    monkeypatch.setattr(decoded_ways, "measure_costs", lambda *models, **settings: COSTS)
    words = (f"target={target_path}", *SMALL, "attention=", "ffn=0.5", "refresh_every=2", "repeats=1", f"data={task_data}", "task=gsm8k")
    rows = list(five_ways.run(parse_config(five_ways.Config, (*words, "max_sparse_steps=2"))))
    assert [row["way"] for row in rows] == [way.name for way in WAYS]
    assert all(row["same_text"] == 1.0 for row in rows if row["lossless"])
