"""From named source tensors to the parameter tree of `Transformer`: one table, used by every reader.

A reader (Hugging Face folder, GGUF file) offers its tensors under Hugging Face names as a `WeightSource`. `check_source` compares the names
and shapes with what the configuration needs before any data is read; `read_params` then reads tensor by tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import traverse_util

from specjax.config import ModelConfig
from specjax.models.transformer import Transformer

# Dtypes that a checkpoint may be stored in. float16 is not among them: bfloat16 weights overflow in it.
STORED_DTYPES: Mapping[str, np.dtype] = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}

# Some old checkpoints carry the rotary frequencies; they follow from the configuration.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_MAX_LISTED = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSource:
    """A model as found, not read yet.

    Attributes:
        name: What to call it: a hub id, or the folder's or file's own name.
        format: `"safetensors"` or `"gguf"`.
        location: The folder or file on this machine.
        config: Its shape.
        quantisation: `"none"`, or the name of the block formats that the weights were stored in.
        shapes: Hugging Face tensor name to shape.
        num_bytes: Bytes of each tensor in its file.
        read: Returns one tensor: bfloat16, float16 or float32, as stored (float32 if it was quantised).
        files: The files that hold the weights.
        write_tokenizer: Writes the tokenizer's files into a folder; returns `False` if the source has none.
    """

    name: str
    format: str
    location: Path
    config: ModelConfig
    quantisation: str
    shapes: Mapping[str, tuple[int, ...]]
    num_bytes: Mapping[str, int]
    read: Callable[[str], np.ndarray]
    files: tuple[Path, ...]
    write_tokenizer: Callable[[Path], bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parameter:
    """One leaf: the tensors that it is made of, with their shapes, and how."""

    tensors: Mapping[str, tuple[int, ...]]
    combine: Callable[..., np.ndarray]


def source_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this shape has, under its Hugging Face name, with its shape."""
    return {name: shape for parameter in _parameter_table(config).values() for name, shape in parameter.tensors.items()}


def check_source(source: WeightSource) -> None:
    """Compares the tensors that are there with those that the configuration needs.

    Raises:
        ValueError: Tensors that fit nowhere, parameters that nothing fills (both are listed), or a tensor of another shape.
    """
    table = _parameter_table(source.config)
    expected = source_tensors(source.config)
    unmapped = [name for name in source.shapes if name not in expected and not name.endswith(_IGNORED_SUFFIXES)]
    missing = [name for name in expected if name not in source.shapes]
    if missing == ["lm_head.weight"] and not unmapped:
        raise ValueError(
            f"{source.name}: lm_head.weight is missing, but tie_word_embeddings is false. If the model does share its embedding with its "
            "head, pass --tie-embeddings (tie_embeddings=True)"
        )
    if unmapped or missing:
        unfilled = [
            f"{path} (from {', '.join(name for name in parameter.tensors if name in missing)})"
            for path, parameter in table.items()
            if any(name in missing for name in parameter.tensors)
        ]
        raise ValueError(
            f"{source.name}: the tensors do not fit the configuration. "
            f"Unmapped source tensors: {_listed(unmapped)}. Parameters left unfilled: {_listed(unfilled)}"
        )
    for name, shape in expected.items():
        if tuple(source.shapes[name]) != shape:
            raise ValueError(
                f"{source.name}: tensor {name} should have shape {shape} by the configuration, got {tuple(source.shapes[name])}"
            )


def read_params(source: WeightSource, dtype: str, on_bytes: Callable[[int], object] = lambda count: None) -> dict:
    """Reads a checked source into a parameter tree, tensor by tensor.

    Args:
        source: What `check_source` accepted.
        dtype: `"bfloat16"` or `"float32"`: the dtype of every leaf. A tensor goes from its own dtype to this one in a single rounding.
        on_bytes: Called with the source bytes of each tensor read.

    Returns:
        The nested dict that `Transformer.apply` takes under `"params"`, of NumPy arrays.

    Raises:
        ValueError: An unknown `dtype`, or a tensor that is no floating-point array.
    """
    if dtype not in STORED_DTYPES:
        raise ValueError(f"dtype must be one of {sorted(STORED_DTYPES)}, got {dtype!r}")
    stored = STORED_DTYPES[dtype]
    expected: dict[str, Any] = traverse_util.flatten_dict(abstract_params(source.config, stored), sep=".")
    leaves: dict[str, np.ndarray] = {}
    for path, parameter in _parameter_table(source.config).items():
        tensors = []
        for name in parameter.tensors:
            tensors.append(_as_dtype(source.read(name), stored, f"{source.name}: tensor {name}"))
            on_bytes(source.num_bytes[name])
        leaf = np.ascontiguousarray(parameter.combine(*tensors))
        assert (leaf.shape, leaf.dtype) == (expected[path].shape, stored), f"{path}: {leaf.shape} {leaf.dtype}, want {expected[path]}"
        leaves[path] = leaf
    assert leaves.keys() == expected.keys()
    return traverse_util.unflatten_dict(leaves, sep=".")


def abstract_params(config: ModelConfig, dtype: np.dtype) -> dict:
    """Shapes and dtypes of the parameters, without their values."""
    model = Transformer(config, dtype=dtype, param_dtype=dtype)
    return jax.eval_shape(model.init_params, jax.random.key(0))


def _as_dtype(tensor: np.ndarray, dtype: np.dtype, label: str) -> np.ndarray:
    if tensor.dtype not in (np.dtype(ml_dtypes.bfloat16), np.float16, np.float32, np.float64):
        raise ValueError(f"{label} should be bfloat16, float16 or float32, got {tensor.dtype}: is the checkpoint quantised?")
    return tensor.astype(dtype, copy=False)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED]) or "none"
    return shown + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")


def _parameter_table(cfg: ModelConfig) -> dict[str, _Parameter]:
    width, ffn, head_dim = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    table = {
        "embedding": _plain("model.embed_tokens.weight", (cfg.vocab_size, width)),
        "final_norm.scale": _plain("model.norm.weight", (width,)),
    }
    if not cfg.tie_word_embeddings:
        table["lm_head"] = _plain("lm_head.weight", (cfg.vocab_size, width))
    for index in range(cfg.num_layers):
        ours, theirs = f"layer_{index}", f"model.layers.{index}"
        attention = f"{theirs}.self_attn"
        table[f"{ours}.attention_norm.scale"] = _plain(f"{theirs}.input_layernorm.weight", (width,))
        table[f"{ours}.attention.qkv"] = _qkv(cfg, attention, "weight")
        if cfg.qkv_bias:
            table[f"{ours}.attention.qkv_bias"] = _qkv(cfg, attention, "bias")
        if cfg.qk_norm:
            table[f"{ours}.attention.query_norm.scale"] = _plain(f"{attention}.q_norm.weight", (head_dim,))
            table[f"{ours}.attention.key_norm.scale"] = _plain(f"{attention}.k_norm.weight", (head_dim,))
        table[f"{ours}.attention.output"] = _transposed(f"{attention}.o_proj.weight", (width, cfg.num_heads * head_dim))
        table[f"{ours}.mlp_norm.scale"] = _plain(f"{theirs}.post_attention_layernorm.weight", (width,))
        table[f"{ours}.mlp.gate_up"] = _Parameter(
            tensors={f"{theirs}.mlp.gate_proj.weight": (ffn, width), f"{theirs}.mlp.up_proj.weight": (ffn, width)},
            combine=lambda gate, up: np.stack([gate.T, up.T], axis=1),
        )
        table[f"{ours}.mlp.down"] = _transposed(f"{theirs}.mlp.down_proj.weight", (width, ffn))
    return table


def _plain(name: str, shape: tuple[int, ...]) -> _Parameter:
    return _Parameter(tensors={name: shape}, combine=lambda tensor: tensor)


def _transposed(name: str, shape: tuple[int, int]) -> _Parameter:
    """Hugging Face stores `[out, in]`, we `[in, out]`."""
    return _Parameter(tensors={name: shape}, combine=lambda tensor: tensor.T)


def _qkv(cfg: ModelConfig, attention: str, kind: str) -> _Parameter:
    """Three `[heads * H, D]` (or, for biases, `[heads * H]`) as one `[D,K,N/K+2,H]`: a key/value head's queries, its key, its value."""
    inputs = (cfg.hidden_size,) if kind == "weight" else ()

    def combine(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        grouped = [tensor.reshape(cfg.num_kv_heads, -1, cfg.head_dim, *inputs) for tensor in (query, key, value)]
        joined = np.concatenate(grouped, axis=1)
        return np.moveaxis(joined, -1, 0) if inputs else joined

    rows = {"q_proj": cfg.num_heads, "k_proj": cfg.num_kv_heads, "v_proj": cfg.num_kv_heads}
    return _Parameter(
        tensors={f"{attention}.{name}.{kind}": (heads * cfg.head_dim, *inputs) for name, heads in rows.items()}, combine=combine
    )
