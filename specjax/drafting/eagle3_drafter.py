"""Drafting with an EAGLE-3 network. arXiv:2503.01840.

Row t of the network pairs the target's features at position t with token t + 1, so a context of n tokens makes rows 0 ... n - 2. The last
one gives the first draft token, and each further one takes a recursive step. After every verification the rows of the committed tokens are
computed from the target's own features, over what the draft wrote there: the cache is then that of a fresh prefill over the emitted text.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads.draft_head import DRAFT_HEAD, check_head
from specjax.drafting.network_params import NETWORK, TARGET_EMBEDDING, TARGET_HEAD, check_target_arrays, with_target_arrays
from specjax.drafting.pick import draft_of, pick
from specjax.model_config import ModelConfig
from specjax.models.kv_cache import KVCache
from specjax.sampling import SamplingParams, split_row_keys
from specjax.state import Commit, Context, Draft, PrefillChunk


def eagle3_params(model: Eagle3, params: Mapping[str, Any], target: ModelConfig, target_params: Mapping[str, Any]) -> dict:
    """The params of `Eagle3Drafter`: the network's own, and what it shares with its target. Nothing is copied.

    Args:
        model: The network.
        params: Its params.
        target: The target's shape.
        target_params: The target's params.
    """
    return with_target_arrays(params, _target_arrays(model.config), target, target_params)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Eagle3State:
    """What an EAGLE-3 drafter carries from step to step.

    Attributes:
        cache: The network's keys and values, one row for each token of the context but the first.
        hidden: `[B,1,D]` after the final norm, of each row's last position: the first draft token comes from it.
        next_state: `[B,1,D]` of the same position, for the first recursive step.
    """

    cache: KVCache
    hidden: jax.Array
    next_state: jax.Array


@dataclasses.dataclass(frozen=True)
class Eagle3Drafter:
    """Drafts G tokens: one pass over the committed ones, and G - 1 recursive steps.

    Example:
        >>> drafter = load_checkpoint("models/drafter")
        >>> model = Eagle3Drafter.for_target(drafter.model, target.model.config)
        >>> params = eagle3_params(model.model, drafter.params, target.model.config, target.params)
        >>> output = speculative_generate(target.model, target.params, model, params, prompts, config=config)

    Attributes:
        model: The network; its `config.feature_layers` are settled.
    """

    model: Eagle3

    @classmethod
    def for_target(cls, model: Eagle3, target: ModelConfig) -> Eagle3Drafter:
        """A drafter for this target, whose depth settles which of its layers are read.

        Raises:
            ValueError: The network does not fit the target.
        """
        return cls(model.clone(config=model.config.for_target(target)))

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """See `Drafter.feature_layers`."""
        layers = self.model.config.feature_layers
        if layers is None:
            raise ValueError("the network's feature_layers depend on its target: use Eagle3Drafter.for_target(model, target_config)")
        return layers

    def check(self, params: Any, *, target: ModelConfig, max_length: int | None) -> None:
        """See `Drafter.check`. A context beyond the window that the network was made for costs acceptance only: a warning."""
        settled = self.model.config.for_target(target)
        if settled.feature_layers != self.feature_layers:
            raise ValueError(
                f"the drafter reads boundaries {self.feature_layers} of the target, for this target they are {settled.feature_layers}"
            )
        check_target_arrays(params, _target_arrays(settled), target, made_with="eagle3_params")
        decoder = settled.decoder
        check_head(settled.head, params[NETWORK].get(DRAFT_HEAD), hidden_size=decoder.hidden_size, vocab_size=decoder.vocab_size)
        window = decoder.max_position_embeddings
        if max_length is not None and max_length > window:
            warnings.warn(
                f"this call may reach {max_length} tokens, the drafter was made for {window}: beyond that few drafts may be accepted",
                stacklevel=2,
            )

    def init(self, params: Any, *, batch_size: int, capacity: int, context_limit: jax.Array | None = None) -> Eagle3State:
        """See `Drafter.init`."""
        empty = jnp.zeros((batch_size, 1, self.model.config.decoder.hidden_size), self.model.dtype)
        cache = self.model.init_cache(batch_size=batch_size, capacity=capacity, context_limit=context_limit)
        return Eagle3State(cache=cache, hidden=empty, next_state=empty)

    def grow(self, params: Any, state: Eagle3State, context: Context, *, capacity: int) -> Eagle3State:
        """See `Drafter.grow`."""
        return dataclasses.replace(state, cache=state.cache.grown(capacity).with_finite_values())

    def prefill(self, params: Any, state: Eagle3State, chunk: PrefillChunk) -> Eagle3State:
        """See `Drafter.prefill`."""
        assert chunk.features is not None
        return dataclasses.replace(state, cache=self._run(params, chunk.features, chunk.next_tokens, state.cache, chunk.start).cache)

    def propose(
        self,
        params: Any,
        state: Eagle3State,
        context: Context,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams | None,
        row_keys: jax.Array,
    ) -> tuple[Draft, Eagle3State]:
        """See `Drafter.propose`."""
        model, variables = self.model, {"params": params[NETWORK]}
        hidden, next_state, cache, picks = state.hidden, state.next_state, state.cache, []
        for step, key in enumerate(split_row_keys(row_keys, num_speculative_tokens)):
            scores = model.apply(variables, hidden[:, 0], params.get(TARGET_HEAD), method="scores")
            options: dict[str, Any] = dict(vocab_size=model.config.decoder.vocab_size, implementation=model.kernels.draft_head)
            picks.append(pick(scores, sampling, key, **options))
            if step < num_speculative_tokens - 1:
                embeddings = model.apply(variables, picks[-1].tokens[:, None], params.get(TARGET_EMBEDDING), method="embed")
                output = model.apply(variables, embeddings, next_state, cache)
                hidden, next_state, cache = output.hidden, output.next_state, output.cache
        return draft_of(picks), dataclasses.replace(state, cache=cache)

    def commit(self, params: Any, state: Eagle3State, commit: Commit) -> Eagle3State:
        """See `Drafter.commit`."""
        assert commit.features is not None
        num_rows = commit.features.shape[1]
        # Row j pairs the feature that committed token j came from with that token.
        first = jnp.maximum(commit.context.length - 1 - commit.num_committed, 0)
        columns = first[:, None] + 1 + jnp.arange(num_rows)
        tokens = jnp.take_along_axis(commit.context.tokens, jnp.minimum(columns, commit.context.tokens.shape[1] - 1), axis=1)
        output = self._run(params, commit.features, tokens, state.cache, first)
        last = jnp.maximum(commit.num_committed - 1, 0)[:, None, None]
        committed = (commit.num_committed > 0)[:, None, None]  # a finished row keeps what it had

        def latest(rows: jax.Array, before: jax.Array) -> jax.Array:
            return jnp.where(committed, jnp.take_along_axis(rows, last, axis=1), before)

        return Eagle3State(
            cache=output.cache.with_length(first + commit.num_committed),
            hidden=latest(output.hidden, state.hidden),
            next_state=latest(output.next_state, state.next_state),
        )

    def _run(self, params: Any, features: jax.Array, tokens: jax.Array, cache: KVCache, start: jax.Array) -> Any:
        """Rows of true features and the tokens that follow them, from slot `start` on."""
        variables = {"params": params[NETWORK]}
        state = self.model.apply(variables, features, method="fuse")
        embeddings = self.model.apply(variables, tokens, params.get(TARGET_EMBEDDING), method="embed")
        return self.model.apply(variables, embeddings, state, cache.with_length(start))


def _target_arrays(config: Eagle3Config) -> list[str]:
    """Which of the target's arrays the drafter reads."""
    return [name for name, used in ((TARGET_EMBEDDING, not config.own_embedding), (TARGET_HEAD, config.head.shared)) if used]
