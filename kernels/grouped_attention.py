"""Attention of new rows over slots of a cache, whichever these are: what fits, what rows see, grouped-query softmax. In plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.few_row_attention import TuningConfig
from specjax.kernels.measured import check_implementation
from specjax.kernels.precision import full_precision


def check_attention(
    operation: str, query: jax.Array, keys: jax.Array, values: jax.Array, *, implementation: str, implementations: tuple[str, ...]
) -> None:
    """Refuses what no attention takes.

    Args:
        operation: Its name, for the message.
        query: Should be `[B,T,N,H]`.
        keys: Should be `[B,K,S,H]`.
        values: Likewise.
        implementation: What was asked for.
        implementations: What there is.

    Raises:
        ValueError: Shapes that disagree, an unknown implementation, or a tuning that cannot be.
    """
    check_implementation(operation, implementation, implementations, tuning=TuningConfig)
    if query.ndim != 4 or keys.ndim != 4 or keys.shape != values.shape:
        raise ValueError(
            f"{operation}: expected query [B,T,N,H] and keys, values [B,K,S,H], got {query.shape}, {keys.shape}, {values.shape}"
        )
    if query.shape[0] != keys.shape[0] or query.shape[3] != keys.shape[3] or query.shape[2] % keys.shape[1]:
        raise ValueError(f"{operation}: query {query.shape} does not fit keys {keys.shape}: B and H must agree and K must divide N")


def visible_offsets(offset_bs: jax.Array, num_rows: int, step_mask: jax.Array | None, window: int | None = None) -> jax.Array:
    """Which slots each new row may attend to, whatever their order.

    Args:
        offset_bs: `[B,S]` int32, where slots stand: 0 is the first new row's, and below it are those before the new rows.
        num_rows: T.
        step_mask: `[T,T]` bool among the new rows, or `None` for causal.
        window: Latest slots that a row may attend to, its own included; `None` is all.

    Returns:
        `[B,T,S]` bool.
    """
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    if step_mask is None:
        visible = offset_bs[:, None, :] <= rows[None, :, None]
    else:
        among_new = jnp.take(step_mask, jnp.clip(offset_bs, 0, num_rows - 1), axis=1).transpose(1, 0, 2)
        inside = (offset_bs >= 0) & (offset_bs < num_rows)
        visible = (offset_bs < 0)[:, None, :] | (inside[:, None, :] & among_new)
    return visible if window is None else visible & (offset_bs[:, None, :] > rows[None, :, None] - window)


def attention_scores(query: jax.Array, keys: jax.Array, *, scale: float) -> jax.Array:
    """`scale * q · k` in float32.

    Args:
        query: `[B,T,N,H]`.
        keys: `[B,K,S,H]`.
        scale: The factor.

    Returns:
        `[B,K,M,T,S]`, M = N / K query heads of each key/value head.
    """
    batch_size, num_rows, num_heads, head_dim = query.shape
    num_kv_heads, num_slots = keys.shape[1], keys.shape[2]
    group_size = num_heads // num_kv_heads
    # m: query heads of one key/value head. Its rows lie together, so that this product and the next are batched over (B, K) alone.
    q_bkmth = query.reshape(batch_size, num_rows, num_kv_heads, group_size, head_dim).transpose(0, 2, 3, 1, 4)
    q_bkxh = q_bkmth.reshape(batch_size, num_kv_heads, group_size * num_rows, head_dim)
    precision = full_precision(query)
    scores_bkxs = jnp.einsum("bkxh,bksh->bkxs", q_bkxh, keys, precision=precision, preferred_element_type=jnp.float32)
    return scores_bkxs.reshape(batch_size, num_kv_heads, group_size, num_rows, num_slots) * scale


def attend(scores_bkmts: jax.Array, values: jax.Array, *, visible: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """The values of visible slots, weighted by the softmax of their scores.

    Args:
        scores_bkmts: Those of `attention_scores`.
        values: `[B,K,S,H]`.
        visible: Bool that broadcasts over the scores: which slots a row attends to.
        sinks: `[N]`, a score of each head without a value; `None` for none.

    Returns:
        `[B,T,N,H]` float32.
    """
    batch_size, num_kv_heads, group_size, num_rows, _ = scores_bkmts.shape
    scores_bkmts = jnp.where(visible, scores_bkmts, -jnp.inf)
    weights_bkmts = _softmax(scores_bkmts, sinks)
    out_bkmth = weighted_values(weights_bkmts, values)
    return out_bkmth.transpose(0, 3, 1, 2, 4).reshape(batch_size, num_rows, num_kv_heads * group_size, -1)


def weighted_values(weights_bkmts: jax.Array, values: jax.Array) -> jax.Array:
    """Sums of values.

    Args:
        weights_bkmts: Float32; rounded to the dtype of the values.
        values: `[B,K,S,H]`.

    Returns:
        `[B,K,M,T,H]` float32.
    """
    batch_size, num_kv_heads, group_size, num_rows, num_slots = weights_bkmts.shape
    weights_bkxs = weights_bkmts.reshape(batch_size, num_kv_heads, group_size * num_rows, num_slots).astype(values.dtype)
    precision = full_precision(values)
    out_bkxh = jnp.einsum("bkxs,bksh->bkxh", weights_bkxs, values, precision=precision, preferred_element_type=jnp.float32)
    return out_bkxh.reshape(batch_size, num_kv_heads, group_size, num_rows, -1)


def _softmax(scores_bkmts: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Over the slots, and over the head's sink, whose own share is left out."""
    if sinks is None:
        return jax.nn.softmax(scores_bkmts, axis=-1)
    num_kv_heads, group_size = scores_bkmts.shape[1:3]
    sinks_km11 = sinks.astype(jnp.float32).reshape(num_kv_heads, group_size, 1, 1)
    largest = jnp.maximum(scores_bkmts.max(axis=-1, keepdims=True), sinks_km11)
    exponentials = jnp.exp(scores_bkmts - largest)
    return exponentials / (exponentials.sum(axis=-1, keepdims=True) + jnp.exp(sinks_km11 - largest))
