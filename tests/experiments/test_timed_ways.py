"""Five ways at a tiny shape: every loop runs, and what it takes is replaced: times of tiny steps mean nothing."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest
import typer

from experiments import five_ways, sparse_times, timed_ways, ways
from experiments.experiment import ExperimentError, parse_config
from experiments.models import LoadedDrafter, load_model
from experiments.record import check_row
from experiments.sparse_settings import named_settings
from experiments.timing import LoopTiming, time_loops
from experiments.ways import SPARSE_VERIFICATION, TWO_LEVELS
from specjax import Lossless, Statistics
from specjax.two_level.level_counts import LevelCounts
from specjax.two_level.two_level_cost import expected_settled

WORDS = ("target=tiny", "drafter=eagle3", "contexts=96", "batches=2", "num_speculative_tokens=2", "block_size=8", "dense_below=16")
WORDS += ("attention=0.1", "dtype=float32", "short_steps=1", "long_steps=2", "short_cycles=1", "long_cycles=3", "repeats=1")
WORDS += ("max_sparse_steps=2", "mean_acceptance_length=2", "dense_acceptances=0.9", "compile_threads=2")
# Milliseconds; a cycle of two sparse steps and their check takes 2 * 1 + 3.
STEP_MS = {
    "autoregressive, dense": 3.0,
    "autoregressive, sparse": 1.0,
    "dense verification": 4.0,
    "sparse verification": 1.0,
    "two levels": 5.0,
}


@pytest.mark.full
def test_each_way_is_timed_in_the_real_loop_with_acceptance_made_up_at_both_levels(monkeypatch):
    def timed(loops, **settings):
        found = {}
        for key, timing in time_loops(loops, **settings).items():
            way = "dense verification" if key is None else key[0].name if isinstance(key[0], timed_ways.Way) else "two levels"
            found[key] = dataclasses.replace(timing, ms_per_step=(STEP_MS[way],))
        return found

    monkeypatch.setattr(timed_ways, "time_loops", timed)
    rows = list(five_ways.run(parse_config(five_ways.Config, (*WORDS, "adapt=false"))))
    assert [row["way"] for row in rows] == [
        "dense verification",
        "autoregressive, dense",
        "autoregressive, sparse",
        "sparse verification",
        "two levels",
    ]
    assert [(row["lossless"], row["synthetic"]) for row in rows] == [
        (True, True),
        (True, False),
        (False, False),
        (False, True),
        (True, True),
    ]
    # Two rows of a batch, two tokens a step.
    assert [row["tokens_per_s"] for row in rows[:4]] == [1000.0, pytest.approx(2000 / 3), 2000.0, 4000.0]
    assert rows[3]["speedup_over_dense_verification"] == 4.0
    levels = rows[4]
    assert (levels["step_cost"], levels["check_cost"], levels["assumed_dense_acceptance"]) == (0.25, 0.75, 0.9)
    assert 0 < levels["break_even_dense_acceptance"] < 0.9
    # Two steps of two tokens wait for every check.
    assert (levels["steps_between_dense"], levels["dense_step_share"]) == (2.0, 0.0)
    assert levels["tokens_per_s"] == pytest.approx(2 * expected_settled(0.9, 4) / 5e-3)
    assert all(check_row(row) and five_ways.columns(row) and "SYNTHETIC" in five_ways.show(row) for row in rows if row["synthetic"])
    # Where seven may wait, there is room for three such steps of up to three tokens, whose check takes the other two milliseconds.
    words = [word for word in WORDS if "max_sparse_steps" not in word] + ["max_sparse_steps=8", "max_waiting_tokens=7", "adapt=false"]
    *_, few = five_ways.run(parse_config(five_ways.Config, words))
    assert (few["steps_between_dense"], few["check_cost"]) == (3.0, 0.5)


def test_checks_take_the_place_of_refreshes(monkeypatch):
    monkeypatch.setattr(timed_ways, "decoding_loop", lambda *models, sparsity, **settings: sparsity)
    config = parse_config(five_ways.Config, (*WORDS, "refresh_every=3"))
    target = load_model("tiny", dtype="float32", implementation="auto", cache_dir=None)
    case = timed_ways.Case(config=config, target=target, drafter=LoadedDrafter("none", None, None, "random"), batch=1, context=96)
    named, lossless = named_settings(config, target.model.config)[0], Lossless(max_steps=2)
    assert case.loop(SPARSE_VERIFICATION, named, {"cache": None}).refresh_every == 3
    checked = case.loop(TWO_LEVELS, named, {"cache": None}, lossless)
    assert (checked.refresh_every, checked.lossless) == (0, lossless)


def test_tokens_of_cycles_are_those_expected_of_what_waited_for_checks():
    def levels(**counts):
        zeros = LevelCounts.zeros(2)
        return dataclasses.replace(zeros, **{name: jnp.array(values, jnp.int32) for name, values in counts.items()})

    def timing(*counts):
        ends = tuple(dataclasses.replace(Statistics.zeros(2, 2), levels=level) for level in counts)
        return LoopTiming((1.0,), (1.0,), (2.0,), 0.0, None, ends)

    first = levels(sparse_steps=[4, 4], dense_passes=[2, 2], provisional=[12, 12], dense_steps=[0, 0])
    last = levels(sparse_steps=[12, 12], dense_passes=[4, 4], provisional=[36, 36], dense_steps=[2, 2])
    # Four cycles a row: two with four sparse steps of three tokens each, two of one dense step of three tokens.
    tokens, steps, share = timed_ways.tokens_of_cycles(timing(first, last), 3.0, 0.9)
    assert (steps, share) == (4.0, 0.5)
    assert tokens == pytest.approx(2 * (expected_settled(0.9, 12) + 3.0) / 2)
    assert timed_ways.tokens_of_cycles(timing(first, last), 3.0, 1.0)[0] == 2 * (13 + 3) / 2


def test_steady_rates_and_drafters_that_cannot_be_are_refused():
    assert ways.steady_rates(3.0, 5) == (1.0, 1.0, 0.0, 0.0, 0.0)
    assert ways.steady_rates(2.25, 3) == (1.0, 0.25, 0.0)
    with pytest.raises(ExperimentError, match="from 1 to 3 for 2 draft tokens, got 3.5"):
        ways.steady_rates(3.5, 2)
    with pytest.raises(ExperimentError, match="prompt lookup finds nothing in random tokens"):
        list(five_ways.run(parse_config(five_ways.Config, ("target=tiny", "dtype=float32"))))


def test_one_command_gives_both_experiments_the_settings_that_they_have(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(sparse_times.run, "main", lambda name, words, **options: calls.append((name, words, options["save_as"])))
    sparse_times.main(["contexts=64", "rows=3", "dense_acceptances=0.5", "five_ways.batches=2"], out=tmp_path)
    (latency, ways) = calls
    assert latency == ("sparse_latency", ["model=llama31_8b", "contexts=64", "rows=3", "dense_acceptances=0.5"], "sparse_latency")
    assert ways[::2] == ("five_ways", "five_ways_8b")
    assert set(ways[1]) == {"target=llama31_8b", "drafter=eagle3", "batches=2", "contexts=64", "dense_acceptances=0.5"}
    with pytest.raises(Exception, match="neither experiment has a setting nonsense"):
        sparse_times.main(["nonsense=1"], out=tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["five_ways.batches=x"], "five_ways: batches must be a comma-separated list of int, got 'x'"),
        (["mean_acceptance_length=9"], "five_ways: mean_acceptance_length must be from 1 to 6 for 5 draft tokens, got 9.0"),
        (["contexts"], "expected key=value, got 'contexts'"),
        (["batches=1", "batches=8"], "key 'batches' is given twice"),
    ],
)
def test_words_that_either_experiment_refuses_are_refused_before_one_runs(words, message, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(sparse_times.run, "main", lambda name, words, **options: calls.append(name))
    with pytest.raises(typer.BadParameter, match=message):
        sparse_times.main(words, out=tmp_path)
    assert calls == []
