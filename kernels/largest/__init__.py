"""The k largest of many numbers, in the order in which they stand: what channels of a network, or candidates of a head, are chosen by."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.largest.reference import in_chunks, radix_largest, selections, sorted_largest
from specjax.kernels.largest.triton_launch import largest_triton, serves
from specjax.kernels.measured import check_implementation, kernel_choice, with_batches_of
from specjax.kernels.shapes import LargestShape

IMPLEMENTATIONS = ("auto", "reference", "triton")


def largest(values: jax.Array, k: int, *, implementation: str = "auto") -> jax.Array:
    """Where the k largest of `values` stand: the columns of `jax.lax.top_k` as a set, ascending.

    Of equal values those in front are taken. NaN counts as larger than all others, and 0 and -0 are equal.

    Args:
        values: `[..., V]` float32, V below 2^24.
        k: Static, from 1 to V.
        implementation: `"reference"` selects by digits; `"triton"` does so in one launch, for V up to 16384 (others are the reference's).
            `"auto"` takes `top_k` on a CPU, and elsewhere what was measured to be the fastest (see `specjax.kernels.measured`), of many
            numbers in several steps (see `in_chunks`).

    Returns:
        `[..., k]` int32 columns, each once, ascending: on all platforms the same.

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
    values = jax.lax.stop_gradient(values)
    if implementation == "triton" and serves(values.shape):
        return _kernel(values, k)
    if implementation != "auto":
        return radix_largest(values, k)
    # A CPU's top_k keeps a heap of k: it reads the numbers once.
    branches: dict[str, Callable[..., Any]] = {
        "cpu": functools.partial(sorted_largest, k=k),
        "default": functools.partial(in_chunks, k=k, select=radix_largest),
    }
    if any(_kernel_is_fastest(shape, k) for shape in selections(values.shape, k)):
        branches["cuda"] = functools.partial(in_chunks, k=k, select=_fastest)
    return jax.lax.platform_dependent(values, **branches)


def _kernel_is_fastest(shape: tuple[int, ...], k: int) -> bool:
    known = LargestShape(rows=math.prod(shape[:-1]), size=shape[-1], chosen=k)
    return serves(shape) and kernel_choice("auto", known, jnp.float32)[0]


def _fastest(values: jax.Array, k: int) -> jax.Array:
    return _kernel(values, k) if _kernel_is_fastest(values.shape, k) else radix_largest(values, k)


def _kernel(values: jax.Array, k: int) -> jax.Array:
    return with_batches_of(functools.partial(radix_largest, k=k), functools.partial(largest_triton, k=k))(values)
