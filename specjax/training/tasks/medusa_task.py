"""Training Medusa's heads, each for one token further ahead. arXiv:2401.10774."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from specjax.drafting.heads.draft_head import DRAFT_HEAD
from specjax.drafting.medusa import Medusa
from specjax.model_config import ModelConfig
from specjax.training.draft_states import DraftStates
from specjax.training.partition import check_params
from specjax.training.target_batch import TargetArrays, TargetBatch


@dataclasses.dataclass(frozen=True)
class MedusaTask:
    """Params: those of the heads. Head i at position t predicts token t + 2 + i.

    Attributes:
        model: The heads.
    """

    model: Medusa
    feature_layers = ()

    def check(self, params: Any, target: ModelConfig) -> None:
        """See `TrainingTask.check`."""
        check_head_sizes(self.model.config, target)
        check_params("Medusa's heads", params, jax.eval_shape(self.model.init_params, jax.random.key(0)))

    def is_trained(self, path: tuple[str, ...]) -> bool:
        """See `TrainingTask.is_trained`: all of them."""
        return True

    def draft_states(self, params: Any, arrays: TargetArrays, batch: TargetBatch) -> tuple[DraftStates, ...]:
        """See `TrainingTask.draft_states`."""
        states = self.model.apply({"params": params}, batch.hidden, method="states")
        return head_groups(self.model.config, params, list(states), arrays)


def check_head_sizes(config: Any, target: ModelConfig) -> None:
    """Refuses heads made for a target of other sizes."""
    for name in ("hidden_size", "vocab_size"):
        made_for, found = getattr(config, name), getattr(target, name)
        if made_for != found:
            raise ValueError(f"the heads were made for a target with {name} = {made_for}, this one has {found}")


def head_groups(config: Any, params: Any, states: list[jax.Array], arrays: TargetArrays) -> tuple[DraftStates, ...]:
    """A group for each of the heads, whose states `[B,T,D]` are given."""
    return tuple(
        DraftStates(
            hidden=state[None],
            head_params=params[f"head_{index}"].get(DRAFT_HEAD, {}),
            shared_head=arrays.lm_head if config.head.shared else None,
            head=config.head,
            # The target's own head predicts t + 1, head 0 what follows it.
            ahead=(index + 1,),
        )
        for index, state in enumerate(states)
    )
