"""AdamW with warm-up, a cosine and clipping, over the parameters that are trained. arXiv:1711.05101."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How parameters follow their gradients. The defaults are those of SlimSpec's drafters, arXiv:2605.10453, its warm-up not being known.

    Attributes:
        learning_rate: The highest.
        warmup_steps: Training steps over which it rises.
        final_ratio: What is left of it at the end of the cosine.
        weight_decay: Of matrices; norms and biases do not decay.
        clip_norm: Norm that all gradients together are cut to; `None` does not cut.
        beta1: Decay of the gradients' mean.
        beta2: Decay of their squares' mean.
        epsilon: Added to the root of the latter.

    Raises:
        ValueError: A number outside its range.
    """

    learning_rate: float = 4e-4
    warmup_steps: int = 100
    final_ratio: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = 0.5
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        ranges = {
            "learning_rate": (0 < self.learning_rate < math.inf, "above 0"),
            "warmup_steps": (isinstance(self.warmup_steps, int) and self.warmup_steps >= 0, "an int of at least 0"),
            "final_ratio": (0 <= self.final_ratio <= 1, "from 0 to 1"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "at least 0"),
            "clip_norm": (self.clip_norm is None or self.clip_norm > 0, "None or above 0"),
            "beta1": (0 <= self.beta1 < 1, "from 0 to below 1"),
            "beta2": (0 <= self.beta2 < 1, "from 0 to below 1"),
            "epsilon": (self.epsilon > 0, "above 0"),
        }
        for name, (holds, wanted) in ranges.items():
            if not holds:
                raise ValueError(f"OptimizerConfig.{name} must be {wanted}, got {getattr(self, name)!r}")

    def learning_rate_at(self, step: jax.Array, num_steps: jax.Array | int) -> jax.Array:
        """Of a training step, float32.

        Args:
            step: int32 from 0 on.
            num_steps: All of the run. Up to step `warmup_steps`, and at it, the rate does not depend on them.
        """
        # + 1: the first step moves too.
        rising = (step + 1) / max(self.warmup_steps, 1)
        done = jnp.clip((step - self.warmup_steps) / jnp.maximum(num_steps - self.warmup_steps, 1), 0.0, 1.0)
        falling = self.final_ratio + (1 - self.final_ratio) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return (self.learning_rate * jnp.where(step < self.warmup_steps, rising, falling)).astype(jnp.float32)

    def build(self, num_steps: jax.Array | int) -> optax.GradientTransformation:
        """The Optax transformation for a run of `num_steps` training steps."""
        adamw = optax.adamw(
            lambda step: self.learning_rate_at(jnp.asarray(step), num_steps),
            b1=self.beta1,
            b2=self.beta2,
            eps=self.epsilon,
            weight_decay=self.weight_decay,
            mask=_matrices,
        )
        return adamw if self.clip_norm is None else optax.chain(optax.clip_by_global_norm(self.clip_norm), adamw)


def _matrices(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf.ndim > 1 and not path[-1].key.endswith("bias"), params)
