"""The EAGLE-3 network against its formulas in float64: a pass over known features, then four recursive steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads import LowRankHead
from tests.drafters import random_params
from tests.helpers import VOCAB_SIZE, numpy_log_softmax, tiny_config

WIDTH, NUM_TOKENS, NUM_RECURSIVE = 32, 7, 4
# float32 through up to five passes over values of order 1, against float64.
TOLERANCE = 2e-4

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as published": ({}, {}),
    "normed features, state and residual, two layers, low rank": (
        dict(num_layers=2),
        dict(fc_norm=True, norm_output=True, norm_before_residual=True, head=LowRankHead(rank=8)),
    ),
    "features normed together": (dict(num_kv_heads=4), dict(norm_before_fc=True)),
}


class NumpyEagle3:
    """The whole sequence at every pass, no cache, one head at a time."""

    def __init__(self, config: Eagle3Config, params: dict) -> None:
        self.config, self.params = config, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.config.decoder.rms_norm_eps) * scale

    def fuse(self, features: np.ndarray) -> np.ndarray:
        if self.config.norm_before_fc:
            features = self.norm(features, self.params["input_norm"]["scale"])
        if self.config.fc_norm:
            parts = np.split(features, 3, axis=-1)
            features = np.concatenate([self.norm(x, self.params[f"fc_norm_{i}"]["scale"]) for i, x in enumerate(parts)], axis=-1)
        return features @ self.params["fc"]

    def rotate(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None] * self.config.decoder.rope.theta ** (-np.arange(half) / half)
        turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=1)

    def attention(self, x: np.ndarray, weights: dict) -> np.ndarray:
        cfg, mixed = self.config.decoder, []
        group = cfg.num_heads // cfg.num_kv_heads
        for head in range(cfg.num_heads):
            query, key, value = (x @ weights["qkv"][:, head // group, slot] for slot in (head % group, group, group + 1))
            scores = self.rotate(query) @ self.rotate(key).T / np.sqrt(cfg.head_dim)
            scores[np.triu_indices(len(x), 1)] = -np.inf
            mixed.append(np.exp(numpy_log_softmax(scores)) @ value)
        return np.concatenate(mixed, axis=1) @ weights["output"]

    def __call__(self, embeddings: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`[T,D]` each → logits `[T,V]`, and what is fed back."""
        h = g
        for index in range(self.config.decoder.num_layers):
            layer = self.params[f"layer_{index}"]
            x = self.norm(h, layer["attention_norm"]["scale"])
            if index == 0:
                h = x if self.config.norm_before_residual else h
                x = np.concatenate([self.norm(embeddings, layer["embedding_norm"]["scale"]), x], axis=-1)
            h = h + self.attention(x, layer["attention"])
            x = self.norm(h, layer["mlp_norm"]["scale"])
            gate, up = x @ layer["mlp"]["gate_up"][:, 0], x @ layer["mlp"]["gate_up"][:, 1]
            h = h + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down"]
        y, head = self.norm(h, self.params["final_norm"]["scale"]), self.params["draft_head"]
        logits = y @ (head["up"] @ head["down"] if "up" in head else head["lm_head"]).T
        return logits, y if self.config.norm_output else h


@pytest.mark.parametrize("name", [name if "low rank" in name else pytest.param(name, marks=pytest.mark.full) for name in CASES])
def test_recursive_steps_equal_the_formulas(name: str) -> None:
    decoder, changes = CASES[name]
    sizes = dict(num_layers=1) | decoder
    config = Eagle3Config(**dict(decoder=tiny_config(**sizes), target_hidden_size=WIDTH, feature_layers=(0, 1, 2)) | changes)
    model = Eagle3(config, dtype=jnp.float32, param_dtype=jnp.float32)
    params = random_params(jax.eval_shape(model.init_params, jax.random.key(0)), vocab_size=VOCAB_SIZE)
    reference, rng = NumpyEagle3(config, params), np.random.default_rng(1)
    features = rng.normal(size=(NUM_TOKENS, 3 * WIDTH))
    table, tokens = rng.normal(size=(VOCAB_SIZE, WIDTH)), rng.integers(VOCAB_SIZE, size=NUM_TOKENS + NUM_RECURSIVE)

    @jax.jit
    def one_pass(inputs: jax.Array, state: jax.Array, cache: Any) -> Any:
        embeddings = model.apply({"params": params}, inputs, jnp.asarray(table, jnp.float32), method="embed")
        output = model.apply({"params": params}, embeddings, state, cache)
        return output, model.apply({"params": params}, output.hidden, method="scores").logits

    states = reference.fuse(features)  # grows by what is fed back
    state = model.apply({"params": params}, jnp.asarray(features[None], jnp.float32), method="fuse")
    cache = model.init_cache(batch_size=1, capacity=16)
    for length in range(NUM_TOKENS, NUM_TOKENS + NUM_RECURSIVE + 1):
        output, logits = one_pass(jnp.asarray(tokens[None, length - state.shape[1] : length], jnp.int32), state, cache)
        expected, fed_back = reference(table[tokens[:length]], states)
        assert expected.std() > 0.3
        np.testing.assert_allclose(logits[0, -1], expected[-1], atol=TOLERANCE * np.abs(expected).max())
        states = np.concatenate([states, fed_back[-1:]])
        state, cache = output.next_state[:, -1:], output.cache
