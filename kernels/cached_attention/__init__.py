"""Attention of T new rows over a key/value cache: the operation of every decode, verification and prefill pass."""

from __future__ import annotations

import jax

from specjax.kernels.cached_attention.reference import cached_attention_reference
from specjax.kernels.grouped_attention import check_attention

IMPLEMENTATIONS = ("auto", "reference")


def cached_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    step_mask: jax.Array | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Softmax attention of the new rows over what the cache holds, themselves included.

    Row t of batch row b attends to slots `s < length[b]` and, among the T new positions at `length[b] ... length[b] + T - 1`, to those that
    `step_mask` allows; with a `window`, only to those less than `window` slots before its own. What lies elsewhere is never attended: keys
    there may be NaN; values must be finite (`specjax.models.kv_cache` sees to it).

    Args:
        query: `[B,T,N,H]`, after the rotary embedding.
        keys: `[B,K,S,H]`, the new positions already written.
        values: `[B,K,S,H]`, likewise.
        length: `[B]` int32, tokens before the new rows.
        scale: Factor on the scores.
        step_mask: `[T,T]` bool, `step_mask[t, u]`: new row t may attend to new row u. `None` is causal (u <= t).
        window: Latest slots that a row attends to, its own included; `None` is all.
        sinks: `[N]`, a score of each head that takes part in the softmax and has no value; `None` for none.
        implementation: `"auto"` or `"reference"`.

    Returns:
        `[B,T,N,H]` in the dtype of `query`.

    Raises:
        ValueError: Shapes that disagree, or an unknown implementation.
    """
    check_attention("cached_attention", query, keys, values, implementation=implementation, implementations=IMPLEMENTATIONS)
    if window is not None and window < 1:
        raise ValueError(f"cached_attention: window must be at least 1, got {window}")
    if sinks is not None and sinks.shape != (query.shape[2],):
        raise ValueError(f"cached_attention: sinks must have a score for each of the {query.shape[2]} heads, got shape {sinks.shape}")
    return cached_attention_reference(query, keys, values, length, step_mask=step_mask, window=window, sinks=sinks, scale=scale)
