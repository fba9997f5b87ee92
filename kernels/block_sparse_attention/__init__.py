"""Attention of T new rows over chosen blocks of a key/value cache: the operation of a sparse verification pass. arXiv:2512.21911."""

from __future__ import annotations

from typing import Any

import jax

from specjax.kernels.block_sparse_attention.reference import block_sparse_attention_reference
from specjax.kernels.few_row_attention import ListedBlocks, TuningConfig, few_row_attention, serves, why_not
from specjax.kernels.grouped_attention import check_attention
from specjax.kernels.measured import dispatch
from specjax.kernels.shapes import AttentionShape

IMPLEMENTATIONS = ("auto", "reference", "triton")


def block_sparse_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
    block_ids: jax.Array,
    num_blocks: jax.Array,
    *,
    block_size: int,
    scale: float,
    step_mask: jax.Array | None = None,
    row_mask: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Softmax attention of the new rows over the slots of the blocks listed, and to no others.

    Block j is the slots `j * block_size ... (j + 1) * block_size - 1`. Of a listed block, row t of batch row b attends to the slots that
    `cached_attention` would let it attend to: `s < length[b]`, and among the T new positions those that `step_mask` allows. With every
    block listed in order the two are one computation. Each row must find a slot that it may attend to (its own block is listed).

    Args:
        query: `[B,T,N,H]`, after the rotary embedding.
        keys: `[B,K,S,H]`, the new positions already written; S a multiple of `block_size`. Slots that no row may attend to may be NaN.
        values: `[B,K,S,H]`, likewise, all finite.
        length: `[B]` int32, tokens before the new rows.
        block_ids: `[B,K,C]` int32, from 0 to S / block_size - 1. The first `num_blocks` count and must differ from one another.
        num_blocks: `[B,K]` int32, from 1 to C.
        block_size: Slots a block.
        scale: Factor on the scores.
        step_mask: `[T,T]` bool, `step_mask[t, u]`: new row t may attend to new row u. `None` is causal (u <= t).
        row_mask: `[B,K,T,C]` bool, which of the listed blocks each row attends to; `None` is all.
        implementation: `"triton"` is the kernel of `few_row_attention`, for passes of up to 64 rows (512 rows times N / K); passes of
            more rows are the reference's; `"triton@..."` also says how the work is cut, as its `TuningConfig` does. `"auto"` takes what
            was measured to be the fastest: see `specjax.kernels.measured`.

    Returns:
        `[B,T,N,H]` in the dtype of `query`.

    Raises:
        ValueError: Shapes that disagree, an unknown implementation, or one that cannot run here.
    """
    check_attention("block_sparse_attention", query, keys, values, implementation=implementation, implementations=IMPLEMENTATIONS)
    if block_size < 1 or keys.shape[2] % block_size:
        raise ValueError(f"block_sparse_attention: {keys.shape[2]} slots are not whole blocks of block_size = {block_size}")
    if block_ids.ndim != 3 or block_ids.shape[:2] != keys.shape[:2] or num_blocks.shape != keys.shape[:2]:
        raise ValueError(
            f"block_sparse_attention: expected block_ids [B,K,C] and num_blocks [B,K] for keys {keys.shape}, got {block_ids.shape} and "
            f"{num_blocks.shape}"
        )
    if row_mask is not None and row_mask.shape != (*keys.shape[:2], query.shape[1], block_ids.shape[2]):
        raise ValueError(f"block_sparse_attention: row_mask must be [B,K,T,C] for {query.shape}, {block_ids.shape}, got {row_mask.shape}")

    def reference(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array, listed: ListedBlocks, mask: jax.Array | None) -> jax.Array:
        options: dict[str, Any] = dict(block_size=block_size, scale=scale, row_mask=listed.row_mask, step_mask=mask)
        return block_sparse_attention_reference(q, k, v, length, listed.block_ids, listed.num_blocks, **options)

    def triton(
        q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array, listed: Any, mask: Any, tuning: TuningConfig | None = None
    ) -> jax.Array:
        return few_row_attention(q, k, v, length, scale=scale, step_mask=mask, listed=listed, tuning=tuning)

    arrays = query, keys, values, length, ListedBlocks(block_ids, num_blocks, row_mask, block_size=block_size), step_mask
    if not serves(query.shape, keys.shape[1]) or (implementation == "auto" and why_not(query, keys, values) is not None):
        return reference(*arrays)
    shape = AttentionShape.of(query.shape, keys.shape, kept_slots=block_ids.shape[2] * block_size, block_size=block_size)
    return dispatch(implementation, shape, keys.dtype, triton=triton, tuning=TuningConfig, reference=reference, arrays=arrays)
