"""What `implementation="auto"` means: the implementation that was measured to be the fastest for this device, dtype and shape.

The measurements are `measured.json`, which `python -m experiments.run tune` fills. A device or dtype that is not in it takes the reference;
so does a shape, unless it lies between two for which the kernel is the faster, and a process with several devices. The choice is made while
a call is traced, from static values; a model's layers are traced once a process, so a table that is rewritten later counts for what has
other shapes or settings.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.kernels.buckets import Bucket, between, bucket
from specjax.kernels.shapes import SHAPE_TYPES, Shape
from specjax.kernels.shared_memory import TooMuchSharedMemory
from specjax.kernels.triton_call import what_is_missing
from specjax.kernels.tuning import Tuning

PATH = Path(__file__).parent / "measured.json"
_KEYS = {"device", "op", "dtype", "shape", "implementation", "us", "reference_us"}
# By device, operation and dtype, and then by rounded shape.
Table = Mapping[tuple[str, str, str], Mapping[Bucket, str]]


def read_table(path: Path = PATH) -> Table:
    """The fastest implementation by device, operation, dtype and rounded shape.

    Of shapes that are rounded alike the one stands for all for which the kernel gains the least.

    Args:
        path: A JSON list of rows `{device, op, dtype, shape, implementation, us, reference_us}`; `implementation` is the fastest, with how
            it cuts its work behind an `@` if that was measured too, `us` its time in microseconds beside the reference's.

    Raises:
        ValueError: A row with other keys, an unknown operation or sizes that it does not have.
    """
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read(path: Path, changed_ns: int) -> Table:
    del changed_ns  # a file that was rewritten is read again
    table: dict[tuple[str, str, str], dict[Bucket, tuple[float, str]]] = {}
    for row in json.loads(path.read_text(encoding="utf-8")):
        if not isinstance(row, dict) or set(row) != _KEYS:
            raise ValueError(f"{path.name}: a row must have the keys {sorted(_KEYS)}, got {row!r}")
        if row["op"] not in SHAPE_TYPES:
            raise ValueError(f"{path.name}: op must be one of {sorted(SHAPE_TYPES)}, got {row['op']!r}")
        if row["implementation"].partition("@")[0] not in ("reference", "triton"):
            raise ValueError(f"{path.name}: implementation must be 'reference' or 'triton', got {row['implementation']!r}")
        try:
            shape = SHAPE_TYPES[row["op"]](**row["shape"])
        except TypeError as error:
            raise ValueError(f"{path.name}: {row['shape']!r} is no shape of {row['op']}: {error}") from None
        known, found = (
            table.setdefault((row["device"], row["op"], row["dtype"]), {}),
            (row["us"] / row["reference_us"], row["implementation"]),
        )
        known[bucket(shape)] = max(found, known.get(bucket(shape), found))
    return {key: {shape: implementation for shape, (_, implementation) in known.items()} for key, known in table.items()}


def fastest(shape: Shape, dtype: Any, *, table: Table | None = None) -> str:
    """What the table prefers here, `"reference"` if that cannot run or is not known; never raises for want of a device or a package.

    A shape that was not measured takes what its neighbours on both sides agree on: see `between`.

    With several devices it is the reference: arrays may be sharded, and of a kernel's arguments XLA would gather all of every one on every
    device.

    Args:
        shape: Of the call.
        dtype: Of what is read.
        table: `None` reads the one that comes along.

    Returns:
        `"reference"`, `"triton"`, or `"triton@..."`.
    """
    table = read_table() if table is None else table
    if not table:  # and so nothing asks JAX for its devices before it must
        return "reference"
    devices = jax.devices()
    if len(devices) > 1:
        return "reference"
    known, own = table.get((devices[0].device_kind, shape.op, jnp.dtype(dtype).name), {}), bucket(shape)
    choice = known[own] if own in known else between(known, own)
    return choice if choice == "reference" or what_is_missing() is None else "reference"


def check_implementation(op: str, implementation: str, implementations: tuple[str, ...], *, tuning: type[Tuning] | None = None) -> None:
    """Refuses what is no implementation of an operation.

    Args:
        op: Its name.
        implementation: What was asked for.
        implementations: What there is.
        tuning: What may stand behind `"triton@"`; `None` is nothing.

    Raises:
        ValueError: Unknown, or a tuning that cannot be.
    """
    name, at, text = implementation.partition("@")
    if name not in implementations or (at and (name != "triton" or tuning is None)):
        raise ValueError(f"{op}: implementation must be one of {implementations}, got {implementation!r}")
    if at and tuning is not None:
        try:
            tuning.of_text(text)
        except ValueError as error:
            raise ValueError(f"{op}: {error}") from None


def kernel_choice(implementation: str, shape: Shape, dtype: Any) -> tuple[bool, str]:
    """Whether the Triton kernel runs, of `"auto"` on CUDA devices alone, and what stands behind the `@`: how its work is cut.

    Args:
        implementation: `"auto"`, `"triton"` or `"triton@..."`; all others run no kernel. Where the table says how to cut the work,
            `"triton"` does so too.
        shape: Of the call.
        dtype: Of what is read.
    """
    name, at, cut = implementation.partition("@")
    if name not in ("auto", "triton") or at:
        return name == "triton", cut
    known, _, cut = fastest(shape, dtype).partition("@")
    return "triton" in (name, known), cut


def dispatch(
    implementation: str,
    shape: Shape,
    dtype: Any,
    *,
    triton: Callable[..., Any],
    reference: Callable[..., Any],
    arrays: tuple[Any, ...],
    tuning: type[Tuning] | None = None,
) -> Any:
    """Runs one of two functions of the same arrays.

    The Triton kernel of `"auto"` has the reference's derivative, and on other platforms than CUDA the reference runs in its place.

    Args:
        implementation: `"auto"`, `"reference"`, `"triton"`, or with `tuning` `"triton@..."`; see `kernel_choice`.
        shape: What the table knows the call by.
        dtype: Of what is read.
        triton: The kernel.
        reference: The reference.
        arrays: Their positional arguments: pytrees of arrays.
        tuning: What stands behind the `@`, which the kernel then takes as its `tuning`.

    Returns:
        What the function returns.
    """
    runs, cut = kernel_choice(implementation, shape, dtype)
    if not runs:
        return reference(*arrays)
    if cut and tuning is not None:
        triton = functools.partial(triton, tuning=tuning.of_text(cut))
    if implementation != "auto":
        return in_place_of(reference, triton)(*arrays)
    return lax.platform_dependent(*arrays, cuda=in_place_of(reference, where_it_fits(triton, reference)), default=reference)


def in_place_of(reference: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` where JAX runs it as it is; under `vmap`, and for derivatives, `reference`."""
    return with_derivative_of(reference, with_batches_of(reference, kernel))


def where_it_fits(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, or `reference` where the kernel takes more shared memory than the device has.

    A cut that was measured stands for shapes of the same powers of two, some of which need larger tiles.
    """

    def run(*arrays: Any) -> Any:
        try:
            return kernel(*arrays)
        except TooMuchSharedMemory:
            return reference(*arrays)

    return run


def with_derivative_of(reference: Callable[..., Any], fast: Callable[..., Any]) -> Callable[..., Any]:
    """`fast` with the derivative of `reference`, in forward and in reverse mode: what a kernel lacks, and a loop whose end is traced."""
    function = jax.custom_jvp(fast)
    function.defjvp(lambda arrays, tangents: (function(*arrays), jax.jvp(reference, arrays, tangents)[1]))
    return function


def with_batches_of(reference: Callable[..., Any], fast: Callable[..., Any]) -> Callable[..., Any]:
    """`fast`, which `jax.vmap` knows nothing of; where it maps, `reference` runs."""
    # Of arrays alone: JAX would hand the reference what a kernel's other arguments have as defaults.
    function = jax.custom_batching.custom_vmap(lambda *arrays: fast(*arrays))

    @function.def_vmap
    def mapped(axis_size: int, is_mapped: Sequence[Any], *arrays: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda flag: 0 if flag else None, tuple(is_mapped))
        out = jax.vmap(reference, in_axes=axes, axis_size=axis_size)(*arrays)
        return out, jax.tree.map(lambda _: True, out)

    return function
