"""A training run that was killed goes on as if it had not been, and never with what another run left."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import training_run
from specjax.checkpoints.training_run import TrainingCheckpoints
from specjax.drafting.heads import FullHead, LowRankHead, TrimmedHead
from specjax.drafting.medusa import Medusa, MedusaConfig
from specjax.training.description import digests
from specjax.training.losses import DraftLoss
from specjax.training.optimizer import OptimizerConfig
from specjax.training.tasks import HeadOnly, MedusaTask
from specjax.training.train_config import TrainConfig
from specjax.training.train_step import DrafterTraining
from specjax.training.trainer import TrainResult, train
from tests.helpers import random_model, tiny_config
from tests.training import VOCAB, WIDTH, MemoryTexts, initial_params

NUM_STEPS, EVERY = 9, 2


def heads(rank: int = 4, **changes: Any) -> tuple[DrafterTraining, dict]:
    head = LowRankHead(rank=rank) if rank else FullHead()
    config = MedusaConfig(hidden_size=WIDTH, vocab_size=VOCAB, num_draft_heads=1, head=head)
    model = Medusa(config, dtype=jnp.float32, param_dtype=jnp.float32)
    return DrafterTraining(task=MedusaTask(model), **changes), initial_params(model)


def texts(seed: int = 0) -> MemoryTexts:
    tokens = np.random.default_rng(seed).integers(VOCAB, size=(24, 8)).astype(np.int32)
    return MemoryTexts(tokens, np.ones_like(tokens, bool), batch_size=4)


def run(
    folder: Path | None, *, num_steps: int = NUM_STEPS, data: Any = None, force: bool = False, drafter: Any = None, **changes: Any
) -> TrainResult:
    """With a state every two steps in `folder`, or with none."""
    target, target_params = random_model(tiny_config(vocab_size=VOCAB, num_layers=1))
    training, params = heads(**changes) if drafter is None else drafter
    return train(
        TrainConfig(num_steps=num_steps, report_every=3, checkpoint_every=EVERY),
        target,
        target_params,
        {"it": training},
        {"it": params},
        texts() if data is None else data,
        checkpoints=None if folder is None else TrainingCheckpoints(folder / "states", force=force),
        report_path=None if folder is None else folder / "reports.jsonl",
    )


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "states").iterdir())


# Dies by SIGKILL while it writes its third state: all arrays are there, but the folder has no name yet.
KILLED = """
import os, signal, sys
from pathlib import Path
from specjax.checkpoints import training_run
from tests.checkpoints.test_training_run import run

write, calls = training_run.write_arrays, []

def write_and_die(*arguments):
    calls.append(write(*arguments))
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

training_run.write_arrays = write_and_die
run(Path(sys.argv[1]))
"""


@pytest.mark.full
def test_a_run_killed_while_it_saves_ends_with_the_params_of_one_that_was_not(tmp_path: Path) -> None:
    whole = run(None)
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert steps(tmp_path) == [".step-00000006.incomplete", "step-00000002", "step-00000004"]
    with (tmp_path / "reports.jsonl").open("a") as file:
        file.write('{"step": 6, "drafter": "fu')  # as if it had been killed while it wrote a report

    again = run(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
    assert steps(tmp_path) == ["step-00000008", "step-00000009"]
    lines = [json.loads(line) for line in (tmp_path / "reports.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 3, 4, 6, 8, 9]
    assert lines[-1]["positions"] == NUM_STEPS * 4 * 8
    assert lines[-1]["loss_tokens"] == lines[-1]["positions"]

    # What is over stays over.
    nothing_left = run(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nothing_left.params, whole.params)
    assert nothing_left.reports == again.reports


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The states of a run of two steps, made to look like one of nine."""
    folder = tmp_path_factory.mktemp("run")
    run(folder, num_steps=2)
    path = folder / "states" / "step-00000002" / "run.json"
    values = json.loads(path.read_text())
    values["description"]["run"]["num_steps"] = NUM_STEPS
    path.write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (dict(loss=DraftLoss(kind="lk_alpha")), r"drafters\.it\.loss\.kind is 'lk_alpha', was 'forward_kl'"),
        (dict(optimizer=OptimizerConfig(learning_rate=1e-3)), r"drafters\.it\.optimizer\.learning_rate is 0\.001, was 0\.0004"),
        (dict(rank=5), r"drafters\.it\.task\.model\.config\.head\.rank is 5, was 4"),
        (dict(rank=0), r"drafters\.it\.task\.model\.config\.head\.type is 'FullHead', was 'LowRankHead'"),
        (dict(num_steps=10), r"run\.num_steps is 10, was 9"),
        (dict(data=texts(seed=1)), r"texts is '\d+', was '\d+'"),
    ],
)
def test_a_run_that_is_another_in_one_field_is_refused_by_its_name(unfinished: Path, changes: dict[str, Any], difference: str) -> None:
    with pytest.raises(ValueError, match=f"holds an unfinished run that is not this one: {difference}. Go on with the settings"):
        run(unfinished, **changes)


def test_a_run_goes_on_with_the_fixed_params_that_it_had_and_no_others(tmp_path: Path) -> None:
    config = MedusaConfig(hidden_size=WIDTH, vocab_size=VOCAB, num_draft_heads=1, head=TrimmedHead(num_tokens=8))
    network = Medusa(config, dtype=jnp.float32, param_dtype=jnp.float32)
    training, params = DrafterTraining(task=HeadOnly(MedusaTask(network))), initial_params(network)
    done = run(tmp_path, num_steps=2, drafter=(training, params))
    head = params["head_0"]["draft_head"]
    other_ids = params["head_0"] | {"draft_head": head | {"token_ids": head["token_ids"] + 8}}
    other_body = jax.tree.map(lambda x: x + 1, params["head_0"]) | {"draft_head": head}
    for other in (other_ids, other_body):
        with pytest.raises(ValueError, match=r"is not this one: drafters\.it\.fixed_params is '\w{16}', was '\w{16}'\. Go on with"):
            run(tmp_path, num_steps=2, drafter=(training, {"head_0": other}))
    # What is trained comes from the checkpoint: shapes will do.
    shapes = head | {"lm_head": jax.ShapeDtypeStruct(head["lm_head"].shape, jnp.float32)}
    again = run(tmp_path, num_steps=2, drafter=(training, {"head_0": params["head_0"] | {"draft_head": shapes}}))
    jax.tree.map(np.testing.assert_array_equal, again.params, done.params)


def test_a_digest_is_of_names_dtypes_shapes_and_values() -> None:
    ones = np.ones((2, 3), np.float32)
    others = {
        "name": {"b": {"x": ones}},
        "dtype": {"a": {"x": ones.view(np.int32)}},
        "shape": {"a": {"x": ones.reshape(3, 2)}},
        "value": {"a": {"x": ones * 2}},
        "half": {"a": {"x": jnp.ones((2, 3), jnp.bfloat16)}},
        "number": {"a": {"x": np.float32(1)}},
        "none": {"a": {}},
    }
    same = {"host": {"a": {"x": ones}}, "device": {"a": {"x": jnp.asarray(ones)}}, "order": {"a": {"x": np.asfortranarray(ones)}}}
    found = digests(same | others)
    assert found["host"] == found["device"] == found["order"]
    assert found["none"] is None
    assert len(set(found.values())) == 1 + len(others)


def test_another_run_is_replaced_if_asked(unfinished: Path, tmp_path: Path) -> None:
    (tmp_path / "states").symlink_to(unfinished / "states")  # looked at, and then replaced
    other = run(tmp_path, num_steps=2, force=True)
    alone = run(None, num_steps=2)
    jax.tree.map(np.testing.assert_array_equal, other.params, alone.params)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "run.json is damaged"),
        ('{"format_version": 1}', "run.json is damaged: it lacks"),
        ('{"format_version": 2, "description": 0, "progress": 0}', "has format 2, this version of specjax reads 1"),
    ],
)
def test_a_damaged_state_is_named(tmp_path: Path, text: str, message: str) -> None:
    folder = tmp_path / "step-00000003"
    folder.mkdir()
    (folder / training_run.RUN).write_text(text)
    with pytest.raises(ValueError, match=message):
        TrainingCheckpoints(tmp_path).restore({}, {})


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(training_run, "write_arrays", full)
    with pytest.raises(OSError, match="no space left"):
        TrainingCheckpoints(tmp_path / "state").save({"it": {"x": jnp.ones(2)}}, {"step": 1}, {})
    assert list(tmp_path.iterdir()) == []


def test_states_keep_their_dtypes_and_their_order(tmp_path: Path) -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class State:
        step: jax.Array
        trained: dict

    states = {
        name: State(step=jnp.int32(index), trained={"b": jnp.full((2, 3), index, jnp.bfloat16), "a": [jnp.float32(7)]})
        for index, name in enumerate(("two", "one"))
    }
    checkpoints, description = TrainingCheckpoints(tmp_path, keep=1), {"run": {"x": 0.1}}
    assert checkpoints.restore(states, description) is None
    for step in (5, 10):
        checkpoints.save(states, {"step": step}, description)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), states)
    restored = checkpoints.restore(shapes, description)
    assert restored is not None
    found, progress = restored
    assert progress == {"step": 10}
    jax.tree.map(np.testing.assert_array_equal, found, states)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, states)
