"""The k largest in one launch: a program a row, which holds all of the row's numbers in registers.

Reads the numbers once. Aims at the time of 16 counts over them, each of which finds two bits of the k-th largest, and of two prefix sums:
XLA takes more than a dozen launches for the same. float32, V up to 16384.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from specjax.kernels.triton_call import power_of_two, triton_call

MAX_SIZE = 16384


def serves(shape: tuple[int, ...]) -> bool:
    """Whether the kernel is for values `[..., V]` of such a shape."""
    return shape[-1] <= MAX_SIZE


def largest_triton(values: jax.Array, k: int) -> jax.Array:
    """See `specjax.kernels.largest.largest`; columns ascend.

    Raises:
        ValueError: No device or package to run it.
    """
    size, rows = values.shape[-1], math.prod(values.shape[:-1])
    (columns,) = triton_call(
        "largest",
        "choose_largest",
        jax.lax.stop_gradient(values).reshape(rows, size),
        out_shapes=[jax.ShapeDtypeStruct((rows, k), jnp.int32)],
        grid=(rows,),
        constants=dict(SIZE=size, CHOSEN=k, BLOCK_V=max(16, power_of_two(size))),
        num_warps=16 if size > 4096 else 4,
        num_stages=1,
    )
    return columns.reshape(*values.shape[:-1], k)
