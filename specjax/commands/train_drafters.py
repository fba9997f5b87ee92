"""Training drafters from checkpoint to checkpoint: a target and token files in, a drafter for each variant out."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import typer

from specjax.atomic import check_destination, check_keeps
from specjax.checkpoints.manifest import MANIFEST
from specjax.checkpoints.store import abstract_checkpoint
from specjax.checkpoints.training_run import TrainingCheckpoints
from specjax.commands.prepare_training import open_token_files, outcome, prepare_training, token_files
from specjax.commands.settle_settings import data_config, with_sequence_length
from specjax.training.data import TokenBatches
from specjax.training.evaluate import Evaluation, evaluate
from specjax.training.metrics import Report
from specjax.training.settings import TrainSettings

STATE_FOLDER, REPORTS = "state", "reports.jsonl"


@dataclasses.dataclass(frozen=True)
class TrainedDrafter:
    """What a training leaves of one drafter.

    Attributes:
        path: Its checkpoint.
        report: The last one.
        evaluation: On held-out data, if there was any.
    """

    path: Path
    report: Report
    evaluation: Evaluation | None


def train_drafters(
    target: str | Path,
    data: str | Path | Sequence[str | Path],
    destination: str | Path,
    settings: TrainSettings,
    *,
    start: str | Path | None = None,
    held_out: str | Path | None = None,
    dtype: Any = None,
    force: bool = False,
    progress: bool = True,
    on_report: Callable[[Report], None] | None = None,
) -> dict[str, TrainedDrafter]:
    """Trains drafters for a target and saves each as a checkpoint. An interrupted run is gone on with by the same call.

    ```
    destination/
    ├── low_rank_8/        a drafter's checkpoint for each variant
    ├── reports.jsonl      loss and expected acceptance on the way
    └── state/             what an interrupted run goes on from; removed at the end
    ```

    Example:
        >>> settings = TrainSettings(variants=(Variant(head="full"), Variant(head="low_rank:8")))
        >>> train_drafters("models/target", "data/sampled", "drafters", settings)

    Args:
        target: The target's checkpoint. On several devices each has all of it, and a share of the batch.
        data: Token files, see `specjax distill` and `specjax tokenize`; folders of one tokenizer are read as one.
        destination: The folder.
        settings: What and how.
        start: A finished drafter's checkpoint to begin with: an EAGLE-3 drafter, whose head is replaced or trained on, or a draft
            model with the target's tokenizer, whose head alone is trained. `None` makes new drafters.
        held_out: Token files to evaluate the finished drafters on.
        dtype: Compute dtype, and that of the finished drafters; the target's if `None`.
        force: Replace finished drafters, and an unfinished run of other settings.
        progress: Show a progress bar on stderr.
        on_report: Called with every report.

    Returns:
        By the variants' names.

    Raises:
        ValueError: Settings that do not fit the target or the data, an unfinished run of other settings, or a finished drafter that is of
            another kind, does not fit the target, or is missing where one is needed.
        OSError: A finished drafter exists, or the destination cannot be written.
    """
    destination = Path(destination)
    state = destination / STATE_FOLDER
    paths = {variant.name: destination / variant.name for variant in settings.variants}
    resumed = TrainingCheckpoints(state, force=force).will_restore()
    folders = [data] if isinstance(data, str | Path) else data
    needed = [target, *folders, *(path for path in (start, held_out) if path is not None)]
    for path in needed:
        if destination.resolve() == Path(path).resolve():
            raise ValueError(f"drafters need a folder of their own, got {destination}, which is what is read from")
    for path in (*paths.values(), state):
        check_keeps(path, *needed)
    for path in paths.values():
        # A run that goes on, or is refused before it saves, may have been interrupted while it saved its drafters: this may be one of them.
        check_destination(path, force=force or resumed, marker=MANIFEST)
    checkpoints = run_checkpoints(state, settings, force=force)
    settings = with_sequence_length(settings, token_files(data))
    held_out_batches = None if held_out is None else _held_out(held_out, target, settings)
    prepared = prepare_training(target, data, settings, start=start, dtype=dtype, resumed=resumed)
    if progress:
        typer.echo(prepared.describe_data(), err=True)
    result = prepared.run(
        checkpoints=checkpoints,
        report_path=destination / REPORTS,
        show_progress=progress,
        on_report=on_report,
    )
    evaluations: Mapping[str, Evaluation] = {}
    if held_out_batches is not None:
        target_model, target_params = prepared.target.model, prepared.target.params
        evaluations = evaluate(target_model, target_params, prepared.drafters, result.params, held_out_batches)
    trained = {}
    for name, path in paths.items():
        report, evaluation = result.reports[name], evaluations.get(name)
        prepared.save(name, path, result.params[name], outcome(report, evaluation), force=True)  # it was checked above
        trained[name] = TrainedDrafter(path, report, evaluation)
    if checkpoints is not None:
        shutil.rmtree(state)
    return trained


def run_checkpoints(state: Path, settings: TrainSettings, *, force: bool) -> TrainingCheckpoints | None:
    """Where a run's states are kept; `None` if the settings want none.

    Args:
        state: The folder.
        settings: The run's.
        force: Replace what an unfinished run left.

    Raises:
        ValueError: The settings want none, and an unfinished run left some.
    """
    checkpoints = TrainingCheckpoints(state, force=force)
    if settings.checkpoint_every is not None:
        return checkpoints
    if checkpoints.will_restore():
        raise ValueError(f"{state} holds an unfinished run: go on with it, with checkpoints, or pass --force to remove it")
    if state.exists():
        if any(state.iterdir()) and not force:
            raise ValueError(
                f"{state} exists and holds no state of a run that could go on: name another folder, or pass --force to remove it"
            )
        shutil.rmtree(state)
    return None


def _held_out(path: str | Path, target: str | Path, settings: TrainSettings) -> TokenBatches:
    """Every row once, in batches that the devices can share; what is left over behind the last one is left out."""
    files, devices = open_token_files(path, abstract_checkpoint(target).tokenizer()), jax.device_count()
    once = dataclasses.replace(data_config(settings), batch_size=devices, packed=False, shuffle=False, num_epochs=1)
    batch_size = min(settings.batch_size, TokenBatches(files, once).num_rows // devices * devices)
    return TokenBatches(files, dataclasses.replace(once, batch_size=batch_size))
