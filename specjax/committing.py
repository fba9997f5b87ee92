"""Committing: what a verification yields goes into the contexts, up to an EOS or a limit, and the cache rolls back to it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.requests import Request
from specjax.state import Context, DecodeState, FinishReason
from specjax.verification.verify import CheckedVerification


def commit_tokens(state: DecodeState, checked: CheckedVerification, logits: jax.Array, request: Request) -> tuple[DecodeState, jax.Array]:
    """Appends what was verified, and rolls the target's cache back to all but the last token of it.

    Args:
        state: The state, its cache still that of the whole verified draft.
        checked: What the verification accepted.
        logits: `[B,G+1,V]` float32, for the log-probabilities.
        request: EOS ids and limits.

    Returns:
        The new state, and the number of tokens that each row received, `[B]` int32.
    """
    tokens, stopping = checked.verification.tokens, request.stopping
    slots = jnp.arange(tokens.shape[1])
    active = state.finish_reason == FinishReason.RUNNING
    count = checked.verification.num_accepted + 1 - checked.nonfinite.astype(jnp.int32)
    count = jnp.where(active, jnp.minimum(count, stopping.max_new_tokens - state.num_generated), 0)
    is_eos = (tokens[..., None] == stopping.eos_token_ids).any(axis=-1) & ~stopping.ignore_eos[:, None] & (slots < count[:, None])
    ends = is_eos.any(axis=1)
    count = jnp.where(ends, jnp.argmax(is_eos, axis=1) + 1, count).astype(jnp.int32)
    num_generated = state.num_generated + count

    reason = jnp.where(checked.nonfinite, FinishReason.NONFINITE_LOGITS, FinishReason.RUNNING)
    reason = jnp.where(num_generated >= stopping.max_new_tokens, FinishReason.LENGTH, reason)
    reason = jnp.where(ends, FinishReason.EOS, reason)
    context = Context(tokens=write_tokens(state.context.tokens, state.context.length, tokens, count), length=state.context.length + count)
    log_probs = state.log_probs
    if log_probs.shape[1]:
        new = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[..., None], axis=-1)[..., 0]
        log_probs = write_tokens(log_probs, state.num_generated, new, count)
    state = dataclasses.replace(
        state,
        context=context,
        num_generated=num_generated,
        finish_reason=jnp.where(active, reason, state.finish_reason).astype(jnp.int32),
        target_cache=state.target_cache.with_length(context.length - 1),
        log_probs=log_probs,
    )
    return state, count


def write_tokens(buffer: jax.Array, start: jax.Array, new: jax.Array, count: jax.Array) -> jax.Array:
    """Writes the first `count` `[B]` entries of each row of `new` at `start` `[B]`."""
    slots = jnp.arange(new.shape[1])
    index = jnp.where(slots < count[:, None], start[:, None] + slots, buffer.shape[1])
    rows = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[rows, index].set(new.astype(buffer.dtype), mode="drop")
