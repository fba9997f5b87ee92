"""Distillation: the target's pass once a batch, an update of every drafter, reports and checkpoints on the way. Start here.

Several drafters learn side by side from one stream of texts, so that what differs between them is what they are, not what they saw.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.config import ModelConfig
from specjax.drafting.heads.draft_head import require_size
from specjax.models.transformer import Transformer
from specjax.training.description import describe
from specjax.training.metrics import ProgressBar, Report, ReportFile, require_finite, step_means
from specjax.training.partition import merge_params, split_params
from specjax.training.target_batch import TargetArrays
from specjax.training.train_step import (
    DrafterTraining,
    StepMetrics,
    TrainState,
    data_mesh,
    place_batch,
    replicated,
    target_step,
    train_step,
    union_of_feature_layers,
)

# Names become folders, and parts of the names of arrays.
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run.

    Attributes:
        num_steps: Training steps: the learning rate follows its course over them, and then the run ends.
        report_every: Steps between reports. Each waits for the devices.
        checkpoint_every: Steps between checkpoints. There is one at the end, and a report before each.

    Raises:
        ValueError: Not a positive int.
    """

    num_steps: int
    report_every: int = 20
    checkpoint_every: int = 1000

    def __post_init__(self) -> None:
        for name in ("num_steps", "report_every", "checkpoint_every"):
            require_size(f"TrainConfig.{name}", getattr(self, name))


class Texts(Protocol):
    """An iterator over batches of one shape, whose state can be saved; `specjax.training.data.TokenBatches` is one."""

    def __next__(self) -> Any:
        """The next batch, with `tokens` `[B,T]` int32, padded on the right, and `loss_mask` `[B,T]` bool."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Where it is, as JSON values; an entry `fingerprint` says which texts these are."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes there."""
        ...


class Checkpoints(Protocol):
    """Where the states of a run are kept; `specjax.checkpoints.training_run.TrainingCheckpoints` is one."""

    def restore(self, states: Mapping[str, Any], description: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The latest states and progress, or `None` if there are none.

        Args:
            states: By drafter, pytrees of shapes with dtypes and shardings.
            description: What the run is.

        Raises:
            ValueError: What is there is another run's.
        """
        ...

    def save(self, states: Mapping[str, Any], progress: Mapping[str, Any], description: Mapping[str, Any]) -> None:
        """Keeps them, whole or not at all.

        Args:
            states: By drafter, pytrees of arrays.
            progress: JSON values, `step` among them.
            description: What the run is.
        """
        ...


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run leaves.

    Attributes:
        params: Of each drafter all params as its task takes them, the trained ones in float32.
        reports: The last one of each drafter.
    """

    params: dict[str, Any]
    reports: dict[str, Report]


def train(
    config: TrainConfig,
    target: Transformer,
    target_params: Any,
    drafters: Mapping[str, DrafterTraining],
    params: Mapping[str, Any],
    texts: Texts,
    *,
    mesh: Mesh | None = None,
    checkpoints: Checkpoints | None = None,
    report_path: Path | None = None,
    show_progress: bool = False,
    on_report: Callable[[Report], None] | None = None,
    target_identity: Any = None,
) -> TrainResult:
    """Trains drafters to predict what the target does.

    Where `checkpoints` holds states of this run it goes on from the latest, and ends with the very parameters that it would have ended with
    had it never been interrupted, as long as the device's libraries choose the same kernels again.

    Args:
        config: How long, and what on the way.
        target: The target.
        target_params: Its params, which do not change.
        drafters: By name, how each is trained.
        params: By the same names, what each begins with. They are not changed either.
        texts: The batches.
        mesh: From `data_mesh`; `None` is all devices. They share the rows of a batch evenly.
        checkpoints: Where states are kept; `None` keeps none.
        report_path: A file for one line of JSON a report.
        show_progress: Draw a bar on standard error.
        on_report: Called with every report.
        target_identity: A JSON value that tells the target's weights from others of the same shape: a run does not go on with those.

    Returns:
        The params, and the last reports.

    Raises:
        ValueError: A drafter does not fit the target, a name or a batch cannot be used, the texts end too early, or the checkpoints are
            another run's.
        FloatingPointError: A loss became infinite or NaN.

    Example:
        >>> config = Eagle3Config(decoder=decoder, target_hidden_size=1536, head=LowRankHead(rank=192)).for_target(target.config)
        >>> network = Eagle3(config, dtype=jnp.bfloat16, param_dtype=jnp.float32)
        >>> texts = TokenBatches(TokenFiles("data/sampled"), DataConfig(batch_size=16, sequence_length=2048))
        >>> result = train(
        ...     TrainConfig(num_steps=1000),
        ...     target,
        ...     target_params,
        ...     {"low-rank": DrafterTraining(task=Eagle3Task(network))},
        ...     {"low-rank": network.init_params(jax.random.key(0))},
        ...     texts,
        ...     show_progress=True,
        ... )
    """
    mesh = data_mesh() if mesh is None else mesh
    check_drafters(drafters, params, target.config)
    parts = {name: split_params(params[name], training.task.is_trained) for name, training in drafters.items()}
    description = {"run": {"num_steps": config.num_steps}, "target": describe(target.config), "drafters": describe(drafters)}
    description["target_identity"] = target_identity
    description["texts"] = texts.get_state().get("fingerprint")
    states, progress, reports = None, {"step": 0, "positions": 0, "loss_tokens": 0}, {}
    if checkpoints is not None:
        restored = checkpoints.restore(_state_shapes(drafters, parts, config.num_steps, mesh), description)
        if restored is not None:
            states, progress = restored
            texts.set_state(progress["texts"])
            reports = {name: Report.from_json(values) for name, values in progress["reports"].items()}
    if states is None:
        states = {name: _first_state(training, parts[name][0], config.num_steps, mesh) for name, training in drafters.items()}
    target_params = jax.device_put(target_params, replicated(mesh))
    fixed = {name: jax.device_put(part, replicated(mesh)) for name, (_, part) in parts.items()}
    arrays = TargetArrays.of(target.config, target_params)
    feature_layers = union_of_feature_layers(drafters)

    window = _Window(**{name: progress[name] for name in ("step", "positions", "loss_tokens")})
    first_step = window.step + 1
    file = None if report_path is None else ReportFile(report_path, window.step, drafters)
    with ProgressBar(config.num_steps, window.step, shown=show_progress) as bar:
        while window.step < config.num_steps:
            batch = _next_batch(texts, window.step, config.num_steps)
            rows = [place_batch(mesh, part) for part in (batch.tokens, batch.loss_mask)]
            outputs = target_step(target_params, *rows, target=target, feature_layers=feature_layers, mesh=mesh)
            metrics = {}
            for name, training in drafters.items():
                static: dict[str, Any] = dict(training=training, num_steps=config.num_steps, mesh=mesh)
                states[name], metrics[name] = train_step(states[name], fixed[name], arrays, outputs, **static)
            window.add(batch, metrics)
            if window.step == first_step:
                # Compiling is not training.
                jax.block_until_ready(metrics)
                window.restart_clock()
            last = window.step == config.num_steps
            checkpoint_due = checkpoints is not None and (last or window.step % config.checkpoint_every == 0)
            if last or checkpoint_due or window.step % config.report_every == 0:
                reports = window.close()
                for report in reports.values():
                    require_finite(report)
                    if file is not None:
                        file.write(report)
                    if on_report is not None:
                        on_report(report)
                bar.show(window.step, reports)
            if checkpoints is not None and checkpoint_due:
                kept = {name: dataclasses.asdict(report) for name, report in reports.items()}
                checkpoints.save(states, {**window.totals, "texts": texts.get_state(), "reports": kept}, description)
                window.restart_clock()
    return TrainResult(params={name: merge_params(states[name].trained, fixed[name]) for name in drafters}, reports=reports)


def check_drafters(drafters: Mapping[str, DrafterTraining], params: Mapping[str, Any], target: ModelConfig) -> None:
    """Refuses what cannot be trained, before anything is compiled.

    Raises:
        ValueError: No drafter, a name that is not letters, digits, `-` and `_`, params that are missing, or a drafter that does not fit.
    """
    if not drafters:
        raise ValueError("there is no drafter to train")
    if drafters.keys() != params.keys():
        raise ValueError(f"drafters and params must have the same names, got {', '.join(drafters)} and {', '.join(params)}")
    for name, training in drafters.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"the name of a drafter must consist of letters, digits, - and _, got {name!r}")
        try:
            training.task.check(params[name], target)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if not jax.tree.leaves(split_params(params[name], training.task.is_trained)[0]):
            raise ValueError(f"{name}: there is nothing to train")


def _first_state(training: DrafterTraining, trained: Any, num_steps: int, mesh: Mesh) -> TrainState:
    # Copies, because a training step takes its state's memory.
    trained = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), trained)
    # All of it in its place: an array that is placed otherwise than what a step returns would have the step compiled twice.
    return jax.device_put(TrainState.of(training, trained, num_steps=num_steps), replicated(mesh))


def _state_shapes(drafters: Mapping[str, DrafterTraining], parts: Mapping[str, Any], num_steps: int, mesh: Mesh) -> dict[str, Any]:
    shapes = {}
    for name, training in drafters.items():
        trained = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), parts[name][0])
        state = jax.eval_shape(lambda trained, training=training: TrainState.of(training, trained, num_steps=num_steps), trained)
        shapes[name] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), state)
    return shapes


def _next_batch(texts: Texts, step: int, num_steps: int) -> Any:
    try:
        return next(texts)
    except StopIteration:
        raise ValueError(f"the texts ended after {step} batches, the run has {num_steps} steps") from None


class _Window:
    """Counts since the run began, and metrics since the last report."""

    def __init__(self, step: int, positions: int, loss_tokens: int) -> None:
        self.step, self._positions, self._loss_tokens = step, positions, loss_tokens
        self._began, self._before, self._metrics = time.perf_counter(), positions, {}

    @property
    def totals(self) -> dict[str, int]:
        """What a run that goes on from here begins with."""
        return {"step": self.step, "positions": self._positions, "loss_tokens": self._loss_tokens}

    def add(self, batch: Any, metrics: Mapping[str, StepMetrics]) -> None:
        """One training step of all drafters. Metrics stay on the device."""
        self.step += 1
        self._positions += batch.tokens.size
        self._loss_tokens += int(np.asarray(batch.loss_mask).sum())
        for name, one in metrics.items():
            self._metrics.setdefault(name, []).append(one)

    def restart_clock(self) -> None:
        """What was done since the last report does not count for positions a second."""
        self._began, self._before = time.perf_counter(), self._positions

    def close(self) -> dict[str, Report]:
        """The reports of all drafters; waits for the devices."""
        means = {name: step_means(metrics) for name, metrics in self._metrics.items()}
        now = time.perf_counter()
        rate = (self._positions - self._before) / max(now - self._began, 1e-9)
        counts: dict[str, Any] = dict(self.totals, positions_per_s=rate)
        self._began, self._before, self._metrics = now, self._positions, {}
        return {name: Report(drafter=name, **counts, **fields) for name, fields in means.items()}
