"""The arg-max of a low-rank LM head without its scores: XLA's `W_down h`, a program for each 128 tokens, and a merge.

Reads both factors once and writes two numbers a row and part of the vocabulary, where the reference writes and reads `[M,V]` float32. Aims
at the memory's bandwidth. bfloat16, float16 and float32; M up to 64. The parts are merged in the vocabulary's order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.low_rank_argmax.reference import inner_product
from specjax.kernels.triton_call import power_of_two, triton_call

MAX_ROWS = 64
_BLOCK_V = 128
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def why_not(hidden: jax.Array, up: jax.Array) -> str | None:
    """What the kernels were not written for, as a sentence, or `None`."""
    if hidden.dtype != up.dtype or up.dtype not in _DTYPES:
        return f"implementation 'triton' needs float32, bfloat16 or float16 throughout, got {hidden.dtype}, {up.dtype}"
    return None


def low_rank_argmax_triton(hidden: jax.Array, down: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `specjax.kernels.low_rank_argmax.low_rank_argmax`.

    Raises:
        ValueError: More than 64 rows, dtypes that the kernel was not written for, or no device or package to run it.
    """
    num_rows, (vocab_size, rank) = hidden.shape[0], up.shape
    if num_rows > MAX_ROWS:
        raise ValueError(f"low_rank_argmax: implementation 'triton' is for up to {MAX_ROWS} rows, got {num_rows}")
    refused = why_not(hidden, up)
    if refused is not None:
        raise ValueError(f"low_rank_argmax: {refused}")
    num_parts = -(-vocab_size // _BLOCK_V)
    sizes = dict(NUM_ROWS=num_rows, VOCAB=vocab_size, RANK=rank, BLOCK_M=max(16, power_of_two(num_rows)), BLOCK_V=_BLOCK_V)
    part_shape = (num_rows, num_parts)
    block_r, stages = 128 // up.dtype.itemsize, 4
    tile = block_r * (sizes["BLOCK_M"] + _BLOCK_V) * up.dtype.itemsize
    part_scores, part_tokens = triton_call(
        "low_rank_argmax",
        "best_of_part",
        inner_product(hidden, down),
        up,
        out_shapes=[jax.ShapeDtypeStruct(part_shape, dtype) for dtype in (jnp.float32, jnp.int32)],
        grid=(num_parts,),
        constants=sizes | dict(BLOCK_R=block_r),
        num_warps=4,
        num_stages=stages,
        shared_bytes=stages * tile + 4 * sizes["BLOCK_M"] * _BLOCK_V,
    )
    scores, tokens = triton_call(
        "low_rank_argmax",
        "best_of_parts",
        part_scores,
        part_tokens,
        out_shapes=[jax.ShapeDtypeStruct((num_rows,), dtype) for dtype in (jnp.float32, jnp.int32)],
        grid=(num_rows,),
        constants=dict(NUM_PARTS=num_parts, BLOCK_P=power_of_two(num_parts)),
        num_warps=4,
        num_stages=1,
    )
    return tokens, scores
