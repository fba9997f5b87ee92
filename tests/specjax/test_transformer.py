"""The decoder against a NumPy version of it, the sizes of published models, and the log probabilities of what is emitted."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.presets import qwen25_05b
from specjax import GenerateConfig, ModelConfig, PromptLookup, RopeConfig, SamplingParams, Transformer, speculative_generate
from tests.helpers import (
    NUM_TOKENS,
    numpy_forward,
    numpy_log_softmax,
    random_model,
    random_prompts,
    tiny_config,
    tiny_target,
)

# float32 against float64 through two or three layers, on logits of order 5.
TOLERANCE = 1e-4

FAMILIES = {
    "llama": dict(),
    "qwen2": dict(qkv_bias=True, tie_word_embeddings=True),
    "qwen3": dict(qk_norm="head", head_dim=12),
    "multi-head": dict(num_kv_heads=4, num_layers=3, rope=RopeConfig(theta=500.0)),
    "multi-query": dict(num_kv_heads=1, rms_norm_eps=1e-2),
}


@functools.partial(jax.jit, static_argnums=(0, 3))
def logits_in_pieces(model: Transformer, params: Any, tokens: jax.Array, pieces: tuple[int, ...]) -> jax.Array:
    cache, all_logits, start = model.init_cache(batch_size=tokens.shape[0], capacity=32), [], 0
    for piece in pieces:
        output = model.apply({"params": params}, tokens[:, start : start + piece], cache)
        cache, start = output.cache, start + piece
        all_logits.append(model.apply({"params": params}, output.hidden, method="logits"))
    return jnp.concatenate(all_logits, axis=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_numpy_decoder(family: str) -> None:
    model, params = random_model(tiny_config(**FAMILIES[family]), seed=3)
    tokens = random_prompts((11, 11), seed=3)
    got = logits_in_pieces(model, params, jnp.asarray(tokens), (6, 1, 4))
    for row in range(2):
        expected = numpy_forward(model.config, params, tokens[row])
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(got[row], expected, atol=TOLERANCE)


def test_features_are_the_residual_stream_at_the_boundaries_asked_for() -> None:
    model, params = tiny_target()
    tokens = jnp.asarray(random_prompts((6,)))
    cache = model.init_cache(batch_size=1, capacity=8)
    output = jax.jit(lambda: model.apply({"params": params}, tokens, cache, feature_layers=(0, 1, 2)))()
    embedded, _, last = np.split(np.asarray(output.features)[0], 3, axis=-1)
    np.testing.assert_array_equal(embedded, params["embedding"][tokens[0]])
    normed = last / np.sqrt((last**2).mean(axis=-1, keepdims=True) + 1e-6) * np.asarray(params["final_norm"]["scale"])
    np.testing.assert_allclose(output.hidden[0], normed, atol=1e-5)


def test_a_bfloat16_model_computes_in_bfloat16_and_returns_float32_logits() -> None:
    model, params = random_model(tiny_config(), dtype=jnp.bfloat16)
    cache = model.init_cache(batch_size=1, capacity=8)
    shapes = jax.eval_shape(lambda: model.apply({"params": params}, jnp.zeros((1, 3), jnp.int32), cache))
    assert shapes.hidden.dtype == shapes.cache.keys[0].dtype == jnp.bfloat16
    logits = jax.eval_shape(lambda hidden: model.apply({"params": params}, hidden, method="logits"), shapes.hidden)
    assert logits.dtype == jnp.float32


def llama3(**sizes: Any) -> ModelConfig:
    return ModelConfig(vocab_size=128256, head_dim=sizes.pop("head_dim", 128), num_kv_heads=8, max_position_embeddings=131072, **sizes)


PUBLISHED = {
    # The counts that Hugging Face shows for the safetensors of each.
    "Llama-3.1-8B": (llama3(hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32), 8_030_261_248),
    "Llama-3.1-70B": (llama3(hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64), 70_553_706_496),
    "Llama-3.2-1B": (
        llama3(hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "Qwen2.5-0.5B": (
        qwen25_05b(),
        494_032_768,
    ),
    "Qwen3-8B": (
        ModelConfig(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            qk_norm="head",
        ),
        8_190_735_360,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_number_of_parameters(name: str) -> None:
    config, expected = PUBLISHED[name]
    model = Transformer(config)
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == expected
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.bfloat16)}
    cache = jax.eval_shape(lambda: model.init_cache(batch_size=2, capacity=64))
    assert len(cache.keys) == config.num_layers
    assert cache.keys[0].shape == (2, config.num_kv_heads, 64, config.head_dim)


def test_log_probs_are_those_of_an_independent_full_forward_under_the_unscaled_softmax() -> None:
    target, params = tiny_target()
    prompts = random_prompts()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, do_sample=True, return_log_probs=True)
    sampling = SamplingParams(np.array([0.0, 0.7, 2.0, 0.0, 1.0]), np.array([0, 3, 0, 0, 10]))
    output = speculative_generate(
        target,
        params,
        PromptLookup(),
        None,
        prompts,
        config=config,
        sampling=sampling,
        rng=jax.random.key(0),
        max_new_tokens=[24, 24, 24, 20, 0],
    )
    assert output.log_probs is not None
    assert output.log_probs.shape == output.tokens.shape
    assert output.statistics.num_accepted_tokens > 0
    for row, prompt in enumerate(prompts):
        length = int(output.lengths[row])
        tokens = output.tokens[row, :length].tolist()
        log_probs = numpy_log_softmax(numpy_forward(target.config, params, prompt + tokens))[len(prompt) - 1 : len(prompt) - 1 + length]
        np.testing.assert_allclose(output.log_probs[row, :length], log_probs[np.arange(length), tokens], atol=TOLERANCE)
        assert (output.log_probs[row, length:] == 0).all()
