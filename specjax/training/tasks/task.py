"""What a training task is: anything with `feature_layers`, `check`, `is_trained` and `draft_states`."""

from __future__ import annotations

from typing import Any, Protocol

from specjax.model_config import ModelConfig
from specjax.training.draft_states import DraftStates
from specjax.training.target_batch import TargetArrays, TargetBatch


class TrainingTask(Protocol):
    """A drafter in training: a frozen, hashable dataclass (static under jit). Its params are an argument.

    Attributes:
        feature_layers: Boundaries of the target that it reads; empty if none.
    """

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Boundaries of the target that the drafter reads."""
        ...

    def check(self, params: Any, target: ModelConfig) -> None:
        """Refuses what does not fit, before anything is compiled.

        Args:
            params: The drafter's params, or their shapes.
            target: The target's shape.

        Raises:
            ValueError: The drafter does not fit the target, or its params do not fit it.
        """
        ...

    def is_trained(self, path: tuple[str, ...]) -> bool:
        """Whether the parameter at this path of the params is trained."""
        ...

    def draft_states(self, params: Any, arrays: TargetArrays, batch: TargetBatch) -> tuple[DraftStates, ...]:
        """What the drafter would draft from, at every position of the texts.

        Args:
            params: The drafter's params.
            arrays: What it may share with its target.
            batch: The texts, with features at `feature_layers` and perhaps more.

        Returns:
            The steps of its chain in order, in one group or several.
        """
        ...
