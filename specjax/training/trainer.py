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
from jax.sharding import Mesh

from specjax.model_config import ModelConfig
from specjax.models.transformer import Transformer
from specjax.training.compile_ahead import compile_steps
from specjax.training.description import describe, digests
from specjax.training.metrics import ProgressBar, Report, ReportFile, ReportWindow, require_finite
from specjax.training.partition import merge_params, split_params
from specjax.training.target_batch import TargetArrays
from specjax.training.train_config import RunLength, TrainConfig
from specjax.training.train_step import (
    DrafterTraining,
    TrainState,
    data_mesh,
    place_batch,
    replicated,
    target_step,
    union_of_feature_layers,
)

# Names become folders, and parts of the names of arrays.
_NAME = re.compile(r"[A-Za-z0-9_-]+")


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
        reports: The last one of each drafter; its `step` is how many training steps the run had.
        compile_seconds: What compiling the steps took, side by side, the target's first pass included; 0 if no step was left.
    """

    params: dict[str, Any]
    reports: dict[str, Report]
    compile_seconds: float


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
    on_evaluation: Callable[[dict[str, Any], dict[str, Report]], None] | None = None,
    before_step: Callable[[], None] | None = None,
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
        params: By the same names, what each begins with. They are not changed either. Where the run goes on from a checkpoint, those that
            are trained may be shapes, and the others must be those that it had.
        texts: The batches.
        mesh: From `data_mesh`; `None` is all devices. They share the rows of a batch evenly.
        checkpoints: Where states are kept; `None`, or no `config.checkpoint_every`, keeps none.
        report_path: A file for one line of JSON a report.
        show_progress: Draw a bar on standard error.
        on_report: Called with every report.
        on_evaluation: Called `config.evaluations` times, with all params of every drafter and their latest reports. The params are the
            state's own arrays, which the next step takes: they are not to be kept. A run that goes on from a checkpoint of a step at which
            drafters are evaluated calls it first, since that may be what was interrupted.
        before_step: Called before every step; what it raises ends the run.
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
    checkpoints = checkpoints if config.checkpoint_every else None
    check_drafters(drafters, params, target.config)
    parts = {name: split_params(params[name], training.task.is_trained) for name, training in drafters.items()}
    run = {"num_steps": config.num_steps, "max_seconds": config.max_seconds}
    description = {"run": run, "target": describe(target.config), "drafters": describe(drafters)}
    description["target_identity"] = target_identity
    description["texts"] = texts.get_state().get("fingerprint")
    states, progress, reports = None, {"step": 0, "positions": 0, "loss_tokens": 0}, {}
    if checkpoints is not None:
        # A checkpoint has what is trained; what is not, such as a frozen body, has to be the same again.
        for name, digest in digests({name: part for name, (_, part) in parts.items()}).items():
            description["drafters"][name]["fixed_params"] = digest
        restored = checkpoints.restore(_state_shapes(drafters, parts, mesh), description)
        if restored is not None:
            states, progress = restored
            texts.set_state(progress["texts"])
            reports = {name: Report.from_json(values) for name, values in progress["reports"].items()}
    if states is None:
        states = {name: _first_state(name, training, parts[name][0], mesh) for name, training in drafters.items()}
    target_params = jax.device_put(target_params, replicated(mesh))
    fixed = {name: jax.device_put(part, replicated(mesh)) for name, (_, part) in parts.items()}
    arrays = TargetArrays.of(target.config, target_params)
    feature_layers = union_of_feature_layers(drafters)

    window = ReportWindow(**{name: progress[name] for name in ("step", "positions", "loss_tokens")})
    warmup_steps = min(training.optimizer.warmup_steps for training in drafters.values())
    length = RunLength(config, step=window.step, num_steps=progress.get("num_steps"), warmup_steps=warmup_steps)
    first_step, compile_seconds, train_steps = window.step + 1, 0.0, {}

    def evaluate_if_due() -> None:
        if on_evaluation is not None and length.evaluates_after(window.step):
            on_evaluation({name: merge_params(states[name].trained, fixed[name]) for name in drafters}, reports)
            window.restart_clock()

    file = None if report_path is None else ReportFile(report_path, window.step, drafters)
    with ProgressBar(length.num_steps, window.step, shown=show_progress) as bar:
        evaluate_if_due()
        while not length.is_over(window.step):
            if before_step is not None:
                before_step()
            batch = _next_batch(texts, window.step, length)
            rows = (place_batch(mesh, batch.tokens), place_batch(mesh, batch.loss_mask))
            num_steps = jax.device_put(length.for_learning_rate, replicated(mesh))
            if train_steps:
                outputs = target_step(target_params, *rows, target=target, feature_layers=feature_layers, mesh=mesh)
            else:
                began = time.perf_counter()
                inputs: dict[str, Any] = dict(states=states, fixed=fixed, arrays=arrays, rows=rows, num_steps=num_steps)
                compiled = compile_steps(target, target_params, drafters, **inputs, mesh=mesh, threads=config.compile_threads)
                outputs, train_steps = compiled.outputs, compiled.train_steps
                compile_seconds = time.perf_counter() - began
                bar.note(f"compiled the steps of {len(drafters)} drafters in {compile_seconds:.1f} s")
            metrics = {}
            for name, step in train_steps.items():
                states[name], metrics[name] = step(states[name], fixed[name], arrays, outputs, num_steps)
            window.add(batch, metrics)
            if window.step == first_step:
                # Compiling is not training.
                jax.block_until_ready(metrics)
                window.restart_clock()
            if length.step_done(window.step, metrics):
                bar.set_num_steps(length.num_steps)
            last = length.is_over(window.step)
            at_checkpoint = length.num_steps is not None and window.step % (config.checkpoint_every or 1) == 0
            checkpoint_due = checkpoints is not None and (last or at_checkpoint)
            if last or checkpoint_due or length.evaluates_after(window.step) or window.step % config.report_every == 0:
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
                totals = {**window.totals, "num_steps": length.num_steps}
                checkpoints.save(states, {**totals, "texts": texts.get_state(), "reports": kept}, description)
                window.restart_clock()
            evaluate_if_due()
    trained = {name: merge_params(states[name].trained, fixed[name]) for name in drafters}
    return TrainResult(params=trained, reports=reports, compile_seconds=compile_seconds)


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


def _first_state(name: str, training: DrafterTraining, trained: Any, mesh: Mesh) -> TrainState:
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trained)):
        raise ValueError(f"{name}: there is no checkpoint to go on from, and its params are shapes: give arrays to begin with")
    # Copies, because a training step takes its state's memory.
    trained = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), trained)
    # All of it in its place, where a step's results are: the compiled steps take nothing else.
    return jax.device_put(TrainState.of(training.optimizer, trained), replicated(mesh))


def _state_shapes(drafters: Mapping[str, DrafterTraining], parts: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    shapes = {}
    for name, training in drafters.items():
        trained = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), parts[name][0])
        state = jax.eval_shape(lambda trained, training=training: TrainState.of(training.optimizer, trained), trained)
        shapes[name] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), state)
    return shapes


def _next_batch(texts: Texts, step: int, length: RunLength) -> Any:
    try:
        return next(texts)
    except StopIteration:
        wanted = "more" if length.num_steps is None else f"{length.num_steps} steps"
        raise ValueError(f"the texts ended after {step} batches, the run has {wanted}") from None
