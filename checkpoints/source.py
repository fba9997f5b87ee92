"""A model as found: its tensors by name, and what each of our parameters is made of.

A reader (Hugging Face folder, GGUF file, drafter format) offers a `WeightSource`. `check_source` compares names, shapes and dtypes with
what the configuration needs before any data is read; `stream_params` then yields one finished parameter after the other, so that memory
is bounded by the largest of them and not by the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import traverse_util

from specjax.checkpoints.kinds import abstract_params
from specjax.checkpoints.messages import listed

# Dtypes that a checkpoint may be stored in. float16 is not among them: bfloat16 weights overflow in it.
STORED_DTYPES: Mapping[str, np.dtype] = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
# Names as in safetensors' header.
FLOATING = frozenset({"BF16", "F16", "F32", "F64"})
INTEGER = frozenset({"I64", "I32"})

_ALL = slice(None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor in a file, not read yet.

    Attributes:
        shape: Its shape.
        dtype: Its dtype by safetensors' name, such as `"BF16"`; that of its values if it is quantised in the file.
        num_bytes: Its size in the file.
        read: Returns the given rows of its first axis.
    """

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    read: Callable[[slice], np.ndarray]


Read = Callable[..., np.ndarray]
"""`read(name, rows=slice(None))`: rows of the first axis of a tensor, as stored."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One leaf of our tree.

    Attributes:
        tensors: What it is made of: names and shapes.
        fill: Writes the leaf, given the array to fill (of its shape and dtype) and a `Read`.
        accepts: Dtypes that its tensors may have.
    """

    tensors: Mapping[str, tuple[int, ...]]
    fill: Callable[[np.ndarray, Read], None]
    accepts: frozenset[str] = FLOATING


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSource:
    """A model as found, not read yet.

    Attributes:
        name: What to call it: a hub id, or the folder's or file's own name.
        format: `"safetensors"`, `"gguf"` or `"torch"`.
        architecture: What the source calls its kind of model.
        location: The folder or file on this machine.
        config: Our configuration of it; its class says which kind of model it is.
        quantisation: `"none"`, or the name of the block formats that the weights were stored in.
        tensors: What the files hold, by name.
        parameters: Every leaf of our tree, by its path joined with dots.
        ignored: Names of tensors that carry nothing we need.
        files: The files that hold the weights.
        write_tokenizer: Writes the tokenizer's files into a folder; returns `False` if the source has none.
    """

    name: str
    format: str
    architecture: str
    location: Path
    config: Any
    quantisation: str
    tensors: Mapping[str, StoredTensor]
    parameters: Mapping[str, Parameter]
    ignored: frozenset[str] = frozenset()
    files: tuple[Path, ...]
    write_tokenizer: Callable[[Path], bool]

    def read(self, name: str, rows: slice = _ALL) -> np.ndarray:
        """Rows of a tensor, as stored."""
        return self.tensors[name].read(rows)


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """How the tensors that are there differ from those that are needed.

    Attributes:
        unmapped: Tensors that fit nowhere.
        unfilled: Parameters that nothing fills, with the tensors that are missing.
        wrong: A sentence for each tensor of another shape or dtype.
    """

    unmapped: tuple[str, ...]
    unfilled: Mapping[str, tuple[str, ...]]
    wrong: tuple[str, ...]


def compare(source: WeightSource) -> Mismatch:
    """Compares the tensors that are there with those that the configuration needs. Reads no data."""
    expected = {name: (shape, parameter.accepts) for parameter in source.parameters.values() for name, shape in parameter.tensors.items()}
    wrong = []
    for name, (shape, accepts) in expected.items():
        found = source.tensors.get(name)
        if found is not None and found.shape != shape:
            wrong.append(f"tensor {name} should have shape {shape} by the configuration, got {found.shape}")
        elif found is not None and found.dtype not in accepts:
            hint = ": is the checkpoint quantised?" if accepts == FLOATING else ""
            wrong.append(f"tensor {name} should be {' or '.join(sorted(accepts))}, got {found.dtype}{hint}")
    unfilled = {}
    for path, parameter in source.parameters.items():
        missing = tuple(name for name in parameter.tensors if name not in source.tensors)
        if missing:
            unfilled[path] = missing
    unmapped = tuple(name for name in source.tensors if name not in expected and name not in source.ignored)
    return Mismatch(unmapped=unmapped, unfilled=unfilled, wrong=tuple(wrong))


def check_source(source: WeightSource) -> None:
    """Refuses a source that does not fill its parameters exactly.

    Raises:
        ValueError: Tensors that fit nowhere, parameters that nothing fills (both are listed), or a tensor of another shape or dtype.
    """
    found = compare(source)
    if list(found.unfilled.values()) == [("lm_head.weight",)] and not found.unmapped:
        raise ValueError(
            f"{source.name}: lm_head.weight is missing, but tie_word_embeddings is false. If the model does share its embedding with its "
            "head, pass --tie-embeddings (tie_embeddings=True)"
        )
    if found.unmapped or found.unfilled:
        unfilled = [f"{path} (from {listed(names)})" for path, names in found.unfilled.items()]
        raise ValueError(
            f"{source.name}: the tensors do not fit the configuration. "
            f"Unmapped source tensors: {listed(found.unmapped)}. Parameters left unfilled: {listed(unfilled)}"
        )
    if found.wrong:
        raise ValueError(f"{source.name}: {listed(found.wrong)}")


def stream_params(
    source: WeightSource, dtype: str, on_bytes: Callable[[float], object] = lambda count: None
) -> Iterator[tuple[str, np.ndarray]]:
    """Reads a checked source, parameter by parameter. One is held at a time, and of its tensors what its `fill` asks for.

    Args:
        source: What `check_source` accepted.
        dtype: `"bfloat16"` or `"float32"`: the dtype of every floating-point leaf. A tensor goes from its own dtype to this one in a single
            rounding (float64 by way of float32).
        on_bytes: Called with the source bytes of each piece read.

    Yields:
        Path joined with dots, and the leaf. The array is used again by nobody; the caller may keep it.

    Raises:
        ValueError: An unknown `dtype`.
    """
    if dtype not in STORED_DTYPES:
        raise ValueError(f"dtype must be one of {sorted(STORED_DTYPES)}, got {dtype!r}")
    expected: dict[str, Any] = traverse_util.flatten_dict(abstract_params(source.config, STORED_DTYPES[dtype]), sep=".")
    assert expected.keys() == source.parameters.keys(), expected.keys() ^ source.parameters.keys()

    def read(name: str, rows: slice = _ALL) -> np.ndarray:
        stored = source.tensors[name]
        piece = stored.read(rows)
        on_bytes(stored.num_bytes * piece.size / max(1, _num_elements(stored.shape)))
        return piece

    for path, parameter in source.parameters.items():
        leaf = np.empty(expected[path].shape, expected[path].dtype)
        parameter.fill(leaf, read)
        yield path, leaf
        del leaf


def read_params(source: WeightSource, dtype: str) -> dict:
    """All of `stream_params` as the nested dict that `apply` takes under `"params"`, of NumPy arrays. For models that fit in memory."""
    return traverse_util.unflatten_dict(dict(stream_params(source, dtype)), sep=".")


def _num_elements(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
