"""Reads a GGUF file: llama, qwen2 and qwen3, in any block format that the `gguf` package can dequantise.

Whether the embedding and the LM head are one matrix is not written in the file. Without an `output.weight` they are. With one they still
may be: quantisers store a tied model's head once more, in higher precision. So the two are compared: quantisation moves a matrix by a few
hundredths of its norm, two matrices trained apart lie further apart than their norm. If they are the same, the more precise one serves as
both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specjax.checkpoints.formats.gguf_tokenizer import check_tokenizer, write_tokenizer
from specjax.checkpoints.formats.transformer_weights import transformer_table
from specjax.checkpoints.source import StoredTensor, WeightSource
from specjax.model_config import ModelConfig, RopeConfig
from specjax.models.rope import inverse_frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Relative distance of two dequantised matrices, below which they are one. 4-bit rounding is 0.09, 2-bit about 0.3, unrelated matrices 1.4.
_SAME_MATRIX = 0.5
_SAMPLED_ROWS = 512

_TOP = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EMBEDDING, _HEAD, _ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"


def open_source(path: str | Path, *, tie_embeddings: bool | None = None) -> WeightSource:
    """Reads a file's metadata and its tensors' names.

    Args:
        path: The GGUF file.
        tie_embeddings: Whether embedding and head are one matrix; `None` finds out (see above).

    Returns:
        The model, its weights not read yet.

    Raises:
        ValueError: A file that is damaged or cut short, or a model that is not supported.
    """
    path = Path(path)
    reader = _open(path)
    fields = _Fields(reader, path.name)
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{path.name}: GGUF architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    check_tokenizer(fields, path.name)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if _EMBEDDING not in tensors:
        raise ValueError(f"{path.name}: tensor {_EMBEDDING} is missing")
    tied = _is_tied(tensors) if tie_embeddings is None else tie_embeddings
    config = _model_config(fields, architecture, tensors, tied=tied)
    stored = {_hugging_face_name(name): tensor for name, tensor in tensors.items() if name != _ROPE_FACTORS}
    if tied and _HEAD in tensors:
        head = stored.pop("lm_head.weight")
        if head.n_bytes > tensors[_EMBEDDING].n_bytes:
            stored["model.embed_tokens.weight"] = head

    return WeightSource(
        name=path.name,
        format="gguf",
        architecture=architecture,
        location=path,
        config=config,
        quantisation=_quantisation(fields, reader),
        tensors={name: _stored(tensor, name, config, interleaved=architecture == "llama") for name, tensor in stored.items()},
        parameters=transformer_table(config),
        files=(path,),
        write_tokenizer=lambda folder: write_tokenizer(fields, folder),
    )


def _stored(tensor: Any, name: str, config: ModelConfig, *, interleaved: bool) -> StoredTensor:
    """A tensor whose rows are dequantised when they are read. Quantisation blocks lie within rows."""
    heads = config.num_heads if ".q_proj." in name else config.num_kv_heads if ".k_proj." in name else 0

    def read(rows: slice) -> np.ndarray:
        if interleaved and heads:
            return _rotary_halves(gguf.dequantize(tensor.data, tensor.tensor_type), heads)[rows]
        return gguf.dequantize(tensor.data[rows], tensor.tensor_type)

    shape = tuple(int(size) for size in reversed(tensor.shape))
    return StoredTensor(shape=shape, dtype="F32", num_bytes=int(tensor.n_bytes), read=read)


class _Fields(Mapping[str, Any]):
    """The file's metadata. Each value is converted when it is first asked for: the vocabulary's take seconds."""

    def __init__(self, reader: gguf.GGUFReader, name: str) -> None:
        self._fields, self._name, self._values = reader.fields, name, {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            self._values[key] = self._fields[key].contents()
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def needed(self, key: str) -> Any:
        if key not in self:
            raise ValueError(f"{self._name}: the file's metadata lacks {key}")
        return self[key]


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is not there") from error
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        # What NumPy says when a slice of the mapped file comes out short.
        raise ValueError(f"{path.name} is not a whole GGUF file; was the download cut short? ({error})") from error


def _model_config(fields: _Fields, architecture: str, tensors: Mapping[str, Any], *, tied: bool) -> ModelConfig:
    def own(key: str, default: Any = None) -> Any:
        return fields.get(f"{architecture}.{key}", default)

    def needed(key: str) -> Any:
        return fields.needed(f"{architecture}.{key}")

    for key, meaning in {"expert_count": "a mixture of experts", "attention.sliding_window": "a sliding window"}.items():
        if own(key):
            raise ValueError(f"{architecture}.{key}={own(key)}: {meaning} is not supported in GGUF files")
    if (fields.get("split.count") or 1) > 1:
        raise ValueError(f"split.count={fields['split.count']}: a GGUF in several files is not supported; join it with llama-gguf-split")
    hidden_size, num_heads = needed("embedding_length"), needed("attention.head_count")
    head_dim = own("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own(key, head_dim) != head_dim:
            raise ValueError(f"{architecture}.{key}={own(key)} is not supported: it differs from the head size {head_dim}")
    return ModelConfig(
        vocab_size=int(tensors[_EMBEDDING].shape[1]),
        hidden_size=hidden_size,
        intermediate_size=needed("feed_forward_length"),
        num_layers=needed("block_count"),
        num_heads=num_heads,
        num_kv_heads=own("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=needed("context_length"),
        rope=_rope_config(own, tensors, head_dim),
        rms_norm_eps=_shortest(needed("attention.layer_norm_rms_epsilon")),
        tie_word_embeddings=tied,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="head" if "blk.0.attn_q_norm.weight" in tensors else None,
    )


def _rope_config(own: Callable[..., Any], tensors: Mapping[str, Any], head_dim: int) -> RopeConfig:
    scaling = own("rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"rotary embedding with rope.scaling.type {scaling!r} is not supported")
    for key in ("rope.scale_linear", "rope.scaling.factor"):
        if own(key, 1.0) not in (0.0, 1.0):
            raise ValueError(f"rotary embedding with {key} = {own(key)} and no rope.scaling.type is not supported")
    plain = RopeConfig(theta=_shortest(own("rope.freq_base", 10000.0)))
    if _ROPE_FACTORS not in tensors:
        return plain
    # Llama 3.1's stretching is stored as its result, a divisor for each frequency; its settings have to be recognised.
    divisors = gguf.dequantize(tensors[_ROPE_FACTORS].data, tensors[_ROPE_FACTORS].tensor_type)
    llama3 = RopeConfig(theta=plain.theta, rope_type="llama3", factor=max(1.0, _shortest(divisors.max())))
    if divisors.shape != (head_dim // 2,) or not np.allclose(
        inverse_frequencies(llama3, head_dim) * divisors, inverse_frequencies(plain, head_dim), rtol=1e-5, atol=0
    ):
        raise ValueError(f"the factors in {_ROPE_FACTORS} are not those of Llama 3.1's rotary embedding; no other is supported")
    return llama3


def _is_tied(tensors: Mapping[str, Any]) -> bool:
    if _HEAD not in tensors:
        return True
    embedding, head = tensors[_EMBEDDING], tensors[_HEAD]
    if tuple(embedding.shape) != tuple(head.shape):
        return False
    rows = np.unique(np.linspace(0, embedding.data.shape[0] - 1, _SAMPLED_ROWS).astype(int))
    first, second = (gguf.dequantize(tensor.data[rows], tensor.tensor_type).astype(np.float32) for tensor in (embedding, head))
    return bool(np.linalg.norm(first - second) < _SAME_MATRIX * np.linalg.norm(second))


def _hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; a name that is not known stays."""
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    prefix, _, rest = module.partition(".")
    index, _, part = rest.partition(".")
    return f"model.layers.{index}.{_IN_LAYER[part]}.{kind}" if prefix == "blk" and part in _IN_LAYER else name


def _rotary_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """From rows that alternate between the two rotary halves (llama files are written so) to one half after the other."""
    alternating = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return alternating.swapaxes(1, 2).reshape(weight.shape)


def _quantisation(fields: _Fields, reader: gguf.GGUFReader) -> str:
    file_type = fields.get("general.file_type")
    if file_type is not None and file_type in gguf.LlamaFileType._value2member_map_:
        names = {gguf.LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")}
    else:
        names = {tensor.tensor_type.name for tensor in reader.tensors}
    return "+".join(sorted(names - {"F32", "F16", "BF16"})) or "none"


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, which was stored as 9.999999747378752e-06."""
    return float(str(np.float32(value)))
