"""Scoring and choosing blocks in one launch: a program for each batch row and key/value head.

Reads the mean keys once, `B K NB H` numbers, and aims at the time of that and of 32 counts over NB scores in registers. bfloat16, float16
and float32; NB up to 16384, H from 16 to 256, up to 16 query heads a key/value head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.shared_memory import shared_bytes_there
from specjax.kernels.triton_call import power_of_two, triton_call

MAX_BLOCKS = 16384
_MAX_GROUP = 16
_MAX_IN_FLIGHT = 7  # tiles
_SHARED_BYTES = 163 * 1024  # an A100's, where a device does not say
_BESIDE_TILES = 20 * 1024  # for queries, and what threads exchange
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def why_not(query: jax.Array, means: jax.Array) -> str | None:
    """What the kernel was not written for, as a sentence, or `None`."""
    if query.dtype not in _DTYPES or means.dtype not in _DTYPES:
        return f"implementation 'triton' needs 16- or 32-bit floats, got {query.dtype} and {means.dtype}"
    (_, num_heads, head_dim), (_, num_kv_heads, num_blocks, _) = query.shape, means.shape
    if 16 <= head_dim <= 256 and num_blocks <= MAX_BLOCKS and num_heads // num_kv_heads <= _MAX_GROUP:
        return None
    return (
        f"implementation 'triton' needs H from 16 to 256, up to {MAX_BLOCKS} blocks and up to {_MAX_GROUP} query heads a key/value head, "
        f"got {head_dim}, {num_blocks} and {num_heads // num_kv_heads}"
    )


def block_selection_triton(
    query: jax.Array,
    means: jax.Array,
    first_tail: jax.Array,
    num_there: jax.Array,
    num_kept: jax.Array,
    *,
    head_blocks: int,
    max_chosen: int,
    group: str,
) -> tuple[jax.Array, jax.Array]:
    """See `specjax.kernels.block_selection.block_selection`.

    Raises:
        ValueError: What `why_not` says, or no device or package to run it.
    """
    refused = why_not(query, means)
    if refused is not None:
        raise ValueError(f"block_selection: {refused}")
    batch_size, num_kv_heads, num_blocks, head_dim = means.shape
    group_size = query.shape[1] // num_kv_heads
    shapes = [(batch_size, num_kv_heads, max_chosen), (batch_size, num_kv_heads)]
    out_shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    out_shapes.append(jax.ShapeDtypeStruct(means.shape[:3], jnp.float32))  # the scores, on their way from tiles to one vector
    constants = dict(GROUP=group_size, NUM_KV_HEADS=num_kv_heads, NUM_BLOCKS=num_blocks, HEAD_DIM=head_dim, MAX_CHOSEN=max_chosen)
    constants |= dict(
        HEAD_BLOCKS=head_blocks, IS_MEAN=group == "mean", BLOCK_J=64 if head_dim <= 128 else 32, BLOCK_H=power_of_two(head_dim)
    )
    constants |= dict(BLOCK_NB=power_of_two(num_blocks), BLOCK_C=power_of_two(max_chosen))
    columns, block_j, itemsize = constants["BLOCK_H"], constants["BLOCK_J"], max(query.dtype.itemsize, means.dtype.itemsize)
    tile_bytes = itemsize * columns * block_j
    # A program is alone on its multiprocessor: nothing but its own tiles in flight, one fewer than stages, hides how late memory answers.
    fitting = ((shared_bytes_there(jax.devices()[0]) or _SHARED_BYTES) - _BESIDE_TILES) // tile_bytes
    stages = 1 + min(_MAX_IN_FLIGHT, -(-num_blocks // block_j), fitting)
    block_ids, counts, _ = triton_call(
        "block_selection",
        "score_and_choose",
        query,
        means,
        first_tail,
        num_there,
        num_kept,
        out_shapes=out_shapes,
        grid=(batch_size * num_kv_heads,),
        constants=constants,
        num_warps=8 if num_blocks > 1024 else 4,
        num_stages=stages,
        shared_bytes=stages * tile_bytes + itemsize * columns * _MAX_GROUP + 8 * constants["BLOCK_NB"],
    )
    return block_ids, counts
