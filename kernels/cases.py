"""A call of each operation that has a kernel, from its shape alone: what tests, tuning and benchmarks run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.block_selection import block_selection
from specjax.kernels.block_sparse_attention import block_sparse_attention
from specjax.kernels.cached_attention import cached_attention
from specjax.kernels.few_row_attention import ListedBlocks, TuningConfig, few_row_attention
from specjax.kernels.low_rank_argmax import low_rank_argmax
from specjax.kernels.shapes import AttentionShape, LowRankShape, SelectionShape, Shape


def arguments(shape: Shape, dtype: Any, rng: jax.Array) -> tuple[jax.Array, ...]:
    """Random arrays of a full cache, of blocks chosen by lot, or of a head.

    Args:
        shape: The sizes.
        dtype: Of all floating-point arrays.
        rng: A key.
    """
    first, second, third, fourth = jax.random.split(rng, 4)
    if isinstance(shape, LowRankShape):
        sizes = (shape.rows, shape.hidden), (shape.rank, shape.hidden), (shape.vocab, shape.rank)
        return tuple(jax.random.normal(key, size, dtype) for key, size in zip((first, second, third), sizes, strict=True))
    heads = shape.kv_heads * shape.group
    if isinstance(shape, SelectionShape):
        query = jax.random.normal(first, (shape.batch, heads, shape.head_dim), dtype)
        means = jax.random.normal(second, (shape.batch, shape.kv_heads, shape.blocks, shape.head_dim), dtype)
        sizes = (shape.blocks - 2, shape.blocks, shape.chosen)
        return query, means, *(jnp.full((shape.batch,), size, jnp.int32) for size in sizes)
    query = jax.random.normal(first, (shape.batch, shape.rows, heads, shape.head_dim), dtype)
    keys, values = (jax.random.normal(key, (shape.batch, shape.kv_heads, shape.slots, shape.head_dim), dtype) for key in (second, third))
    length = jnp.full((shape.batch,), shape.slots - shape.rows, jnp.int32)
    if shape.kept_slots is None:
        return query, keys, values, length
    num_blocks, width = shape.slots // shape.block_size, shape.kept_slots // shape.block_size
    drawn = jax.random.uniform(fourth, (shape.batch, shape.kv_heads, num_blocks)).at[..., -1].set(1.0)  # the last holds the new rows
    block_ids = jnp.sort(jax.lax.top_k(drawn, width)[1], axis=-1).astype(jnp.int32)
    return query, keys, values, length, block_ids, jnp.full(block_ids.shape[:2], width, jnp.int32)


def run(shape: Shape, arrays: tuple[jax.Array, ...], implementation: str, *, tuning: TuningConfig | None = None) -> Any:
    """Calls the operation.

    Args:
        shape: The sizes.
        arrays: From `arguments`.
        implementation: Passed on.
        tuning: How few-row attention cuts its work; for `"triton"` alone.

    Raises:
        ValueError: A `tuning` for anything else.
    """
    if tuning is not None:
        if implementation != "triton" or not isinstance(shape, AttentionShape):
            raise ValueError(f"a tuning is for few-row attention as 'triton', not for {shape.op} as {implementation!r}")
        listed = None if shape.kept_slots is None else ListedBlocks(arrays[4], arrays[5], None, block_size=shape.block_size)
        return few_row_attention(*arrays[:4], scale=shape.head_dim**-0.5, listed=listed, tuning=tuning)
    if isinstance(shape, LowRankShape):
        return low_rank_argmax(*arrays, implementation=implementation)
    if isinstance(shape, SelectionShape):
        return block_selection(*arrays, head_blocks=1, max_chosen=shape.chosen, implementation=implementation)
    assert isinstance(shape, AttentionShape)
    scale = shape.head_dim**-0.5
    if shape.kept_slots is None:
        return cached_attention(*arrays, scale=scale, implementation=implementation)
    return block_sparse_attention(*arrays, block_size=shape.block_size, scale=scale, implementation=implementation)
