"""Whether a multiprocessor has the shared memory that a compiled Triton kernel takes: CUDA says so only when the kernel is launched."""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax

# KiB that one program may have, by compute capability (CUDA programming guide, "Technical Specifications per Compute Capability").
_KIBIBYTES = {"7.0": 96, "7.2": 96, "7.5": 64, "8.0": 163, "8.6": 99, "8.7": 163, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
_COMPILING = threading.Lock()
_TRITON_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "bool": "i1"}


class TooMuchSharedMemory(ValueError):
    """A kernel takes more than the device has: its work must be cut into smaller tiles, or fewer of them be in flight."""


def shared_bytes_there(device: Any) -> int | None:
    """The shared memory that one program may have, or `None` where that is not known.

    Args:
        device: One of `jax.devices()`.
    """
    said = getattr(device, "shared_memory_per_block_optin", None)
    if isinstance(said, int):
        return said
    known = _KIBIBYTES.get(str(getattr(device, "compute_capability", "")))
    return None if known is None else known * 1024


def check_shared_memory(
    name: str,
    function: Any,
    arrays: Sequence[Any],
    *,
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int,
    at_most: int,
) -> None:
    """Refuses a kernel that would fail when it is launched, before anything runs.

    A kernel that might take too much is compiled for its bytes, which Triton keeps on disk; all others cost nothing.

    Args:
        name: Of the operation and the kernel, for the message.
        function: The kernel.
        arrays: Its arguments, results included: whatever has a `dtype`, and ints.
        constants: Its `constexpr` arguments.
        num_warps: Warps a program.
        num_stages: Loads that a loop keeps in flight.
        at_most: Bytes that it cannot exceed.

    Raises:
        TooMuchSharedMemory: It does not fit; with the bytes taken and there, and how the work is cut.
    """
    device = jax.devices()[0]
    there = shared_bytes_there(device)
    if there is None or at_most <= there:
        return
    options = dict(num_warps=num_warps, num_stages=num_stages)
    taken = compiled(function, arrays, constants, options, architecture=_architecture(device)).metadata.shared
    if taken > there:
        blocks = {key: value for key, value in constants.items() if key.startswith("BLOCK_")} | options
        raise TooMuchSharedMemory(
            f"{name} takes {taken} bytes of shared memory, and {device.device_kind} has {there} for a program: "
            f"choose smaller tiles or fewer stages than {', '.join(f'{key} {value}' for key, value in blocks.items())}"
        )


def compiled(function: Any, arrays: Sequence[Any], constants: Mapping[str, Any], options: Mapping[str, int], *, architecture: int) -> Any:
    """What Triton makes of a kernel; needs no device.

    Args:
        function: The kernel.
        arrays: Its arguments but constants: whatever has a `dtype`, and ints.
        constants: Its `constexpr` arguments.
        options: Of the compiler.
        architecture: 90 for compute capability 9.0.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = ["i32" if isinstance(array, int) else "*" + _TRITON_NAMES[array.dtype.name] for array in arrays]
    signature = dict(zip(function.arg_names, kinds, strict=False)) | dict.fromkeys(constants, "constexpr")
    aligned = {(index,): [["tt.divisibility", 16]] for index, kind in enumerate(kinds) if kind[0] == "*"}  # as jax-triton says of arrays
    source = ASTSource(function, signature=signature, constexprs=dict(constants), attrs=aligned)
    with _COMPILING, knobs.cache.scope():  # what is set is set for all threads
        if not knobs.cache.dir:  # jax-triton, once imported, leaves Triton without a folder for what it compiles, and that is an error here
            knobs.cache.dir = _folder().name
        return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(options))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    """For what this process compiles where Triton has no folder of its own."""
    return tempfile.TemporaryDirectory(prefix="specjax-triton-")


def _architecture(device: Any) -> int:
    return int(str(device.compute_capability).replace(".", ""))
