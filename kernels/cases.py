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
from specjax.kernels.few_row_attention import TuningConfig
from specjax.kernels.few_row_linear import Normed, few_row_linear
from specjax.kernels.few_row_linear.triton_launch import LinearTuning
from specjax.kernels.gated_unit import GatedUnit
from specjax.kernels.gathered_ffn import gathered_ffn
from specjax.kernels.largest import largest
from specjax.kernels.low_rank_argmax import low_rank_argmax
from specjax.kernels.rope_and_write import Heads, rope_and_write
from specjax.kernels.shapes import (
    AttentionShape,
    ChoiceShape,
    ExpertShape,
    GatheredShape,
    LargestShape,
    LinearShape,
    LowRankShape,
    RotaryShape,
    SelectionShape,
    Shape,
)
from specjax.kernels.tuning import Tuning

_EPSILON = 1e-6
# What the numbers behind an `@` mean, by operation.
_TUNINGS: dict[str, type[Tuning]] = {
    "cached_attention": TuningConfig,
    "block_sparse_attention": TuningConfig,
    "few_row_linear": LinearTuning,
    "expert_products": ExpertTuning,
}


def arguments(shape: Shape, dtype: Any, rng: jax.Array) -> tuple[Any, ...]:
    """Random arrays of a full cache, of blocks, experts or channels chosen by lot, of a head, of a linear layer, or of new rows.

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
    if isinstance(shape, ExpertShape):
        return _mixture(shape, dtype, rng)
    if isinstance(shape, ChoiceShape):
        return (jax.random.normal(first, (shape.rows, shape.experts)),)
    if isinstance(shape, LargestShape):
        return (jnp.abs(jax.random.normal(first, (shape.rows, shape.size), dtype)).astype(jnp.float32),)
    if isinstance(shape, GatheredShape):
        return _network(shape, dtype, rng)
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


def run(shape: Shape, arrays: tuple[Any, ...], implementation: str) -> Any:
    """Calls the operation.

    Args:
        shape: The sizes.
        arrays: From `arguments`.
        implementation: Passed on; of a mixture of experts `"reference"` is what XLA is fastest with, `"auto"` without the kernel.
    """
    if isinstance(shape, ExpertShape):
        name = without_kernel(shape.rows * shape.choices, shape.experts) if implementation == "reference" else implementation
        return expert_products(*arrays, activation=GatedUnit(), implementation=name)
    if isinstance(shape, ChoiceShape):
        return expert_choice(*arrays, choices=shape.choices, normalise=True, implementation=implementation)
    if isinstance(shape, GatheredShape):
        return gathered_ffn(*arrays, unit=GatedUnit(), implementation=implementation)
    if isinstance(shape, LargestShape):
        return largest(*arrays, shape.chosen, implementation=implementation)
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


def takes(shape: Shape, implementation: str) -> bool:
    """Whether the operation of a shape can be cut as the name of an implementation says; a name that says nothing of it fits all.

    What a device's shared memory has to say of it comes out where it runs: see `specjax.kernels.shared_memory`.

    Args:
        shape: The sizes.
        implementation: A name.
    """
    _, at, text = implementation.partition("@")
    kind = _TUNINGS.get(shape.op)
    if not at or kind is None:
        return not at
    try:
        tuning = kind.of_text(text)
    except ValueError:
        return False
    return not isinstance(tuning, LinearTuning) or tuning.tensor_cores == 1 or (isinstance(shape, LinearShape) and shape.rows == 1)
