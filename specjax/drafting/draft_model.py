"""A smaller causal language model with the target's tokenizer as the drafter. arXiv:2211.17192.

Its cache holds the context but for the last two tokens, and each proposal begins with a pass over those two. So the same static shape
serves a row whose whole draft was accepted (the cache lacks the last draft token, which no pass has seen) and one whose draft was rejected
(the first of the two is written again, to the same value).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.drafting.heads import DraftHead, FullHead
from specjax.drafting.heads.draft_head import DRAFT_HEAD, check_head
from specjax.drafting.pick import Pick, draft_of, pick
from specjax.model_config import ModelConfig
from specjax.models.kv_cache import KVCache
from specjax.models.transformer import Transformer
from specjax.sampling import SamplingParams, split_row_keys
from specjax.state import Commit, Context, Draft, PrefillChunk


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Drafts G tokens with `model`, greedily or by sampling with the call's own parameters.

    Example:
        >>> drafter = DraftModel(draft_transformer)
        >>> output = speculative_generate(target, target_params, drafter, draft_params, prompts, config=config)

    Attributes:
        model: The draft model. Its vocabulary must be the target's.
        head: Its draft LM head: its own LM head, or one whose arrays the drafter's params hold as `draft_head` beside the model's.
    """

    model: Transformer
    head: DraftHead = FullHead(shared=True)
    feature_layers = ()

    def check(self, params: Any, *, target: ModelConfig, max_length: int | None) -> None:
        """See `Drafter.check`."""
        config = self.model.config
        if config.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model has a vocabulary of {config.vocab_size} tokens, the target one of {target.vocab_size}: "
                "they must be the same"
            )
        if max_length is not None and max_length > config.max_position_embeddings:
            raise ValueError(f"the draft model's window is {config.max_position_embeddings} tokens, this call may reach {max_length}")
        if not isinstance(params, Mapping) or "embedding" not in params:
            raise ValueError(f"drafter_params must be the draft model's params, got {type(params).__name__}")
        check_head(self.head, params.get(DRAFT_HEAD), hidden_size=config.hidden_size, vocab_size=config.vocab_size)

    def init(self, params: Any, *, batch_size: int, capacity: int, context_limit: jax.Array | None = None) -> KVCache:
        """See `Drafter.init`."""
        return self.model.init_cache(batch_size=batch_size, capacity=capacity, context_limit=context_limit)

    def grow(self, params: Any, state: KVCache, context: Context, *, capacity: int) -> KVCache:
        """See `Drafter.grow`."""
        # Where the last draft was accepted whole, no pass has seen its last token, and what is to follow will attend to it.
        return self._run_one(params, state.grown(capacity).with_finite_values(), context, _first_of_last_two(context))

    def prefill(self, params: Any, state: KVCache, chunk: PrefillChunk) -> KVCache:
        """See `Drafter.prefill`."""
        return self.model.apply({"params": params}, chunk.tokens, state.with_length(chunk.start)).cache

    def propose(
        self,
        params: Any,
        state: KVCache,
        context: Context,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams | None,
        row_keys: jax.Array,
    ) -> tuple[Draft, KVCache]:
        """See `Drafter.propose`."""
        start = _first_of_last_two(context)
        inputs = jnp.take_along_axis(context.tokens, start[:, None] + jnp.arange(2), axis=1)
        cache = state.with_length(start)
        lm_head = params["embedding" if self.model.config.tie_word_embeddings else "lm_head"]
        head_params = params.get(DRAFT_HEAD, {})

        def draft_one(carry: tuple[jax.Array, KVCache], keys: jax.Array) -> tuple[tuple[jax.Array, KVCache], Pick]:
            inputs, cache = carry
            output = self.model.apply({"params": params}, inputs, cache)
            scores = self.head.scores(head_params, output.hidden[:, -1], lm_head)
            one = pick(scores, sampling, keys, vocab_size=self.model.config.vocab_size, implementation=self.model.kernels.draft_head)
            return (one.tokens[:, None], output.cache), one

        keys = split_row_keys(row_keys, num_speculative_tokens)
        carry, first = draft_one((inputs, cache), keys[0])
        if num_speculative_tokens == 1:
            return draft_of([first]), carry[1]
        # One body for all passes but the first, which takes two tokens: G copies of a deep model take long to compile.
        # Not `stack`: `jax.debug_key_reuse` then takes the first pass's key for one of these.
        carry, others = lax.scan(draft_one, carry, jnp.concatenate([key[None] for key in keys[1:]]))
        picks = [first, *(jax.tree.map(lambda x, index=index: x[index], others) for index in range(num_speculative_tokens - 1))]
        return draft_of(picks), carry[1]

    def commit(self, params: Any, state: KVCache, commit: Commit) -> KVCache:
        """See `Drafter.commit`. The rollback is a length."""
        if commit.rechecked:
            # One token more than was committed before: the first that the cache may lack then stands behind it, third from the end.
            start = jnp.maximum(commit.context.length - 3, 0)
            state = self._run_one(params, state, commit.context, start)
        return state.with_length(_first_of_last_two(commit.context))

    def _run_one(self, params: Any, state: KVCache, context: Context, start: jax.Array) -> KVCache:
        """Writes the token at `start` `[B]`; all before it must be in the cache."""
        tokens = jnp.take_along_axis(context.tokens, start[:, None], axis=1)
        return self.model.apply({"params": params}, tokens, state.with_length(start)).cache


def _first_of_last_two(context: Context) -> jax.Array:
    """`[B]` int32. A finished row may hold a single token; whatever is drafted for it counts for nothing."""
    return jnp.maximum(context.length - 2, 0)
