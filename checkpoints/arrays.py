"""Writes a tree of arrays leaf by leaf, and restores it batch by batch, so that neither needs a second tree's memory.

Orbax's partial save: <https://orbax.readthedocs.io/en/latest/>, `orbax.checkpoint.experimental.v1.partial`.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import glob
import logging
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from flax import traverse_util

from specjax.checkpoints.messages import listed

# Leaves are written together up to this size. Each save reads again what the earlier ones noted: 300 saves take 94 s, however small.
_WRITE_BATCH_BYTES = 256 * 2**20
# Restored together: each batch costs a garbage collection, and its host buffers live until then.
_READ_BATCH_BYTES = 512 * 2**20
# A chunk is read and decoded whole, also where a device wants a part of it only.
_CHUNK_BYTES = 64 * 2**20
_GRACE_SECONDS = 0.3
_LONGEST_REASON = 200


def write_arrays(folder: Path, expected: Mapping[str, Any], leaves: Iterable[tuple[str, np.ndarray | jax.Array]]) -> None:
    """Writes the leaves of a tree as they come, and makes the folder appear when all of them are on disk.

    Holds one leaf, and others of 256 MiB in all before it. A generator that keeps its own reference to what it yielded holds one more:
    `del leaf` after the `yield`.

    Args:
        folder: The folder to create; one that exists must be empty. Until all is written there is `FOLDER.partial_save` beside it; what an
            interrupted call left there is removed.
        expected: Nested dict of `jax.ShapeDtypeStruct`.
        leaves: Pairs of a path in that dict, joined with dots, and its array; each path once, in any order. NumPy arrays need not be
            contiguous or in memory (a transposed memory map is fine), JAX arrays may be sharded.

    Raises:
        FileExistsError: `folder` exists and is not empty.
        OSError: It cannot be written.
        ValueError: A leaf that is unexpected, missing, came twice, or has another shape or dtype.

    Example:
        >>> write_arrays(Path("params"), jax.eval_shape(lambda: params), flax.traverse_util.flatten_dict(params, sep=".").items())
    """
    folder = folder.absolute()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if folder.exists():
        raise FileExistsError(f"{folder} exists and is not empty")
    _remove_partial(folder)
    waiting = _flat(expected)
    folder.parent.mkdir(parents=True, exist_ok=True)
    needed, free = _num_bytes(waiting), shutil.disk_usage(folder.parent).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {needed:,} bytes are needed and {free:,} free", str(folder))
    known = frozenset(waiting)
    batch: dict[str, Any] = {}
    try:
        for path, array in leaves:
            _check_leaf(path, array, waiting, known)
            del waiting[path]
            batch[path] = array
            # This name would keep the leaf while the next one is made.
            del array
            if _num_bytes(batch) >= _WRITE_BATCH_BYTES:
                _write_batch(folder, batch)
                batch.clear()
        if waiting:
            raise ValueError(f"{folder}: {len(waiting)} leaves did not come: {listed(waiting)}")
        if batch:
            _write_batch(folder, batch)
        with _writing(folder):
            ocp.partial.finalize(str(folder))
    except BaseException:
        _remove_partial(folder)
        raise


def read_arrays(folder: Path, abstract: Mapping[str, Any]) -> dict[str, Any]:
    """Restores a tree onto the devices asked for, whichever devices it was saved from.

    Beyond the result it takes about the largest leaf of host memory (or 512 MiB), in the dtype that was asked for.

    Args:
        folder: What `write_arrays` made, or `ocp.StandardCheckpointer().save`.
        abstract: Nested dict of `jax.ShapeDtypeStruct`, each with a `sharding`. A leaf of another dtype than stored is cast as it is read.

    Returns:
        The same nested dict, of JAX arrays.

    Raises:
        ValueError: There is no complete tree in `folder`, it has other leaves or shapes, or it cannot be read.

    Example:
        >>> here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        >>> read_arrays(Path("params"), {"scale": jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=here)})
    """
    folder = folder.absolute()
    wanted = _flat(abstract)
    unplaced = [path for path, leaf in wanted.items() if leaf.sharding is None]
    if unplaced:
        raise ValueError(f"every leaf needs a sharding, these have none: {listed(unplaced)}")
    try:
        with _quiet():
            _check_stored(_stored(folder), wanted)
            arrays: dict[str, jax.Array] = {}
            for batch in _batches(wanted):
                arrays |= _read_batch(folder, batch)
                # Orbax leaves the buffers that it read into in reference cycles: without this, host memory doubles.
                gc.collect()
    except Exception as error:
        raise ValueError(f"{folder} cannot be read: {_reason(error)}") from error
    return traverse_util.unflatten_dict({path: arrays[path] for path in wanted}, sep=".")


def stored_arrays(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of what was written, by path joined with dots; no data is read.

    Raises:
        ValueError: There is no complete tree in `folder`.
    """
    folder = folder.absolute()
    try:
        with _quiet():
            return _stored(folder)
    except Exception as error:
        raise ValueError(f"{folder} cannot be read: {_reason(error)}") from error


def _write_batch(folder: Path, batch: Mapping[str, Any]) -> None:
    with _writing(folder):
        ocp.partial.save(str(folder), traverse_util.unflatten_dict(dict(batch), sep="."))


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Around calls of Orbax that write: our options, and errors that say what the system said."""
    try:
        with _quiet(), _saving_options():
            try:
                yield
            except Exception:
                # The batch's other writes are still under way, and would complain that nobody waits for them.
                time.sleep(_GRACE_SECONDS)
                raise
    except Exception as error:
        # TensorStore puts the system's error number into the text of a ValueError.
        number = re.search(r"os_error_code='(\d+)'", str(error))
        if number:
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
        if isinstance(error, OSError):
            raise
        raise OSError(f"writing {folder} failed: {_reason(error)}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what Orbax and asyncio print of a failure, once for each of their threads: we raise it."""
    loggers, hook = [logging.getLogger(name) for name in ("absl", "asyncio")], sys.unraisablehook
    before = [logger.disabled for logger in loggers]

    def unless_abandoned(unraisable: Any) -> None:
        if not str(unraisable.exc_value).startswith(("Event loop is closed", "Encountered error while reading array index")):
            hook(unraisable)

    sys.unraisablehook = unless_abandoned
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    except Exception as error:
        # What the failed call left unfinished is closed here, not in whatever runs when the next collection comes.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        raise
    finally:
        sys.unraisablehook = hook
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _remove_partial(folder: Path) -> None:
    # Orbax adds to what it finds there. It has a further suffix until its first save is complete.
    for leftover in folder.parent.glob(glob.escape(folder.name) + ".partial_save*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _saving_options() -> ocp.Context:
    context = ocp.Context()
    # Saves 22 % of bfloat16 weights on disk, halves the speed of writing and reading, doubles the memory for writing.
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # Names devices that may not be there when it is read; the reader says where arrays go.
    context.array.saving.enable_write_sharding_file = False
    # A copy would guard against changes during an asynchronous save. Ours is not.
    context.memory.deepcopy_host_arrays = False
    return context


def _read_batch(folder: Path, batch: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    # Where a chunk holds several devices' parts, each of them reads it whole. Must exceed the largest leaf; + 1: strictly.
    context.memory.read_concurrent_bytes = max(2 * _num_bytes({"": leaf}) for leaf in batch.values()) + _READ_BATCH_BYTES + 1
    with context:
        tree = ocp.load(str(folder), traverse_util.unflatten_dict(dict(batch), sep="."))
    # Transfers that are under way hold the host's buffers.
    return _flat(jax.block_until_ready(tree))


def _batches(leaves: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    batch: dict[str, jax.ShapeDtypeStruct] = {}
    for path, leaf in leaves.items():
        if batch and _num_bytes(batch | {path: leaf}) > _READ_BATCH_BYTES:
            yield batch
            batch = {}
        batch[path] = leaf
    if batch:
        yield batch


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return traverse_util.flatten_dict(dict(tree), sep=".")  # pyright: ignore[reportReturnType]  # its keys are strings with `sep`


def _num_bytes(leaves: Mapping[str, Any]) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())


def _check_leaf(path: str, array: Any, waiting: Mapping[str, Any], known: frozenset[str]) -> None:
    if path not in waiting:
        raise ValueError(f"leaf {path} came twice" if path in known else f"leaf {path} is not in the expected tree")
    want = waiting[path]
    if (array.shape, array.dtype) != (want.shape, want.dtype):
        raise ValueError(f"leaf {path} should be {want.dtype}{list(want.shape)}, got {array.dtype}{list(array.shape)}")


def _stored(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    tree: Any = ocp.metadata(str(folder)).metadata
    if tree is None:
        raise ValueError("the list of its arrays is damaged")
    return {path: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype) for path, leaf in _flat(tree).items()}


def _check_stored(stored: Mapping[str, jax.ShapeDtypeStruct], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    if stored.keys() != wanted.keys():
        missing, extra = [path for path in wanted if path not in stored], [path for path in stored if path not in wanted]
        raise ValueError(f"it holds another tree; missing: {listed(missing)}; not asked for: {listed(extra)}")
    for path, leaf in wanted.items():
        if stored[path].shape != leaf.shape:
            raise ValueError(f"leaf {path} is stored with shape {stored[path].shape}, asked for {leaf.shape}")


def _reason(error: BaseException) -> str:
    # Orbax wraps what happened in an exception that shows the whole TensorStore specification.
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0][:_LONGEST_REASON]
