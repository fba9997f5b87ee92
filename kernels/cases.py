"""A call of each operation that has a kernel, from its shape alone: what tests, tuning and benchmarks run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.block_selection import block_selection
from specjax.kernels.block_sparse_attention import block_sparse_attention
from specjax.kernels.cached_attention import cached_attention
from specjax.kernels.few_row_attention import TuningConfig
from specjax.kernels.few_row_linear import Normed, few_row_linear
from specjax.kernels.few_row_linear.triton_launch import LinearTuning
from specjax.kernels.low_rank_argmax import low_rank_argmax
from specjax.kernels.rope_and_write import Heads, rope_and_write
from specjax.kernels.shapes import AttentionShape, LinearShape, LowRankShape, RotaryShape, SelectionShape, Shape
from specjax.kernels.tuning import Tuning

_EPSILON = 1e-6
_MAX_SHARED_BYTES = 227 * 1024


def arguments(shape: Shape, dtype: Any, rng: jax.Array) -> tuple[Any, ...]:
    """Random arrays of a full cache, of blocks chosen by lot, of a head, of a linear layer, or of new rows and an empty cache.

    The first is what a loop of calls hands on; all others of one set may come from memory.

    Args:
        shape: The sizes.
        dtype: Of all floating-point arrays.
        rng: A key.
    """
    first, second, third, fourth = jax.random.split(rng, 4)
    if isinstance(shape, LowRankShape):
        sizes = (shape.rows, shape.hidden), (shape.rank, shape.hidden), (shape.vocab, shape.rank)
        return tuple(jax.random.normal(key, size, dtype) for key, size in zip((first, second, third), sizes, strict=True))
    if isinstance(shape, LinearShape):
        columns = (2, shape.columns) if shape.gated else (shape.columns,)
        x = jax.random.normal(first, (shape.rows, shape.inner), dtype)
        weight = jax.random.normal(second, (shape.inner, *columns), dtype) * shape.inner**-0.5
        # What is not normed goes back to the residual stream.
        return x, weight, jax.random.normal(third, (shape.inner,) if shape.normed else (shape.rows, shape.columns), dtype)
    heads = shape.kv_heads * shape.group
    if isinstance(shape, RotaryShape):
        batch = max(1, shape.rows // 16)
        rows, slots = shape.rows // batch, 256
        qkv = jax.random.normal(first, (batch, rows, shape.kv_heads, shape.group + 2, shape.head_dim), dtype)
        cos, sin = (jax.random.normal(key, (batch, rows, shape.head_dim // 2)) for key in (second, third))
        cache = jnp.zeros((batch, shape.kv_heads, slots, shape.head_dim), dtype)
        return (qkv, cache, cache), cos, sin, jnp.full((batch,), slots // 2, jnp.int32)
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


def run(shape: Shape, arrays: tuple[Any, ...], implementation: str) -> Any:
    """Calls the operation.

    Args:
        shape: The sizes.
        arrays: From `arguments`.
        implementation: Passed on.
    """
    if isinstance(shape, LowRankShape):
        return low_rank_argmax(*arrays, implementation=implementation)
    if isinstance(shape, SelectionShape):
        return block_selection(*arrays, head_blocks=1, max_chosen=shape.chosen, implementation=implementation)
    if isinstance(shape, LinearShape):
        x, weight, last = arrays
        if shape.normed:
            return few_row_linear(Normed(x, last, _EPSILON), weight, gated=shape.gated, implementation=implementation)
        return few_row_linear(x, weight, residual=last, gated=shape.gated, implementation=implementation)
    if isinstance(shape, RotaryShape):
        (qkv, keys, values), cos, sin, start = arrays
        return rope_and_write(Heads(qkv=qkv, cos=cos, sin=sin), keys, values, start, implementation=implementation)
    assert isinstance(shape, AttentionShape)
    scale = shape.head_dim**-0.5
    if shape.kept_slots is None:
        return cached_attention(*arrays, scale=scale, implementation=implementation)
    return block_sparse_attention(*arrays, block_size=shape.block_size, scale=scale, implementation=implementation)


def takes(shape: Shape, dtype: Any, implementation: str) -> bool:
    """Whether the operation of a shape can be cut as the name of an implementation says; a name that says nothing of it fits all.

    Args:
        shape: The sizes.
        dtype: Of all floating-point arrays.
        implementation: A name.
    """
    _, at, text = implementation.partition("@")
    kinds: dict[type, type[Tuning]] = {LinearShape: LinearTuning, AttentionShape: TuningConfig}
    kind = kinds.get(type(shape))
    if not at or kind is None:
        return not at
    try:
        tuning = kind.of_text(text)
    except ValueError:
        return False
    if isinstance(shape, LinearShape) and isinstance(tuning, LinearTuning):
        shared_bytes = tuning.shared_bytes(num_rows=shape.rows, itemsize=jnp.dtype(dtype).itemsize, gated=shape.gated)
        return shared_bytes <= _MAX_SHARED_BYTES and (tuning.tensor_cores == 1 or shape.rows == 1)
    return True
