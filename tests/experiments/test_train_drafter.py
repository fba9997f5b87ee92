"""The training experiment, and after it the comparison of heads, end to end on a tiny target."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from experiments import head_quality, step_costs, train_drafter
from experiments.experiment import ExperimentError, parse_config
from experiments.record import Record, check_row, collect
from experiments.timing import LoopTiming
from specjax.checkpoints.store import load_checkpoint
from specjax.cost_model import throughput_ratio
from tests.token_data import write_token_files

SMALL = ("steps=4", "evaluations=2", "batch_size=4", "sequence_length=12", "chain=2", "warmup_steps=1", "new_tokens=8")
DECODING = ("prompts_per_set=2", "num_speculative_tokens=2", "dtype=float32", "compile_threads=2")


@pytest.fixture(scope="module")
def trained(target_path: Path, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], Path]:
    folder = tmp_path_factory.mktemp("training")
    data = write_token_files(folder / "tokens", target_path)
    paths = (f"target={target_path}", f"data={data}", f"out={folder / 'out'}", f"data_dir={data_dir}")
    words = ("variants=full@svd,trimmed:40@svd@lk_lambda", "sets=first,second")
    rows = list(train_drafter.run(parse_config(train_drafter.Config, (*paths, *words, *SMALL, *DECODING))))
    return rows, folder / "out"


@pytest.mark.full
def test_every_evaluation_has_a_row_a_set_and_one_for_their_mean(trained: tuple[list[dict], Path]) -> None:
    rows, out = trained
    names = ("full-svd", "trimmed_40-svd-lk_lambda")
    found = [(row["step"], row["variant"], row["dataset"]) for row in rows]
    assert found == [(step, name, dataset) for step in (2, 4) for name in names for dataset in ("first", "second", "mean")]
    for row in rows:
        check_row(row)
        assert row["mean_acceptance_length"] >= 1
        # Rows of 12 tokens, of which the first 3 are context.
        assert row["train_tokens"] == row["step"] * 4 * 9
    first, second, mean = rows[:3]
    assert mean["mean_acceptance_length"] == pytest.approx((first["mean_acceptance_length"] + second["mean_acceptance_length"]) / 2)
    assert (rows[3]["head"], rows[3]["rows"], rows[3]["loss"], rows[3]["init"]) == ("trimmed", 40, "lk_lambda", "svd")
    assert sorted(path.name for path in out.iterdir()) == sorted([*names, "reports.jsonl"])
    record = load_checkpoint(out / "full-svd").metadata["training"]
    assert record["evaluation"]["mean_acceptance_length"] == rows[8]["mean_acceptance_length"]
    assert "mean acceptance length" in train_drafter.show(mean)
    assert train_drafter.columns(mean)["set"] == "mean"


@pytest.mark.full
def test_heads_are_compared_with_the_full_one_and_with_what_the_model_predicts(
    trained: tuple[list[dict], Path], target_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On tiny shapes times mean nothing: these are a full head of 250 us and a trimmed one of 50, in a step whose rest takes 4,500.
    times = {"plain": 4.0, "step": 5.0, "given": 0.3, "head full": 0.8, "head trimmed, 40 rows": 0.4}

    def timed(loops, **settings):
        assert set(times) < set(loops)
        return {name: timing(times.get(name, 4.2)) for name in loops}

    def timing(ms_per_step: float) -> LoopTiming:
        return LoopTiming(ms_per_step=(ms_per_step,), raw_short_ms=(0.0,), raw_long_ms=(ms_per_step,), compile_s=0.0, temp_bytes=None)

    monkeypatch.setattr(step_costs, "time_loops", timed)
    # Nor can a prefill of a few tokens be told from the decoding of as few.
    monkeypatch.setattr(head_quality.Decoder, "prefill_seconds", lambda self, prompts, **options: 0.0)
    _, out = trained
    paths = (f"target={target_path}", f"drafters={out / 'full-svd'},{out / 'trimmed_40-svd-lk_lambda'}", f"data_dir={data_dir}")
    words = ("sets=first", "batches=2", "temperatures=0", "new_tokens=8", "context=64", "short_steps=1", "long_steps=2", "loop_repeats=1")
    rows = list(head_quality.run(parse_config(head_quality.Config, (*paths, *words, *DECODING))))
    assert [(row["dataset"], row["head"]) for row in rows] == [(name, head) for name in ("first", "mean") for head in ("full", "trimmed")]
    for row in rows:
        check_row(row)
        assert row["head_us"] == pytest.approx(250 if row["head"] == "full" else 50)
        assert row["kappa"] == pytest.approx(2 * 250 / 4500)
        expected = throughput_ratio(acceptance_ratio=row["rho_tau"], kappa=row["kappa"], nu=row["nu"])
        assert row["predicted_speedup_over_full"] == expected
        assert row["speedup_over_autoregressive"] == pytest.approx(row["tokens_per_s"] / row["tokens_per_s_autoregressive"])
        assert (row["loss"], row["init"]) == (("forward_kl", "svd") if row["head"] == "full" else ("lk_lambda", "svd"))
        assert row["train_tokens"] == 4 * 4 * 9
        assert (row["share_outside"] is None) == (row["head"] == "full")
        assert "over full" in head_quality.show(row)
    full, trimmed = rows[:2]
    assert (full["rho_tau"], full["nu"], full["speedup_over_full"]) == (1.0, 1.0, 1.0)
    assert trimmed["nu"] == pytest.approx(0.2)
    # A random target's text is hardly made of the tokens that random training texts have most of.
    assert 0 < trimmed["share_outside"] <= 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "train_drafter needs target=PATH"),
        (("variants=full@svd@lk_lambda@x",), "a variant is HEAD, HEAD@INIT or HEAD@INIT@LOSS"),
        (("variants=full@zeros",), "init must be one of"),
        (("steps=0",), "num_steps must be at least 1, got 0"),
        (("steps=none",), "there must be evaluations, and steps or max_seconds"),
    ],
)
def test_wrong_settings_of_a_training_are_refused(words: tuple[str, ...], message: str, target_path: Path, data_dir: Path) -> None:
    paths = (f"target={target_path}", "data=nowhere", "out=nowhere", f"data_dir={data_dir}") if words else ()
    with pytest.raises(ExperimentError, match=message):
        list(train_drafter.run(parse_config(train_drafter.Config, (*paths, *words))))


@pytest.mark.full
def test_a_comparison_needs_a_drafter_with_the_full_head(trained: tuple[list[dict], Path], target_path: Path, data_dir: Path) -> None:
    _, out = trained
    config = head_quality.Config(target=str(target_path), data_dir=str(data_dir), sets=("first",), dtype="float32")
    with pytest.raises(ExperimentError, match="head_quality needs target=PATH, drafters=PATH,PATH and data_dir=PATH"):
        list(head_quality.run(config))
    with pytest.raises(ExperimentError, match="one of the drafters must have the full head, got trimmed, 40 rows"):
        list(head_quality.run(dataclasses.replace(config, drafters=(str(out / "trimmed_40-svd-lk_lambda"),))))


@pytest.mark.full
def test_a_training_interrupted_in_its_last_evaluation_is_finished_by_the_same_call(
    target_path: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_token_files(tmp_path / "tokens", target_path)
    paths = (f"target={target_path}", f"data={data}", f"out={tmp_path / 'out'}", f"data_dir={data_dir}")
    words = (*paths, "variants=low_rank:4@svd", "sets=first", "checkpoint_every=3", *SMALL, *DECODING)
    evaluate, calls = train_drafter.Evaluator.__call__, []

    def failing(self, params, reports):
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return evaluate(self, params, reports)

    with monkeypatch.context() as patch:
        patch.setattr(train_drafter.Evaluator, "__call__", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            list(train_drafter.run(parse_config(train_drafter.Config, words)))
    rows = list(train_drafter.run(parse_config(train_drafter.Config, words)))
    assert [(row["step"], row["dataset"]) for row in rows] == [(4, "first"), (4, "mean")]
    record = load_checkpoint(tmp_path / "out" / "low_rank_4-svd").metadata["training"]
    assert record["evaluation"]["step"] == record["last_report"]["positions"] // (4 * 12) == 4
    # Of a run without checkpoints nothing is left to go on from: not by accident of an earlier one's either.
    (tmp_path / "out" / "state").mkdir()
    with pytest.raises(ExperimentError, match="holds an unfinished run"):
        list(train_drafter.run(parse_config(train_drafter.Config, (*(word for word in words if word != "checkpoint_every=3"),))))


@pytest.mark.full
def test_a_training_that_is_interrupted_stops_before_its_next_step(target_path: Path, data_dir: Path, tmp_path: Path) -> None:
    data = write_token_files(tmp_path / "tokens", target_path)
    paths = (f"target={target_path}", f"data={data}", f"out={tmp_path / 'out'}", f"data_dir={data_dir}")
    words = (*paths, "variants=low_rank:4@svd", "sets=first", "steps=1000000", "evaluations=500000", *SMALL[2:], *DECODING)
    record = Record("train_drafter", "Q?", "command", "0123456", {})
    rows = collect(record, train_drafter.run(parse_config(train_drafter.Config, words)), tmp_path / "result.json")
    assert next(rows)["step"] == 2
    rows.close()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
    assert not [thread for thread in threads if thread.is_alive()]
    kept = json.loads((tmp_path / "result.json.partial").read_text())
    assert kept["interrupted"]
    assert [row["step"] for row in kept["rows"]] == [2]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["reports.jsonl"]


@pytest.mark.full
def test_a_training_of_given_time_ends_with_its_evaluation(target_path: Path, data_dir: Path, tmp_path: Path) -> None:
    data = write_token_files(tmp_path / "tokens", target_path)
    paths = (f"target={target_path}", f"data={data}", f"out={tmp_path / 'out'}", f"data_dir={data_dir}")
    words = (*paths, "variants=low_rank:4@svd", "sets=first", "steps=none", "max_seconds=1", "evaluations=2", *SMALL[2:], *DECODING)
    rows = list(train_drafter.run(parse_config(train_drafter.Config, words)))
    assert len(rows) == 4
    assert rows[0]["step"] == pytest.approx(rows[-1]["step"] / 2, abs=1)
    record = load_checkpoint(tmp_path / "out" / "low_rank_4-svd").metadata["training"]
    assert (record["num_steps"], record["max_seconds"]) == (rows[-1]["step"], 1.0)
