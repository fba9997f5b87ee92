"""The tensors of a folder's weight files: safetensors or PyTorch's format, one file or shards with an index. Nothing is read ahead.

Orbax can read safetensors too, but it takes every `*.safetensors` file that it finds and no notice of the index: where a shard is missing,
half a model comes back without a word.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors looks up by name)
import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.checkpoints.formats.fields import needed, read_json
from specjax.checkpoints.formats.torch_file import open_torch_file
from specjax.checkpoints.source import StoredTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
_TORCH_SINGLE = "pytorch_model.bin"

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

    @property
    def format(self) -> str:
        """`"safetensors"` or `"torch"`."""
        return "safetensors" if self.files[0].suffix == ".safetensors" else "torch"


def open_weight_files(folder: Path, name: str) -> TensorFiles | None:
    """Opens `model.safetensors` or `pytorch_model.bin`, or the shards of either that an index names; safetensors where there are both.

    Args:
        folder: Where.
        name: What to call the model in messages.

    Returns:
        The tensors; `None` if there are no such files.

    Raises:
        ValueError: A shard that is missing or cut short, a tensor in two shards, an index that disagrees with them, or a file in
            PyTorch's format that is not safe to read.
    """
    for index, single in ((INDEX, SINGLE), (TORCH_INDEX, _TORCH_SINGLE)):
        if (folder / single).is_file():
            return open_file(folder / single, name)
        if (folder / index).is_file():
            return _open_shards(folder, name, index)
    return None


def needed_weight_files(folder: Path, name: str) -> TensorFiles:
    """The same for a folder that has to hold a model.

    Raises:
        ValueError: As `open_weight_files`; or there are no such files.
    """
    files = open_weight_files(folder, name)
    if files is None:
        found = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
        raise ValueError(f"{name}: needs {SINGLE}, {_TORCH_SINGLE} or an index of shards, found {', '.join(found) or 'no weights'}")
    return files


def open_file(path: Path, name: str) -> TensorFiles:
    """Opens one file, memory-mapped: safetensors by its suffix, otherwise PyTorch's format.

    Raises:
        ValueError: The file is not whole, or not safe to read.
    """
    opener = _open_safetensors if path.suffix == ".safetensors" else lambda path, name: open_torch_file(path)
    return TensorFiles(tensors=opener(path, name), files=(path,))


def _open_shards(folder: Path, name: str, index: str) -> TensorFiles:
    weight_map = needed(read_json(folder / index, name), "weight_map", index)
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{name}: weight_map in {index} should map tensors to files, got {weight_map!r:.80}")
    for file in weight_map.values():
        # Shards lie beside their index; a path could point anywhere on this machine.
        if not isinstance(file, str) or not file or file != Path(file).name or "\0" in file:
            raise ValueError(f"{name}: {index} should name files in its own folder, got {file!r:.80}")
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise ValueError(f"{name}: {index} names files that are not there: {', '.join(absent)}")
    shards = {file: open_file(folder / file, name).tensors for file in files}
    for tensor, file in weight_map.items():
        if tensor not in shards[file]:
            raise ValueError(f"{name}: {index} promises tensor {tensor} in {file}, which does not hold it")
    tensors: dict[str, StoredTensor] = {}
    for file, held in shards.items():
        for tensor, stored in held.items():
            if tensor in tensors:
                first = next(other for other, names in shards.items() if tensor in names)
                raise ValueError(f"{name}: tensor {tensor} is in two shards, {first} and {file}")
            tensors[tensor] = stored
    return TensorFiles(tensors=tensors, files=tuple(folder / file for file in files))


def _open_safetensors(path: Path, name: str) -> dict[str, StoredTensor]:
    try:
        handle = safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{name}: {path.name} is not a whole safetensors file; was the download cut short? ({error})") from error
    return {tensor: _stored(handle, tensor) for tensor in handle.keys()}  # noqa: SIM118 (not a mapping)


def _stored(handle: Any, tensor: str) -> StoredTensor:
    view = handle.get_slice(tensor)
    shape, dtype = tuple(view.get_shape()), view.get_dtype()

    def read(rows: slice) -> np.ndarray:
        # A slice reads its own rows only; a scalar has none.
        return view[rows] if shape else handle.get_tensor(tensor)

    return StoredTensor(shape=shape, dtype=dtype, num_bytes=math.prod(shape) * _ITEM_BYTES.get(dtype, 1), read=read)
