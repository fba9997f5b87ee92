"""The weight files of a drafter: safetensors, or PyTorch's format, under the names of several projects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoints.fields import needed, read_json
from specjax.checkpoints.source import Parameter, StoredTensor, WeightSource
from specjax.checkpoints.tensor_files import INDEX, SINGLE, TensorFiles, open_safetensors, open_safetensors_files
from specjax.checkpoints.torch_file import open_torch_file

_TORCH_SINGLE = "pytorch_model.bin"
_TORCH_INDEX = "pytorch_model.bin.index.json"


def open_files(folder: Path, name: str, stem: str | None = None) -> TensorFiles | None:
    """Opens what is there. Nothing is read before it is asked for.

    Args:
        folder: Where.
        name: What to call the drafter in messages.
        stem: Opens `stem.safetensors` or `stem.pt`; `None` opens `model.safetensors` or `pytorch_model.bin`, in shards or whole.

    Returns:
        The tensors; `None` if there are no such files.

    Raises:
        ValueError: A file that is not whole, or not safe to read.
    """
    if stem is not None:
        if (folder / f"{stem}.safetensors").is_file():
            ((path, tensors),) = open_safetensors_files([folder / f"{stem}.safetensors"], name)
            return TensorFiles(tensors=tensors, files=(path,))
        path = folder / f"{stem}.pt"
        return TensorFiles(tensors=open_torch_file(path), files=(path,)) if path.is_file() else None
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        return open_safetensors(folder, name)
    if (folder / _TORCH_INDEX).is_file():
        weight_map = needed(read_json(folder / _TORCH_INDEX, name), "weight_map", _TORCH_INDEX)
        paths = tuple(folder / file for file in sorted(set(weight_map.values())))
        held = {path.name: open_torch_file(path) for path in paths}
        absent = [tensor for tensor, file in weight_map.items() if tensor not in held[file]]
        if absent:
            raise ValueError(f"{name}: {_TORCH_INDEX} promises tensor {absent[0]} in {weight_map[absent[0]]}, which does not hold it")
        return TensorFiles(tensors={tensor: held[file][tensor] for tensor, file in weight_map.items()}, files=paths)
    path = folder / _TORCH_SINGLE
    return TensorFiles(tensors=open_torch_file(path), files=(path,)) if path.is_file() else None


def drafter_source(
    folder: Path,
    name: str,
    files: TensorFiles,
    *,
    config: Any,
    architecture: str = "",
    tensors: Mapping[str, StoredTensor],
    parameters: Mapping[str, Parameter],
    ignored: frozenset[str],
) -> WeightSource:
    """A `WeightSource` of what was opened; the tensors under the names that `parameters` uses."""
    return WeightSource(
        name=name,
        architecture=architecture,
        format="safetensors" if files.files[0].suffix == ".safetensors" else "torch",
        location=folder,
        config=config,
        quantisation="none",
        tensors=tensors,
        parameters=parameters,
        ignored=ignored,
        files=files.files,
        write_tokenizer=lambda destination: False,  # a drafter works with its target's
    )
