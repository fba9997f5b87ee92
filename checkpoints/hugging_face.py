"""Reads a Hugging Face model: a folder, or a hub id, with config.json and safetensors weights.

Llama, Qwen2 and Qwen3 (dense). What the decoder would run wrongly (sliding windows, other activations, other rotary embeddings, biases that
it has no place for) is refused by name.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors looks up by name)
import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.checkpoints.weights import WeightSource
from specjax.config import ROPE_TYPES, ModelConfig, RopeConfig

# Architecture, and the model_type that stands for it where `architectures` is absent.
SUPPORTED = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    # AutoTokenizer picks the class by the model's type where tokenizer_config.json does not name one.
    "config.json",
)
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def open_source(source: str | Path, *, tie_embeddings: bool | None = None) -> WeightSource:
    """Finds a model and reads its configuration and its tensors' names.

    Args:
        source: A folder, or the id of a model on the Hugging Face hub, which is downloaded into the hub's cache.
        tie_embeddings: Overrides `tie_word_embeddings` of config.json.

    Returns:
        The model, its weights not read yet.

    Raises:
        ValueError: Neither a folder nor a hub id in reach, an unsupported configuration, or an unreadable file.
    """
    folder = _locate(str(source))
    name = folder.resolve().name if Path(source).is_dir() else str(source)
    raw = _read_json(folder / "config.json", name)
    config = model_config(raw, tie_embeddings=tie_embeddings)
    shards = _open_shards(folder, name)
    handles = {tensor: handle for handle in shards.values() for tensor in handle.keys()}  # noqa: SIM118 (not a mapping)
    shapes = {tensor: tuple(handle.get_slice(tensor).get_shape()) for tensor, handle in handles.items()}

    def read(tensor: str) -> np.ndarray:
        stored = handles[tensor].get_slice(tensor).get_dtype()
        if stored not in ("BF16", "F16", "F32", "F64"):
            raise ValueError(f"{name}: tensor {tensor} should be BF16, F16 or F32, got {stored}: is the checkpoint quantised?")
        return handles[tensor].get_tensor(tensor)

    if config.tie_word_embeddings and "lm_head.weight" in shapes:
        shapes.pop("lm_head.weight")
        if not np.array_equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
            warnings.warn(
                f"{name}: tie_word_embeddings is true, but the file holds an lm_head.weight that differs from the embedding. The embedding "
                "is used for both; pass --no-tie-embeddings (tie_embeddings=False) to use the head",
                stacklevel=2,
            )
    return WeightSource(
        name=name,
        format="safetensors",
        location=folder,
        config=config,
        quantisation="none",
        shapes=shapes,
        num_bytes={tensor: int(np.prod(shape)) * _item_bytes(handles[tensor], tensor) for tensor, shape in shapes.items()},
        read=read,
        files=tuple(folder / shard for shard in shards),
        write_tokenizer=lambda destination: _copy_tokenizer(folder, destination),
    )


def model_config(raw: Mapping[str, Any], *, tie_embeddings: bool | None = None) -> ModelConfig:
    """Our configuration for a Hugging Face one.

    Args:
        raw: The contents of config.json.
        tie_embeddings: Overrides its `tie_word_embeddings`.

    Returns:
        The model's shape.

    Raises:
        ValueError: A family or a setting that is not supported, or a missing field; the message names it.
    """
    family = _family(raw)
    _refuse_unsupported(raw, family)
    num_heads = _needed_size(raw, "num_attention_heads")
    hidden_size = _needed_size(raw, "hidden_size")
    head_dim = raw.get("head_dim")
    if head_dim is None:
        # Qwen3's head size is its own, never hidden_size / num_attention_heads.
        head_dim = _needed(raw, "head_dim") if family == "qwen3" else hidden_size // num_heads
    num_kv_heads = raw.get("num_key_value_heads")
    if num_kv_heads is None:
        num_kv_heads = num_heads if family == "llama" else _needed(raw, "num_key_value_heads")
    return ModelConfig(
        vocab_size=_needed_size(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_needed_size(raw, "intermediate_size"),
        num_layers=_needed_size(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_needed_size(raw, "max_position_embeddings"),
        rope=rope_config(raw),
        rms_norm_eps=float(_needed(raw, "rms_norm_eps")),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)) if tie_embeddings is None else tie_embeddings,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def rope_config(raw: Mapping[str, Any]) -> RopeConfig:
    """The rotary embedding, from any of the three layouts: a flat `rope_theta`, `rope_scaling` beside it, or `rope_parameters`.

    Args:
        raw: The contents of config.json.

    Returns:
        Our rotary configuration.

    Raises:
        ValueError: A type other than `default` and `llama3`, or a missing field.
    """
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    settings = raw.get(key) or {}
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise ValueError(f"{key} with a rotary embedding for each kind of layer is not supported: {sorted(settings)}")
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rotary embedding of type {rope_type!r} ({key} in config.json) is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if settings.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    theta = settings.get("rope_theta", raw.get("rope_theta"))
    # transformers' default for every family here.
    theta = 10000.0 if theta is None else float(theta)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    return RopeConfig(
        theta=theta,
        rope_type="llama3",
        factor=float(_needed(settings, "factor", key)),
        low_freq_factor=float(_needed(settings, "low_freq_factor", key)),
        high_freq_factor=float(_needed(settings, "high_freq_factor", key)),
        original_max_position_embeddings=int(_needed(settings, "original_max_position_embeddings", key)),
    )


def _needed(raw: Mapping[str, Any], field: str, where: str = "config.json") -> Any:
    if raw.get(field) is None:
        raise ValueError(f"{where} lacks the field {field!r}, which is needed")
    return raw[field]


def _needed_size(raw: Mapping[str, Any], field: str) -> int:
    value = _needed(raw, field)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{field} in config.json should be a positive int, got {value!r}")
    return value


def _family(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures") or []
    by_type = {model_type: name for name, model_type in SUPPORTED.items()}
    found = architectures[0] if architectures else by_type.get(raw.get("model_type", ""), f"model_type {raw.get('model_type')!r}")
    if found not in SUPPORTED:
        raise ValueError(f"architecture {found} is not supported; supported: {', '.join(SUPPORTED)}")
    return SUPPORTED[found]


def _refuse_unsupported(raw: Mapping[str, Any], family: str) -> None:
    quantisation = raw.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown")
        raise ValueError(
            f"quantization_config: checkpoints quantised with {method!r} are not supported; take the unquantised one, or a GGUF file"
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: 'silu'")
    if raw.get("mlp_bias"):
        raise ValueError("mlp_bias=true is not supported: the feed-forward network has no biases here")
    if raw.get("attention_bias") and family != "qwen2":
        raise ValueError(f"attention_bias=true is not supported for {family}: it puts a bias on o_proj too, and the decoder has none there")
    if raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window=true is not supported: attention sees the whole context here")
    other_layers = sorted(set(raw.get("layer_types") or []) - {"full_attention"})
    if other_layers:
        raise ValueError(f"layer_types with {', '.join(other_layers)} is not supported; supported: full_attention")


def _locate(source: str) -> Path:
    """The folder itself, or the hub's snapshot of it."""
    if Path(source).is_dir():
        return Path(source)
    complaint = f"{source!r} is neither a folder nor the id of a model that the Hugging Face hub serves"
    try:
        patterns = ["model*.safetensors", _INDEX, *TOKENIZER_FILES]
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ValueError(f"{complaint} ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _read_json(path: Path, name: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{name}: no {path.name} in the folder")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}: {path.name} is not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name}: {path.name} should hold an object, got {type(values).__name__}")
    return values


def _open_shards(folder: Path, name: str) -> dict[str, Any]:
    """File name → open safetensors file, memory-mapped."""
    if (folder / _INDEX).is_file():
        weight_map = _needed(_read_json(folder / _INDEX, name), "weight_map", _INDEX)
        files = sorted(set(weight_map.values()))
    elif (folder / _SINGLE).is_file():
        weight_map, files = {}, [_SINGLE]
    else:
        found = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".gguf", ".pth"))
        raise ValueError(f"{name}: needs {_SINGLE} or {_INDEX}, found {', '.join(found) or 'no weights'}")
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise ValueError(f"{name}: {_INDEX} names files that are not there: {', '.join(absent)}")
    shards = {}
    for file in files:
        try:
            shards[file] = safe_open(folder / file, framework="numpy")
        except SafetensorError as error:
            raise ValueError(f"{name}: {file} is not a whole safetensors file; was the download cut short? ({error})") from error
    for tensor, file in weight_map.items():
        if tensor not in shards[file].keys():  # noqa: SIM118 (not a mapping)
            raise ValueError(f"{name}: {_INDEX} promises tensor {tensor} in {file}, which does not hold it")
    return shards


def _item_bytes(handle: Any, tensor: str) -> int:
    stored = handle.get_slice(tensor).get_dtype()
    return {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}.get(stored, 1)


def _copy_tokenizer(folder: Path, destination: Path) -> bool:
    if not any((folder / file).is_file() for file in _VOCABULARY_FILES):
        return False
    destination.mkdir(parents=True, exist_ok=True)
    for file in TOKENIZER_FILES:
        if (folder / file).is_file():
            shutil.copyfile(folder / file, destination / file)
    return True
