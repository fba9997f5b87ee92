"""Reads Hydra heads of the `mlp` architecture as published: `hydra_lm_head.pt` beside config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoints.formats.drafter_source import drafter_source
from specjax.checkpoints.formats.fields import optional_size
from specjax.checkpoints.formats.medusa_format import check_target
from specjax.checkpoints.formats.parameters import plain, transposed
from specjax.checkpoints.formats.tensor_files import TensorFiles
from specjax.checkpoints.source import Parameter, WeightSource
from specjax.drafting.heads import FullHead
from specjax.drafting.hydra import HydraConfig
from specjax.model_config import ModelConfig

FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")

# The official file has the target's embedding too, under this name.
_TARGET_EMBEDDING = "input_embed_fn.weight"


def detects(raw: Mapping[str, Any]) -> bool:
    """Whether config.json is that of Hydra heads."""
    return "hydra_num_heads" in raw


def open_source(folder: Path, name: str, raw: Mapping[str, Any], files: TensorFiles, *, target: ModelConfig | None = None) -> WeightSource:
    """Configuration and table of Hydra heads. Sizes are taken from the tensors: config.json names none.

    Args:
        folder: Where they lie.
        name: What to call them.
        raw: The contents of config.json. Absent fields are the official class's defaults: 4 heads of 1 layer, `mlp`, not grounded.
        files: The weights. They may hold more heads than config.json declares; those are left out.
        target: The target's shape, if it is known.

    Raises:
        ValueError: Another architecture than `mlp`, another hidden state than the last, or heads that do not fit the target.
    """
    architecture = raw.get("hydra_head_arch", "mlp")
    if architecture != "mlp":
        raise ValueError(f"hydra_head_arch {architecture!r} is not supported; supported: 'mlp'")
    if raw.get("hidden_state_offset"):
        raise ValueError(f"hidden_state_offset = {raw['hidden_state_offset']!r} is not supported: heads read the last hidden state")
    head = files.tensors.get("hydra_lm_head.0.weight")
    if head is None or len(head.shape) != 2:
        raise ValueError(f"no hydra_lm_head.0.weight among {', '.join(list(files.tensors)[:4])}")
    num_heads, num_layers = optional_size(raw, "hydra_num_heads", 4), optional_size(raw, "hydra_num_layers", 1)
    assert num_heads is not None
    assert num_layers is not None
    config = HydraConfig(
        hidden_size=head.shape[1],
        vocab_size=head.shape[0],
        head=FullHead(bias=True),
        num_draft_heads=num_heads,
        num_layers=num_layers,
        grounded=bool(raw.get("grounded_heads", False)),
    )
    check_target(config, target)
    surplus = {tensor for tensor in files.tensors if _head_of(tensor) >= num_heads}
    return drafter_source(
        folder,
        name,
        files,
        config=config,
        architecture=architecture,
        tensors=files.tensors,
        parameters=_table(config),
        ignored=frozenset(surplus | {_TARGET_EMBEDDING}),
    )


def _head_of(tensor: str) -> int:
    found = re.match(r"hydra_(?:mlp|lm_head)\.(\d+)\.", tensor)
    return int(found[1]) if found else -1


def _table(cfg: HydraConfig) -> dict[str, Parameter]:
    table, width = {}, cfg.hidden_size
    for head in range(cfg.num_draft_heads):
        first_width = width * (head + 2) if cfg.grounded else width
        modules = {f"block_{block}": (f"{block}.linear", width if block else first_width) for block in range(cfg.num_layers)}
        if cfg.grounded:
            modules["residual"] = ("0.res_connection", first_width)
        for ours, (theirs, inputs) in modules.items():
            table[f"head_{head}.{ours}"] = transposed(f"hydra_mlp.{head}.{theirs}.weight", (width, inputs))
            table[f"head_{head}.{ours}_bias"] = plain(f"hydra_mlp.{head}.{theirs}.bias", (width,))
        table[f"head_{head}.draft_head.lm_head"] = plain(f"hydra_lm_head.{head}.weight", (cfg.vocab_size, width))
        table[f"head_{head}.draft_head.bias"] = plain(f"hydra_lm_head.{head}.bias", (cfg.vocab_size,))
    return table
