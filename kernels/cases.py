"""A call of each operation that has a kernel, from its shape alone: what tests, tuning and benchmarks run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.block_selection import block_selection
from specjax.kernels.block_sparse_attention import block_sparse_attention
from specjax.kernels.cached_attention import cached_attention
from specjax.kernels.expert_choice import expert_choice
from specjax.kernels.expert_products import ExpertTuning, expert_products, without_kernel
from specjax.kernels.expert_products.triton_launch import expert_products_triton
from specjax.kernels.few_row_attention import ListedBlocks, TuningConfig, few_row_attention
from specjax.kernels.gated_unit import GatedUnit
from specjax.kernels.gathered_ffn import gathered_ffn
from specjax.kernels.largest import largest
from specjax.kernels.low_rank_argmax import low_rank_argmax
from specjax.kernels.shapes import (
    AttentionShape,
    ChoiceShape,
    ExpertShape,
    GatheredShape,
    LargestShape,
    LowRankShape,
    SelectionShape,
    Shape,
)

_MIXTURE: dict[str, Any] = dict(activation=GatedUnit(), gate_up_bias=None, down_bias=None)


def arguments(shape: Shape, dtype: Any, rng: jax.Array) -> tuple[jax.Array, ...]:
    """Random arrays of a full cache, of blocks chosen by lot, of a head, of experts or channels chosen by lot.

    Args:
        shape: The sizes.
        dtype: Of all floating-point arrays.
        rng: A key.
    """
    first, second, third, fourth = jax.random.split(rng, 4)
    if isinstance(shape, LowRankShape):
        sizes = (shape.rows, shape.hidden), (shape.rank, shape.hidden), (shape.vocab, shape.rank)
        return tuple(jax.random.normal(key, size, dtype) for key, size in zip((first, second, third), sizes, strict=True))
    if isinstance(shape, ExpertShape):
        return _mixture(shape, dtype, rng)
    if isinstance(shape, ChoiceShape):
        return (jax.random.normal(first, (shape.rows, shape.experts)),)
    if isinstance(shape, LargestShape):
        return (jnp.abs(jax.random.normal(first, (shape.rows, shape.size), dtype)).astype(jnp.float32),)
    if isinstance(shape, GatheredShape):
        return _network(shape, dtype, rng)
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


def _mixture(shape: ExpertShape, dtype: Any, rng: jax.Array) -> tuple[jax.Array, ...]:
    """Weights of the scale that trained ones have: activations stay of order 1."""
    first, second, third, fourth = jax.random.split(rng, 4)
    x = jax.random.normal(first, (shape.rows, shape.hidden), dtype)
    scores = jax.random.normal(second, (shape.rows, shape.experts))
    weights, experts = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), shape.choices)
    gate_up = jax.random.normal(third, (shape.experts, shape.hidden, 2, shape.ffn), dtype) * jnp.asarray(shape.hidden**-0.5, dtype)
    down = jax.random.normal(fourth, (shape.experts, shape.ffn, shape.hidden), dtype) * jnp.asarray(shape.ffn**-0.5, dtype)
    return x, experts, weights / weights.sum(axis=-1, keepdims=True), gate_up, down


def _network(shape: GatheredShape, dtype: Any, rng: jax.Array) -> tuple[jax.Array, ...]:
    first, second, third, fourth, fifth = jax.random.split(rng, 5)
    x = jax.random.normal(first, (shape.groups, shape.rows, shape.hidden), dtype)
    activated = jax.nn.silu(jax.random.normal(second, (shape.groups, shape.rows, shape.ffn), dtype))
    drawn = jax.random.uniform(third, (shape.groups, shape.ffn))
    channels = jnp.sort(jax.lax.top_k(drawn, shape.kept)[1], axis=-1).astype(jnp.int32)
    up = jax.random.normal(fourth, (shape.ffn, shape.hidden), dtype) * jnp.asarray(shape.hidden**-0.5, dtype)
    down = jax.random.normal(fifth, (shape.ffn, shape.hidden), dtype) * jnp.asarray(shape.kept**-0.5, dtype)
    return x, activated, channels, up, down


def run(shape: Shape, arrays: tuple[jax.Array, ...], implementation: str, *, tuning: TuningConfig | ExpertTuning | None = None) -> Any:
    """Calls the operation.

    Args:
        shape: The sizes.
        arrays: From `arguments`.
        implementation: Passed on; of a mixture of experts `"reference"` is what XLA is fastest with, `"auto"` without the kernel.
        tuning: How few-row attention or a mixture of experts cuts its work; for `"triton"` alone.

    Raises:
        ValueError: A `tuning` for anything else.
    """
    if isinstance(tuning, ExpertTuning) and isinstance(shape, ExpertShape) and implementation == "triton":
        return expert_products_triton(*arrays, **_MIXTURE, may_skip=False, tuning=tuning)
    if isinstance(tuning, TuningConfig) and isinstance(shape, AttentionShape) and implementation == "triton":
        listed = None if shape.kept_slots is None else ListedBlocks(arrays[4], arrays[5], None, block_size=shape.block_size)
        return few_row_attention(*arrays[:4], scale=shape.head_dim**-0.5, listed=listed, tuning=tuning)
    if tuning is not None:
        raise ValueError(f"{tuning} is not for {shape.op} as {implementation!r}")
    if isinstance(shape, ExpertShape):
        if implementation == "reference":
            implementation = without_kernel(shape.rows * shape.choices, shape.experts)
        return expert_products(*arrays, **_MIXTURE, implementation=implementation)
    if isinstance(shape, ChoiceShape):
        return expert_choice(arrays[0], choices=shape.choices, normalise=True, implementation=implementation)
    if isinstance(shape, GatheredShape):
        return gathered_ffn(*arrays, unit=GatedUnit(), implementation=implementation)
    if isinstance(shape, LargestShape):
        return largest(arrays[0], shape.chosen, implementation=implementation)
    if isinstance(shape, LowRankShape):
        return low_rank_argmax(*arrays, implementation=implementation)
    if isinstance(shape, SelectionShape):
        return block_selection(*arrays, head_blocks=1, max_chosen=shape.chosen, implementation=implementation)
    assert isinstance(shape, AttentionShape)
    scale = shape.head_dim**-0.5
    if shape.kept_slots is None:
        return cached_attention(*arrays, scale=scale, implementation=implementation)
    return block_sparse_attention(*arrays, block_size=shape.block_size, scale=scale, implementation=implementation)
