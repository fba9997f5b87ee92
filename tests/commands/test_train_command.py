"""`specjax train`: from a tiny target and token files to drafters that draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from specjax import GenerateConfig, generate, speculative_generate
from specjax.checkpoints.pairing import drafter_for_target
from specjax.checkpoints.store import load_checkpoint, save_checkpoint
from specjax.commands import prepare_training
from specjax.commands.main import app
from specjax.drafting.heads import LowRankHead, TrimmedHead
from specjax.training.token_files import TokenFiles
from tests.tiny_checkpoint import write_checkpoint
from tests.token_data import write_token_files

SMALL = ("--steps", 4, "--batch-size", 4, "--sequence-length", 12, "--chain", 2, "--report-every", 2, "--warmup-steps", 1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_token_files(tmp_path_factory.mktemp("data") / "tokens", target)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, words)])


@pytest.mark.full
def test_drafters_are_trained_saved_and_draft(target: Path, data: Path, tmp_path: Path, full_grid: bool) -> None:
    out = tmp_path / "out"
    kinds = {"trimmed_40": TrimmedHead} | ({"low_rank_4": LowRankHead} if full_grid else {})
    heads = [word for name in kinds for word in ("--head", name.replace("_4", ":4"))]
    # The same folder a second time, so that there is more than one.
    done = run(target, data, out, *SMALL, *heads, "--more-data", data, "--packed", "--held-out", data)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in out.iterdir()) == sorted([*kinds, "reports.jsonl"])
    assert "on the held-out data" in done.stdout
    reports = [json.loads(line) for line in (out / "reports.jsonl").read_text().splitlines()]
    assert [(report["step"], report["drafter"]) for report in reports] == [(step, name) for step in (2, 4) for name in kinds]

    loaded = load_checkpoint(target)
    prompts = [[5, 6, 7], [8, 9]]
    config = GenerateConfig(max_new_tokens=12, num_speculative_tokens=3)
    plain = generate(loaded.model, loaded.params, prompts, config=config)
    for name, kind in kinds.items():
        checkpoint = load_checkpoint(out / name)
        assert isinstance(checkpoint.model.config.head, kind)
        record = checkpoint.metadata["training"]
        assert (record["num_steps"], record["variants"][0]["head"]) == (4, name.replace("_4", ":4"))
        assert record["data"]["num_sequences"] == 2 * TokenFiles(data).manifest.num_sequences
        assert record["packed"]
        assert record["held_out"]["acceptance_length"] >= 1
        ready = drafter_for_target(checkpoint, loaded)
        output = speculative_generate(loaded.model, loaded.params, ready.drafter, ready.params, prompts, config=config)
        np.testing.assert_array_equal(output.tokens, plain.tokens)
    # The tokens that the texts have most of, and those that end a text, however rare they are.
    kept = np.asarray(load_checkpoint(out / "trimmed_40").params["draft_head"]["token_ids"])
    assert loaded.tokenizer().eos_token_id in kept

    refused = run(target, data, out, *SMALL, "--head", "trimmed:40")
    assert refused.exit_code == 1
    assert "trimmed_40" in refused.stderr
    assert "--force" in refused.stderr


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["medusa", "hydra"])
def test_heads_on_the_last_hidden_state_are_trained_too(drafter: str, target: Path, data: Path, tmp_path: Path) -> None:
    done = run(target, data, tmp_path / "out", *SMALL, "--drafter", drafter, "--head", "low_rank:4", "--init", "svd", "--dtype", "float32")
    assert done.exit_code == 0, done.output
    checkpoint = load_checkpoint(tmp_path / "out" / "low_rank_4-svd")
    assert checkpoint.model.config.num_draft_heads == 2
    assert checkpoint.params["head_1"]["draft_head"]["down"].dtype == jnp.float32


@pytest.mark.full
def test_a_run_interrupted_while_it_saves_its_drafters_is_finished_by_the_same_call(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (target, data, tmp_path / "out", *SMALL, "--head", "low_rank:4", "--head", "low_rank:8", "--init", "svd")
    saved = []

    def failing(path: Path, *arguments: Any, **options: Any) -> None:
        if saved:
            raise OSError("no space left on device")
        save_checkpoint(path, *arguments, **options)
        saved.append(path.name)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_training, "save_checkpoint", failing)
        interrupted = run(*words)
    assert interrupted.exit_code == 1
    assert "no space left on device" in interrupted.stderr
    first = load_checkpoint(tmp_path / "out" / saved[0])
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["low_rank_4-svd", "low_rank_8-svd", "reports.jsonl"]
    again = load_checkpoint(tmp_path / "out" / saved[0])
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)
    assert first.metadata == again.metadata
    assert again.metadata["training"]["last_report"]["loss_tokens"] > 0
    # Another run in the same folder leaves the reports of this one.
    assert run(target, data, tmp_path / "out", *SMALL, "--head", "low_rank:2", "--init", "svd").exit_code == 0
    reports = [json.loads(line)["drafter"] for line in (tmp_path / "out" / "reports.jsonl").read_text().splitlines()]
    assert set(reports) == {"low_rank_4-svd", "low_rank_8-svd", "low_rank_2-svd"}


def test_a_finished_drafter_is_not_replaced_where_a_run_left_a_folder_without_states(target: Path, data: Path, tmp_path: Path) -> None:
    finished = tmp_path / "out" / "low_rank_8" / "specjax.json"
    finished.parent.mkdir(parents=True)
    finished.write_text("{}")
    (tmp_path / "out" / "state" / ".step-00000004.incomplete").mkdir(parents=True)
    refused = run(target, data, tmp_path / "out", *SMALL)
    assert refused.exit_code == 1
    assert "low_rank_8 exists; pass --force" in refused.stderr
    assert finished.read_text() == "{}"


@pytest.mark.full
def test_a_training_that_diverges_is_one_line(target: Path, data: Path, tmp_path: Path) -> None:
    done = run(target, data, tmp_path / "out", *SMALL, "--drafter", "medusa", "--head", "full", "--init", "svd", "--learning-rate", 1e30)
    assert done.exit_code == 1
    assert "lower the learning rate, or look at the data" in done.stderr
    assert "Traceback" not in done.output


def test_wrong_calls_end_with_one_line_that_says_what_was_expected(target: Path, data: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", special_tokens=("<u>", "<x>"))
    cases = [
        ((target, data, tmp_path / "a", "--head", "low_rank:5"), "must divide hidden_size = 16, got 5"),
        ((target, data, tmp_path / "a", "--drafter", "eagle"), "drafter must be one of eagle3, medusa, hydra, draft_model, got 'eagle'"),
        ((target, data, tmp_path / "a", "--init", "zeros"), "init must be one of"),
        ((target, data, tmp_path / "a", "--head", "full", "--head", "full"), "of different names, got full, full"),
        ((target, data, tmp_path / "a", "--steps", 0), "num_steps must be at least 1, got 0"),
        ((target, data, tmp_path / "a", "--epochs", 0), "num_epochs must be at least 1, got 0"),
        (
            (target, data, tmp_path / "a", "--epochs", 2, "--steps", 3),
            "num_epochs is for a run without num_steps and max_seconds, got 2 with",
        ),
        ((target, data, tmp_path / "a", "--epochs", 2, "--max-seconds", 3), "num_epochs is for a run without num_steps and max_seconds"),
        ((target, data, tmp_path / "a", "--drafter", "medusa", "--no-fc-norm"), "fc_norm is for eagle3, got False for medusa"),
        ((target, tmp_path, tmp_path / "a"), "holds no token files"),
        ((other, data, tmp_path / "a", "--batch-size", 4), "another tokenizer"),
        ((target, data, tmp_path / "a", "--batch-size", 400), "fewer than a batch of 400"),
        ((target, data, tmp_path / "a", "--dtype", "float16"), "--dtype must be bfloat16 or float32"),
    ]
    for words, message in cases:
        refused = run(*words)
        assert refused.exit_code == 1, message
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr
    assert not (tmp_path / "a").exists()
