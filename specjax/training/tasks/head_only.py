"""Training the draft LM heads of a finished drafter, whose body stays as it is."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.drafting.heads.draft_head import DRAFT_HEAD
from specjax.model_config import ModelConfig
from specjax.training.draft_states import DraftStates
from specjax.training.target_batch import TargetArrays, TargetBatch
from specjax.training.tasks.task import TrainingTask


@dataclasses.dataclass(frozen=True)
class HeadOnly:
    """Another task, of which nothing but draft heads is trained: no gradient passes through the body.

    Attributes:
        task: The drafter. Its params outside the heads may be of any dtype.
    """

    task: TrainingTask

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """See `TrainingTask.feature_layers`."""
        return self.task.feature_layers

    def check(self, params: Any, target: ModelConfig) -> None:
        """See `TrainingTask.check`."""
        self.task.check(params, target)

    def is_trained(self, path: tuple[str, ...]) -> bool:
        """See `TrainingTask.is_trained`."""
        return DRAFT_HEAD in path and self.task.is_trained(path)

    def draft_states(self, params: Any, arrays: TargetArrays, batch: TargetBatch) -> tuple[DraftStates, ...]:
        """See `TrainingTask.draft_states`."""
        return self.task.draft_states(params, arrays, batch)
