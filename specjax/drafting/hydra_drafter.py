"""Drafting with Hydra's heads: a chain in which each head sees the tokens drafted before its own. arXiv:2402.05109.

The pending token, at position t + 1, came from position t. Head i reads the target's hidden state at t and the target's embeddings of the
pending token and of i draft tokens, and gives the draft of position t + 2 + i.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafting.hidden_state_drafter import HiddenState, HiddenStateDrafter, padded_draft
from specjax.drafting.hydra import Hydra
from specjax.drafting.network_params import NETWORK, TARGET_EMBEDDING, TARGET_HEAD, TARGET_NORM, with_target_arrays
from specjax.drafting.pick import draft_of, pick
from specjax.model_config import ModelConfig
from specjax.sampling import SamplingParams, split_row_keys
from specjax.state import Context, Draft


def hydra_params(model: Hydra, params: Mapping[str, Any], target: ModelConfig, target_params: Mapping[str, Any]) -> dict:
    """The params of `HydraDrafter`: the network's own, and what it reads of its target. Nothing is copied.

    Args:
        model: The network.
        params: Its params.
        target: The target's shape.
        target_params: The target's params.
    """
    return with_target_arrays(params, HydraDrafter.for_target(model, target).target_arrays, target, target_params)


@dataclasses.dataclass(frozen=True)
class HydraDrafter(HiddenStateDrafter):
    """Drafts up to K tokens, one for each head; where more are asked for, the draft has K.

    Example:
        >>> heads = load_checkpoint("models/hydra")
        >>> drafter = HydraDrafter.for_target(heads.model, target.model.config)
        >>> params = hydra_params(drafter.model, heads.params, target.model.config, target.params)
        >>> output = speculative_generate(target.model, target.params, drafter, params, prompts, config=config)

    Attributes:
        model: The network.
        num_target_layers: L of the target.
        norm_epsilon: That of the target's final norm.
    """

    model: Hydra
    reads = (TARGET_NORM, TARGET_EMBEDDING)
    made_with = "hydra_params"

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
        cfg, variables = self.model.config, {"params": params[NETWORK]}
        last = jnp.maximum(context.length - 1, 0)[:, None]
        embeddings, picks = _embed(params, jnp.take_along_axis(context.tokens, last, axis=1)), []
        for key in split_row_keys(row_keys, min(num_speculative_tokens, cfg.num_draft_heads)):
            scores = self.model.apply(variables, state.hidden, embeddings, params.get(TARGET_HEAD))
            picks.append(pick(scores, sampling, key, vocab_size=cfg.vocab_size, implementation=self.model.kernels.draft_head))
            embeddings = jnp.concatenate([embeddings, _embed(params, picks[-1].tokens[:, None])], axis=1)
        return padded_draft(draft_of(picks), num_speculative_tokens), state


def _embed(params: Any, tokens: jax.Array) -> jax.Array:
    """`[B,T]` → `[B,T,D]`; the network casts them to its own dtype."""
    return jnp.take(params[TARGET_EMBEDDING], tokens, axis=0, mode="clip")
