"""The auxiliary loss that keeps the experts of a mixture equally busy while it is trained. Switch Transformer, arXiv:2101.03961, eq. 4."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoadBalance:
    """How evenly one layer's experts are used.

    Attributes:
        loss: float32, `E * sum over e of f_e P_e`: f_e the share of all choices that fall on expert e, P_e its mean probability; 1 where
            all are used alike, E / k where every token takes the same k for certain.
        shares: `[E]` float32, the f_e. No gradient flows through them.
    """

    loss: jax.Array
    shares: jax.Array


def load_balance(probs: jax.Array, *, num_experts_per_token: int) -> LoadBalance:
    """Of a router's probabilities.

    Args:
        probs: `[M,E]` float32, a softmax over the experts for each of M tokens.
        num_experts_per_token: k, how many each token takes: its most probable ones.
    """
    num_tokens, num_experts = probs.shape
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(probs), num_experts_per_token)
    counts = jnp.zeros((num_experts,), jnp.float32).at[chosen.reshape(-1)].add(1.0)
    shares = counts / (num_tokens * num_experts_per_token)
    return LoadBalance(loss=num_experts * (shares * probs.mean(axis=0)).sum(), shares=shares)
