"""Rotating and writing in one launch, a program for each new row and key/value head; the cache is written where it lies.

Reads and writes a few kilobytes a row: the launch is all of its cost. The cache arrays are arguments that the results alias. Inside a
`while_loop` XLA then writes into the loop's own buffers, as it does for a `dynamic_update_slice`. If anything else read the old cache
after the call, XLA would copy it first: the numbers would still be right, and a layer would cost the time of copying its cache. The model
reads only what was written, and a test on the GPU looks for such copies in the compiled loop. bfloat16 and float32; norms over each head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.rope_and_write.heads import Heads
from specjax.kernels.triton_call import power_of_two, triton_call

MAX_ROWS = 64
_DTYPES = (jnp.bfloat16, jnp.float32)


def why_not(heads: Heads, keys: jax.Array, values: jax.Array) -> str | None:
    """What the kernel was not written for, as a sentence, or `None`."""
    if heads.clip is not None:
        return "implementation 'triton' does not clip queries, keys and values"
    if heads.query_scale is not None and heads.query_scale.shape[0] != heads.qkv.shape[-1]:
        return "implementation 'triton' norms each head by itself, not all of them together"
    if not (heads.qkv.dtype == keys.dtype == values.dtype) or keys.dtype not in _DTYPES:
        dtypes = f"{heads.qkv.dtype}, {keys.dtype} and {values.dtype}"
        return f"implementation 'triton' needs new rows and cache of one dtype, bfloat16 or float32, got {dtypes}"
    return None


def rope_and_write_triton(heads: Heads, keys: jax.Array, values: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `specjax.kernels.rope_and_write.rope_and_write`.

    Raises:
        ValueError: What `why_not` says, or no device or package to run it.
    """
    refused = why_not(heads, keys, values)
    if refused is not None:
        raise ValueError(f"rope_and_write: {refused}")
    batch, num_rows, num_kv_heads, both, head_dim = heads.qkv.shape
    group, normed = both - 2, heads.query_scale is not None
    unread = heads.cos  # stands where the kernel reads nothing
    scales = tuple(unread if scale is None else scale for scale in (heads.query_scale, heads.key_scale))
    query = jax.ShapeDtypeStruct((batch, num_rows, num_kv_heads * group, head_dim), heads.qkv.dtype)
    arrays = heads.qkv, heads.cos, heads.sin, start, *scales, keys, values
    results = triton_call(
        "rope_and_write",
        "rotate_and_write",
        *arrays,
        num_rows,
        keys.shape[2],
        out_shapes=[query, *(jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (keys, values))],
        grid=(batch * num_rows, num_kv_heads),
        constants=dict(
            EPSILON=float(heads.epsilon),
            NORMED=normed,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HALF=head_dim // 2,
            BLOCK_G=power_of_two(group),
            BLOCK_H=power_of_two(head_dim // 2),
        ),
        num_warps=2,
        num_stages=1,
        aliases={6: 1, 7: 2},
    )
    return results[0], results[1], results[2]
