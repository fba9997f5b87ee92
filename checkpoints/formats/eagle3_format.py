"""Reads EAGLE-3 drafters as published: official and SpecForge (`midlayer.*`), speculators, vLLM and Model-Optimizer (`layers.0.*`).

The low-rank LM head `lm_head.down.weight`, `lm_head.up.weight` is TorchSpec's public format.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints.formats.draft_vocabulary import target_ids
from specjax.checkpoints.formats.drafter_source import drafter_source
from specjax.checkpoints.formats.eagle3_fields import eagle3_config
from specjax.checkpoints.formats.fields import optional_list
from specjax.checkpoints.formats.parameters import gate_up, grouped_qkv, plain, stacked, transposed
from specjax.checkpoints.formats.tensor_files import TensorFiles
from specjax.checkpoints.source import INTEGER, Parameter, Read, StoredTensor, WeightSource
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads import LowRankHead, TrimmedHead
from specjax.model_config import ModelConfig

OFFICIAL_FIRST_LAYER = "midlayer"
_FIRST_LAYERS = (OFFICIAL_FIRST_LAYER, "layers.0")
# Fields and tensors that no plain language model has.
_FIELDS = ("draft_vocab_size", "eagle_config", "lm_head_rank_divisor", "transformer_layer_config")
_TENSORS = ("fc.weight", *(f"{layer}.hidden_norm.weight" for layer in _FIRST_LAYERS))
# Tensors of drafters that compute something else, with what that is.
_OTHER_DRAFTERS = {
    "parallel_draft_heads.": "parallel draft heads",
    "mask_hidden": "a parallel drafter (P-EAGLE)",
    "enorm.": "a drafter with enorm and eh_proj",
    "eh_proj.": "a drafter with enorm and eh_proj",
    "kv_a_proj_with_mqa": "multi-head latent attention",
    "input_scale": "quantised weights",
    "weight_scale": "quantised weights",
}


def detects(raw: Mapping[str, Any], tensor_names: Sequence[str]) -> bool:
    """Whether this is an EAGLE-3 drafter, or close enough for its differences to be named.

    Args:
        raw: The contents of config.json.
        tensor_names: Names in the weight files.
    """
    names = {name.removeprefix("model.") for name in tensor_names}
    return any(raw.get(field) is not None for field in _FIELDS) or any(name in names for name in _TENSORS)


def open_source(
    folder: Path,
    name: str,
    raw: Mapping[str, Any],
    files: TensorFiles,
    *,
    target: ModelConfig | None = None,
    feature_layers: Sequence[int] | None = None,
    draft_ids: str | None = None,
) -> WeightSource:
    """Configuration and table of an EAGLE-3 drafter.

    Args:
        folder: Where it lies.
        name: What to call it.
        raw: The contents of config.json.
        files: The weights.
        target: The target's shape, if it is known.
        feature_layers: Boundaries of the target to read, in the place of the layer ids in config.json.
        draft_ids: How to read `d2t`: `"offsets"`, `"absolute"`, or `None` to find out.

    Raises:
        ValueError: What is not supported, by name; see `eagle3_config` and `target_ids`.
    """
    if raw.get("quantization_config"):
        raise ValueError("quantization_config: a drafter with quantised weights is not supported")
    tensors = _without_prefix(files.tensors)
    for tensor, (part, what) in itertools.product(tensors, _OTHER_DRAFTERS.items()):
        if part in tensor:
            raise ValueError(f"{what} (tensor {tensor}) is not supported")
    first_layers = [layer for layer in _FIRST_LAYERS if any(name.startswith(f"{layer}.") for name in tensors)]
    if len(first_layers) != 1:
        raise ValueError(f"an EAGLE-3 drafter has a layer midlayer or layers.0, found {' and '.join(first_layers) or 'neither'}")
    (first,) = first_layers
    if f"{first}.hidden_norm.weight" not in tensors and f"{first}.input_layernorm.weight" not in tensors:
        raise ValueError(f"no {first}.hidden_norm.weight: EAGLE and EAGLE-2 drafters are not supported")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for matrix in ("fc.weight", "lm_head.weight"):  # sizes are taken from them
        if len(shapes.get(matrix, (0, 0))) != 2:
            raise ValueError(f"tensor {matrix} should have two axes, got shape {shapes[matrix]}")
    config = eagle3_config(raw, shapes, first_layer=first, target=target, feature_layers=feature_layers)
    ids = _draft_to_target(config, tensors, draft_ids)
    return drafter_source(
        folder,
        name,
        files,
        config=config,
        architecture=(optional_list(raw, "architectures", str) or [""])[0],
        tensors=tensors,
        parameters=eagle3_table(config, ids, first_layer=first),
        ignored=_ignored(config, tensors),
    )


def eagle3_table(cfg: Eagle3Config, draft_to_target: np.ndarray, *, first_layer: str) -> dict[str, Parameter]:
    """What each parameter is made of.

    Args:
        cfg: The drafter's shape.
        draft_to_target: `[Vd]`, the target's ids for the rows of a trimmed LM head, as `d2t` was understood.
        first_layer: What the names of layer 0's tensors begin with.
    """
    decoder, width = cfg.decoder, cfg.decoder.hidden_size
    fused = cfg.num_features * cfg.target_hidden_size
    table = {"fc": transposed("fc.weight", (width, fused)), "final_norm.scale": plain("norm.weight", (width,))}
    if cfg.own_embedding:
        table["embedding"] = plain("embed_tokens.weight", (decoder.vocab_size, width))
    if cfg.norm_before_fc:
        table["input_norm.scale"] = plain("input_norm.weight", (fused,))
    if cfg.fc_norm:
        for index in range(cfg.num_features):
            table[f"fc_norm_{index}.scale"] = plain(f"fc_norm.{index}.weight", (cfg.target_hidden_size,))
    table |= {f"draft_head.{name}": parameter for name, parameter in _head_table(cfg, draft_to_target).items()}
    for index in range(decoder.num_layers):
        layer = _layer(cfg, first_layer if index == 0 else f"layers.{index}", first=index == 0)
        table |= {f"layer_{index}.{name}": parameter for name, parameter in layer.items()}
    return table


def _head_table(cfg: Eagle3Config, draft_to_target: np.ndarray) -> dict[str, Parameter]:
    head, vocab_size, width = cfg.head, cfg.decoder.vocab_size, cfg.decoder.hidden_size
    if isinstance(head, LowRankHead):
        return {"down": plain("lm_head.down.weight", (head.rank, width)), "up": plain("lm_head.up.weight", (vocab_size, head.rank))}
    if not isinstance(head, TrimmedHead):
        return {} if head.shared else {"lm_head": plain("lm_head.weight", (vocab_size, width))}

    def fill(out: np.ndarray, read: Read) -> None:
        out[:] = draft_to_target

    token_ids = Parameter(tensors={"d2t": (head.num_tokens,)}, fill=fill, accepts=INTEGER)
    return {"lm_head": plain("lm_head.weight", (head.num_tokens, width)), "token_ids": token_ids}


def _layer(cfg: Eagle3Config, theirs: str, *, first: bool) -> dict[str, Parameter]:
    decoder, width, ffn = cfg.decoder, cfg.decoder.hidden_size, cfg.decoder.intermediate_size
    attention, mlp, head_dim = f"{theirs}.self_attn", f"{theirs}.mlp", decoder.head_dim
    heads = {"num_heads": decoder.num_heads, "num_kv_heads": decoder.num_kv_heads, "head_dim": head_dim}
    heads["width"] = 2 * width if first else width
    # In layer 0 `input_layernorm` is the embedding's, in the others that of the residual stream.
    table = {
        "attention_norm.scale": plain(f"{theirs}.{'hidden_norm' if first else 'input_layernorm'}.weight", (width,)),
        "attention.qkv": grouped_qkv(attention, "weight", **heads),
        "attention.output": transposed(f"{attention}.o_proj.weight", (width, decoder.num_heads * head_dim)),
        "mlp_norm.scale": plain(f"{theirs}.post_attention_layernorm.weight", (width,)),
        "mlp.gate_up": gate_up(mlp, ffn=ffn, width=width),
        "mlp.down": transposed(f"{mlp}.down_proj.weight", (width, ffn)),
    }
    if first:
        table["embedding_norm.scale"] = plain(f"{theirs}.input_layernorm.weight", (width,))
    if decoder.qkv_bias:
        table["attention.qkv_bias"] = grouped_qkv(attention, "bias", **heads)
    if decoder.output_bias:
        table["attention.output_bias"] = plain(f"{attention}.o_proj.bias", (width,))
    if decoder.qk_norm is not None:
        table["attention.query_norm.scale"] = plain(f"{attention}.q_norm.weight", (head_dim,))
        table["attention.key_norm.scale"] = plain(f"{attention}.k_norm.weight", (head_dim,))
    if decoder.mlp_bias:
        table["mlp.gate_up_bias"] = stacked({f"{mlp}.gate_proj.bias": (ffn,), f"{mlp}.up_proj.bias": (ffn,)})
        table["mlp.down_bias"] = plain(f"{mlp}.down_proj.bias", (width,))
    return table


def _without_prefix(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Some writers put `model.` before all names, some before all but the LM head's."""
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        twice = next(name for name in tensors if f"model.{name}" in tensors)
        raise ValueError(f"the file holds both {twice} and model.{twice}")
    return renamed


def _draft_to_target(cfg: Eagle3Config, tensors: Mapping[str, StoredTensor], reading: str | None) -> np.ndarray:
    """`[Vd]` int32; checked even where it is the identity and no parameter needs it."""
    num_tokens = cfg.head.num_tokens if isinstance(cfg.head, TrimmedHead) else cfg.decoder.vocab_size
    if "d2t" not in tensors:
        return np.arange(num_tokens, dtype=np.int32)  # for a pruned vocabulary `check_source` says that d2t is missing
    d2t, t2d = tensors["d2t"], tensors.get("t2d")
    if d2t.shape != (num_tokens,) or d2t.dtype not in INTEGER:
        raise ValueError(f"d2t should hold {num_tokens} integers, one for each row of the LM head, got {d2t.dtype} {d2t.shape}")
    kept = None if t2d is None else t2d.read(slice(None)).astype(bool)
    ids = target_ids(d2t.read(slice(None)), cfg.decoder.vocab_size, kept=kept, reading=reading)
    if not isinstance(cfg.head, TrimmedHead) and not np.array_equal(ids, np.arange(len(ids))):
        raise ValueError("d2t of a drafter with the whole vocabulary should be the identity; a permutation is not supported")
    return ids


def _ignored(cfg: Eagle3Config, tensors: Mapping[str, StoredTensor]) -> frozenset[str]:
    """`t2d` says what `d2t` says, the verifier's tensors are the target's, and rotary frequencies follow from the configuration."""
    ignored = {name for name in tensors if name.startswith("verifier_") or name.endswith("rotary_emb.inv_freq")}
    if "d2t" in tensors:
        ignored.add("t2d")
    if not isinstance(cfg.head, TrimmedHead):
        ignored |= {"d2t", "t2d"}
    return frozenset(ignored)
