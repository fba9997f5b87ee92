"""Measured costs and known acceptance become a recommendation. The loops' times are replaced: on tiny shapes they mean nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import recommend_head, step_costs
from experiments.draft_heads import describe
from experiments.experiment import ExperimentError, parse_config, portable
from experiments.known_acceptance import assumed_rates, recorded_rates
from experiments.record import check_row
from experiments.timing import LoopTiming, time_loops
from specjax import ModelConfig
from specjax.checkpoints.store import load_checkpoint, save_checkpoint
from specjax.cost_model import HeadCandidate, StepCosts, expect, throughput_ratio
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads import FullHead, LowRankHead

G = 2
LOW_RANK = "low_rank, R 4"
SMALL = ("context=64", "dtype=float32", "short_steps=1", "long_steps=2", "repeats=1", f"num_speculative_tokens={G}", "verification_rows=2")
# Milliseconds a step of each loop; a step of the full head is that of its verification, two bodies of 0.1 and two heads of 0.25.
STEP_MS = {
    "plain": 4.0,
    "step": 4.9,
    "verification of 2 rows": 4.1,
    "verification of 3 rows": 4.2,
    "given": 0.3,
    "head full": 0.8,
    f"head {LOW_RANK}": 0.4,
}
HEADS = {"full": describe(FullHead(), 96), "low_rank:8": describe(LowRankHead(rank=4), 96)}


@pytest.fixture
def fixed_times(monkeypatch):
    """Every step is traced, and may be repeated: its result has the form of its state. Then it takes what `STEP_MS` says."""

    def timed(loops, **settings):
        assert set(loops) == set(STEP_MS)
        for loop in loops.values():
            result = jax.eval_shape(loop.step, loop.params, loop.state)
            assert jax.tree.map(lambda x: (x.shape, x.dtype), result) == jax.tree.map(lambda x: (x.shape, x.dtype), loop.state)
        return {name: fixed(STEP_MS[name]) for name in loops}

    monkeypatch.setattr(step_costs, "time_loops", timed)


def fixed(ms_per_step: float) -> LoopTiming:
    return LoopTiming(ms_per_step=(ms_per_step,), raw_short_ms=(0.0,), raw_long_ms=(ms_per_step,), compile_s=0.0, temp_bytes=None)


@pytest.fixture(scope="module")
def low_rank_drafter(tmp_path_factory, target_path) -> Path:
    target = load_checkpoint(target_path)
    sizes = dict(vocab_size=target.model.config.vocab_size, hidden_size=16, intermediate_size=24, num_layers=1)
    decoder = ModelConfig(**sizes, num_heads=2, num_kv_heads=1, head_dim=8, max_position_embeddings=512)
    config = Eagle3Config(decoder=decoder, target_hidden_size=16, head=LowRankHead(rank=4), feature_layers=(0, 1))
    shapes = jax.eval_shape(Eagle3(config, param_dtype=np.float32).init_params, jax.random.key(0))
    generator = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: generator.normal(0.1, 0.3, leaf.shape).astype(np.float32), shapes)
    path = tmp_path_factory.mktemp("drafters") / "low-rank"
    save_checkpoint(path, config, params, {"source": "low-rank", "quantisation": "none"})
    return path


@pytest.mark.full
def test_a_trained_drafter_is_decoded_with_timed_and_ranked(target_path, low_rank_drafter, data_dir, fixed_times):
    words = [f"target={target_path}", f"drafters={low_rank_drafter}", f"data_dir={data_dir}", "sets=first", "prompts_per_set=2"]
    config = parse_config(recommend_head.Config, [*words, "new_tokens=16", *SMALL])
    costs, full, low_rank, *choices = [check_row(row) for row in recommend_head.run(config)]

    assert costs["plain_us"] == pytest.approx(4000)
    assert costs["drafter_us"] == pytest.approx(100)
    assert (costs["verification_rows"], costs["verification_us"]) == ([2, 3], pytest.approx([4100, 4200]))
    assert [row["head_us"] for row in (full, low_rank)] == pytest.approx([250, 50])
    assert low_rank["nu"] == pytest.approx(0.2)
    assert low_rank["kappa"] == pytest.approx(2 * 250 / 4400)
    # Nobody knows what a full head of random weights would have had accepted.
    assert full["tokens_per_step"] is low_rank["throughput_ratio"] is None

    assert [(choice["place"], choice["name"]) for choice in choices] == [(1, LOW_RANK), (2, LOW_RANK)]
    assert {choice["num_speculative_tokens"] for choice in choices} == {1, 2}
    assert choices[0]["tokens_per_s"] >= choices[1]["tokens_per_s"]
    longest = next(choice for choice in choices if choice["num_speculative_tokens"] == G)
    assert longest["step_us"] == pytest.approx(4200 + 2 * (100 + 50))
    assert longest["tokens_per_step"] == pytest.approx(low_rank["tokens_per_step"])
    assert 1 <= longest["tokens_per_step"] <= 3
    for row in (costs, full, low_rank, *choices):
        assert (row["synthetic"], row["acceptance"], row["target"]) == (False, "measured", "tiny-target")
        assert "SYNTHETIC" not in recommend_head.show(row)
        assert recommend_head.columns(row)["batch"] == 1
    assert portable(config)["drafters"] == ["low-rank"]


@pytest.mark.full
def test_a_published_shape_is_ranked_by_assumed_rates_and_says_so(fixed_times, monkeypatch):
    monkeypatch.setitem(STEP_MS, "head low_rank:8", STEP_MS[f"head {LOW_RANK}"])
    monkeypatch.delitem(STEP_MS, f"head {LOW_RANK}")
    words = ["target=tiny", "heads=low_rank:8", "rates=full=0.8/0.6,low_rank:8=0.78/0.6", *SMALL]
    rows = [check_row(row) for row in recommend_head.run(parse_config(recommend_head.Config, words))]
    assert [row["mode"] for row in rows] == ["costs", "head", "head", "choice", "choice", "choice", "choice"]
    assert (rows[3]["name"], rows[3]["num_speculative_tokens"]) == ("low_rank:8", 2)
    assert rows[3]["speed_up"] == pytest.approx(2.38 * 4000 / 4500)
    for row in rows:
        assert (row["synthetic"], row["acceptance"], row["weights"]) == (True, "assumed", "random")
        assert row["mode"] == "costs" or "SYNTHETIC" in recommend_head.show(row)


@pytest.mark.full
def test_costs_are_measured_by_running_every_loop(monkeypatch):
    found = {}

    def timed(loops, **settings):
        found.update(time_loops(loops, **settings))
        return {name: fixed(STEP_MS[name]) for name in loops}

    monkeypatch.setattr(step_costs, "time_loops", timed)
    monkeypatch.setitem(STEP_MS, "head low_rank:8", STEP_MS[f"head {LOW_RANK}"])
    words = ["target=tiny", "heads=low_rank:8", "pick=sample", *SMALL]
    list(recommend_head.run(parse_config(recommend_head.Config, words)))
    assert len(found) == 7
    assert all(len(timing.ms_per_step) == 1 for timing in found.values())


def test_a_head_is_held_against_the_full_one_at_the_longest_draft_that_both_are_known_of():
    costs = StepCosts(plain_us=4000, drafter_us=100, verification_rows=(2, 6), verification_us=(4100, 4200))
    measured = step_costs.MeasuredCosts(costs=costs, head_us={"full": 250.0, "low_rank:8": 50.0}, timings={})
    chains = {"full": (0.8, 0.7, 0.6), "low_rank:8": (0.79, 0.7, 0.6, 0.5)}
    row = recommend_head.head_row("low_rank:8", 5, measured, chains)
    assert row["num_speculative_tokens"] == 3
    full, ours = (
        expect(costs, HeadCandidate(name=name, head_us=measured.head_us[name], conditional_acceptance=chain), 3)
        for name, chain in chains.items()
    )
    assert row["throughput_ratio"] == pytest.approx(ours.tokens_per_s / full.tokens_per_s)
    assert row["throughput_ratio"] == pytest.approx(
        throughput_ratio(acceptance_ratio=row["acceptance_ratio"], kappa=row["kappa"], nu=row["nu"])
    )
    assert recommend_head.head_row("full", 5, measured, chains)["throughput_ratio"] == pytest.approx(1.0)
    assert recommend_head.head_row("full", 5, measured, {})["num_speculative_tokens"] == 5
    noise = dataclasses.replace(measured, head_us={"full": 250.0, "low_rank:8": -1.0})
    with pytest.raises(ExperimentError, match="lost in the noise: nu must be a positive finite number, got -0.004"):
        recommend_head.head_row("low_rank:8", 5, noise, chains)


def test_recorded_rates_are_found_by_head_and_averaged(tmp_path):
    rows = [
        {"head": "full", "rank": None, "acceptance_rate_per_position": [0.8, 0.6, 0.4]},
        {"head": "low_rank", "rank": 4, "rows": 96, "acceptance_rate_per_position": [0.7, 0.5, 0.3], "synthetic": False},
        {"head": "low_rank", "rank": 4, "acceptance_rate_per_position": [0.5, 0.3]},
        {"head": "low_rank", "rank": 8, "acceptance_rate_per_position": [0.1, 0.1]},
        {"head": "low_rank", "rank": 4, "drafter": "draft_model", "acceptance_rate_per_position": [0.1, 0.1]},
        {"head": "low_rank", "rank": 4, "init": "cut from full", "acceptance_rate_per_position": [0.1, 0.1]},
        {"head": "low_rank", "rank": 4, "rows": 50, "acceptance_rate_per_position": [0.1, 0.1]},
        {"head": "low_rank", "rank": 4, "mean_acceptance_length": 3.0},
        {"head": "low_rank", "rank": 4, "temperature": 1.0, "acceptance_rate_per_position": [0.3, 0.2]},
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"experiment": "head_quality", "rows": rows}))
    found, synthetic = recorded_rates(path, HEADS, sampled=False, drafter="eagle3")
    assert found == {"full": pytest.approx((0.8, 0.6, 0.4)), "low_rank:8": pytest.approx((0.6, 0.4))}
    assert synthetic is False
    assert recorded_rates(path, HEADS, sampled=True, drafter="eagle3")[0]["low_rank:8"] == pytest.approx((1.5 / 3, 1.0 / 3))
    path.write_text(json.dumps([rows[0] | {"synthetic": True}]))
    assert recorded_rates(path, HEADS, sampled=False, drafter="eagle3") == ({"full": pytest.approx((0.8, 0.6, 0.4))}, True)


def test_assumed_rates_are_read_from_words():
    assert assumed_rates(["full=0.8/0.6", "low_rank:8=1/0.5"], HEADS) == {"full": (0.8, 0.6), "low_rank:8": (1.0, 0.5)}


@pytest.mark.parametrize("content", ["not json", "{}", "[1, 2]", json.dumps([{"head": "trimmed", "acceptance_rate_per_position": [0.5]}])])
def test_a_file_without_rates_of_these_heads_is_refused(tmp_path, content):
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(
        ExperimentError, match="rows.json: (expected a JSON file of rows|no row has .*, greedy, of any of: full, low_rank, R 4)"
    ):
        recorded_rates(path, HEADS, sampled=False, drafter="eagle3")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pick=beam"], "pick must be argmax or sample, got 'beam'"),
        (["num_speculative_tokens=0"], "got 0"),
        (["verification_rows=1,4"], "at least 2, got 7 and \\(1, 4\\)"),
        (["rates=full=0.5", "acceptance=a.json"], "one source"),
        (["data_dir=prompts"], "data_dir needs drafters"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(words, message):
    with pytest.raises(ExperimentError, match=message):
        parse_config(recommend_head.Config, words)


@pytest.mark.parametrize(
    ("words", "message"), [(["screened:8=0.5"], "rates name screened:8; the heads are full, low_rank:8"), (["full=high"], "got full=high")]
)
def test_rates_that_cannot_be_read_are_refused(words, message):
    with pytest.raises(ExperimentError, match=message):
        assumed_rates(words, HEADS)


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["heads=low_rank:8", "rates=full=0.5/0.6"], "must not rise"),
        (["heads=low_rank:8", "acceptance=nothing.json"], "FileNotFoundError"),
        (["heads=shared"], "heads must have arrays of their own, got shared"),
    ],
)
def test_acceptance_that_cannot_be_is_refused_before_anything_is_timed(words, message):
    with pytest.raises(ExperimentError, match=message):
        list(recommend_head.run(parse_config(recommend_head.Config, ["target=tiny", *SMALL, *words])))


def test_drafters_that_cannot_be_compared_are_refused(target_path, low_rank_drafter):
    for drafters, message in (
        (f"{low_rank_drafter},{target_path}", "must be of one kind, got eagle3 and draft_model"),
        (f"{low_rank_drafter},{low_rank_drafter}", "a second drafter with the head low_rank, R 4"),
    ):
        with pytest.raises(ExperimentError, match=message):
            list(recommend_head.run(parse_config(recommend_head.Config, [f"target={target_path}", f"drafters={drafters}", *SMALL])))
