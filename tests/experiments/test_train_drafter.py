"""The training experiment, end to end on a tiny target."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from experiments import train_drafter
from experiments.experiment import ExperimentError, parse_config
from experiments.record import Record, check_row, collect
from specjax.checkpoints.store import load_checkpoint
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
def test_a_draft_models_head_is_trained_and_evaluated(target_path: Path, drafter_path: Path, data_dir: Path, tmp_path: Path) -> None:
    data = write_token_files(tmp_path / "tokens", target_path)
    paths = (f"target={target_path}", f"data={data}", f"out={tmp_path / 'out'}", f"data_dir={data_dir}", f"start={drafter_path}")
    words = ("drafter=draft_model", "variants=low_rank:4@svd", "sets=first", *SMALL, *DECODING)
    rows = [check_row(row) for row in train_drafter.run(parse_config(train_drafter.Config, (*paths, *words)))]
    assert {(row["drafter"], row["head"], row["rank"]) for row in rows} == {("draft_model", "low_rank", 4)}
    assert load_checkpoint(tmp_path / "out" / "low_rank_4-svd").metadata["training"]["start"] == "tiny-drafter"


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
    kept = tmp_path / "out" / "state" / "step-00000003" / "run.json"
    kept.parent.mkdir(parents=True)
    kept.touch()
    with pytest.raises(ExperimentError, match="holds an unfinished run"):
        list(train_drafter.run(parse_config(train_drafter.Config, (*(word for word in words if word != "checkpoint_every=3"),))))


def test_drafters_that_are_there_are_not_replaced(target_path: Path, data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "low_rank_4").mkdir()
    words = (f"target={target_path}", "data=nowhere", f"out={tmp_path}", f"data_dir={data_dir}", "variants=low_rank:4,full", "steps=2")
    with pytest.raises(ExperimentError, match="has drafters already: low_rank_4; out must be a folder without these"):
        list(train_drafter.run(parse_config(train_drafter.Config, words)))


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
