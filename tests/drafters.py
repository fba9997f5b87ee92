"""Random drafters for a target, and how well what they make it emit fits the target's exact law."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import GenerateConfig, RejectionSampling, SamplingParams, speculative_generate
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.eagle3_drafter import Eagle3Drafter, eagle3_params
from specjax.drafting.heads.draft_head import DRAFT_HEAD
from tests.helpers import chi_square_p_value, numpy_filtered_probs, numpy_forward, random_model, tiny_config

# Boundaries of a target of two layers.
LAYERS = (0, 1, 2)

SMALL_VOCAB, NUM_EMITTED, NUM_ROWS = 5, 3, 4096
PROMPT = (3, 1, 4, 1)
REJECTION = RejectionSampling()


def random_params(shapes: Any, *, vocab_size: int, seed: int = 0) -> dict:
    """Weights that keep activations at twice their size; token ids ascend, and are not the first ones."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == jnp.int32:
            return jnp.asarray(np.sort(rng.permutation(vocab_size)[: leaf.shape[0]]), jnp.int32)
        if leaf.ndim == 1:
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), jnp.float32)
        fan_in = leaf.shape[-1] if DRAFT_HEAD in [part.key for part in path] else leaf.shape[0]
        return jnp.asarray(rng.normal(0, 2 * fan_in**-0.5, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def eagle3(target: Any, target_params: dict, *, seed: int = 0, **changes: Any) -> tuple[Eagle3Drafter, dict]:
    """A random network for a target; as wide as it, so that embedding and head can be shared."""
    cfg = target.config
    sizes = dict(hidden_size=cfg.hidden_size, vocab_size=cfg.vocab_size, num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads)
    decoder = tiny_config(num_layers=1, intermediate_size=24, head_dim=cfg.head_dim, **sizes)
    config = Eagle3Config(**dict(decoder=decoder, target_hidden_size=cfg.hidden_size, feature_layers=LAYERS) | changes)
    model = Eagle3(config, dtype=jnp.float32, param_dtype=jnp.float32)
    params = random_params(jax.eval_shape(model.init_params, jax.random.key(0)), vocab_size=cfg.vocab_size, seed=seed)
    return Eagle3Drafter(model), eagle3_params(model, params, cfg, target_params)


@functools.cache
def small_target(seed: int = 0) -> tuple[Any, dict]:
    """A target of five tokens."""
    sizes = dict(vocab_size=SMALL_VOCAB, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4)
    model, params = random_model(tiny_config(**sizes), seed=seed)
    return model, params | {"lm_head": params["lm_head"] * 0.5}


@functools.cache
def small_law(setting: tuple[float, int, float]) -> np.ndarray:
    """Probabilities `[V,V,V]` of what the small target emits after `PROMPT`, by enumeration."""
    target, target_params = small_target()
    law = np.ones((SMALL_VOCAB,) * NUM_EMITTED)
    for length in range(NUM_EMITTED):
        for prefix in itertools.product(range(SMALL_VOCAB), repeat=length):
            probs = numpy_filtered_probs(numpy_forward(target.config, target_params, [*PROMPT, *prefix])[-1], *setting)
            law[prefix] *= probs.reshape(-1, *[1] * (NUM_EMITTED - length - 1))
    return law


def emitted_p_value(
    drafter: Any, params: Any, *, setting: tuple[float, int, float] = (1.0, 0, 1.0), rule: Any = REJECTION
) -> tuple[float, float]:
    """The p-value of what the small target emits with this drafter, and the share of drafts that were accepted."""
    target, target_params = small_target()
    output = speculative_generate(
        target,
        target_params,
        drafter,
        params,
        np.tile(np.int32(PROMPT), (NUM_ROWS, 1)),
        config=GenerateConfig(max_new_tokens=NUM_EMITTED, num_speculative_tokens=2, do_sample=True, verification=rule),
        sampling=SamplingParams(*setting),
        rng=jax.random.key(5),
    )
    counts = np.zeros((SMALL_VOCAB,) * NUM_EMITTED)
    np.add.at(counts, tuple(np.asarray(output.tokens).T), 1)
    return chi_square_p_value(counts, small_law(setting)), float(output.statistics.draft_acceptance_rate)
