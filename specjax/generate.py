"""Generation: prefill, then one `lax.while_loop` of draft → verify → commit.

Start here. `speculative_generate` and `generate` are the same loop, with and without a drafter. Everything that may be replaced (the
drafter, its head, the verification rule, the attention implementation) comes in through an argument; the loop knows none of them by name.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.config import GenerateConfig
from specjax.drafting.drafter import Drafter
from specjax.models.transformer import Transformer
from specjax.requests import Request, prepare, row_keys
from specjax.sampling import SamplingParams, split_row_keys
from specjax.state import Commit, Context, Continuation, DecodeState, Draft, FinishReason, GenerateOutput, PrefillChunk
from specjax.statistics import Statistics
from specjax.verification.verify import CheckedVerification, verify


def speculative_generate(
    target: Transformer,
    target_params: Any,
    drafter: Drafter | None,
    drafter_params: Any,
    prompt_tokens: Any,
    *,
    config: GenerateConfig,
    prompt_lengths: Any = None,
    sampling: SamplingParams | None = None,
    eos_token_ids: Any = (),
    ignore_eos: Any = False,
    max_new_tokens: Any = None,
    rng: jax.Array | None = None,
    continue_from: Continuation | None = None,
) -> GenerateOutput:
    """Generates with a drafter. Lossless under the default verification rule.

    Greedy (`do_sample=False`): the tokens equal `generate`'s, one for one in float32. In bfloat16 a pass over G + 1 rows rounds differently
    from a pass over one, so where two tokens are nearly tied the two may part; the `NoDraft` drafter decodes plainly with the very same
    passes, and its output is equal. Sampled: every token follows the target's distribution after temperature, top-k and top-p.

    Pure; may be called as it is (compiled and cached here, prompts padded to buckets) or from inside a caller's own `jit`. There, `target`,
    `drafter` and `config` must be static, arrays may be traced, and what cannot be checked is a contract: lengths from 1 to P, ids inside
    the vocabulary, context plus new tokens within the window and, with `continue_from`, within `cache_capacity` where that is given.

    Example:
        >>> config = GenerateConfig(max_new_tokens=128, num_speculative_tokens=5)
        >>> output = speculative_generate(target, params, PromptLookup(), None, [[1, 5, 9]], config=config, eos_token_ids=2)
        >>> output.tokens[0, : output.lengths[0]], output.statistics.mean_acceptance_length

    Args:
        target: The target model. Static.
        target_params: Its params.
        drafter: Proposes tokens; `None` decodes plainly. Static.
        drafter_params: Its params; `None` where it has none.
        prompt_tokens: `[B,P]` int, left-aligned, or a list of B lists of ints. (`left_align` turns a padded batch with a mask into this.)
        config: Static choices and sizes.
        prompt_lengths: `[B]` int; `None`: all P count.
        sampling: Temperature, top-k and top-p, each a scalar or `[B]`; read only with `do_sample`.
        eos_token_ids: An int or several; any of them ends a row, and is delivered.
        ignore_eos: Bool, scalar or `[B]`: such rows run to their limit.
        max_new_tokens: Int, scalar or `[B]`: a limit a row, at most `config.max_new_tokens` (the default).
        rng: One key, or `[B]` keys; needed with `do_sample`. Row b of a single key uses `fold_in(rng, b)`.
        continue_from: An earlier output's `continuation`: its context stands before the prompts, which may then be empty (length 0).

    Returns:
        A `GenerateOutput`.

    Raises:
        ValueError: Empty prompt, prompt and limit beyond the model's window, token or EOS ids outside the vocabulary, a negative or too
            large limit, temperature negative or NaN, top-p outside (0, 1], negative top-k, a missing key, too small a `cache_capacity`, or
            a drafter that does not fit (its vocabulary is another).
        TypeError: `rng` is not a key.

    Reference: arXiv:2211.17192, arXiv:2302.01318.
    """
    request, static = prepare_call(
        target,
        drafter,
        drafter_params,
        prompt_tokens,
        config=config,
        prompt_lengths=prompt_lengths,
        sampling=sampling,
        eos_token_ids=eos_token_ids,
        ignore_eos=ignore_eos,
        max_new_tokens=max_new_tokens,
        rng=rng,
        continue_from=continue_from,
    )
    output = _generate(target, drafter, static, target_params, drafter_params, request, continue_from)
    return trim(output, config.max_new_tokens)


def generate(target: Transformer, target_params: Any, prompt_tokens: Any, *, config: GenerateConfig, **arguments: Any) -> GenerateOutput:
    """Generates plainly, one token a pass: `speculative_generate` without a drafter, with the same arguments otherwise.

    Example:
        >>> output = generate(target, params, [[1, 5, 9]], config=GenerateConfig(max_new_tokens=128), eos_token_ids=2)

    Args:
        target: The target model. Static.
        target_params: Its params.
        prompt_tokens: `[B,P]` int or a list of B lists of ints.
        config: Static choices; `num_speculative_tokens` and `verification` are not used.
        **arguments: `prompt_lengths`, `sampling`, `eos_token_ids`, `ignore_eos`, `max_new_tokens`, `rng`, `continue_from`, as in
            `speculative_generate`.

    Returns:
        A `GenerateOutput`.

    Raises:
        ValueError: As `speculative_generate`.
        TypeError: As `speculative_generate`.
    """
    return speculative_generate(target, target_params, None, None, prompt_tokens, config=config, **arguments)


def prepare_call(
    target: Transformer, drafter: Drafter | None, drafter_params: Any, prompt_tokens: Any, *, config: GenerateConfig, **arguments: Any
) -> tuple[Request, GenerateConfig]:
    """Checks a call against the target and the drafter; see `specjax.requests.prepare`."""
    if drafter is not None:
        drafter.check(drafter_params, vocab_size=target.config.vocab_size)
    draft_length = 0 if drafter is None else config.num_speculative_tokens
    if drafter is None:
        # Not used; another value must not compile another program.
        config = dataclasses.replace(config, num_speculative_tokens=1, verification=GenerateConfig.verification)
    return prepare(target.config, prompt_tokens, draft_length=draft_length, config=config, **arguments)


def trim(output: GenerateOutput, max_new_tokens: int) -> GenerateOutput:
    """Cuts the output from its bucket to what was asked for; no operation where they agree."""
    if output.tokens.shape[1] == max_new_tokens:
        return output
    log_probs = None if output.log_probs is None else output.log_probs[:, :max_new_tokens]
    return dataclasses.replace(output, tokens=output.tokens[:, :max_new_tokens], log_probs=log_probs)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(target, drafter, config, target_params, drafter_params, request, continue_from) -> GenerateOutput:
    state = prefill(target, drafter, config, target_params, drafter_params, request, continue_from)
    state = lax.while_loop(is_running, partial(decode_step, target, drafter, config, target_params, drafter_params, request), state)
    return finish(state, config)


def is_running(state: DecodeState) -> jax.Array:
    """Whether any row still has something to do."""
    return jnp.any(state.finish_reason == FinishReason.RUNNING)


def decode_step(
    target: Transformer,
    drafter: Drafter | None,
    config: GenerateConfig,
    target_params: Any,
    drafter_params: Any,
    request: Request,
    state: DecodeState,
) -> DecodeState:
    """One step: draft, verify in one pass of the target, commit. Rows that have finished stand still."""
    next_keys, draft_keys, verify_keys = split_row_keys(state.row_keys, 3)
    sampling = request.sampling.broadcast(state.num_generated.shape[0])

    if drafter is None:
        draft, drafter_state = _empty_draft(state.num_generated), state.drafter_state
    else:
        draft, drafter_state = drafter.propose(
            drafter_params,
            state.drafter_state,
            state.context,
            num_speculative_tokens=config.num_speculative_tokens,
            sampling=sampling if config.do_sample else None,
            row_keys=draft_keys,
        )

    pending = jnp.take_along_axis(state.context.tokens, state.context.length[:, None] - 1, axis=1)
    verified_tokens = jnp.concatenate([pending, draft.tokens], axis=1)
    output = target.apply({"params": target_params}, verified_tokens, state.target_cache, feature_layers=_feature_layers(drafter))
    logits = target.apply({"params": target_params}, output.hidden, method="logits")
    checked = verify(config.verification, draft, logits, sampling, verify_keys, do_sample=config.do_sample)

    active = state.finish_reason == FinishReason.RUNNING
    state = dataclasses.replace(state, target_cache=output.cache, row_keys=next_keys)
    state, num_committed = _commit(state, checked, logits, request)
    statistics = state.statistics.record(
        active=active,
        num_drafted=draft.num_drafted,
        num_accepted=checked.verification.num_accepted,
        num_committed=num_committed,
    )
    if drafter is not None:
        commit = Commit(context=state.context, num_committed=num_committed, features=output.features)
        drafter_state = drafter.commit(drafter_params, drafter_state, commit)
    return dataclasses.replace(state, drafter_state=drafter_state, statistics=statistics)


def prefill(
    target: Transformer,
    drafter: Drafter | None,
    config: GenerateConfig,
    target_params: Any,
    drafter_params: Any,
    request: Request,
    continue_from: Continuation | None,
) -> DecodeState:
    """Takes in the prompts chunk by chunk and emits each row's first token. Chunks that hold padding alone are not run."""
    batch_size = request.prompt_lengths.shape[0]
    capacity = config.cache_capacity
    context, prompt, start, cache, drafter_state = _starting_point(target, drafter, config, drafter_params, request, continue_from)
    chunk_size = min(config.prefill_chunk_size, prompt.tokens.shape[1])
    num_columns = -(-prompt.tokens.shape[1] // chunk_size) * chunk_size
    padded = jnp.pad(prompt.tokens, ((0, 0), (0, num_columns - prompt.tokens.shape[1])))
    last_hidden = jnp.zeros((batch_size, target.config.hidden_size), target.dtype)

    def run_chunk(carry):
        index, cache, drafter_state, last_hidden = carry
        tokens = lax.dynamic_slice_in_dim(padded, index * chunk_size, chunk_size, axis=1)
        output = target.apply({"params": target_params}, tokens, cache, feature_layers=_feature_layers(drafter))
        if drafter is not None:
            chunk = PrefillChunk(tokens=tokens, start=start + index * chunk_size, features=output.features)
            drafter_state = drafter.prefill(drafter_params, drafter_state, chunk)
        offset = prompt.length - 1 - index * chunk_size
        here = (offset >= 0) & (offset < chunk_size)
        hidden = jnp.take_along_axis(output.hidden, jnp.clip(offset, 0, chunk_size - 1)[:, None, None], axis=1)[:, 0]
        return index + 1, output.cache, drafter_state, jnp.where(here[:, None], hidden, last_hidden)

    carry = (jnp.int32(0), cache, drafter_state, last_hidden)
    if num_columns == chunk_size:
        carry = run_chunk(carry)
    else:
        carry = lax.while_loop(lambda carry: carry[0] * chunk_size < prompt.length.max(), run_chunk, carry)
    _, cache, drafter_state, last_hidden = carry

    logits = target.apply({"params": target_params}, last_hidden[:, None], method="logits")
    next_keys, verify_keys = split_row_keys(row_keys(request.rng, batch_size), 2)
    draft = _empty_draft(start)
    sampling = request.sampling.broadcast(batch_size)
    checked = verify(config.verification, draft, logits, sampling, verify_keys, do_sample=config.do_sample)
    num_speculative_tokens = 0 if drafter is None else config.num_speculative_tokens
    state = DecodeState(
        context=context,
        num_generated=jnp.zeros((batch_size,), jnp.int32),
        finish_reason=jnp.full((batch_size,), FinishReason.RUNNING, jnp.int32),
        target_cache=cache,
        drafter_state=drafter_state,
        row_keys=next_keys,
        log_probs=jnp.zeros((batch_size, config.max_new_tokens if config.return_log_probs else 0), jnp.float32),
        statistics=Statistics.zeros(batch_size, num_speculative_tokens, synthetic=drafter is not None and config.verification.synthetic),
    )
    assert context.tokens.shape[1] == capacity
    state, num_committed = _commit(state, checked, logits, request)
    if drafter is not None:
        commit = Commit(context=state.context, num_committed=num_committed, features=None)
        state = dataclasses.replace(state, drafter_state=drafter.commit(drafter_params, state.drafter_state, commit))
    return state


def finish(state: DecodeState, config: GenerateConfig) -> GenerateOutput:
    """Cuts the new tokens out of the contexts."""
    slots = jnp.arange(config.max_new_tokens)
    index = (state.context.length - state.num_generated)[:, None] + slots
    tokens = jnp.take_along_axis(state.context.tokens, jnp.minimum(index, state.context.tokens.shape[1] - 1), axis=1)
    return GenerateOutput(
        tokens=jnp.where(slots < state.num_generated[:, None], tokens, config.pad_token_id),
        lengths=state.num_generated,
        finish_reason=state.finish_reason,
        log_probs=state.log_probs if config.return_log_probs else None,
        statistics=state.statistics,
        continuation=Continuation(context=state.context, target_cache=state.target_cache, drafter_state=state.drafter_state),
    )


def _starting_point(target, drafter, config, drafter_params, request, continue_from):
    """The context with the prompts in place, the tokens to take in, where they start, and the caches up to there."""
    batch_size, width = request.prompt_tokens.shape
    capacity = config.cache_capacity
    if continue_from is None:
        start = jnp.zeros((batch_size,), jnp.int32)
        tokens = jnp.pad(request.prompt_tokens, ((0, 0), (0, capacity - width)))
        prompt = Context(tokens=request.prompt_tokens, length=request.prompt_lengths)
        cache = target.init_cache(batch_size=batch_size, capacity=capacity, sharding=config.cache_sharding)
        state = None if drafter is None else drafter.init(drafter_params, batch_size=batch_size, capacity=capacity)
        return Context(tokens=tokens, length=request.prompt_lengths), prompt, start, cache, state
    earlier = continue_from.context
    start = earlier.length - 1
    pending = jnp.take_along_axis(earlier.tokens, start[:, None], axis=1)
    prompt = Context(tokens=jnp.concatenate([pending, request.prompt_tokens], axis=1), length=request.prompt_lengths + 1)
    tokens = jnp.pad(earlier.tokens, ((0, 0), (0, capacity - earlier.tokens.shape[1])))
    tokens = _write_tokens(tokens, earlier.length, request.prompt_tokens, request.prompt_lengths)
    cache = continue_from.target_cache.grown(capacity).with_finite_values()
    state = None if drafter is None else drafter.grow(drafter_params, continue_from.drafter_state, earlier, capacity=capacity)
    return Context(tokens=tokens, length=earlier.length + request.prompt_lengths), prompt, start, cache, state


def _commit(state: DecodeState, checked: CheckedVerification, logits: jax.Array, request: Request) -> tuple[DecodeState, jax.Array]:
    """Appends what was verified, up to an EOS or the row's limit, and rolls the cache back to it. Also returns the count `[B]`."""
    tokens, stopping = checked.verification.tokens, request.stopping
    slots = jnp.arange(tokens.shape[1])
    active = state.finish_reason == FinishReason.RUNNING
    count = checked.verification.num_accepted + 1 - checked.nonfinite
    count = jnp.where(active, jnp.minimum(count, stopping.max_new_tokens - state.num_generated), 0)
    is_eos = (tokens[..., None] == stopping.eos_token_ids).any(axis=-1) & ~stopping.ignore_eos[:, None] & (slots < count[:, None])
    ends = is_eos.any(axis=1)
    count = jnp.where(ends, jnp.argmax(is_eos, axis=1) + 1, count).astype(jnp.int32)
    num_generated = state.num_generated + count

    reason = jnp.where(checked.nonfinite, FinishReason.NONFINITE_LOGITS, FinishReason.RUNNING)
    reason = jnp.where(num_generated >= stopping.max_new_tokens, FinishReason.LENGTH, reason)
    reason = jnp.where(ends, FinishReason.EOS, reason)
    context = Context(tokens=_write_tokens(state.context.tokens, state.context.length, tokens, count), length=state.context.length + count)
    log_probs = state.log_probs
    if log_probs.shape[1]:
        new = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[..., None], axis=-1)[..., 0]
        log_probs = _write_tokens(log_probs, state.num_generated, new, count)
    state = dataclasses.replace(
        state,
        context=context,
        num_generated=num_generated,
        finish_reason=jnp.where(active, reason, state.finish_reason).astype(jnp.int32),
        target_cache=state.target_cache.with_length(context.length - 1),
        log_probs=log_probs,
    )
    return state, count


def _write_tokens(buffer: jax.Array, start: jax.Array, new: jax.Array, count: jax.Array) -> jax.Array:
    """Writes the first `count` `[B]` entries of each row of `new` at `start` `[B]`."""
    slots = jnp.arange(new.shape[1])
    index = jnp.where(slots < count[:, None], start[:, None] + slots, buffer.shape[1])
    rows = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[rows, index].set(new.astype(buffer.dtype), mode="drop")


def _empty_draft(like: jax.Array) -> Draft:
    batch_size = like.shape[0]
    return Draft(tokens=jnp.zeros((batch_size, 0), jnp.int32), num_drafted=jnp.zeros((batch_size,), jnp.int32), probs=None)


def _feature_layers(drafter: Drafter | None) -> tuple[int, ...]:
    return () if drafter is None else drafter.feature_layers
