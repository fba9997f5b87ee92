"""Reads Medusa heads as published: the official files (also TGI's and TensorRT-LLM's), and those of vLLM and speculators.

The official names are `3.0.linear.weight` (head 3, block 0) and `3.1.weight` (its LM head, after one block), vLLM's are
`blocks.3.layers.0.weight` and `lm_heads.3.weight`. Heads without LM heads (Medusa's second version) use the target's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoints.formats.drafter_source import drafter_source
from specjax.checkpoints.formats.fields import needed_size
from specjax.checkpoints.formats.parameters import plain, transposed
from specjax.checkpoints.formats.tensor_files import TensorFiles
from specjax.checkpoints.source import Parameter, StoredTensor, WeightSource
from specjax.drafting.heads import FullHead
from specjax.drafting.medusa import MedusaConfig
from specjax.model_config import ModelConfig

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")

_PREFIX = re.compile(r"^(medusa_heads?|heads)\.(?=blocks\.|lm_heads\.|\d)")
_VLLM_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_VLLM_HEAD = re.compile(r"^lm_heads\.(\d+)\.weight$")


def detects(raw: Mapping[str, Any]) -> bool:
    """Whether config.json is that of Medusa heads."""
    return "medusa_num_heads" in raw or raw.get("model_type") == "medusa" or raw.get("speculators_model_type") == "medusa"


def open_source(folder: Path, name: str, raw: Mapping[str, Any], files: TensorFiles, *, target: ModelConfig | None = None) -> WeightSource:
    """Configuration and table of Medusa heads. Sizes are taken from the tensors: the official config.json names none.

    Args:
        folder: Where they lie.
        name: What to call them.
        raw: The contents of config.json.
        files: The weights. They may hold more heads than config.json declares; those are left out.
        target: The target's shape, if it is known.

    Raises:
        ValueError: What is not supported, by name, or heads that do not fit the target.
    """
    _refuse_unsupported(raw)
    num_layers = _declared(raw, "medusa_num_layers", "num_hidden_layers")
    tensors = _official_names(files.tensors, num_layers)
    first = tensors.get("0.0.linear.weight")
    if first is None:
        raise ValueError(f"no weights of head 0 among {', '.join(list(files.tensors)[:4])}")
    own_head = f"0.{num_layers}.weight" in tensors
    for matrix in ("0.0.linear.weight", *((f"0.{num_layers}.weight",) if own_head else ())):  # sizes are taken from them
        if len(tensors[matrix].shape) != 2:
            raise ValueError(f"tensor {matrix} should have two axes, got shape {tensors[matrix].shape}")
    if not own_head and target is None:
        raise ValueError("these Medusa heads use the target's LM head: its vocabulary has to be known (target)")
    config = MedusaConfig(
        hidden_size=first.shape[0],
        vocab_size=tensors[f"0.{num_layers}.weight"].shape[0] if own_head or target is None else target.vocab_size,
        num_draft_heads=_declared(raw, "medusa_num_heads", "num_heads"),
        num_layers=num_layers,
        block_bias="0.0.linear.bias" in tensors,
        head=FullHead(shared=not own_head),
    )
    check_target(config, target)
    surplus = {tensor for tensor in tensors if re.match(r"\d+\.", tensor) and int(tensor.split(".")[0]) >= config.num_draft_heads}
    table = _table(config)
    return drafter_source(folder, name, files, config=config, tensors=tensors, parameters=table, ignored=frozenset(surplus))


def check_target(config: Any, target: ModelConfig | None) -> None:
    """Refuses heads of another width or vocabulary than the target's.

    Args:
        config: Anything with `hidden_size` and `vocab_size`.
        target: The target's shape; `None` fits.
    """
    if target is not None and (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"the heads have hidden size {config.hidden_size} and {config.vocab_size} tokens, the target has {target.hidden_size} and "
            f"{target.vocab_size}"
        )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    whole = raw.get("vocab_size", raw.get("medusa_vocab_size"))
    harmless: dict[str, tuple[Any, ...]] = {
        "truncated_vocab_size": (None, 0, whole),
        "original_lm_head": (None, False),
        "logit_scale": (None, 1),
        "quantization_config": (None, {}),
    }
    for field, values in harmless.items():
        if raw.get(field) not in values:
            raise ValueError(f"{field} = {raw[field]!r:.80} is not supported for Medusa heads")


def _declared(raw: Mapping[str, Any], *fields: str) -> int:
    return needed_size(raw, next((field for field in fields if field in raw), fields[0]))


def _official_names(tensors: Mapping[str, StoredTensor], num_layers: int) -> dict[str, StoredTensor]:
    named = {}
    for found, tensor in tensors.items():
        name = _PREFIX.sub("", found)
        name = _VLLM_BLOCK.sub(r"\1.\2.linear.\3", name)
        name = _VLLM_HEAD.sub(rf"\g<1>.{num_layers}.weight", name)
        if name in named:
            raise ValueError(f"the file holds {found} twice, under two names")
        named[name] = tensor
    return named


def _table(cfg: MedusaConfig) -> dict[str, Parameter]:
    table, width = {}, cfg.hidden_size
    for head in range(cfg.num_draft_heads):
        for block in range(cfg.num_layers):
            table[f"head_{head}.block_{block}"] = transposed(f"{head}.{block}.linear.weight", (width, width))
            if cfg.block_bias:
                table[f"head_{head}.block_{block}_bias"] = plain(f"{head}.{block}.linear.bias", (width,))
        if not cfg.head.shared:
            table[f"head_{head}.draft_head.lm_head"] = plain(f"{head}.{cfg.num_layers}.weight", (cfg.vocab_size, width))
    return table
