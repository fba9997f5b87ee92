"""The k largest of many numbers in no particular order: what channels of a network, or candidates of a head, are chosen by."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from specjax.kernels.largest.reference import radix_largest, sorted_largest
from specjax.kernels.largest.triton_launch import largest_triton, serves
from specjax.kernels.measured import check_implementation, kernel_choice, with_batches_of
from specjax.kernels.shapes import LargestShape

IMPLEMENTATIONS = ("auto", "reference", "triton")


def largest(values: jax.Array, k: int, *, implementation: str = "auto") -> jax.Array:
    """Where the k largest of `values` stand: as a set the columns of `jax.lax.top_k`, but in any order.

    Of equal values those in front are taken. NaN counts as larger than all others, and 0 and -0 are equal.

    Args:
        values: `[..., V]` float32, V below 2^24.
        k: Static, from 1 to V.
        implementation: `"reference"` selects by digits; `"triton"` does so in one launch, for V up to 16384 (others are the reference's).
            `"auto"` takes `top_k` on a CPU, and elsewhere what was measured to be the fastest: see `specjax.kernels.measured`.

    Returns:
        `[..., k]` int32 columns, each once. On a CPU they are in `top_k`'s order, elsewhere ascending.

    Raises:
        ValueError: Another dtype, a k outside 1 to V, an unknown implementation, or one that cannot run here.
    """
    check_implementation("largest", implementation, IMPLEMENTATIONS)
    if values.dtype != jnp.float32 or values.ndim == 0:
        raise ValueError(f"values must be float32 [..., V], got {values.dtype} of shape {list(values.shape)}")
    if not 1 <= k <= values.shape[-1]:
        raise ValueError(f"k must be from 1 to V = {values.shape[-1]}, got {k}")
    if k == values.shape[-1]:
        return jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), values.shape)
    reference = functools.partial(radix_largest, k=k)
    kernel = with_batches_of(reference, functools.partial(largest_triton, k=k))
    if implementation == "triton" and serves(values.shape):
        return kernel(values)
    if implementation != "auto":
        return reference(values)
    # A CPU's top_k keeps a heap of k: it reads the numbers once.
    branches = {"cpu": functools.partial(sorted_largest, k=k), "default": reference}
    shape = LargestShape(rows=math.prod(values.shape[:-1]), size=values.shape[-1], chosen=k)
    if serves(values.shape) and kernel_choice("auto", shape, values.dtype)[0]:
        branches["cuda"] = kernel
    return jax.lax.platform_dependent(values, **branches)
