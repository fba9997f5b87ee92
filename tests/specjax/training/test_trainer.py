"""A run: drafters side by side, what it reports, what it leaves alone, what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafting.heads import FullHead, LowRankHead
from specjax.drafting.medusa import Medusa, MedusaConfig
from specjax.training import train_config
from specjax.training.evaluate import evaluate
from specjax.training.losses import DraftLoss
from specjax.training.optimizer import OptimizerConfig
from specjax.training.tasks import HeadOnly, MedusaTask
from specjax.training.train_config import TrainConfig
from specjax.training.train_step import DrafterTraining
from specjax.training.trainer import TrainResult, train
from tests.training import PROMPT_LENGTH, TEXT_LENGTH, VOCAB, WIDTH, MemoryTexts, greedy_texts, initial_params, sure_target

NUM_STEPS, COUNTED = 30, TEXT_LENGTH - PROMPT_LENGTH


def heads(head: Any = LowRankHead(rank=4), *, only_heads: bool = False, dtype: Any = jnp.float32) -> tuple[DrafterTraining, dict]:  # noqa: B008
    model = Medusa(MedusaConfig(hidden_size=WIDTH, vocab_size=VOCAB, num_draft_heads=2, head=head), dtype=dtype, param_dtype=jnp.float32)
    task = MedusaTask(model)
    optimizer = OptimizerConfig(learning_rate=0.01, warmup_steps=5)
    return DrafterTraining(task=HeadOnly(task) if only_heads else task, optimizer=optimizer), initial_params(model)


def texts(**options: Any) -> MemoryTexts:
    _, tokens, loss_mask = greedy_texts()
    return MemoryTexts(tokens, loss_mask, batch_size=16, **options)


def run(
    drafters: dict[str, tuple[DrafterTraining, dict]], *, report_every: int = 10, config: Any = None, data: Any = None, **options: Any
) -> TrainResult:
    target, target_params = sure_target()
    return train(
        TrainConfig(num_steps=NUM_STEPS, report_every=report_every) if config is None else config,
        target,
        target_params,
        {name: training for name, (training, _) in drafters.items()},
        {name: params for name, (_, params) in drafters.items()},
        texts() if data is None else data,
        **options,
    )


def test_drafters_side_by_side_learn_what_each_learns_alone(tmp_path: Path) -> None:
    drafters, reports = {"low-rank": heads(), "head-only": heads(only_heads=True)}, []
    together = run(drafters, on_report=reports.append, report_path=tmp_path / "reports.jsonl")
    alone = run({"low-rank": drafters["low-rank"]})
    jax.tree.map(np.testing.assert_array_equal, together.params["low-rank"], alone.params["low-rank"])

    assert [(report.step, report.drafter) for report in reports] == [(step, name) for step in (10, 20, 30) for name in drafters]
    for name in drafters:
        losses = [report.loss for report in reports if report.drafter == name]
        assert losses[-1] < losses[1] < losses[0], name
    last = together.reports["low-rank"]
    assert last.positions == NUM_STEPS * 16 * TEXT_LENGTH
    assert last.loss_tokens == NUM_STEPS * 16 * COUNTED
    np.testing.assert_allclose(last.loss, last.step_losses[0] + 0.8 * last.step_losses[1], rtol=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "reports.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert lines[-2]["acceptance_length"] == last.acceptance_length > 1

    # What a run began with is still there; a body that is not trained has not moved.
    for name, (_, params) in drafters.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            found = together.params[name]
            for part in path:
                found = found[part.key]
            stays = name == "head-only" and "draft_head" not in [part.key for part in path]
            assert np.array_equal(leaf, found) is stays, path


@pytest.mark.full
def test_bfloat16_computes_and_float32_is_trained() -> None:
    training, params = heads(FullHead(), dtype=jnp.bfloat16)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    losses = []
    result = run({"it": (training, params)}, on_report=lambda report: losses.append(report.loss))
    assert {leaf.dtype for leaf in jax.tree.leaves(result.params)} == {jnp.dtype(jnp.float32)}
    assert losses[-1] < 0.9 * losses[0]


def test_an_evaluation_gives_the_numbers_of_the_training_itself() -> None:
    training, params = heads()
    reports = []
    target, target_params = sure_target()
    result = run({"it": (training, params)}, report_every=1, on_report=reports.append)
    before = evaluate(target, target_params, {"it": training}, {"it": params}, [next(texts())])["it"]
    np.testing.assert_allclose(before.acceptance, reports[0].acceptance, rtol=1e-5)
    np.testing.assert_allclose(before.step_losses, reports[0].step_losses, rtol=1e-5)
    assert before.num_positions == (16 * COUNTED, 16 * COUNTED)
    data = texts()
    both = evaluate(target, target_params, {"it": training}, result.params, [next(data), next(data)])["it"]
    assert both.num_positions == (2 * 16 * COUNTED, 2 * 16 * COUNTED)
    assert both.acceptance_length != before.acceptance_length
    with pytest.raises(ValueError, match="there is no batch to evaluate on"):
        evaluate(target, target_params, {"it": training}, {"it": params}, [])


def test_a_loss_that_is_not_a_number_ends_the_run() -> None:
    training, params = heads()
    params["head_0"]["block_0"] = params["head_0"]["block_0"].at[0, 0].set(jnp.nan)
    with pytest.raises(FloatingPointError, match="the loss of it is nan and its gradients' norm nan at step 10: lower the learning rate"):
        run({"it": (training, params)})


def test_what_cannot_be_trained_is_refused() -> None:
    training, params = heads()
    target, target_params = sure_target()
    config = TrainConfig(num_steps=3)
    for drafters, given, message in (
        ({}, {}, "there is no drafter to train"),
        ({"a": training}, {"b": params}, "drafters and params must have the same names, got a and b"),
        ({"a.b": training}, {"a.b": params}, "must consist of letters, digits, - and _, got 'a.b'"),
        ({"a": training}, {"a": {}}, "a: Medusa's heads: head_0.block_0 should have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            train(config, target, target_params, drafters, given, texts())
    with pytest.raises(ValueError, match="the texts ended after 2 batches, the run has 30 steps"):
        run({"it": (training, params)}, data=texts(num_batches=2))
    shared = Medusa(MedusaConfig(hidden_size=WIDTH, vocab_size=VOCAB, num_draft_heads=1, head=FullHead(shared=True)), dtype=jnp.float32)
    with pytest.raises(ValueError, match="it: there is nothing to train"):
        run({"it": (DrafterTraining(task=HeadOnly(MedusaTask(shared))), initial_params(shared))})
    with pytest.raises(ValueError, match="it: there is no checkpoint to go on from, and its params are shapes"):
        run({"it": (training, jax.eval_shape(lambda: params))})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(report_every=0), "TrainConfig.report_every must be a positive int, got 0"),
        (dict(num_steps=None), "TrainConfig needs num_steps or max_seconds, got neither"),
        (dict(max_seconds=0.0), "TrainConfig.max_seconds must be above 0, got 0.0"),
        (dict(evaluations=-1), "TrainConfig.evaluations must be an int of at least 0, got -1"),
        (dict(compile_threads=None), "TrainConfig.compile_threads must be a positive int, got None"),
    ],
)
def test_a_run_of_impossible_length_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**dict(num_steps=1) | changes)


class Clock:
    """Seconds that pass by `passes`, and otherwise not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(train_config.time, "perf_counter", lambda: self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_a_run_of_given_time_is_the_run_of_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, clock = heads(), Clock(monkeypatch)
    # A warm-up of five steps, each of half a second; evaluating takes far longer, and does not count.
    evaluated, rates = [], []
    timed = run(
        {"it": drafter},
        config=TrainConfig(max_seconds=6.3, evaluations=4, report_every=1),
        before_step=lambda: clock.passes(0.5),
        on_evaluation=lambda params, reports: (evaluated.append(reports["it"].step), clock.passes(100.0)),
        on_report=lambda report: rates.append(report.learning_rate),
    )
    assert timed.reports["it"].step == 12
    assert evaluated == [6, 9, 12]  # and not at 3: how many there are is known from step 6 on
    given = run({"it": drafter}, config=TrainConfig(num_steps=12, report_every=12))
    jax.tree.map(np.testing.assert_array_equal, timed.params, given.params)
    assert max(rates) == rates[4] == rates[5] > rates[6] > rates[-1] > 0
    # A number of steps is the most.
    both = run({"it": drafter}, config=TrainConfig(num_steps=4, max_seconds=1e6), before_step=lambda: clock.passes(0.5))
    assert both.reports["it"].step == 4


def test_drafters_are_evaluated_evenly_with_the_params_and_reports_of_then() -> None:
    drafters, seen = {"a": heads(), "b": heads(only_heads=True)}, []

    def look(params: dict[str, Any], reports: dict[str, Any]) -> None:
        seen.append((jax.tree.map(np.asarray, params), reports))

    config = TrainConfig(num_steps=7, evaluations=3, report_every=100)
    result = run(drafters, config=config, on_evaluation=look)
    assert [reports["b"].step for _, reports in seen] == [3, 5, 7]
    jax.tree.map(np.testing.assert_array_equal, seen[-1][0], result.params)
    assert seen[-1][1] == result.reports
    with pytest.raises(AssertionError):
        jax.tree.map(np.testing.assert_array_equal, seen[0][0], result.params)


COMPILES = """
import jax
compiles = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiles.append(name) if "backend_compile" in name else None)
from specjax.training.train_config import TrainConfig
from tests.specjax.training.test_trainer import heads, run
marks = []
drafters = {"a": heads(), "b": heads(only_heads=True)}
config = TrainConfig(max_seconds=1e6, num_steps=12, report_every=2)
run(drafters, config=config, before_step=lambda: marks.append((len(compiles), jax.device_count())))
print(marks[0], *[after for after, _ in marks[2:]], len(compiles), sep="|")
"""


@pytest.mark.full
def test_nothing_is_compiled_after_the_first_step_on_two_devices() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", COMPILES]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    first, *later = done.stdout.split("|")
    assert first.endswith(", 2)")
    # All of a run's steps but its first, in which three programs at least were compiled: the target's and two drafters'.
    assert len({int(count) for count in later}) == 1
    assert int(later[0]) >= int(first[1:].split(",")[0]) + 3


SCRIPT = """
import json
import jax, numpy as np
from specjax.drafting.heads import LowRankHead
from specjax.training.tasks import Eagle3Task
from specjax.training.train_step import DrafterTraining, data_mesh
from tests.specjax.training.test_trainer import heads, run, texts
from tests.training import eagle3_network, initial_params
import sys

if sys.argv[1] == "medusa":
    drafter = heads()
else:
    network = eagle3_network(LowRankHead(rank=4))
    drafter = DrafterTraining(task=Eagle3Task(network, num_steps=2)), initial_params(network)
results = []
for devices in (jax.devices(), jax.devices()[:1]):
    reports = []
    result = run({"it": drafter}, report_every=3, mesh=data_mesh(devices), on_report=reports.append)
    sizes = [float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(result.params)]
    results.append([reports[0].loss, reports[0].gradient_norm, *reports[0].acceptance, *sizes])
try:
    run({"it": drafter}, mesh=data_mesh(jax.devices()[:3]))
except ValueError as error:
    print(error, file=sys.stderr)
print(json.dumps([jax.device_count(), *results]))
"""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_eight_devices_make_of_a_batch_what_one_makes(kind: str) -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", SCRIPT, kind]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "a batch of 16 rows cannot be shared evenly by 3 devices" in done.stderr
    num_devices, many, one = json.loads(done.stdout.splitlines()[-1])
    assert num_devices == 8
    # Sums over rows in another order, through thirty steps of Adam, which divides by gradients' sizes.
    np.testing.assert_allclose(many, one, rtol=1e-3)


@pytest.mark.full
def test_losses_other_than_the_divergence_can_be_chosen() -> None:
    training, params = heads()
    kinds = {kind: dataclasses.replace(training, loss=DraftLoss(kind=kind)) for kind in ("lk_alpha", "lk_lambda")}
    losses: dict[str, list[float]] = {kind: [] for kind in kinds}
    run({kind: (one, params) for kind, one in kinds.items()}, on_report=lambda report: losses[report.drafter].append(report.loss))
    for kind, values in losses.items():
        assert values[-1] < values[0], kind
