"""Training Hydra's heads, which see the tokens before the one that they predict. arXiv:2402.05109."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafting.hydra import Hydra
from specjax.model_config import ModelConfig
from specjax.training.draft_states import DraftStates
from specjax.training.partition import check_params
from specjax.training.target_batch import TargetArrays, TargetBatch
from specjax.training.tasks.medusa_task import check_head_sizes, head_groups
from specjax.training.training_time_test import rows_ahead


@dataclasses.dataclass(frozen=True)
class HydraTask:
    """Params: those of the heads. Head i at position t predicts token t + 2 + i, and is shown the text's tokens t + 1 ... t + 1 + i.

    Attributes:
        model: The heads.
    """

    model: Hydra
    feature_layers = ()

    def check(self, params: Any, target: ModelConfig) -> None:
        """See `TrainingTask.check`."""
        check_head_sizes(self.model.config, target)
        check_params("Hydra's heads", params, jax.eval_shape(self.model.init_params, jax.random.key(0)))

    def is_trained(self, path: tuple[str, ...]) -> bool:
        """See `TrainingTask.is_trained`: all of them."""
        return True

    def draft_states(self, params: Any, arrays: TargetArrays, batch: TargetBatch) -> tuple[DraftStates, ...]:
        """See `TrainingTask.draft_states`."""
        embeddings = jnp.take(arrays.embedding, batch.tokens, axis=0).astype(self.model.dtype)
        following = [rows_ahead(embeddings, index + 1) for index in range(self.model.config.num_draft_heads)]
        states = [
            self.model.apply({"params": params}, batch.hidden, jnp.stack(following[: index + 1], axis=-2), method="state")
            for index in range(len(following))
        ]
        return head_groups(self.model.config, params, states, arrays)
