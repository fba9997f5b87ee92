"""The pytrees that flow through a generation, and the letters that name their axes.

B batch · T query positions in a call · S cache slots · N query heads · K key/value heads · H head size · D model width · F FFN width ·
V vocabulary · L layers · G draft length.

A *step* is one draft and one verification. The *context* of a row is its prompt and all tokens emitted so far; its last token is
*pending*: emitted, but not yet in the target's cache. So `cache.length == context.length - 1` between steps.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.kv_cache import KVCache
from specjax.statistics import Statistics
from specjax.two_level.pace import Pace


class FinishReason(enum.IntEnum):
    """Why a row stopped."""

    RUNNING = 0
    EOS = 1
    LENGTH = 2
    NONFINITE_LOGITS = 3
    NO_CAPACITY = 4  # only where lengths are traced, and behind such a call: no room for this row's, and nothing was generated


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Prompt and emitted tokens.

    Attributes:
        tokens: `[B,S]` int32, left-aligned.
        length: `[B]` int32, tokens that count.
    """

    tokens: jax.Array
    length: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """A run of prompt positions that the target has just processed, for a drafter to process too.

    Attributes:
        tokens: `[B,C]` int32, standing at positions `start ... start + C - 1`. Columns behind a row's prompt are padding.
        next_tokens: `[B,C]` int32, the prompt's token after each: what a drafter on features pairs with them. After a prompt's last token
            comes the first one emitted, which the `Commit` that ends the prefill brings, with the feature that it pairs with.
        start: `[B]` int32.
        features: `[B,C,*]` the target's residual stream at the drafter's `feature_layers`, or `None` if it asked for none.
    """

    tokens: jax.Array
    next_tokens: jax.Array
    start: jax.Array
    features: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """What a drafter proposes for the next positions.

    Attributes:
        tokens: `[B,G]` int32; entries at or beyond `num_drafted` do not count.
        num_drafted: `[B]` int32, from 0 (nothing) to G.
        probs: `[B,G,V]` float32, the distributions that the tokens were really sampled from, or `None`: every token was chosen
            deterministically (a point mass).
    """

    tokens: jax.Array
    num_drafted: jax.Array
    probs: jax.Array | None

    @classmethod
    def empty(cls, batch_size: int) -> Draft:
        """No draft positions at all (G = 0): plain decoding."""
        return cls(tokens=jnp.zeros((batch_size, 0), jnp.int32), num_drafted=jnp.zeros((batch_size,), jnp.int32), probs=None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verification:
    """What a verification commits.

    Attributes:
        tokens: `[B,G+1]` int32: the accepted draft tokens, then the recovered or bonus token, then nothing that counts.
        num_accepted: `[B]` int32, from 0 to G.
    """

    tokens: jax.Array
    num_accepted: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Commit:
    """What a drafter learns after a verification, or after the prefill (which verifies one row, the prompt's last token).

    Attributes:
        context: The context with the committed tokens.
        num_committed: `[B]` int32, tokens this step added (0 in finished rows).
        features: `[B,T,*]` the target's residual stream for the T verified rows (the pending token, then the draft), or `None` if the
            drafter asked for none: row j is the one that committed token j came from. Rows at or beyond `num_committed` count for nothing.
        rechecked: The committed tokens but the last stood in earlier commits, perhaps with others behind them that are gone, and these are
            their final features (two-level verification). Static.
    """

    context: Context
    num_committed: jax.Array
    features: jax.Array | None
    rechecked: bool = dataclasses.field(metadata={"static": True}, default=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stopping:
    """When rows end; all traced.

    Attributes:
        eos_token_ids: `[E]` int32, any of which ends a row; -1 matches nothing.
        ignore_eos: `[B]` bool.
        max_new_tokens: `[B]` int32, at most the static `GenerateConfig.max_new_tokens`.
    """

    eos_token_ids: jax.Array
    ignore_eos: jax.Array
    max_new_tokens: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SinceDense:
    """How far a cache is dense where refreshes are due now and then.

    Attributes:
        dense_length: `[B]` int32, tokens whose keys and values no sparse pass wrote.
        num_steps: Scalar int32, sparse steps since the last dense one.
    """

    dense_length: jax.Array
    num_steps: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The carry of the decode loop.

    Attributes:
        context: Prompt and emitted tokens.
        num_generated: `[B]` int32, emitted tokens of this call.
        finish_reason: `[B]` int32, a `FinishReason`.
        target_cache: The target's cache.
        drafter_state: Whatever the drafter keeps.
        row_keys: `[B]` typed keys, advanced once a step.
        log_probs: `[B,M]` float32 of the emitted tokens (M is `max_new_tokens`, or 0 where they were not asked for).
        statistics: Acceptance counts.
        since_dense: How far the cache is dense; `None` without refreshes.
        pace: What two-level verification has seen so far; `None` without it.
    """

    context: Context
    num_generated: jax.Array
    finish_reason: jax.Array
    target_cache: KVCache
    drafter_state: Any
    row_keys: jax.Array
    log_probs: jax.Array
    statistics: Statistics
    since_dense: SinceDense | None = None
    pace: Pace | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Continuation:
    """Where a finished call left off, for `continue_from` of the next.

    Attributes:
        context: Prompt and emitted tokens.
        target_cache: The target's cache: all of the context but its last token.
        drafter_state: The drafter's state.
        dense_length: `[B]` int32, tokens whose keys and values are dense, after a call with sparse passes: the next call first replaces
            those of the others. `None` where all are.
        max_behind: Most tokens that are not. Static.
    """

    context: Context
    target_cache: KVCache
    drafter_state: Any
    dense_length: jax.Array | None = None
    max_behind: int = dataclasses.field(metadata={"static": True}, default=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """What `generate` and `speculative_generate` return.

    Attributes:
        tokens: `[B,M]` int32, the new tokens, an EOS included; `pad_token_id` beyond `lengths`.
        lengths: `[B]` int32, new tokens delivered.
        finish_reason: `[B]` int32, a `FinishReason`.
        log_probs: `[B,M]` float32, log p(token) under the target's unscaled softmax, 0 beyond `lengths`; `None` unless asked for.
        statistics: Acceptance counts and rates.
        continuation: Pass it to `continue_from` to go on from here.
    """

    tokens: jax.Array
    lengths: jax.Array
    finish_reason: jax.Array
    log_probs: jax.Array | None
    statistics: Statistics
    continuation: Continuation
