"""What a training of drafters is prepared from: nothing is made that the run does not need."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax.checkpoints.training_run import TrainingCheckpoints
from specjax.commands import prepare_training as module
from specjax.commands import training_memory
from specjax.commands.prepare_training import PreparedTraining, prepare_training
from specjax.commands.settle_settings import with_sequence_length
from specjax.commands.train_drafters import run_checkpoints
from specjax.commands.training_memory import plan_training, warn_of_float32
from specjax.models.transformer import Transformer
from specjax.training.losses import DraftLoss
from specjax.training.settings import TrainSettings, Variant
from specjax.training.token_files import TokenFiles
from tests.helpers import tiny_config
from tests.tiny_checkpoint import write_checkpoint
from tests.token_data import write_token_files

LK = DraftLoss(kind="lk_alpha")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_token_files(tmp_path_factory.mktemp("data") / "tokens", target)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the dear functions that were called, which here cost nothing."""
    calls: list[str] = []

    def covariance(*arguments: Any, **options: Any) -> np.ndarray:
        calls.append("covariance")
        return np.eye(16)

    def params(network: Any, start: Any, rng: jax.Array) -> Any:
        calls.append(f"{type(network.config.head).__name__}, {start.init}")
        head = start.params(network.config.head, rng)
        return {"head_0": {"block_0": jax.numpy.zeros((16, 16)), "draft_head": head}}

    monkeypatch.setattr(module, "hidden_covariance", covariance)
    monkeypatch.setattr(module, "initial_params", params)
    return calls


def prepared(target: Path, data: Path, *variants: Variant, resumed: bool = False, **options: Any) -> PreparedTraining:
    small: dict[str, Any] = dict(drafter="medusa", batch_size=4, chain=1) | options
    return prepare_training(target, data, TrainSettings(variants=variants, **small), resumed=resumed)


def test_the_covariance_is_taken_for_low_rank_factors_alone_and_params_once_a_head_and_start(
    target: Path, data: Path, made: list[str]
) -> None:
    prepared(target, data, Variant(head="full"), Variant(head="trimmed:40"))
    assert made == ["FullHead, weighted_svd", "TrimmedHead, weighted_svd"]
    made.clear()
    both = prepared(target, data, Variant(head="low_rank:4"), Variant(head="low_rank:4", loss=LK), Variant(head="low_rank:4", init="svd"))
    assert made == ["covariance", "LowRankHead, weighted_svd", "LowRankHead, svd"]
    first, second, other = both.params.values()
    assert first is second is not other


def test_a_run_that_goes_on_makes_no_params_but_those_that_stay(target: Path, data: Path, made: list[str]) -> None:
    again = prepared(target, data, Variant(head="low_rank:4"), Variant(head="trimmed:40"), resumed=True)
    assert "covariance" not in made
    assert {call.split(", ")[1] for call in made} == {"random"}
    low_rank, trimmed = (params["head_0"]["draft_head"] for params in again.params.values())
    assert isinstance(low_rank["down"], jax.ShapeDtypeStruct)
    assert isinstance(trimmed["lm_head"], jax.ShapeDtypeStruct)
    assert trimmed["token_ids"].shape == (40,)
    assert isinstance(trimmed["token_ids"], np.ndarray)


def test_sequences_are_as_long_as_the_longest_needs(target: Path, data: Path, made: list[str]) -> None:
    files = TokenFiles(data)
    longest = int(files.lengths.max())
    assert longest <= 64
    assert with_sequence_length(TrainSettings(), files).sequence_length == 64
    assert with_sequence_length(TrainSettings(sequence_length=7), files).sequence_length == 7
    run = prepared(target, data, Variant(head="full"))
    assert run.settings.sequence_length == 64
    assert next(run.batches).tokens.shape == (4, 64)
    share = 1 - files.lengths.mean() / 64
    assert run.describe_data() == f"rows of 64 positions, of which {share:.0%} are padding"
    assert "100% of the sequences are cut" in prepared(target, data, Variant(head="full"), sequence_length=5).describe_data()


def test_a_time_stands_instead_of_epochs(target: Path, data: Path, made: list[str]) -> None:
    assert prepared(target, data, Variant(head="full"), max_seconds=60.0).num_steps is None
    assert prepared(target, data, Variant(head="full"), max_seconds=60.0, num_steps=5).num_steps == 5
    epochs = prepared(target, data, Variant(head="full"), num_epochs=3)
    assert epochs.num_steps == 3 * epochs.batches.num_rows // 4
    for changes, message in (
        (dict(max_seconds=-1.0), "max_seconds must be above 0, got -1.0"),
        (dict(checkpoint_every=0), "checkpoint_every must be at least 1, got 0"),
        (dict(sequence_length=1), "sequence_length must be at least 2, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainSettings(**changes)


def test_a_training_that_cannot_fit_is_refused_with_what_takes_how_much(
    target: Path, data: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(target, data, Variant(head="full"), Variant(head="trimmed:40"))
    model, config = run.target.model, run.target.model.config
    plan = plan_training(model, run.drafters, run.networks, run.settings)
    assert plan.available_bytes is None  # a CPU does not say
    plan.check()
    width, vocab_size = config.hidden_size, config.vocab_size
    sizes = {name: width * width + width + width * rows for name, rows in (("full", vocab_size), ("trimmed_40", 40))}
    # Float32 parameters and two moments; the trimmed head's token ids are int32.
    assert plan.drafter_bytes == {"full": 12 * sizes["full"], "trimmed_40": 12 * sizes["trimmed_40"] + 4 * 40}
    assert plan.gradient_bytes == 4 * sizes["full"]
    # Four rows of 64 positions, all of them one chunk; of one step of the chain the drafter's logits and their gradient.
    assert plan.logits_bytes == 4 * 256 * vocab_size * 3
    monkeypatch.setattr(training_memory, "device_bytes", lambda device: 2**10)
    small = dataclasses.replace(plan, target_bytes=2**30, available_bytes=2**29)
    with pytest.raises(ValueError, match=r"needs 1.0 GiB at least, .* 0.5 GiB: the target 1.00, drafter full 0.00, drafter trimmed_40"):
        small.check()
    with pytest.raises(ValueError, match="Train fewer drafters at a time, lower chunk_size or batch_size"):
        prepared(target, data, Variant(head="full"))


def test_a_float32_target_is_pointed_out_where_another_dtype_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformer(tiny_config(), dtype=jax.numpy.float32)
    warn_of_float32(model)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.warns(UserWarning, match="--dtype bfloat16"):
        warn_of_float32(model)
    warn_of_float32(model.clone(dtype=jax.numpy.bfloat16))


def test_states_that_a_run_left_are_not_lost_by_one_without_checkpoints(tmp_path: Path) -> None:
    with_them, without = TrainSettings(), TrainSettings(checkpoint_every=None)
    assert run_checkpoints(tmp_path / "state", without, force=False) is None
    kept = run_checkpoints(tmp_path / "state", with_them, force=False)
    assert isinstance(kept, TrainingCheckpoints)
    assert not kept.will_restore()
    (tmp_path / "state").mkdir()
    assert not kept.will_restore()
    assert run_checkpoints(tmp_path / "state", without, force=False) is None  # nothing is lost with an empty folder
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="state exists and holds no state of a run that could go on"):
        run_checkpoints(tmp_path / "state", without, force=False)
    (tmp_path / "state" / "thesis.txt").unlink()
    kept.save({"it": {"x": jax.numpy.ones(2)}}, {"step": 1}, {})
    assert kept.will_restore()
    forced = run_checkpoints(tmp_path / "state", with_them, force=True)
    assert forced is not None
    assert not forced.will_restore()
    with pytest.raises(ValueError, match="holds an unfinished run: go on with it, with checkpoints, or pass --force to remove it"):
        run_checkpoints(tmp_path / "state", without, force=False)
    assert run_checkpoints(tmp_path / "state", without, force=True) is None
    assert not (tmp_path / "state").exists()
