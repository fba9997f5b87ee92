"""Reads PyTorch's `.bin` and `.pt` files without PyTorch, and without running what is pickled in them.

Such a file is a zip archive: `data.pkl`, a pickle that says which tensors there are, and a stored (not compressed) entry `data/N` for each
storage. The pickle may name nothing but the few functions that plain tensors are rebuilt with, and those are replaced by ones that only
note where the numbers lie. Numbers are read from a memory map when they are asked for.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import pickletools
import reprlib
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specjax.checkpoints.source import StoredTensor

# Storage class in the pickle → safetensors' name, and NumPy's dtype.
_STORAGES: Mapping[str, tuple[str, np.dtype]] = {
    "BFloat16Storage": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "HalfStorage": ("F16", np.dtype("<f2")),
    "FloatStorage": ("F32", np.dtype("<f4")),
    "DoubleStorage": ("F64", np.dtype("<f8")),
    "LongStorage": ("I64", np.dtype("<i8")),
    "IntStorage": ("I32", np.dtype("<i4")),
    "ShortStorage": ("I16", np.dtype("<i2")),
    "CharStorage": ("I8", np.dtype("i1")),
    "ByteStorage": ("U8", np.dtype("u1")),
    "BoolStorage": ("BOOL", np.dtype("?")),
}
# Keys under which training scripts keep the state dict beside other things.
_WRAPPERS = ("state_dict", "model", "model_state_dict")
_ZIP_MAGIC = b"PK\x03\x04"
# The pickled number 0x1950a86a20f9469cfc6c, with which files written before PyTorch 1.6 begin.
_LEGACY_MAGIC = bytes.fromhex("8a0a6cfc9c46f9206aa85019")
_LOCAL_HEADER = struct.Struct("<26xHH")
_MAX_PICKLE_BYTES = 2**28
# What a damaged or malicious pickle makes the unpickler raise, ours or Python's.
_PICKLE_ERRORS = (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
_PICKLE_ERRORS += (MemoryError, RecursionError)


def open_torch_file(path: str | Path) -> dict[str, StoredTensor]:
    """The tensors of a state dict, by name. Their numbers are not read yet.

    Args:
        path: A `.bin` or `.pt` file. It may hold the state dict itself, or a dictionary with it under `"state_dict"` or `"model"`.

    Raises:
        ValueError: No such file, one that is cut short, compressed, big-endian or older than PyTorch 1.6; one whose pickle names anything
            but plain tensors (the message says what; it is not run); or one that holds something else than a state dict.
    """
    path = Path(path)
    archive = _Archive.open(path)
    try:
        content = _Unpickler(archive).load()
    except _PICKLE_ERRORS as error:
        raise ValueError(f"{path.name}: the pickle in it cannot be read: {error or type(error).__name__}") from error
    return {name: _stored(archive, tensor) for name, tensor in _state_dict(content, path.name).items()}


@dataclasses.dataclass(frozen=True)
class _Archive:
    """The zip file: its pickle, and where in the memory map each storage lies."""

    name: str
    data: np.ndarray  # [file size] uint8
    pickled: bytes
    storages: Mapping[str, tuple[int, int]]  # key → first byte, number of bytes

    @classmethod
    def open(cls, path: Path) -> _Archive:
        name = path.name
        if not path.is_file():
            raise ValueError(f"{name}: no such file")
        with path.open("rb") as file:
            start = file.read(16)
        if start[2 : 2 + len(_LEGACY_MAGIC)] == _LEGACY_MAGIC:
            raise ValueError(
                f"{name}: written in the format from before PyTorch 1.6, which is not supported; save it again with a newer one: "
                "torch.save(torch.load(file, weights_only=True), file)"
            )
        if not start.startswith(_ZIP_MAGIC):
            raise ValueError(f"{name}: not a file that torch.save wrote")
        try:
            with zipfile.ZipFile(path) as archive:
                return cls._read(archive, name, np.memmap(path, np.uint8, "r"))
        except (zipfile.BadZipFile, struct.error, EOFError, OSError, NotImplementedError) as error:
            raise ValueError(f"{name}: not a whole file; was the download cut short? ({error})") from error

    @classmethod
    def _read(cls, archive: zipfile.ZipFile, name: str, data: np.ndarray) -> _Archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        roots = [entry.removesuffix("/data.pkl") for entry in entries if entry.endswith("/data.pkl")]
        if len(entries) != len(archive.infolist()) or len(roots) != 1 or f"{roots[0]}/constants.pkl" in entries:
            raise ValueError(f"{name}: not a state dict that torch.save wrote (a scripted model, or another archive)")
        packed = [entry.filename for entry in entries.values() if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1]
        if packed:
            raise ValueError(f"{name}: {packed[0]} is compressed or encrypted, which torch.save never does")
        root = roots[0]
        if f"{root}/byteorder" in entries and archive.read(f"{root}/byteorder") != b"little":
            raise ValueError(f"{name}: written on a big-endian machine, which is not supported")
        pickled = entries[f"{root}/data.pkl"]
        if pickled.file_size > _MAX_PICKLE_BYTES:
            raise ValueError(f"{name}: the pickle in it has {pickled.file_size} bytes, more than any list of tensors")
        storages = {}
        for entry in entries.values():
            if entry.filename.startswith(f"{root}/data/"):
                first, size = entry.header_offset, entry.file_size
                # The extra field in the local header pads the data to an alignment; the archive's directory does not know its length.
                first += 30 + sum(_LOCAL_HEADER.unpack(data[first : first + 30].tobytes()))
                if not 0 <= first <= first + size <= data.size:
                    raise ValueError(f"{name}: {entry.filename} lies beyond the end of the file")
                storages[entry.filename.removeprefix(f"{root}/data/")] = (first, size)
        return cls(name=name, data=data, pickled=archive.read(pickled), storages=storages)


@dataclasses.dataclass(frozen=True)
class _Storage:
    dtype: str
    numbers: np.ndarray  # one dimension, in the memory map


@dataclasses.dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements


class _Unpickler(pickle.Unpickler):
    """Knows no more than `find_class` lists, whatever the pickle asks for."""

    def __init__(self, archive: _Archive) -> None:
        _check_memo(archive.pickled)
        super().__init__(io.BytesIO(archive.pickled))
        self._archive = archive
        # Made anew for each file: a pickle can set attributes of what it is given.
        self._globals: dict[tuple[str, str], Callable[..., Any] | type] = {
            ("collections", "OrderedDict"): type("OrderedDict", (OrderedDict,), {}),
            ("torch._utils", "_rebuild_tensor"): lambda storage, offset, size, stride: _tensor(storage, offset, size, stride),
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2(),
            ("torch._utils", "_rebuild_parameter"): lambda tensor, requires_grad, hooks: tensor,
            ("torch._utils", "_rebuild_parameter_with_state"): lambda tensor, requires_grad, hooks, state: tensor,
        }
        self._storage_types = {("torch", name): type(name, (), {}) for name in _STORAGES}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        key = (module_name, global_name)
        found = self._globals.get(key) or self._storage_types.get(key)
        if found is None:
            raise pickle.UnpicklingError(
                f"it names {module_name}.{global_name}, which a state dict of plain tensors does not need; nothing of it was run"
            )
        return found

    def persistent_load(self, pid: Any, /) -> _Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise pickle.UnpicklingError(f"it refers to {_short(pid)}, expected a storage")
        _, kind, key, _, num_elements = pid
        names = [name for (_, name), storage_type in self._storage_types.items() if kind is storage_type]
        if not names:
            raise pickle.UnpicklingError(f"it has a storage of type {_short(kind)}")
        dtype, numpy_dtype = _STORAGES[names[0]]
        if not isinstance(key, str) or key not in self._archive.storages:
            raise pickle.UnpicklingError(f"the file lacks the storage {_short(key)}")
        first, size = self._archive.storages[key]
        if not _is_size(num_elements) or num_elements * numpy_dtype.itemsize != size:
            raise pickle.UnpicklingError(f"storage {key} should hold {_short(num_elements)} numbers of {dtype}, it has {size} bytes")
        return _Storage(dtype=dtype, numbers=self._archive.data[first : first + size].view(numpy_dtype))


def _check_memo(pickled: bytes) -> None:
    """Refuses a memo index that no honest pickle has: Python would allocate a table up to it."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument > len(pickled):
            raise pickle.UnpicklingError(f"it stores object number {argument}, and has {len(pickled)} bytes")


def _rebuild_tensor_v2() -> Callable[..., _Tensor]:
    def rebuild(storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None) -> _Tensor:
        if metadata:
            raise pickle.UnpicklingError(f"a tensor has the flags {_short(metadata)}, which are not supported")
        return _tensor(storage, offset, size, stride)

    return rebuild


def _tensor(storage: Any, offset: Any, size: Any, stride: Any) -> _Tensor:
    """A checked view: nothing in it lies outside its storage."""
    well_formed = (
        isinstance(storage, _Storage)
        and isinstance(size, tuple)
        and isinstance(stride, tuple)
        and len(size) == len(stride)
        and all(map(_is_size, (offset, *size, *stride)))
    )
    if not well_formed:
        raise pickle.UnpicklingError(f"a tensor of size {_short(size)} and stride {_short(stride)} is malformed")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if math.prod(size) and last >= storage.numbers.size:
        raise pickle.UnpicklingError(f"a tensor of size {size} reaches beyond its storage of {storage.numbers.size} numbers")
    return _Tensor(storage=storage, offset=offset, shape=size, strides=stride)


def _short(value: Any) -> str:
    # repr() of a hostile value may be larger than memory.
    return reprlib.repr(value)[:80]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48


def _state_dict(content: Any, name: str) -> dict[str, _Tensor]:
    if isinstance(content, dict):
        content = _plain(content)
        wrapped = [key for key in _WRAPPERS if isinstance(content.get(key), dict)]
        if len(wrapped) == 1 and not any(isinstance(value, _Tensor) for value in content.values()):
            content = _plain(content[wrapped[0]])
    if not isinstance(content, dict):
        raise ValueError(f"{name}: holds a {type(content).__name__}, expected a state dict")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, _Tensor):
            kind = type(value).__name__.lstrip("_")
            raise ValueError(f"{name}: expected a state dict of names and tensors; under {_short(key)} it has a {kind}")
    return content


def _plain(content: dict[Any, Any]) -> dict[Any, Any]:
    """The same entries: a pickle may have given its ordered dictionary other methods."""
    return dict(dict.items(content))


def _stored(archive: _Archive, tensor: _Tensor) -> StoredTensor:
    numbers, shape = tensor.storage.numbers, tensor.shape
    item_bytes = numbers.dtype.itemsize

    def read(rows: slice) -> np.ndarray:
        if math.prod(shape) == 0:
            return np.zeros(shape, numbers.dtype)[rows]
        strides = tuple(step * item_bytes for step in tensor.strides)
        view = np.lib.stride_tricks.as_strided(numbers[tensor.offset :], shape, strides, writeable=False)
        return np.array(view[rows] if shape else view, subok=False)

    return StoredTensor(shape=shape, dtype=tensor.storage.dtype, num_bytes=math.prod(shape) * item_bytes, read=read)
