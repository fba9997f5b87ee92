"""Chosen channels of a feed-forward network in two launches: up with the activation, then down, in parts that XLA adds up in their order.

Reads the chosen rows of `up` and `down` once, in pieces of 256 bytes and more, and writes no copy of them, where XLA writes and reads one.
Aims at the memory's bandwidth. bfloat16, float16 and float32; up to 64 tokens that share their channels. Results repeat bit for bit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.gated_unit import GatedUnit
from specjax.kernels.triton_call import added, power_of_two, triton_call

MAX_ROWS = 64
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# Two programs for each of an H200's 132 multiprocessors.
_PROGRAMS = 264
_BLOCK_O, _BLOCK_K = 128, 64


def serves(shape: tuple[int, ...]) -> bool:
    """Whether the kernels are for tokens `[G,T,D]` of such a shape."""
    return shape[1] <= MAX_ROWS


def gathered_ffn_triton(
    x: jax.Array,
    activated: jax.Array,
    channels: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    unit: GatedUnit,
    up_bias: jax.Array | None,
) -> jax.Array:
    """See `specjax.kernels.gathered_ffn.gathered_ffn`.

    Raises:
        ValueError: Dtypes that the kernels were not written for, or no device or package to run them.
    """
    if {array.dtype for array in (x, activated, up, down)} - {jnp.dtype(dtype) for dtype in _DTYPES}:
        raise ValueError(f"gathered_ffn: implementation 'triton' needs 16- or 32-bit floats, got {x.dtype}, {up.dtype}, {down.dtype}")
    (groups, rows, width), (_, kept), (ffn, outputs) = x.shape, channels.shape, down.shape
    itemsize = up.dtype.itemsize
    sizes: dict[str, Any] = dict(NUM_ROWS=rows, KEPT=kept, BLOCK_M=max(16, power_of_two(rows)))
    block_n = 32 if groups * -(-kept // 32) >= _PROGRAMS else 16
    block_d, block_k = (256 if rows <= 16 else 128) * 2 // itemsize, _BLOCK_K * 2 // itemsize
    (inner,) = triton_call(
        "gathered_ffn",
        "chosen_up",
        x,
        activated,
        channels,
        up,
        up if up_bias is None else up_bias,  # or what is not read
        out_shapes=[jax.ShapeDtypeStruct((groups, rows, kept), x.dtype)],
        grid=(-(-kept // block_n), groups),
        constants=sizes
        | dict(WIDTH=width, FFN=ffn, HAS_BIAS=up_bias is not None, IS_CLAMPED=unit.limit is not None, LIMIT=float(unit.limit or 0))
        | dict(BLOCK_N=block_n, BLOCK_D=block_d),
        num_warps=4,
        num_stages=4,
        shared_bytes=_shared_bytes(sizes["BLOCK_M"], block_n, block_d, stages=4, itemsize=max(itemsize, x.dtype.itemsize)),
    )
    tiles = -(-outputs // _BLOCK_O)
    num_parts = max(1, min(_PROGRAMS // (groups * tiles), -(-kept // _BLOCK_K)))
    (parts,) = triton_call(
        "gathered_ffn",
        "chosen_down",
        inner,
        channels,
        down,
        out_shapes=[jax.ShapeDtypeStruct((groups, num_parts, rows, outputs), jnp.float32)],
        grid=(tiles, num_parts, groups),
        constants=sizes | dict(WIDTH=outputs, PARTS=num_parts, BLOCK_N=_BLOCK_O, BLOCK_K=block_k),
        num_warps=4,
        num_stages=5,  # of an indirect load Triton halves the stages
        shared_bytes=_shared_bytes(sizes["BLOCK_M"], _BLOCK_O, block_k, stages=5, itemsize=max(itemsize, x.dtype.itemsize)),
    )
    return added(parts, axis=1).astype(x.dtype)


def _shared_bytes(rows: int, columns: int, depth: int, *, stages: int, itemsize: int) -> int:
    """At most: tiles in flight, the numbers of their channels, and the sums that threads exchange."""
    return stages * depth * ((rows + columns) * itemsize + 4) + 4 * rows * columns
