"""Shapes of published models, and random weights for them: for timing, where only the sizes count."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax import ModelConfig, MoEConfig, RopeConfig, Transformer
from specjax.drafting.eagle3 import Eagle3


def llama31_8b() -> ModelConfig:
    """Llama-3.1-8B."""
    return ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope=RopeConfig(theta=500000.0, rope_type="llama3", factor=8.0),
        rms_norm_eps=1e-5,
    )


def llama32_1b() -> ModelConfig:
    """Llama-3.2-1B, a drafter for `llama31_8b`."""
    return ModelConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rope=RopeConfig(theta=500000.0, rope_type="llama3", factor=32.0),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )


def qwen25_15b() -> ModelConfig:
    """Qwen2.5-1.5B, the Coder variant included."""
    return ModelConfig(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        max_position_embeddings=32768,
        rope=RopeConfig(theta=1000000.0),
        tie_word_embeddings=True,
        qkv_bias=True,
    )


def qwen25_05b() -> ModelConfig:
    """Qwen2.5-0.5B, the Coder variant included; a drafter for `qwen25_15b`."""
    return ModelConfig(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
        rope=RopeConfig(theta=1000000.0),
        tie_word_embeddings=True,
        qkv_bias=True,
    )


def smollm2_135m() -> ModelConfig:
    """SmolLM2-135M."""
    return ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope=RopeConfig(theta=100000.0),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )


def qwen3_30b_a3b() -> ModelConfig:
    """Qwen3-30B-A3B: a mixture of 128 experts, 8 a token."""
    return ModelConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        max_position_embeddings=40960,
        rope=RopeConfig(theta=1000000.0),
        qk_norm="head",
        moe=MoEConfig(num_experts=128, num_experts_per_token=8, intermediate_size=768),
    )


def gpt_oss_20b() -> ModelConfig:
    """GPT-OSS-20B, in bfloat16: a mixture of 32 experts, 4 a token; every second layer sees 128 tokens."""
    return ModelConfig(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rope=RopeConfig(
            theta=150000.0,
            rope_type="yarn",
            factor=32.0,
            original_max_position_embeddings=4096,
            truncate=False,
            attention_factor=1.3465735902799727,  # 0.1 ln(32) + 1
        ),
        rms_norm_eps=1e-5,
        qkv_bias=True,
        output_bias=True,
        layer_windows=(128, None) * 12,
        attention_sinks=True,
        activation="clamped_swiglu",
        mlp_bias=True,
        moe=MoEConfig(num_experts=32, num_experts_per_token=4, intermediate_size=2880, router_bias=True),
    )


def tiny() -> ModelConfig:
    """One narrow layer, for trying things out on a CPU."""
    return ModelConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
    )


_PRESETS = (llama31_8b, llama32_1b, qwen25_15b, qwen25_05b, qwen3_30b_a3b, gpt_oss_20b, smollm2_135m, tiny)
PRESETS = {preset.__name__: preset for preset in _PRESETS}


def random_params(model: Transformer | Eagle3, rng: jax.Array) -> dict:
    """Random weights of a model's shapes in its `param_dtype`, leaf by leaf on the device; norm scales near one, the rest `N(0, 0.02²)`."""
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    filled = []
    for index, (path, leaf) in enumerate(leaves):
        noise = random_array(jax.random.fold_in(rng, index), leaf.shape, leaf.dtype, 0.02)
        filled.append(noise + jnp.ones((), leaf.dtype) if path[-1].key == "scale" else noise)
    return jax.tree.unflatten(treedef, filled)


def random_array(rng: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    """`N(0, scale²)`, made by one compiled program a shape."""
    return _random_array(rng, scale, shape=shape, dtype=jnp.dtype(dtype))


def _fill(rng: jax.Array, scale: jax.Array, *, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jax.random.normal(rng, shape, dtype) * scale.astype(dtype)


_random_array = jax.jit(_fill, static_argnames=("shape", "dtype"))


def weight_bytes_per_pass(params: dict, config: ModelConfig, *, num_tokens: int = 1) -> float:
    """Bytes of weights that one forward pass has to read.

    All of them, but of an embedding that is not the head too only a few rows, and of experts those that `num_tokens` tokens choose: on
    average, if each chooses at random, `E (1 - (1 - C / E)^num_tokens)` of E.
    """
    chosen = 1.0
    if config.moe is not None:
        chosen = 1 - (1 - config.moe.num_experts_per_token / config.moe.num_experts) ** num_tokens
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        share = chosen if path[-1].key.startswith("expert_") else 1.0
        total += share * leaf.size * leaf.dtype.itemsize
    embedding = params["embedding"]
    return total if config.tie_word_embeddings else total - embedding.size * embedding.dtype.itemsize


def kv_bytes(config: ModelConfig, *, batch: int, context: int, itemsize: int) -> int:
    """Bytes of keys and values that a pass has to read at a context of so many tokens; of a windowed layer, those in its window."""
    tokens = sum(min(context, config.window(layer) or context) for layer in range(config.num_layers))
    return 2 * config.num_kv_heads * config.head_dim * batch * tokens * itemsize
