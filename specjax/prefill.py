"""Prefill: the prompts through the target and the drafter in chunks, and each row's first token.

Chunks bound the memory of attention scores, logits are formed for each row's last prompt token alone, and chunks that hold only padding are
not run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from specjax.capacity import whole_chunks
from specjax.catch_up import catch_up
from specjax.committing import commit_tokens, write_tokens
from specjax.drafting.drafter import Drafter
from specjax.generate_config import GenerateConfig
from specjax.kernels.varying import varying_as
from specjax.models.kv_cache import KVCache
from specjax.models.sparse_attention import prepare_cache
from specjax.models.transformer import Transformer
from specjax.requests import Request, row_keys
from specjax.sampling import split_row_keys
from specjax.sharding import check_auto_axes
from specjax.state import Commit, Context, Continuation, DecodeState, Draft, FinishReason, PrefillChunk, SinceDense
from specjax.statistics import Statistics
from specjax.two_level.level_counts import LevelCounts
from specjax.two_level.pace import Pace
from specjax.verification.verify import verify
from specjax.verification_pass import counts_of_nothing


def prefill(
    target: Transformer,
    drafter: Drafter | None,
    config: GenerateConfig,
    target_params: Any,
    drafter_params: Any,
    request: Request,
    continue_from: Continuation | None,
) -> DecodeState:
    """Takes in the prompts and commits each row's first token: the state that the loop starts from."""
    # Here, where calls are traced: types tell, and a call that is compiled pays nothing.
    check_auto_axes("target_params", target_params)
    check_auto_axes("drafter_params", drafter_params)
    batch_size = request.prompt_lengths.shape[0]
    context, prompt, start, cache, drafter_state = _starting_point(target, drafter, config, drafter_params, request, continue_from)
    arrays = (request, target_params, drafter_params, continue_from)
    start, cache, drafter_state = varying_as((start, cache, drafter_state), *arrays)
    cache = prepare_cache(cache, config.sparsity, target.config)
    if continue_from is not None and continue_from.dense_length is not None and continue_from.max_behind:
        num_rows = min(continue_from.max_behind, config.prefill_chunk_size, cache.capacity)
        cache = _made_dense(target, target_params, context.tokens, cache, continue_from.dense_length, num_rows=num_rows)
    chunk_size = min(config.prefill_chunk_size, prompt.tokens.shape[1])
    num_columns = whole_chunks(prompt.tokens.shape[1], chunk_size)
    padded = jnp.pad(prompt.tokens, ((0, 0), (0, num_columns + 1 - prompt.tokens.shape[1])))  # + 1: the last column has a next token too
    feature_layers = () if drafter is None else drafter.feature_layers
    # What the target made of each row's last prompt token: the hidden state, and the drafter's features.
    last_row = [jnp.zeros((batch_size, 1, target.config.hidden_size), target.dtype)]
    if feature_layers:
        last_row.append(jnp.zeros((batch_size, 1, len(feature_layers) * target.config.hidden_size), target.dtype))
    last_row = varying_as(last_row, *arrays)

    def run_chunk(carry):
        index, cache, drafter_state, last_row = carry
        tokens = lax.dynamic_slice_in_dim(padded, index * chunk_size, chunk_size, axis=1)
        output = target.apply({"params": target_params}, tokens, cache, feature_layers=feature_layers)
        if drafter is not None:
            next_tokens = lax.dynamic_slice_in_dim(padded, index * chunk_size + 1, chunk_size, axis=1)
            chunk = PrefillChunk(tokens=tokens, next_tokens=next_tokens, start=start + index * chunk_size, features=output.features)
            drafter_state = drafter.prefill(drafter_params, drafter_state, chunk)
        offset = (prompt.length - 1 - index * chunk_size)[:, None, None]
        here = (offset >= 0) & (offset < chunk_size)
        rows = [output.hidden] if output.features is None else [output.hidden, output.features]
        picked = [jnp.take_along_axis(row, jnp.clip(offset, 0, chunk_size - 1), axis=1) for row in rows]
        return index + 1, output.cache, drafter_state, [jnp.where(here, new, old) for new, old in zip(picked, last_row, strict=True)]

    carry = (jnp.int32(0), cache, drafter_state, last_row)
    if num_columns == chunk_size:
        carry = run_chunk(carry)
    else:
        carry = lax.while_loop(lambda carry: carry[0] * chunk_size < prompt.length.max(), run_chunk, carry)
    _, cache, drafter_state, (last_hidden, *last_features) = carry

    logits = target.apply({"params": target_params}, last_hidden, method="logits")
    next_keys, verify_keys = split_row_keys(row_keys(request.rng, batch_size), 2)
    draft = Draft.empty(batch_size)
    sampling = request.sampling.broadcast(batch_size)
    checked = verify(config.verification, draft, logits, sampling, verify_keys, do_sample=config.do_sample)
    num_speculative_tokens = 0 if drafter is None else config.num_speculative_tokens
    # Concrete lengths were checked before compiling; traced ones can only be caught here. A write beyond the end would land elsewhere.
    num_chunks = jnp.maximum(-(-prompt.length.max() // chunk_size), 1)
    one_pass = prompt.length + config.max_unsettled(num_speculative_tokens) + 1
    decoded = one_pass + request.stopping.max_new_tokens
    held = True if continue_from is None else start < continue_from.context.tokens.shape[1]
    fits = held & (start + jnp.maximum(num_chunks * chunk_size, decoded) <= cache.capacity)
    # Such a row's earlier keys may be overwritten, by its prompt or by the passes of other rows: its context is marked as lost.
    is_whole = held & (start + jnp.maximum(num_chunks * chunk_size, one_pass) <= cache.capacity)
    context = dataclasses.replace(context, length=jnp.where(is_whole, context.length, context.tokens.shape[1] + 1))
    lossless = config.sparsity.lossless
    state = DecodeState(
        context=context,
        num_generated=jnp.zeros((batch_size,), jnp.int32),
        finish_reason=jnp.where(fits, FinishReason.RUNNING, FinishReason.NO_CAPACITY).astype(jnp.int32),
        target_cache=cache,
        drafter_state=drafter_state,
        row_keys=next_keys,
        log_probs=jnp.zeros((batch_size, config.max_new_tokens if config.return_log_probs else 0), jnp.float32),
        statistics=Statistics.zeros(
            batch_size,
            num_speculative_tokens,
            synthetic=drafter is not None and config.verification.synthetic,
            **counts_of_nothing(target, target_params, config.sparsity, cache),
            levels=None if lossless is None else LevelCounts.zeros(batch_size, check_cost=lossless.check_cost),
        ),
        pace=None if lossless is None else Pace.unknown(),
    )
    state, num_committed = commit_tokens(state, checked, logits, request)
    if config.sparsity.refresh_every:
        state = dataclasses.replace(state, since_dense=SinceDense(dense_length=state.context.length - 1, num_steps=jnp.int32(0)))
    if drafter is not None:
        commit = Commit(context=state.context, num_committed=num_committed, features=last_features[0] if last_features else None)
        state = dataclasses.replace(state, drafter_state=drafter.commit(drafter_params, state.drafter_state, commit))
    return state


def _made_dense(target, target_params, tokens, cache, dense_length, *, num_rows) -> KVCache:
    """The cache with dense keys and values in the place of those that sparse passes wrote, `num_rows` tokens at a time."""
    num_behind = (cache.length - dense_length).max()

    def run_chunk(carry):
        index, cache = carry
        start = dense_length + index * num_rows
        return index + 1, catch_up(target, target_params, tokens, cache, start, num_rows=num_rows).cache

    return lax.while_loop(lambda carry: carry[0] * num_rows < num_behind, run_chunk, (jnp.int32(0), cache))[1]


def _starting_point(target, drafter, config, drafter_params, request, continue_from):
    """The context with the prompts in place, the tokens to take in, where they start, and the caches up to there."""
    batch_size, width = request.prompt_tokens.shape
    capacity = config.cache_capacity
    if continue_from is None:
        start = jnp.zeros((batch_size,), jnp.int32)
        tokens = jnp.pad(request.prompt_tokens, ((0, 0), (0, capacity - width)))
        prompt = Context(tokens=request.prompt_tokens, length=request.prompt_lengths)
        sizes = {"batch_size": batch_size, "capacity": capacity, "context_limit": request.context_limits}
        cache = target.init_cache(**sizes, sharding=config.cache_sharding)
        state = None if drafter is None else drafter.init(drafter_params, **sizes)
        return Context(tokens=tokens, length=request.prompt_lengths), prompt, start, cache, state
    earlier = continue_from.context
    start = earlier.length - 1
    pending = jnp.take_along_axis(earlier.tokens, start[:, None], axis=1)
    prompt = Context(tokens=jnp.concatenate([pending, request.prompt_tokens], axis=1), length=request.prompt_lengths + 1)
    tokens = jnp.pad(earlier.tokens, ((0, 0), (0, capacity - earlier.tokens.shape[1])))
    tokens = write_tokens(tokens, earlier.length, request.prompt_tokens, request.prompt_lengths)
    cache = continue_from.target_cache.grown(capacity).with_finite_values()
    state = None if drafter is None else drafter.grow(drafter_params, continue_from.drafter_state, earlier, capacity=capacity)
    return Context(tokens=tokens, length=earlier.length + request.prompt_lengths), prompt, start, cache, state
