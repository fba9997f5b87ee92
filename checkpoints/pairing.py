"""A drafter's checkpoint and its target's, brought together: whatever kind of drafter it is, ready to draft."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.checkpoints.store import Checkpoint
from specjax.checkpoints.tokenizer_check import check_same_tokenizer
from specjax.drafting.draft_model import DraftModel
from specjax.drafting.draft_model_network import DraftModelNetwork
from specjax.drafting.drafter import Drafter
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_drafter import Eagle3Drafter, eagle3_params
from specjax.drafting.hydra import Hydra
from specjax.drafting.hydra_drafter import HydraDrafter, hydra_params
from specjax.drafting.medusa import Medusa
from specjax.drafting.medusa_drafter import MedusaDrafter, medusa_params
from specjax.drafting.network_params import TARGET_ARRAYS


@dataclasses.dataclass(frozen=True)
class ReadyDrafter:
    """A drafter for a target.

    Attributes:
        drafter: For `speculative_generate`.
        params: Its params.
        shared: Which of the target's arrays it reads, in words: "embedding", "LM head", "final norm". They are not copied.
    """

    drafter: Drafter
    params: Any
    shared: tuple[str, ...]


def drafter_for_target(draft: Checkpoint, target: Checkpoint, *, allow_different_tokenizer: bool = False) -> ReadyDrafter:
    """Makes a drafter of a checkpoint: a draft model (with its own LM head or another), or EAGLE-3, Medusa or Hydra heads.

    Example:
        >>> target, draft = load_checkpoint("models/target"), load_checkpoint("models/draft")
        >>> ready = drafter_for_target(draft, target)
        >>> output = speculative_generate(target.model, target.params, ready.drafter, ready.params, prompts, config=config)

    Args:
        draft: The drafter's checkpoint.
        target: The target's.
        allow_different_tokenizer: A draft model with another tokenizer is a warning only. The output stays the target's own.

    Returns:
        The drafter and its params.

    Raises:
        ValueError: The drafter does not fit the target, or a draft model has another tokenizer.
    """
    model, config = draft.model, target.model.config
    if isinstance(model, Eagle3):
        drafter = Eagle3Drafter.for_target(model, config)
        params = eagle3_params(drafter.model, draft.params, config, target.params)
    elif isinstance(model, Medusa):
        drafter, params = MedusaDrafter.for_target(model, config), medusa_params(model, draft.params, config, target.params)
    elif isinstance(model, Hydra):
        drafter, params = HydraDrafter.for_target(model, config), hydra_params(model, draft.params, config, target.params)
    else:
        check_same_tokenizer(target, draft, allow_different=allow_different_tokenizer)
        drafter = model.drafter if isinstance(model, DraftModelNetwork) else DraftModel(model)
        return ReadyDrafter(drafter, draft.params, shared=())
    return ReadyDrafter(drafter, params, shared=tuple(words for name, words in TARGET_ARRAYS.items() if name in params))
