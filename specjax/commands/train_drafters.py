"""Training drafters from checkpoint to checkpoint: a target and token files in, a drafter for each variant out."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specjax.atomic import check_destination, check_keeps
from specjax.checkpoints.manifest import MANIFEST
from specjax.checkpoints.training_run import TrainingCheckpoints
from specjax.commands.prepare_training import data_config, open_token_files, prepare_training
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
        report: The last one; `None` if an interrupted run had nothing left to do.
        evaluation: On held-out data, if there was any.
    """

    path: Path
    report: Report | None
    evaluation: Evaluation | None


def train_drafters(
    target: str | Path,
    data: str | Path,
    destination: str | Path,
    settings: TrainSettings,
    *,
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
        data: Token files, see `specjax distill` and `specjax tokenize`.
        destination: The folder.
        settings: What and how.
        held_out: Token files to evaluate the finished drafters on.
        dtype: Compute dtype, and that of the finished drafters; the target's if `None`.
        force: Replace finished drafters, and an unfinished run of other settings.
        progress: Show a progress bar on stderr.
        on_report: Called with every report.

    Returns:
        By the variants' names.

    Raises:
        ValueError: Settings that do not fit the target or the data, or an unfinished run of other settings.
        OSError: A finished drafter exists, or the destination cannot be written.
    """
    destination = Path(destination)
    paths = {variant.name: destination / variant.name for variant in settings.variants}
    for path in paths.values():
        check_destination(path, force=force, marker=MANIFEST)
    check_keeps(destination, target, data, *([] if held_out is None else [held_out]))
    prepared = prepare_training(target, data, settings, dtype=dtype)
    held_out_batches = None
    if held_out is not None:
        once = dataclasses.replace(data_config(settings), shuffle=False, num_epochs=1)
        held_out_batches = TokenBatches(open_token_files(held_out, prepared.target.tokenizer()), once)
    state = destination / STATE_FOLDER
    result = prepared.run(
        checkpoints=TrainingCheckpoints(state, force=force),
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
        report, evaluation = result.reports.get(name), evaluations.get(name)
        prepared.save(name, path, result.params[name], _outcome(report, evaluation), force=force)
        trained[name] = TrainedDrafter(path, report, evaluation)
    shutil.rmtree(state)
    return trained


def _outcome(report: Report | None, evaluation: Evaluation | None) -> dict[str, Any]:
    outcome = {}
    if report is not None:
        kept = ("loss", "acceptance", "acceptance_length", "positions", "loss_tokens")
        outcome["last_report"] = {name: getattr(report, name) for name in kept}
    if evaluation is not None:
        outcome["held_out"] = dataclasses.asdict(evaluation) | {"acceptance_length": evaluation.acceptance_length}
    return outcome
