"""The optimizer against AdamW from its paper, step by step in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.training.optimizer import OptimizerConfig

NUM_STEPS = 9
# float32 against float64 over nine steps of size 0.1.
TOLERANCE = 1e-5


def expected_rate(config: OptimizerConfig, step: int) -> float:
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / (NUM_STEPS - config.warmup_steps)
    return config.learning_rate * (config.final_ratio + (1 - config.final_ratio) * (1 + np.cos(np.pi * done)) / 2)


@pytest.mark.parametrize("changes", [dict(), dict(weight_decay=0.3, clip_norm=0.7, final_ratio=0.25)])
def test_updates_are_those_of_adamw(changes: dict[str, Any]) -> None:
    config = OptimizerConfig(**dict(learning_rate=0.1, warmup_steps=3, clip_norm=None) | changes)
    rng = np.random.default_rng(0)
    params = {"weight": rng.normal(size=(3, 2)), "block_0_bias": rng.normal(size=(2, 2)), "scale": rng.normal(size=3)}
    decays = {"weight": 1.0, "block_0_bias": 0.0, "scale": 0.0}
    optimizer = config.build(NUM_STEPS)
    found = jax.tree.map(jnp.float32, params)
    state, mean, square = optimizer.init(found), jax.tree.map(np.zeros_like, params), jax.tree.map(np.zeros_like, params)
    update = jax.jit(optimizer.update)
    for step in range(NUM_STEPS):
        gradients = {name: rng.normal(size=value.shape) for name, value in params.items()}
        updates, state = update(jax.tree.map(jnp.float32, gradients), state, found)
        found = optax.apply_updates(found, updates)

        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
        factor = 1.0 if config.clip_norm is None else min(1.0, config.clip_norm / norm)
        rate = expected_rate(config, step)
        np.testing.assert_allclose(config.learning_rate_at(jnp.int32(step), NUM_STEPS), rate, rtol=1e-6)
        for name, gradient in gradients.items():
            mean[name] = 0.9 * mean[name] + 0.1 * factor * gradient
            square[name] = 0.95 * square[name] + 0.05 * (factor * gradient) ** 2
            direction = mean[name] / (1 - 0.9 ** (step + 1)) / (np.sqrt(square[name] / (1 - 0.95 ** (step + 1))) + config.epsilon)
            params[name] = params[name] - rate * (direction + decays[name] * config.weight_decay * params[name])
        for name, value in params.items():
            np.testing.assert_allclose(found[name], value, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(learning_rate=0.0), "learning_rate must be above 0, got 0.0"),
        (dict(learning_rate=float("nan")), "learning_rate must be above 0, got nan"),
        (dict(warmup_steps=0.5), "warmup_steps must be an int of at least 0, got 0.5"),
        (dict(final_ratio=2.0), "final_ratio must be from 0 to 1, got 2.0"),
        (dict(weight_decay=-1.0), "weight_decay must be at least 0, got -1.0"),
        (dict(clip_norm=0.0), "clip_norm must be None or above 0, got 0.0"),
        (dict(beta2=1.0), "beta2 must be from 0 to below 1, got 1.0"),
        (dict(epsilon=0.0), "epsilon must be above 0, got 0.0"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"OptimizerConfig.{message}"):
        OptimizerConfig(**changes)
