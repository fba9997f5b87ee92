"""The choice of experts: the specification, in plain jnp."""

from __future__ import annotations

import jax


def expert_choice_reference(scores: jax.Array, *, choices: int, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """See `specjax.kernels.expert_choice.expert_choice`."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), choices)
    return weights / weights.sum(axis=-1, keepdims=True) if normalise else weights, experts
