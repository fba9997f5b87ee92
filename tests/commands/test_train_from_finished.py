"""`specjax train --from`: a finished drafter under another head, of which nothing but the head changes."""

from __future__ import annotations

import dataclasses
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
from specjax.checkpoints.store import Checkpoint, load_checkpoint, save_checkpoint
from specjax.commands.finished_drafter import full_head_of, network_with_head, params_with_head, states_covariance, task_of
from specjax.commands.main import app
from specjax.commands.prepare_training import prepare_training
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.heads import DraftHead, FullHead, LowRankHead, ScreenedHead
from specjax.drafting.heads.from_full_head import low_rank_from
from specjax.training.new_drafters import new_eagle3
from specjax.training.settings import TrainSettings, Variant
from specjax.training.target_batch import TargetArrays, target_outputs
from tests.helpers import random_model, tiny_config
from tests.tiny_checkpoint import write_checkpoint
from tests.token_data import write_token_files
from tests.training import Batch, initial_params

SMALL = ("--steps", 2, "--batch-size", 4, "--sequence-length", 12, "--chain", 2, "--warmup-steps", 1, "--learning-rate", 0.01)
# Sums of a few dozen numbers near 1, in float32.
COVARIANCE_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "draft", seed=1)


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_token_files(tmp_path_factory.mktemp("data") / "tokens", target)


def save_eagle3(path: Path, target: Path, head: DraftHead) -> Path:
    network = new_eagle3(load_checkpoint(target).model.config, head, dtype=jnp.float32)
    save_checkpoint(path, network.config, initial_params(network), {"source": path.name})
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, words)])


def changed(before: dict, after: dict) -> set[str]:
    """Names of the parameters of a body that are not bit for bit what they were."""
    before, after = ({name: leaf for name, leaf in tree.items() if name != "draft_head"} for tree in (before, after))
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), before, after)
    return {jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(same) if not leaf}


@pytest.mark.full
def test_a_draft_models_head_is_replaced_trained_saved_and_drafts(target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(target, data, out, *SMALL, "--drafter", "draft_model", "--from", draft, "--head", "low_rank:4")
    assert done.exit_code == 0, done.output
    original, trained = load_checkpoint(draft), load_checkpoint(out / "low_rank_4")
    assert trained.model.config.head == LowRankHead(rank=4)
    assert trained.metadata["training"]["start"] == "draft"
    # Whole and by itself: the body is the draft model's, and so is the tokenizer.
    assert changed(original.params, trained.params) == set()
    start = low_rank_from(original.params["lm_head"], 4).params
    assert {name: leaf.shape for name, leaf in trained.params["draft_head"].items()} == {name: leaf.shape for name, leaf in start.items()}

    loaded, prompts = load_checkpoint(target), [[5, 6, 7], [8, 9]]
    ready = drafter_for_target(trained, loaded)
    config = GenerateConfig(max_new_tokens=8, num_speculative_tokens=3)
    output = speculative_generate(loaded.model, loaded.params, ready.drafter, ready.params, prompts, config=config)
    np.testing.assert_array_equal(output.tokens, generate(loaded.model, loaded.params, prompts, config=config).tokens)

    exported = CliRunner().invoke(app, ["export", str(out / "low_rank_4"), str(tmp_path / "exported")])
    assert exported.exit_code == 1
    assert "no published layout has a draft model with another LM head" in exported.stderr
    described = CliRunner().invoke(app, ["describe", str(out / "low_rank_4"), "--json"])
    assert described.exit_code == 0, described.output
    assert json.loads(described.stdout)["kind"] == "draft_model"


@pytest.mark.full
@pytest.mark.parametrize("head_only", [True, False])
def test_an_eagle3_drafters_head_is_replaced_and_trained_alone_or_with_its_body(
    head_only: bool, target: Path, data: Path, tmp_path: Path
) -> None:
    start = save_eagle3(tmp_path / "eagle3", target, FullHead())
    words = (*SMALL, "--from", start, "--head", "low_rank:4", "--init", "svd", *(["--head-only"] if head_only else []))
    done = run(target, data, tmp_path / "out", *words)
    assert done.exit_code == 0, done.output
    trained = load_checkpoint(tmp_path / "out" / "low_rank_4-svd")
    assert isinstance(trained.model, Eagle3)
    assert trained.metadata["training"]["head_only"] is head_only
    assert (changed(load_checkpoint(start).params, trained.params) == set()) is head_only


def test_what_the_finished_drafter_has_otherwise_is_refused_by_name(target: Path, data: Path, tmp_path: Path) -> None:
    start = save_eagle3(tmp_path / "eagle3", target, LowRankHead(rank=4))  # new_eagle3 norms features and output
    cases = [
        (("--no-fc-norm",), "fc_norm of the finished drafter is True, and stays so, got False"),
        (("--no-norm-output",), "norm_output of the finished drafter is True, and stays so, got False"),
        (("--init", "weighted_svd"), "init is for a head that is made anew, got 'weighted_svd' for low_rank:4: the finished drafter has"),
    ]
    for words, message in cases:
        refused = run(target, data, tmp_path / "a", *SMALL, "--from", start, "--head", "low_rank:4", *words)
        assert refused.exit_code == 1, message
        assert message in refused.stderr


def test_settings_hold_what_is_used_and_not_what_might_have_been(target: Path, data: Path, tmp_path: Path) -> None:
    def settled(start: Path | None, *variants: Variant, **options: Any) -> TrainSettings:
        return prepare_training(target, data, TrainSettings(variants=variants, batch_size=4, chain=1, **options), start=start).settings

    config = dataclasses.replace(new_eagle3(load_checkpoint(target).model.config, FullHead()).config, fc_norm=False)
    start = tmp_path / "eagle3"
    save_checkpoint(start, config, initial_params(Eagle3(config, param_dtype=jnp.float32)), {"source": "eagle3"})
    again = settled(start, Variant(head="full"), Variant(head="low_rank:4", init="svd"), num_steps=2, fc_norm=False)
    assert [variant.init for variant in again.variants] == [None, "svd"]
    assert (again.fc_norm, again.norm_output, again.num_epochs) == (False, True, None)
    new = settled(None, Variant(head="full"), norm_output=False)
    assert [variant.init for variant in new.variants] == ["weighted_svd"]
    assert (new.fc_norm, new.norm_output, new.num_epochs) == (True, False, 1)


def test_a_drafter_can_be_trained_beside_the_one_that_it_begins_with_but_not_in_its_place(target: Path, data: Path, tmp_path: Path) -> None:
    start = save_eagle3(tmp_path / "low_rank_4", target, LowRankHead(rank=4))
    beside = run(target, data, tmp_path, *SMALL, "--from", start, "--head", "low_rank:5")
    assert "must divide hidden_size = 16, got 5" in beside.stderr  # the place is no matter
    instead = run(target, data, tmp_path, *SMALL, "--from", start, "--head", "low_rank:4", "--force")
    assert instead.exit_code == 1
    assert "low_rank_4 cannot be replaced: it is what is read from" in instead.stderr
    (tmp_path / "state").mkdir()
    inside = run(target, data, tmp_path, *SMALL, "--from", start, "--held-out", tmp_path / "state" / "texts", "--head", "full")
    assert "state/texts is what is read from" in inside.stderr
    into = run(target, data, target, *SMALL, "--head", "full")
    assert "drafters need a folder of their own" in into.stderr


def checkpoints(head: DraftHead) -> tuple[Checkpoint, Checkpoint, Checkpoint]:
    """A target, an EAGLE-3 drafter with this head, and a draft model, in memory."""
    model, params = random_model(tiny_config(vocab_size=24), seed=0)
    draft_model, draft_params = random_model(tiny_config(vocab_size=24, num_layers=1, hidden_size=16), seed=1)
    network = new_eagle3(model.config, head, dtype=jnp.float32)
    return (
        Checkpoint(model, params, {}, None),
        Checkpoint(network, initial_params(network), {}, None),
        Checkpoint(draft_model, draft_params, {}, None),
    )


def test_the_covariance_is_that_of_the_drafters_own_hidden_states() -> None:
    target, _, finished = checkpoints(FullHead())
    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(24, size=(2, 6)).astype(np.int32), rng.random((2, 6)) < 0.6
    found = states_covariance(finished, TrainSettings(drafter="draft_model"), target, [Batch(tokens, mask)] * 2, feature_layers=())
    model = finished.model
    hidden = model.apply({"params": finished.params}, tokens, model.init_cache(batch_size=2, capacity=6)).hidden
    rows = np.asarray(hidden)[:, :-1][mask[:, 1:]]
    np.testing.assert_allclose(found, rows.T @ rows / len(rows), atol=COVARIANCE_TOLERANCE)


@pytest.mark.full
def test_every_step_of_eagle3s_chain_counts_for_the_covariance() -> None:
    target, finished, _ = checkpoints(FullHead())
    tokens, mask = np.arange(12, dtype=np.int32).reshape(2, 6), np.ones((2, 6), bool)
    settings, layers = TrainSettings(chain=2), finished.model.config.feature_layers
    found = states_covariance(finished, settings, target, [Batch(tokens, mask)], feature_layers=layers)
    batch = target_outputs(target.model, target.params, jnp.asarray(tokens), jnp.asarray(mask), feature_layers=layers)
    task = task_of(network_with_head(finished.model, FullHead(), target.model.config), settings)
    (group,) = task.draft_states(finished.params, TargetArrays.of(target.model.config, target.params), batch)
    rows = np.concatenate([np.asarray(group.hidden[0])[:, :4].reshape(8, -1), np.asarray(group.hidden[1])[:, :3].reshape(6, -1)])
    np.testing.assert_allclose(found, rows.T @ rows / 14, atol=COVARIANCE_TOLERANCE)


@pytest.mark.parametrize(
    ("head", "place"), [(FullHead(), "own"), (ScreenedHead(rank=2, num_candidates=3), "own"), (FullHead(shared=True), "target"),
                        (LowRankHead(rank=4), None)], ids=["full", "screened", "shared", "low_rank"]
)  # fmt: skip
def test_heads_are_made_from_the_full_head_that_the_drafter_drafts_with(head: DraftHead, place: str | None) -> None:
    target, finished, draft_model = checkpoints(head)
    arrays = TargetArrays.of(target.model.config, target.params)
    expected = {"own": finished.params.get("draft_head", {}).get("lm_head"), "target": arrays.lm_head, None: None}[place]
    assert full_head_of(finished.model, finished.params, arrays) is expected
    assert full_head_of(draft_model.model, draft_model.params, arrays) is draft_model.params["lm_head"]


def test_a_head_that_the_drafter_has_already_is_gone_on_with_and_no_other_is_made_of_it() -> None:
    _, finished, _ = checkpoints(LowRankHead(rank=4))
    params = params_with_head(finished, LowRankHead(rank=4), None, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params, finished.params)
    with pytest.raises(ValueError, match=r"FullHead\(.*cannot be made from the drafter's LowRankHead\(rank=4\)"):
        params_with_head(finished, FullHead(), None, jax.random.key(0))


@pytest.mark.full
def test_what_cannot_be_begun_with_is_refused_by_name(target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", special_tokens=("<u>", "<x>"))
    larger = write_checkpoint(tmp_path / "larger", special_tokens=("<u>", "<a>", "<x>"))
    eagle3 = save_eagle3(tmp_path / "eagle3", target, LowRankHead(rank=4))
    of_draft_model: tuple[Any, ...] = ("--drafter", "draft_model")
    cases = [
        (of_draft_model, "to train a draft model there has to be a finished drafter to begin with"),
        (("--head-only",), "to train the head alone of eagle3 there has to be a finished drafter"),
        ((*of_draft_model, "--from", other), "the drafter must have the target's tokenizer"),
        ((*of_draft_model, "--from", larger), "the draft model has a vocabulary of 260 tokens, the target one of 259"),
        (
            (*of_draft_model, "--from", eagle3),
            "begin with, got one of kind 'eagle3'",
        ),
        (("--from", draft), "to train eagle3, expected a checkpoint of that to begin with, got one of kind 'transformer'"),
        (("--drafter", "medusa", "--from", draft), "a training of medusa cannot begin with a finished drafter"),
        (("--from", eagle3, "--head", "full", "--init", "svd"), "cannot be made from the drafter's LowRankHead(rank=4)"),
        ((*of_draft_model, "--from", draft, "--head", "shared", "--init", "svd"), "there is nothing to train: FullHead(shared=True"),
    ]
    for words, message in cases:
        refused = run(target, data, tmp_path / "a", *SMALL, *words)
        assert refused.exit_code == 1, message
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr
