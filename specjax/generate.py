"""Generation: prefill, then one `lax.while_loop` of draft → verify → commit.

Start here. `speculative_generate` and `generate` are the same loop, with and without a drafter. Everything that may be replaced (the
drafter, its head, the verification rule, the kernels) comes in through an argument; the loop knows none of them by name.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.capacity import bucket
from specjax.committing import commit_tokens
from specjax.continuing import check_continuation, earlier_lengths
from specjax.drafting.drafter import Drafter
from specjax.generate_config import GenerateConfig
from specjax.kernels.varying import varying_as
from specjax.models.transformer import Transformer
from specjax.prefill import prefill
from specjax.refresh import counted_step, take_step
from specjax.requests import Request, prepare
from specjax.sampling import SamplingParams, split_row_keys
from specjax.state import Commit, Continuation, DecodeState, Draft, FinishReason, GenerateOutput
from specjax.traced import is_traced
from specjax.two_level.cycle import Cycle
from specjax.verification.verify import verify
from specjax.verification_pass import verification_pass


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
    """Generates with a drafter. Lossless under the default verification rule, with dense passes (the default).

    Greedy (`do_sample=False`): the tokens equal `generate`'s, one for one in float32. In bfloat16 a pass over G + 1 rows rounds differently
    from a pass over one, so where two tokens are nearly tied the two may part; the `NoDraft` drafter decodes plainly with the very same
    passes, and its output is equal. Sampled: every token follows the target's distribution after temperature, top-k and top-p.

    `config.sparsity` makes the target's passes sparse, and the output lossy: it then follows the sparse target's distribution, which
    depends on where steps begin, so that speculative and plain decoding need not agree. `statistics.summary()` says what was kept.
    A call that continues it first reads densely what its sparse passes took in: each call's context is dense, whatever the one before was.
    With `SparsityConfig(lossless=Lossless())` dense passes check it, and what stands above holds again: see `specjax.two_level.lossless`.

    Pure; may be called as it is (compiled and cached here, prompts padded to buckets) or from inside a caller's own `jit`. There, `target`,
    `drafter` and `config` must be static, arrays may be traced, and what cannot be checked is a contract: lengths from 1 to P, ids inside
    the vocabulary, temperature at least 0, top-k at least 0, top-p in (0, 1], and context plus new tokens within the window. Limits are
    clipped. With `continue_from`, give `cache_capacity`: without it the cache grows by a whole call each time, and each size compiles. It
    needs a slot for the earlier context less one token, plus the larger of 1 + P padded to whole prefill chunks and 1 + P +
    `max_new_tokens` + G + 1 (with lossless sparsity not G, but `config.max_unsettled(G)`); a row for which it is too small gets no tokens
    and `FinishReason.NO_CAPACITY`, and so it does again where it is continued, if not even its prompt and a step fitted. A model whose
    rotary frequencies depend on the length keeps those that the first call planned for. Inside `shard_map` each device decodes its own
    rows.

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
        continue_from: An earlier output's `continuation`, of the same target and drafter (of any drafter, to go on without one): its
            context stands before the prompts, which may then be empty (length 0).

    Returns:
        A `GenerateOutput`. Its `continuation` holds the caches: drop it where outputs are collected, with
        `dataclasses.replace(output, continuation=None)`.

    Raises:
        ValueError: Empty prompt, prompt and limit beyond the model's window, token or EOS ids outside the vocabulary, a negative or too
            large limit, temperature negative or NaN, top-p outside (0, 1], negative top-k, a missing key, too small a `cache_capacity`, a
            drafter that does not fit (its vocabulary is another, its window too short), a continuation of other models, or
            sparsity that does not fit the target.
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
    if isinstance(drafter, type):
        raise ValueError(f"drafter must be an instance such as PromptLookup(), got the class {drafter.__name__}")
    draft_length = 0 if drafter is None else config.num_speculative_tokens
    if drafter is None:
        # Not used; another value must not compile another program.
        config = dataclasses.replace(config, num_speculative_tokens=1, verification=GenerateConfig.verification)
    config.sparsity.check(target.config)
    request, static = prepare(target.config, prompt_tokens, draft_length=draft_length, config=config, **arguments)
    continue_from = arguments.get("continue_from")
    if drafter is not None:
        drafter.check(drafter_params, target=target.config, max_length=_max_length(request, continue_from))
    check_continuation(target, drafter, drafter_params, continue_from)
    return request, static


def _max_length(request: Request, continue_from: Continuation | None) -> int | None:
    """Tokens that the longest row may reach; `None` where that is traced."""
    lengths = [request.prompt_lengths, request.stopping.max_new_tokens]
    lengths += [] if continue_from is None else [earlier_lengths(continue_from, request.prompt_lengths.shape[0])]
    return None if is_traced(lengths) else int(np.sum([np.asarray(x) for x in lengths], axis=0).max())


def trim(output: GenerateOutput, max_new_tokens: int) -> GenerateOutput:
    """Cuts the output from its bucket to what was asked for; no operation where they agree."""
    if output.tokens.shape[1] == max_new_tokens:
        return output
    log_probs = None if output.log_probs is None else output.log_probs[:, :max_new_tokens]
    return dataclasses.replace(output, tokens=output.tokens[:, :max_new_tokens], log_probs=log_probs)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(target, drafter, config, target_params, drafter_params, request, continue_from) -> GenerateOutput:
    state = prefill(target, drafter, config, target_params, drafter_params, request, continue_from)
    state = varying_as(state, state, target_params, drafter_params, request)
    if config.max_new_tokens > 1:  # the first token comes of the prefill: a call for one compiles no loop
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
    """One step: draft, verify in one pass of the target, commit. Rows that have finished stand still.

    With lossless sparsity it is a cycle: a few such steps, and the dense pass that checks them. See `specjax.two_level.cycle`.
    """
    models: dict[str, Any] = dict(
        target=target, drafter=drafter, target_params=target_params, drafter_params=drafter_params, request=request
    )
    step, sparsity = partial(_step, **models), config.sparsity
    if sparsity.lossless is not None:
        return Cycle(config=config, step=step, **models)(state)
    if not sparsity.refresh_every:
        return step(config, state)[0]

    def refreshing(state: DecodeState, *, refresh: bool) -> DecodeState:
        return step(config, state, refresh=refresh)[0]

    return take_step(refreshing, state, refresh_every=sparsity.refresh_every)


def _step(
    config: GenerateConfig,
    state: DecodeState,
    *,
    target: Transformer,
    drafter: Drafter | None,
    target_params: Any,
    drafter_params: Any,
    request: Request,
    refresh: bool = False,
) -> tuple[DecodeState, jax.Array]:
    """The state after one step, and the hidden states `[B,G+1,D]` whose logits verified it."""
    next_keys, draft_keys, verify_keys = split_row_keys(state.row_keys, 3)
    sampling = request.sampling.broadcast(state.num_generated.shape[0])

    if drafter is None:
        draft, drafter_state, feature_layers = Draft.empty(state.num_generated.shape[0]), state.drafter_state, ()
    else:
        feature_layers = drafter.feature_layers
        draft, drafter_state = drafter.propose(
            drafter_params,
            state.drafter_state,
            state.context,
            num_speculative_tokens=config.num_speculative_tokens,
            sampling=sampling if config.do_sample else None,
            row_keys=draft_keys,
        )

    rows = verification_pass(target, target_params, config.sparsity, state, draft, feature_layers=feature_layers, refresh=refresh)
    logits = target.apply({"params": target_params}, rows.hidden, method="logits")
    checked = verify(config.verification, draft, logits, sampling, verify_keys, do_sample=config.do_sample)

    active = state.finish_reason == FinishReason.RUNNING
    state = dataclasses.replace(state, target_cache=rows.cache, row_keys=next_keys)
    state, num_committed = commit_tokens(state, checked, logits, request)
    statistics = state.statistics.record(
        active=active,
        num_drafted=draft.num_drafted,
        num_accepted=checked.verification.num_accepted,
        num_committed=num_committed,
        target_pass=rows.target_pass,
    )
    if drafter is not None:
        commit = Commit(context=state.context, num_committed=num_committed, features=rows.features)
        drafter_state = drafter.commit(drafter_params, drafter_state, commit)
    state = dataclasses.replace(state, drafter_state=drafter_state, statistics=statistics)
    return counted_step(state, refresh=refresh), rows.hidden


def finish(state: DecodeState, config: GenerateConfig) -> GenerateOutput:
    """Cuts the new tokens out of the contexts."""
    dense_length, max_behind = _not_dense(state, config)
    slots = jnp.arange(config.max_new_tokens)
    index = (state.context.length - state.num_generated)[:, None] + slots
    tokens = jnp.take_along_axis(state.context.tokens, jnp.minimum(index, state.context.tokens.shape[1] - 1), axis=1)
    return GenerateOutput(
        tokens=jnp.where(slots < state.num_generated[:, None], tokens, config.pad_token_id),
        lengths=state.num_generated,
        finish_reason=state.finish_reason,
        log_probs=state.log_probs if config.return_log_probs else None,
        statistics=state.statistics,
        continuation=Continuation(
            context=state.context,
            target_cache=state.target_cache,
            drafter_state=state.drafter_state,
            dense_length=dense_length,
            max_behind=max_behind,
        ),
    )


def _not_dense(state: DecodeState, config: GenerateConfig) -> tuple[jax.Array | None, int]:
    """From where on keys and values are those of sparse passes, and how many at most; `None` and 0 where none are."""
    sparsity = config.sparsity
    if state.since_dense is not None:
        return state.since_dense.dense_length, sparsity.refresh_rows(state.statistics.draft_length)
    if sparsity.is_dense or sparsity.lossless is not None:
        return None, 0
    # The prefill is dense: it took in all that stands before the first new token.
    return state.context.length - state.num_generated, bucket(config.max_new_tokens)  # inside and outside of a caller's `jit` the same
