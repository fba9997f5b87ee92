"""Runs a Triton kernel on JAX arrays, through whichever version of jax-triton is installed.

jax-triton is imported where it is used: its import fails where JAX has no GPU support. It names the shapes of results `out_shape` up to 0.3
and `out_type` from 0.4 on.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.shared_memory import check_shared_memory
from specjax.kernels.varying import varying_as

# Their rule for dead code has another signature than JAX 0.12 calls: every `jit` around a kernel fails. 0.3.1 has none, and works.
_WITHOUT_JAX_0_12 = ((0, 4, 0), (0, 4, 1))


def triton_call(
    op: str,
    kernel: str,
    *arrays: jax.Array | int,
    out_shapes: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int,
    shared_bytes: int = 0,
    aliases: Mapping[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Launches `kernel(*arrays, *results, **constants)` for every place of `grid`.

    Args:
        op: The folder whose `triton.py` holds the kernel.
        kernel: Name of a `triton.jit` function there, whose pointers stand first, those of the results last among them.
        *arrays: What it reads: arrays, and ints, which stand in the kernel's arguments in their places.
        out_shapes: Of the results; what the kernel does not write is not defined.
        grid: Programs along up to three axes.
        constants: The `constexpr` arguments.
        num_warps: Warps a program.
        num_stages: Loads that a loop keeps in flight.
        shared_bytes: Of a program's shared memory, at most: what its loops keep in flight, and what its threads exchange. 0 where no tiles
            are kept, which fits every device.
        aliases: Arrays, by index, that results, by index, are written into; what the kernel does not write stays. XLA copies such an array
            first if it is read afterwards.

    Returns:
        The results.

    Raises:
        ValueError: jax-triton or a CUDA device is missing; the message says which.
        TooMuchSharedMemory: The kernel would not fit a multiprocessor.
    """
    missing = what_is_missing()
    if missing is not None:
        raise ValueError(missing)
    import jax_triton

    function = getattr(importlib.import_module(f"specjax.kernels.{op}.triton"), kernel)
    check_shared_memory(
        f"{op}: kernel {kernel!r}",
        function,
        (*arrays, *out_shapes),
        constants=constants,
        num_warps=num_warps,
        num_stages=num_stages,
        at_most=shared_bytes,
    )
    results = "out_type" if "out_type" in inspect.signature(jax_triton.triton_call).parameters else "out_shape"
    options = {results: tuple(out_shapes), "grid": grid, "num_warps": num_warps, "num_stages": num_stages}
    if aliases:
        options["input_output_aliases"] = dict(aliases)
    return varying_as(tuple(jax_triton.triton_call(*arrays, kernel=function, **options, **constants)), arrays)


def what_is_missing() -> str | None:
    """Why Triton kernels cannot run here, as a sentence, or `None` where they can."""
    platform = jax.default_backend()
    if platform not in ("gpu", "cuda"):
        return f"implementation 'triton' needs a CUDA device, and JAX computes on {platform!r} here: use 'auto' or 'reference'"
    try:
        import jax_triton
        import triton  # noqa: F401
    except ImportError as error:
        return f"implementation 'triton' needs jax-triton, which comes with specjax[gpu] and cannot be imported here: {error}"
    if jax.__version_info__ >= (0, 12) and jax_triton.__version_info__ in _WITHOUT_JAX_0_12:
        versions = f"jax-triton {jax_triton.__version__} and JAX {jax.__version__}"
        return f"implementation 'triton' cannot run with {versions}: install jax-triton 0.3.1"
    return None


def power_of_two(size: int) -> int:
    """The power of two at or above a size of at least 1: tiles have such sizes."""
    return 1 << (size - 1).bit_length()


def added(parts: jax.Array, *, axis: int = 0) -> jax.Array:
    """The sum over an axis, one part after another: of a sum over an axis XLA may choose the order."""
    return functools.reduce(jnp.add, [jax.lax.index_in_dim(parts, index, axis, keepdims=False) for index in range(parts.shape[axis])])
