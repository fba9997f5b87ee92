"""The target's pass over a pending token and its draft: dense, sparse, or a refresh that also reads what sparse passes read before."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.catch_up import catch_up
from specjax.committing import write_tokens
from specjax.models.kv_cache import KVCache
from specjax.models.sparse_attention import dense_reads, no_reads
from specjax.models.transformer import Transformer
from specjax.sparsity.pass_counts import PassCounts, TargetPass
from specjax.sparsity.sparsity_config import SparsityConfig
from specjax.state import DecodeState, Draft, FinishReason


@dataclasses.dataclass(frozen=True)
class VerifiedRows:
    """What the target made of the pending token and the draft.

    Attributes:
        hidden: `[B,G+1,D]`.
        features: `[B,G+1,*]` or `None`.
        cache: The cache, its length behind the draft.
        target_pass: What is counted of the pass; `None` where nothing is sparse.
    """

    hidden: jax.Array
    features: jax.Array | None
    cache: KVCache
    target_pass: TargetPass | None


def verification_pass(
    target: Transformer,
    target_params: Any,
    sparsity: SparsityConfig,
    state: DecodeState,
    draft: Draft,
    *,
    feature_layers: tuple[int, ...],
    refresh: bool,
) -> VerifiedRows:
    """Runs the target over G + 1 rows, or over those and the ones behind which its cache is not dense.

    Args:
        target: The target. Static.
        target_params: Its params.
        sparsity: What is left out. Static.
        state: The state before the step.
        draft: What was drafted.
        feature_layers: For the drafter.
        refresh: The pass is dense, and starts where the cache ceases to be. Static.
    """
    if refresh:
        return _refresh(target, target_params, sparsity, state, draft, feature_layers)
    pending = jnp.take_along_axis(state.context.tokens, state.context.length[:, None] - 1, axis=1)
    tokens = jnp.concatenate([pending, draft.tokens], axis=1)
    if sparsity.is_dense:
        output = target.apply({"params": target_params}, tokens, state.target_cache, feature_layers=feature_layers)
        return VerifiedRows(output.hidden, output.features, output.cache, None)
    active = state.finish_reason == FinishReason.RUNNING
    counted = active[:, None] & (jnp.arange(tokens.shape[1]) <= draft.num_drafted[:, None])
    output = target.apply(
        {"params": target_params}, tokens, state.target_cache, feature_layers=feature_layers, sparsity=sparsity, counted=counted
    )
    counts = TargetPass(reads=output.reads, mlp_work=output.mlp_work, context=state.target_cache.length, num_tokens=tokens.shape[1])
    return VerifiedRows(output.hidden, output.features, output.cache, counts)


def counts_of_nothing(target: Transformer, target_params: Any, sparsity: SparsityConfig, cache: KVCache) -> dict[str, Any]:
    """The counts before the first pass, as `Statistics.zeros` takes them; none where nothing is sparse.

    Args:
        target: The target.
        target_params: Its params.
        sparsity: What its passes leave out.
        cache: Its cache.
    """
    if sparsity.is_dense:
        return {}
    model = target.config
    has_ffn = sparsity.ffn is not None and not sparsity.ffn.exact
    has_moe = sparsity.moe is not None and model.moe is not None and not sparsity.moe.exact(model.moe)

    def measured(layer: int) -> tuple[str, ...]:
        routed = model.has_experts(layer)
        return (*["channels"] * has_ffn, *["experts"] * (has_moe and routed), *["distinct"] * ((has_ffn or has_moe) and routed))

    counts = PassCounts.zeros(
        cache.length.shape[0],
        model=model,
        measured=tuple(map(measured, range(model.num_layers))),
        weight_bytes=target_params["embedding"].dtype.itemsize,
        cache_bytes=cache.keys[0].dtype.itemsize,
    )
    return {"attention_reads": None if sparsity.attention is None else no_reads(cache, sparsity.attention), "pass_counts": counts}


def _refresh(
    target: Transformer, target_params: Any, sparsity: SparsityConfig, state: DecodeState, draft: Draft, feature_layers: tuple[int, ...]
) -> VerifiedRows:
    assert state.since_dense is not None
    context, cache, num_drafts = state.context, state.target_cache, draft.tokens.shape[1]
    num_rows = sparsity.refresh_rows(num_drafts)
    tokens = write_tokens(context.tokens, context.length, draft.tokens, draft.num_drafted)
    dense_length = state.since_dense.dense_length
    dense = catch_up(target, target_params, tokens, cache, dense_length, num_rows=num_rows, feature_layers=feature_layers)
    reads = None if sparsity.attention is None else dense_reads(cache.with_length(dense.start), sparsity.attention, num_rows, target.config)
    return VerifiedRows(
        hidden=dense.at(dense.hidden, cache.length, num_drafts + 1),
        features=None if dense.features is None else dense.at(dense.features, cache.length, num_drafts + 1),
        cache=dense.cache.with_length(cache.length + num_drafts + 1),
        target_pass=TargetPass(reads=reads, mlp_work=(None,) * target.config.num_layers, context=dense.start, num_tokens=num_rows),
    )
