"""Training an EAGLE-3 network through the recursive steps of its own drafting. arXiv:2503.01840."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from specjax.checks import require_size
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.heads.draft_head import DRAFT_HEAD
from specjax.model_config import ModelConfig
from specjax.training.draft_states import DraftStates
from specjax.training.partition import check_params
from specjax.training.target_batch import TargetArrays, TargetBatch
from specjax.training.training_time_test import training_time_test

# The network's own embedding.
_EMBEDDING = "embedding"


@dataclasses.dataclass(frozen=True)
class Eagle3Task:
    """Params: those of the network.

    Attributes:
        model: The network, its `feature_layers` settled (`Eagle3Config.for_target`). Its `dtype` may be bfloat16; params are float32.
        num_steps: Steps of the chain that are trained: the first pass and `num_steps - 1` recursive ones.
        train_embedding: Train the network's own embedding, if it has one; otherwise it stays the copy of the target's that it is.
    """

    model: Eagle3
    num_steps: int = 5
    train_embedding: bool = False

    def __post_init__(self) -> None:
        require_size("Eagle3Task.num_steps", self.num_steps)
        if self.model.config.feature_layers is None:
            raise ValueError("the network's feature_layers depend on its target: settle them with Eagle3Config.for_target")

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """See `TrainingTask.feature_layers`."""
        layers = self.model.config.feature_layers
        assert layers is not None
        return layers

    def check(self, params: Any, target: ModelConfig) -> None:
        """See `TrainingTask.check`."""
        self.model.config.for_target(target)
        check_params("an EAGLE-3 drafter", params, jax.eval_shape(self.model.init_params, jax.random.key(0)))

    def is_trained(self, path: tuple[str, ...]) -> bool:
        """See `TrainingTask.is_trained`."""
        return path[0] != _EMBEDDING or self.train_embedding

    def draft_states(self, params: Any, arrays: TargetArrays, batch: TargetBatch) -> tuple[DraftStates, ...]:
        """See `TrainingTask.draft_states`."""
        head = self.model.config.head
        hidden = training_time_test(
            self.model,
            params,
            batch.features_at(self.feature_layers),
            batch.tokens,
            num_steps=self.num_steps,
            target_embedding=None if self.model.config.own_embedding else arrays.embedding,
        )
        return (
            DraftStates(
                hidden=hidden,
                head_params=params.get(DRAFT_HEAD, {}),
                shared_head=arrays.lm_head if head.shared else None,
                head=head,
                # The first draft follows the token that row t is paired with, t + 1.
                ahead=tuple(range(1, self.num_steps + 1)),
            ),
        )
