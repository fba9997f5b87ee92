"""What drafting with Medusa's and with Hydra's heads has in common: all that they know of the context is one hidden state of the target.

It is that of the position which the pending token came from, after the target's final norm. A drafter receives the residual stream, so the
norm's scale is among its params, and its epsilon one of its fields. There is no cache: rejected drafts leave nothing behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from specjax.drafting.heads.draft_head import DRAFT_HEAD, check_head
from specjax.drafting.network_params import NETWORK, TARGET_HEAD, TARGET_NORM, check_target_arrays
from specjax.model_config import ModelConfig
from specjax.models.layers import RMSNorm
from specjax.state import Commit, Context, Draft, PrefillChunk


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HiddenState:
    """What such a drafter carries from step to step.

    Attributes:
        hidden: `[B,D]`, the target's, after its final norm, at the position that each row's pending token came from. NaN where nothing
            was committed yet: no score is finite then, and nothing is drafted.
    """

    hidden: jax.Array


@dataclasses.dataclass(frozen=True)
class HiddenStateDrafter:
    """Base of the two. What is left to write is `propose`.

    Attributes:
        reads: Which of the target's arrays the network reads, apart from a shared LM head.
        made_with: Name of the function that makes the params.
        model: The network: K heads `head_0` ..., whose `config` has `hidden_size`, `vocab_size`, `num_draft_heads` and `head`.
        num_target_layers: L of the target: its last boundary is what the drafter reads.
        norm_epsilon: That of the target's final norm.
    """

    reads: ClassVar[tuple[str, ...]]
    made_with: ClassVar[str]
    model: Any
    num_target_layers: int
    norm_epsilon: float

    @classmethod
    def for_target(cls, model: Any, target: ModelConfig) -> Self:
        """A drafter for this target.

        Args:
            model: The network.
            target: The target's shape.

        Raises:
            ValueError: The network does not fit the target.
        """
        cfg = model.config
        if cfg.vocab_size != target.vocab_size:
            raise ValueError(f"the drafter was made for a vocabulary of {cfg.vocab_size} tokens, the target has {target.vocab_size}")
        if cfg.hidden_size != target.hidden_size:
            raise ValueError(f"the drafter was made for a target of width {cfg.hidden_size}, this one has {target.hidden_size}")
        return cls(model, num_target_layers=target.num_layers, norm_epsilon=target.rms_norm_eps)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """See `Drafter.feature_layers`."""
        return (self.num_target_layers,)

    @property
    def target_arrays(self) -> tuple[str, ...]:
        """Which of the target's arrays stand in the params beside the network."""
        return (*self.reads, TARGET_HEAD) if self.model.config.head.shared else self.reads

    def check(self, params: Any, *, target: ModelConfig, max_length: int | None) -> None:
        """See `Drafter.check`."""
        if self != self.for_target(self.model, target):
            raise ValueError(
                f"the drafter reads a target of {self.num_target_layers} layers whose final norm has the epsilon {self.norm_epsilon}, "
                f"this one has {target.num_layers} and {target.rms_norm_eps}: use {type(self).__name__}.for_target(model, target_config)"
            )
        check_target_arrays(params, self.target_arrays, target, made_with=self.made_with)
        cfg, network = self.model.config, params[NETWORK]
        for name in (f"head_{index}" for index in range(cfg.num_draft_heads)):
            if not isinstance(network.get(name), Mapping):
                raise ValueError(
                    f"drafter_params.{NETWORK} should have {name}, as there are {cfg.num_draft_heads} heads, got {', '.join(network)}"
                )
            where = f"{name}.{DRAFT_HEAD}"
            check_head(cfg.head, network[name].get(DRAFT_HEAD), hidden_size=cfg.hidden_size, vocab_size=cfg.vocab_size, where=where)

    def init(self, params: Any, *, batch_size: int, capacity: int, context_limit: jax.Array | None = None) -> HiddenState:
        """See `Drafter.init`."""
        return HiddenState(hidden=jnp.full((batch_size, self.model.config.hidden_size), jnp.nan, self.model.dtype))

    def grow(self, params: Any, state: HiddenState, context: Context, *, capacity: int) -> HiddenState:
        """See `Drafter.grow`."""
        return state

    def prefill(self, params: Any, state: HiddenState, chunk: PrefillChunk) -> HiddenState:
        """See `Drafter.prefill`. What counts comes with the commit that ends the prefill."""
        return state

    def commit(self, params: Any, state: HiddenState, commit: Commit) -> HiddenState:
        """See `Drafter.commit`."""
        assert commit.features is not None
        last = jnp.maximum(commit.num_committed - 1, 0)[:, None, None]
        residual = jnp.take_along_axis(commit.features, last, axis=1)[:, 0]
        norm = RMSNorm(self.norm_epsilon, params[TARGET_NORM].dtype)
        hidden: Any = norm.apply({"params": {"scale": params[TARGET_NORM]}}, residual)
        committed = (commit.num_committed > 0)[:, None]  # a finished row keeps what it had
        return HiddenState(hidden=jnp.where(committed, hidden.astype(self.model.dtype), state.hidden))


def padded_draft(draft: Draft, num_speculative_tokens: int) -> Draft:
    """The same draft over G positions, of which those beyond its own hold nothing: heads may be fewer than G.

    Args:
        draft: Of up to G positions.
        num_speculative_tokens: G.
    """
    missing = num_speculative_tokens - draft.tokens.shape[1]
    probs = None if draft.probs is None else jnp.pad(draft.probs, ((0, 0), (0, missing), (0, 0)))
    return dataclasses.replace(draft, tokens=jnp.pad(draft.tokens, ((0, 0), (0, missing))), probs=probs)
