"""Drafting with Medusa's heads: one pass for the whole draft, whose tokens do not know of one another. arXiv:2401.10774.

The pending token, at position t + 1, came from position t. Head i reads the target's hidden state at t and gives the draft of position
t + 2 + i. Each draft token is sampled from its own head's distribution, which is its true one given those before it: they do not enter.
So the draft is lossless with every rule that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from specjax.drafting.hidden_state_drafter import HiddenState, HiddenStateDrafter, padded_draft
from specjax.drafting.medusa import Medusa
from specjax.drafting.network_params import NETWORK, TARGET_HEAD, TARGET_NORM, with_target_arrays
from specjax.drafting.pick import draft_of, pick
from specjax.model_config import ModelConfig
from specjax.sampling import SamplingParams, split_row_keys
from specjax.state import Context, Draft


def medusa_params(model: Medusa, params: Mapping[str, Any], target: ModelConfig, target_params: Mapping[str, Any]) -> dict:
    """The params of `MedusaDrafter`: the network's own, and what it reads of its target. Nothing is copied.

    Args:
        model: The network.
        params: Its params.
        target: The target's shape.
        target_params: The target's params.
    """
    return with_target_arrays(params, MedusaDrafter.for_target(model, target).target_arrays, target, target_params)


@dataclasses.dataclass(frozen=True)
class MedusaDrafter(HiddenStateDrafter):
    """Drafts up to K tokens, one for each head; where more are asked for, the draft has K.

    Example:
        >>> heads = load_checkpoint("models/medusa")
        >>> drafter = MedusaDrafter.for_target(heads.model, target.model.config)
        >>> params = medusa_params(drafter.model, heads.params, target.model.config, target.params)
        >>> output = speculative_generate(target.model, target.params, drafter, params, prompts, config=config)

    Attributes:
        model: The network.
        num_target_layers: L of the target.
        norm_epsilon: That of the target's final norm.
    """

    model: Medusa
    reads = (TARGET_NORM,)
    made_with = "medusa_params"

    def propose(
        self,
        params: Any,
        state: HiddenState,
        context: Context,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams | None,
        row_keys: jax.Array,
    ) -> tuple[Draft, HiddenState]:
        """See `Drafter.propose`."""
        cfg = self.model.config
        keys = split_row_keys(row_keys, min(num_speculative_tokens, cfg.num_draft_heads))
        # Heads beyond G are not computed: nothing reads their scores.
        all_scores = self.model.apply({"params": params[NETWORK]}, state.hidden, params.get(TARGET_HEAD))
        options: dict[str, Any] = dict(vocab_size=cfg.vocab_size, implementation=self.model.kernels.draft_head)
        picks = [pick(scores, sampling, key, **options) for scores, key in zip(all_scores, keys, strict=False)]
        return padded_draft(draft_of(picks), num_speculative_tokens), state
