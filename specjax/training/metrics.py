"""What a training run reports: sums over the steps since the last report, a line of JSON for each drafter, a bar on the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specjax.training.train_step import StepMetrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One drafter over the training steps since its last report.

    Attributes:
        step: Training steps done.
        drafter: Its name.
        loss: Mean of the steps' losses.
        acceptance: For each step of the chain the expected acceptance of a sampled draft token, where the ones before it were accepted.
        step_losses: For each step of the chain the mean loss of its positions.
        gradient_norm: Mean, before clipping.
        learning_rate: Of the last step.
        positions: Token positions processed since the run began, padding included.
        loss_tokens: Those of them where the loss counts (and of which `LossPositions.every` takes a part).
        positions_per_s: Since the last report, all drafters together; without what compiling and saving took.
    """

    step: int
    drafter: str
    loss: float
    acceptance: tuple[float, ...]
    step_losses: tuple[float, ...]
    gradient_norm: float
    learning_rate: float
    positions: int
    loss_tokens: int
    positions_per_s: float

    @property
    def acceptance_length(self) -> float:
        """Expected tokens a step of decoding, `1 + a_0 + a_0 a_1 + ...`, with a draft as long as the chain."""
        return acceptance_length(self.acceptance)

    def to_json(self) -> str:
        """One line."""
        return json.dumps({**dataclasses.asdict(self), "acceptance_length": self.acceptance_length})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Report:
        """A report from its fields as JSON values."""
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**fields)


def acceptance_length(acceptance: Sequence[float]) -> float:
    """`1 + a_0 + a_0 a_1 + ...`: tokens a step, the bonus included, from the acceptance at each step of a chain."""
    return 1.0 + float(np.cumprod(acceptance).sum())


def step_means(metrics: Sequence[StepMetrics]) -> dict[str, Any]:
    """Fields of a `Report` that come from its training steps."""
    metrics = jax.tree.map(np.float64, jax.device_get(list(metrics)))
    count = np.maximum(sum(one.sums.count for one in metrics), 1.0)
    by_step = {
        "acceptance": sum(one.sums.acceptance for one in metrics) / count,
        "step_losses": sum(one.sums.loss for one in metrics) / count,
    }
    return {
        "loss": float(np.mean([one.loss for one in metrics])),
        "gradient_norm": float(np.mean([one.gradient_norm for one in metrics])),
        "learning_rate": float(metrics[-1].learning_rate),
        **{name: tuple(float(value) for value in values) for name, values in by_step.items()},
    }


def require_finite(report: Report) -> None:
    """Stops a run that has lost its numbers.

    Raises:
        FloatingPointError: The loss, or the gradients' norm, is not finite.
    """
    if not (math.isfinite(report.loss) and math.isfinite(report.gradient_norm)):
        raise FloatingPointError(
            f"the loss of {report.drafter} is {report.loss} and its gradients' norm {report.gradient_norm} at step {report.step}: "
            "lower the learning rate, or look at the data"
        )


class ReportWindow:
    """Counts since the run began, and metrics since the last report.

    Args:
        step: Training steps done.
        positions: Token positions processed.
        loss_tokens: Those of them where the loss counts.
    """

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


class ReportFile:
    """Lines of JSON, one for each report. A run that goes on from step n keeps those up to n, and those of other drafters.

    Args:
        path: The file.
        step: Training steps done already.
        drafters: Names of the run's drafters.
    """

    def __init__(self, path: Path, step: int, drafters: Collection[str]) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        # The last line of a run that was killed may be half of one.
        whole = [(line, json.loads(line)) for line in lines if line.endswith("\n")]
        kept = [line for line, report in whole if report["step"] <= step or report["drafter"] not in drafters]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(kept), encoding="utf-8")

    def write(self, report: Report) -> None:
        """Appends a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(report.to_json() + "\n")


class ProgressBar:
    """Steps done, and each drafter's loss and expected acceptance length, on standard error.

    Args:
        num_steps: Of the run; `None` if that is not known yet.
        step: Done already.
        shown: Whether to draw it.
    """

    def __init__(self, num_steps: int | None, step: int, *, shown: bool) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
        self._task = self._bar.add_task("compiling …", total=num_steps, completed=step)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """A line above the bar, where there is one."""
        if not self._bar.disable:
            self._bar.console.print(text, highlight=False)

    def set_num_steps(self, num_steps: int | None) -> None:
        """How many there are is known now."""
        self._bar.update(self._task, total=num_steps)

    def show(self, step: int, reports: Mapping[str, Report]) -> None:
        """Moves on; the reports are the latest of each drafter."""
        parts = [f"{name}: loss {one.loss:.3f}, {one.acceptance_length:.2f} tokens a step" for name, one in reports.items()]
        rates = [f"{one.positions_per_s:,.0f} positions/s" for one in list(reports.values())[:1]]
        self._bar.update(self._task, completed=step, description=" · ".join(parts + rates) or "compiling …")
