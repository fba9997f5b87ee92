"""The tensors of a folder of safetensors files: one file, or shards with an index. Nothing is read before it is asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors looks up by name)
import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.checkpoints.fields import needed, read_json
from specjax.checkpoints.source import StoredTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pth", ".pt")


@dataclasses.dataclass(frozen=True)
class TensorFiles:
    """What a set of files holds.

    Attributes:
        tensors: By name.
        files: The files.
    """

    tensors: dict[str, StoredTensor]
    files: tuple[Path, ...]


def open_safetensors(folder: Path, name: str) -> TensorFiles:
    """Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Args:
        folder: Where.
        name: What to call the model in messages.

    Raises:
        ValueError: No such files, a shard that is missing or cut short, a tensor in two shards, or an index that disagrees with them.
    """
    if (folder / INDEX).is_file():
        weight_map = needed(read_json(folder / INDEX, name), "weight_map", INDEX)
        files = sorted(set(weight_map.values()))
    elif (folder / SINGLE).is_file():
        weight_map, files = {}, [SINGLE]
    else:
        found = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
        raise ValueError(f"{name}: needs {SINGLE} or {INDEX}, found {', '.join(found) or 'no weights'}")
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise ValueError(f"{name}: {INDEX} names files that are not there: {', '.join(absent)}")
    opened = open_safetensors_files([folder / file for file in files], name)
    names_in = {file.name: set(tensors) for file, tensors in opened}
    for tensor, file in weight_map.items():
        if tensor not in names_in[file]:
            raise ValueError(f"{name}: {INDEX} promises tensor {tensor} in {file}, which does not hold it")
    tensors: dict[str, StoredTensor] = {}
    for file, held in opened:
        for tensor, stored in held.items():
            if tensor in tensors:
                first = next(other for other, names in names_in.items() if tensor in names)
                raise ValueError(f"{name}: tensor {tensor} is in two shards, {first} and {file.name}")
            tensors[tensor] = stored
    return TensorFiles(tensors=tensors, files=tuple(folder / file for file in files))


def open_safetensors_files(files: Iterable[Path], name: str) -> list[tuple[Path, dict[str, StoredTensor]]]:
    """Opens single files, memory-mapped.

    Raises:
        ValueError: A file that is not whole.
    """
    opened = []
    for file in files:
        try:
            handle = safe_open(file, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{name}: {file.name} is not a whole safetensors file; was the download cut short? ({error})") from error
        opened.append((file, {tensor: _stored(handle, tensor) for tensor in handle.keys()}))  # noqa: SIM118 (not a mapping)
    return opened


def _stored(handle: Any, tensor: str) -> StoredTensor:
    view = handle.get_slice(tensor)
    shape, dtype = tuple(view.get_shape()), view.get_dtype()

    def read(rows: slice) -> np.ndarray:
        # A slice reads its own rows only; a scalar has none.
        return view[rows] if shape else handle.get_tensor(tensor)

    return StoredTensor(shape=shape, dtype=dtype, num_bytes=math.prod(shape) * _ITEM_BYTES.get(dtype, 1), read=read)
