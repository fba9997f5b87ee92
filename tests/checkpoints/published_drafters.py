"""Tiny drafters as other programs publish them, with random weights, without PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from specjax import ModelConfig
from specjax.checkpoints.formats.drafters import open_drafter
from specjax.checkpoints.source import WeightSource, check_source

WIDTH, FFN, VOCAB_SIZE, DRAFT_VOCAB_SIZE = 32, 48, 96, 40
# Not the first tokens, and with gaps and runs.
KEPT_IDS = np.sort(np.random.default_rng(5).permutation(VOCAB_SIZE)[:DRAFT_VOCAB_SIZE])


def official_config(**changes: Any) -> dict[str, Any]:
    """A flat config.json like the official one, which has no rotary base and no layer ids; `...` takes a field out."""
    config = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        initializer_range=0.02,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        torch_dtype="float16",
        transformers_version="4.28.1",
        use_cache=True,
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
    )
    return {name: value for name, value in (config | changes).items() if value is not ...}


def speculators_config(**changes: Any) -> dict[str, Any]:
    """The same drafter as the speculators library describes it."""
    flat = official_config()
    layer = {name: value for name, value in flat.items() if name not in ("architectures", "draft_vocab_size", "torch_dtype")}
    config = dict(
        architectures=["Eagle3Speculator"],
        auto_map={"": "eagle3.Eagle3SpeculatorConfig"},
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        has_no_defaults_at_init=False,
        norm_before_residual=False,
        speculators_config=dict(algorithm="eagle3", proposal_methods=[dict(proposal_type="greedy", speculative_tokens=5)]),
        speculators_model_type="eagle3",
        speculators_version="0.2.0",
        target_hidden_size=None,
        torch_dtype="float32",
        transformer_layer_config=layer | dict(attention_bias=False, mlp_bias=False, rope_scaling=None, rope_theta=10000.0),
    )
    return {name: value for name, value in (config | changes).items() if value is not ...}


def eagle3_tensors(
    *,
    first_layer: str = "midlayer",
    num_layers: int = 1,
    num_features: int = 3,
    target_width: int = WIDTH,
    draft_vocab_size: int | None = DRAFT_VOCAB_SIZE,
    rank: int | None = None,
    head_dim: int = 8,
    embedding: bool = False,
    dtype: Any = np.float32,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """A drafter's tensors under their published names: `lm_head` is left out if `draft_vocab_size` is `None` and `rank` too."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (WIDTH, num_features * target_width), "norm.weight": (WIDTH,)}
    for index in range(num_layers):
        layer, width = (first_layer, 2 * WIDTH) if index == 0 else (f"layers.{index}", WIDTH)
        if index == 0:
            shapes[f"{layer}.hidden_norm.weight"] = (WIDTH,)
        shapes |= {f"{layer}.{norm}.weight": (WIDTH,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (heads * head_dim, width) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
        shapes[f"{layer}.self_attn.o_proj.weight"] = (WIDTH, 4 * head_dim)
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (FFN, WIDTH) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (WIDTH, FFN)
    if embedding:
        shapes["embed_tokens.weight"] = (VOCAB_SIZE, WIDTH)
    if rank is not None:
        shapes |= {"lm_head.down.weight": (rank, WIDTH), "lm_head.up.weight": (VOCAB_SIZE, rank)}
    elif draft_vocab_size is not None:
        shapes["lm_head.weight"] = (draft_vocab_size, WIDTH)
    tensors = {name: random_tensor(name, shape, seed=seed + index, dtype=dtype) for index, (name, shape) in enumerate(shapes.items())}
    if rank is None and draft_vocab_size == DRAFT_VOCAB_SIZE:
        tensors |= {"d2t": KEPT_IDS - np.arange(DRAFT_VOCAB_SIZE), "t2d": np.isin(np.arange(VOCAB_SIZE), KEPT_IDS)}
    return tensors


def random_tensor(name: str, shape: tuple[int, ...], *, seed: int, dtype: Any = np.float32) -> np.ndarray:
    """Norms around 1, everything else such that activations keep their size."""
    rng = np.random.default_rng(seed)
    if "norm" in name:
        return rng.uniform(0.5, 1.5, shape).astype(dtype)
    return (rng.normal(size=shape) * (1.0 if "embed" in name else shape[-1] ** -0.5)).astype(dtype)


def write_drafter(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, file: str = "model.safetensors") -> Path:
    """config.json and a safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / file)
    return folder


def opened(folder: Path, **options: Any) -> WeightSource:
    """A drafter that fits its configuration."""
    source = open_drafter(folder, **options)
    assert source is not None
    check_source(source)
    return source


def target(num_layers: int = 32, **changes: Any) -> ModelConfig:
    """A target that these drafters fit."""
    sizes = dict(vocab_size=VOCAB_SIZE, hidden_size=WIDTH, intermediate_size=FFN, num_heads=4, num_kv_heads=2, head_dim=8)
    return ModelConfig(**sizes | dict(num_layers=num_layers, max_position_embeddings=128) | changes)
