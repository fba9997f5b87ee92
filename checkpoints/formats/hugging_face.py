"""Reads a Hugging Face model: a folder, or a hub id, with config.json and weights in safetensors or PyTorch's format."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np

from specjax.checkpoints.formats.drafters import HEAD_FILES, may_be_drafter
from specjax.checkpoints.formats.families import architecture, model_config
from specjax.checkpoints.formats.fields import read_json
from specjax.checkpoints.formats.parameters import row_chunks
from specjax.checkpoints.formats.tensor_files import INDEX, TORCH_INDEX, needed_weight_files
from specjax.checkpoints.formats.transformer_weights import transformer_table
from specjax.checkpoints.source import StoredTensor, WeightSource
from specjax.model_config import ModelConfig

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
# Whole models, and what drafters are published as. PyTorch's format only where there is nothing else.
_SAFETENSORS = ("model*.safetensors", *(file for file in HEAD_FILES if file.endswith(".safetensors")))
_TORCH = ("pytorch_model*.bin", *(file for file in HEAD_FILES if not file.endswith(".safetensors")))
# Some old checkpoints carry the rotary frequencies; they follow from the configuration.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


def locate(source: str | Path, *, tie_embeddings: bool | None = None) -> tuple[Path, str]:
    """The folder of a model, and what to call it.

    Args:
        source: A folder, or the id of a model on the Hugging Face hub, which is downloaded into the hub's cache: its configuration first,
            and its weights if that is supported.
        tie_embeddings: As in `open_source`.

    Raises:
        ValueError: Neither a folder nor a hub id in reach, or the hub's model has an unsupported configuration.
    """
    if Path(source).is_dir():
        return Path(source), Path(source).resolve().name
    name = str(source)
    folder = _download(name, (*TOKENIZER_FILES, INDEX, TORCH_INDEX))
    raw = read_json(folder / "config.json", name)
    try:
        model_config(raw, tie_embeddings=tie_embeddings)
    except ValueError:
        if not _may_be_drafter(raw, folder, name):
            raise
    _download(name, _SAFETENSORS, revision=folder.name)
    if not any(folder.glob("*.safetensors")):
        _download(name, _TORCH, revision=folder.name)
    return folder, name


def open_source(source: str | Path, *, tie_embeddings: bool | None = None) -> WeightSource:
    """Finds a model and reads its configuration and its tensors' names.

    Args:
        source: As in `locate`.
        tie_embeddings: Overrides `tie_word_embeddings` of config.json.

    Returns:
        The model, its weights not read yet.

    Raises:
        ValueError: Neither a folder nor a hub id in reach, an unsupported configuration, or an unreadable file.
    """
    return open_folder(*locate(source, tie_embeddings=tie_embeddings), tie_embeddings=tie_embeddings)


def open_folder(folder: Path, name: str, *, tie_embeddings: bool | None = None) -> WeightSource:
    """The same for what `locate` has found."""
    raw = read_json(folder / "config.json", name)
    config = model_config(raw, tie_embeddings=tie_embeddings)
    files = needed_weight_files(folder, name)
    ignored = {tensor for tensor in files.tensors if tensor.endswith(_IGNORED_SUFFIX)}
    if config.tie_word_embeddings and "lm_head.weight" in files.tensors:
        ignored.add("lm_head.weight")
        _warn_if_head_differs(files.tensors, name)
    layout = _expert_layout(config, files.tensors)
    return WeightSource(
        name=name,
        format=files.format,
        architecture=architecture(raw),
        location=folder,
        config=config,
        quantisation="MXFP4" if layout == "gpt_oss_mxfp4" else "none",
        tensors=files.tensors,
        parameters=transformer_table(config, expert_layout=layout),
        ignored=frozenset(ignored),
        files=files.files,
        write_tokenizer=lambda destination: copy_tokenizer(folder, destination),
    )


def copy_tokenizer(folder: Path, destination: Path) -> bool:
    """Copies a folder's tokenizer files; `False` if it has none."""
    if not any((folder / file).is_file() for file in _VOCABULARY_FILES):
        return False
    destination.mkdir(parents=True, exist_ok=True)
    for file in TOKENIZER_FILES:
        if (folder / file).is_file():
            shutil.copyfile(folder / file, destination / file)
    return True


def _download(name: str, files: Sequence[str], *, revision: str | None = None) -> Path:
    """The folder of a hub's model, whose name is that of its revision, with those of the files that the model has."""
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files), revision=revision))
    except (OSError, ValueError) as error:
        complaint = f"{name!r} is neither a folder nor the id of a model that the Hugging Face hub serves"
        raise ValueError(f"{complaint} ({_first_line(error)})") from error


def _may_be_drafter(raw: Mapping[str, Any], folder: Path, name: str) -> bool:
    """Whether a hub's model without a supported language model's configuration may be a drafter. Fetches the heads of one, if any."""
    maps = [read_json(folder / index, name).get("weight_map") for index in (INDEX, TORCH_INDEX) if (folder / index).is_file()]
    tensor_names = [tensor for found in maps if isinstance(found, dict) for tensor in found]
    if may_be_drafter(raw, tensor_names):
        return True
    _download(name, HEAD_FILES, revision=folder.name)
    return any((folder / file).is_file() for file in HEAD_FILES)


def _expert_layout(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> str:
    """How the experts are stored: found in the names, for each of several versions of transformers wrote its own."""
    layer = next((index for index in range(config.num_layers) if config.has_experts(index)), None)
    if layer is None:
        return "separate"
    mlp = f"model.layers.{layer}.mlp"
    if config.attention_sinks:
        return "gpt_oss_mxfp4" if f"{mlp}.experts.gate_up_proj_blocks" in tensors else "gpt_oss"
    if f"{mlp}.experts.gate_up_proj" in tensors:
        return "fused"
    return "mixtral" if any(name.startswith(f"model.layers.{layer}.block_sparse_moe.") for name in tensors) else "separate"


def _warn_if_head_differs(tensors: Mapping[str, StoredTensor], name: str) -> None:
    head, embedding = tensors["lm_head.weight"], tensors.get("model.embed_tokens.weight")
    if embedding is None:
        return
    same = head.shape == embedding.shape and all(
        np.array_equal(head.read(rows), embedding.read(rows)) for rows in row_chunks(head.shape, itemsize=4)
    )
    if not same:
        warnings.warn(
            f"{name}: tie_word_embeddings is true, but the file holds an lm_head.weight that differs from the embedding. The embedding "
            "is used for both; pass --no-tie-embeddings (tie_embeddings=False) to use the head",
            stacklevel=3,
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
