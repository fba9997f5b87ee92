"""Training the draft LM head of a draft model that otherwise stays as it is: say, a low-rank head in the place of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafting.draft_model import DraftModel
from specjax.drafting.heads.draft_head import DRAFT_HEAD
from specjax.model_config import ModelConfig
from specjax.training.draft_states import DraftStates
from specjax.training.partition import check_params
from specjax.training.target_batch import TargetArrays, TargetBatch, whole_texts


@dataclasses.dataclass(frozen=True)
class DraftModelTask:
    """Params: those of the draft model, with the head's arrays as `draft_head` beside them; these alone are trained.

    Of the pass over the texts nothing is kept but the last hidden states: no gradient goes through the model.

    Attributes:
        drafter: The draft model and its head. The model's params may be of any dtype; the head's are trained in float32.
    """

    drafter: DraftModel
    feature_layers = ()

    def check(self, params: Any, target: ModelConfig) -> None:
        """See `TrainingTask.check`."""
        self.drafter.check(params, target=target, max_length=None)
        config, head = self.drafter.model.config, self.drafter.head
        expected = jax.eval_shape(self.drafter.model.init_params, jax.random.key(0))
        sizes = dict(hidden_size=config.hidden_size, vocab_size=config.vocab_size)
        expected[DRAFT_HEAD] = jax.eval_shape(lambda rng: head.init_params(rng, **sizes, dtype=jnp.float32), jax.random.key(0))
        if not expected[DRAFT_HEAD]:
            raise ValueError(f"there is nothing to train: {head} has no arrays of its own")
        check_params("the draft model", params, expected)

    def is_trained(self, path: tuple[str, ...]) -> bool:
        """See `TrainingTask.is_trained`."""
        return path[0] == DRAFT_HEAD

    def draft_states(self, params: Any, arrays: TargetArrays, batch: TargetBatch) -> tuple[DraftStates, ...]:
        """See `TrainingTask.draft_states`: one step, since a draft model's later ones are computed from the same kind of state."""
        model, head = self.drafter.model, self.drafter.head
        body = jax.lax.stop_gradient({name: leaf for name, leaf in params.items() if name != DRAFT_HEAD})
        hidden, _ = whole_texts(model, body, batch.tokens)
        shared_head = TargetArrays.of(model.config, body).lm_head if head.shared else None
        head_params = params.get(DRAFT_HEAD, {})
        return (DraftStates(hidden=hidden[None], head_params=head_params, shared_head=shared_head, head=head, ahead=(0,)),)
