"""How leaves are made of tensors: the pieces from which each model's table is built. Large tensors are read in rows, never whole.

Hugging Face stores a projection `[out, in]`, we `[in, out]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from specjax.checkpoints.source import INTEGER, Parameter, Read

_CHUNK_BYTES = 64 * 2**20


def plain(name: str, shape: tuple[int, ...], *, accepts: frozenset[str] | None = None) -> Parameter:
    """The tensor as it is."""

    def fill(out: np.ndarray, read: Read) -> None:
        for rows in row_chunks(out.shape, itemsize=out.itemsize):
            out[rows] = read(name, rows)

    return Parameter(tensors={name: shape}, fill=fill) if accepts is None else Parameter(tensors={name: shape}, fill=fill, accepts=accepts)


def integers(name: str, shape: tuple[int, ...]) -> Parameter:
    """An integer tensor as it is."""
    return plain(name, shape, accepts=INTEGER)


def transposed(name: str, shape: tuple[int, int]) -> Parameter:
    """`[out, in]`, stored as `[in, out]`."""

    def fill(out: np.ndarray, read: Read) -> None:
        for rows in row_chunks(shape, itemsize=out.itemsize):
            out[:, rows] = read(name, rows).T

    return Parameter(tensors={name: shape}, fill=fill)


def grouped_qkv(prefix: str, kind: str, *, num_heads: int, num_kv_heads: int, head_dim: int, width: int) -> Parameter:
    """Three `[heads * H, in]` (or, for biases, `[heads * H]`) as one `[in,K,N/K+2,H]`: a key/value head's queries, its key, its value."""
    group = num_heads // num_kv_heads
    inputs = (width,) if kind == "weight" else ()
    slots = {"q_proj": slice(0, group), "k_proj": slice(group, group + 1), "v_proj": slice(group + 1, group + 2)}

    def fill(out: np.ndarray, read: Read) -> None:
        for name, where in slots.items():
            tensor = read(f"{prefix}.{name}.{kind}")
            heads = tensor.reshape(num_kv_heads, -1, head_dim, *inputs)
            out[..., :, where, :] = np.moveaxis(heads, -1, 0) if inputs else heads

    heads = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
    return Parameter(tensors={f"{prefix}.{name}.{kind}": (count * head_dim, *inputs) for name, count in heads.items()}, fill=fill)


def gate_up(prefix: str, *, ffn: int, width: int) -> Parameter:
    """Gate and up projections, each `[F, D]`, as one `[D,2,F]`."""
    names = {f"{prefix}.gate_proj.weight": 0, f"{prefix}.up_proj.weight": 1}

    def fill(out: np.ndarray, read: Read) -> None:
        for name, half in names.items():
            for rows in row_chunks((ffn, width), itemsize=out.itemsize):
                out[:, half, rows] = read(name, rows).T

    return Parameter(tensors=dict.fromkeys(names, (ffn, width)), fill=fill)


def stacked(names: Mapping[str, tuple[int, ...]]) -> Parameter:
    """Tensors of one shape side by side, along a new first axis."""

    def fill(out: np.ndarray, read: Read) -> None:
        for index, name in enumerate(names):
            out[index] = read(name)

    return Parameter(tensors=names, fill=fill)


def row_chunks(shape: tuple[int, ...], *, itemsize: int) -> Iterator[slice]:
    """Slices of the first axis of such an array, each of at most 64 MiB."""
    if not shape:
        yield slice(None)
        return
    row_bytes = itemsize * math.prod(shape[1:])
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))
