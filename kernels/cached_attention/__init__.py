"""Attention of T new rows over a key/value cache: the operation of every decode, verification and prefill pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from specjax.kernels.cached_attention.blocked import blocked_attention, is_long
from specjax.kernels.cached_attention.reference import cached_attention_reference
from specjax.kernels.few_row_attention import TuningConfig, few_row_attention, serves, why_not
from specjax.kernels.grouped_attention import check_attention
from specjax.kernels.measured import dispatch, with_derivative_of
from specjax.kernels.shapes import AttentionShape

IMPLEMENTATIONS = ("auto", "reference", "triton")


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
        implementation: `"triton"` is the kernel of `few_row_attention`, for passes of up to 64 rows (512 rows times N / K). Passes of
            more rows, such as a prefill, are XLA's whatever is asked for: the reference, or over a cache of 4096 slots or more
            `blocked_attention`. `"triton@..."` also says how the work is cut, as its `TuningConfig` does. `"auto"` takes what was measured
            to be the fastest: see `specjax.kernels.measured`.

    Returns:
        `[B,T,N,H]` in the dtype of `query`.

    Raises:
        ValueError: Shapes that disagree, an unknown implementation, or one that cannot run here.
    """
    check_attention("cached_attention", query, keys, values, implementation=implementation, implementations=IMPLEMENTATIONS)
    if window is not None and window < 1:
        raise ValueError(f"cached_attention: window must be at least 1, got {window}")
    if sinks is not None and sinks.shape != (query.shape[2],):
        raise ValueError(f"cached_attention: sinks must have a score for each of the {query.shape[2]} heads, got shape {sinks.shape}")

    def positional(attention: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        options: dict[str, Any] = dict(window=window, scale=scale)
        return lambda q, k, v, length, mask, sinks, **how: attention(q, k, v, length, step_mask=mask, sinks=sinks, **options, **how)

    arrays = query, keys, values, length, step_mask, sinks
    reference, triton = positional(cached_attention_reference), positional(few_row_attention)
    if not serves(query.shape, keys.shape[1]):
        is_blocked = is_long(query.shape[1], keys.shape[2])
        return (with_derivative_of(reference, positional(blocked_attention)) if is_blocked else reference)(*arrays)
    if implementation == "auto" and why_not(query, keys, values) is not None:
        return reference(*arrays)
    shape = AttentionShape.of(query.shape, keys.shape)
    return dispatch(implementation, shape, keys.dtype, triton=triton, tuning=TuningConfig, reference=reference, arrays=arrays)
