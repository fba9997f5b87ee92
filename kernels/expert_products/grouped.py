"""Rows grouped by expert: a loop over blocks of rows that share an expert, each one dense product. Plain XLA.

The (row, expert) pairs are sorted by expert, and each expert's pairs are padded to whole blocks, so that shapes are static and no pair is
ever dropped. The loop runs only over the blocks that hold pairs: at most `M * C / block + E`, and an expert that nobody chose is not read.
The idea is MegaBlocks' (arXiv:2211.15841).

In bfloat16 on a CPU, JAX 0.10.2 converts all experts to float32 before the loop, chosen or not (0.12 does not): measured at E = 128, C = 8,
D = 512, F = 192, one row: 46 ms and 152 MB of scratch, where float32 takes 0.5 ms and 1 MB. Slices behind an optimisation barrier, gathers
and bitcasts to integers were tried and do not prevent it. Convert such a model to float32, or run it under Python 3.12.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from specjax.kernels.precision import full_precision
from specjax.kernels.varying import varying_as

_LARGEST_BLOCK = 128


def expert_products_grouped(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    gate_up_bias: jax.Array | None,
    down_bias: jax.Array | None,
    may_skip: bool,
) -> jax.Array:
    """See `specjax.kernels.expert_products.expert_products`."""
    num_rows, width = x.shape[0], down.shape[2]
    num_choices, num_experts = experts.shape[1], gate_up.shape[0]
    num_pairs = num_rows * num_choices
    block = _block_size(num_pairs, num_experts)
    max_blocks = -(-num_pairs // block) + min(num_experts, num_pairs)
    precision = full_precision(x)

    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)  # pairs by expert
    counts = jnp.zeros((num_experts,), jnp.int32).at[flat].add(1)
    blocks_of = -(-counts // block)
    last_block = jnp.cumsum(blocks_of)
    first_slot = (last_block - blocks_of) * block
    rank = jnp.arange(num_pairs, dtype=jnp.int32) - (jnp.cumsum(counts) - counts)[flat[order]]  # within the expert
    slot = first_slot[flat[order]] + rank
    if may_skip:  # pairs of no expert stand last, and get no slot
        slot = jnp.where(flat[order] == num_experts, max_blocks * block, slot)
    pair_of_slot = jnp.full((max_blocks * block,), num_pairs, jnp.int32).at[slot].set(order.astype(jnp.int32))
    slot_of_pair = jnp.zeros((num_pairs,), jnp.int32).at[order].set(slot)
    expert_of_block = jnp.searchsorted(last_block, jnp.arange(max_blocks, dtype=jnp.int32), side="right").astype(jnp.int32)

    def run_block(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, out = carry
        expert = expert_of_block[index]
        pairs = lax.dynamic_slice_in_dim(pair_of_slot, index * block, block)
        rows = x[jnp.minimum(pairs // num_choices, num_rows - 1)]  # a padding slot repeats a row; nobody reads its result
        inner = jnp.einsum("md,dcf->mcf", rows, gate_up[expert].astype(x.dtype), precision=precision)
        if gate_up_bias is not None:
            inner = inner + gate_up_bias[expert].astype(x.dtype)
        result = jnp.einsum("mf,fd->md", activation(inner[:, 0], inner[:, 1]), down[expert].astype(x.dtype), precision=precision)
        if down_bias is not None:
            result = result + down_bias[expert].astype(x.dtype)
        return index + 1, lax.dynamic_update_slice_in_dim(out, result, index * block, axis=0)

    empty = varying_as(jnp.zeros((max_blocks * block, width), x.dtype), x, experts, gate_up, gate_up_bias, down, down_bias)
    _, results = lax.while_loop(lambda carry: carry[0] < last_block[-1], run_block, (jnp.int32(0), empty))
    picked = results[slot_of_pair].reshape(num_rows, num_choices, width)
    weighted = picked.astype(jnp.float32) * weights[:, :, None]
    if may_skip:
        weighted = jnp.where((experts == num_experts)[:, :, None], 0.0, weighted)
    return weighted.sum(axis=1).astype(x.dtype)


def _block_size(num_pairs: int, num_experts: int) -> int:
    """The power of two at or above an expert's mean share, so that most experts take one or two blocks."""
    share = -(-num_pairs // num_experts)
    return min(_LARGEST_BLOCK, 1 << (share - 1).bit_length())
