"""Mixture of experts, dropless: each token goes through its best few experts, whatever the other tokens chose.

Routing as in Switch and Mixtral (arXiv:2101.03961, 2401.04088): a softmax over the router's scores, the k largest, normalised or not.
Taking the k largest scores first and a softmax over those (GPT-OSS) is the same as normalising.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.config import ModelConfig
from specjax.kernels.expert_products import expert_products
from specjax.models.feed_forward import gated
from specjax.models.layers import PROJECTION_INIT, product


class MixtureOfExperts(nn.Module):
    """In the place of the feed-forward network.

    Attributes:
        config: Sizes; `config.moe` is set.
        param_dtype: Dtype of the parameters.
        implementation: Passed to `expert_products`.
    """

    config: ModelConfig
    param_dtype: jnp.dtype
    implementation: str = "auto"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg, moe = self.config, self.config.moe
        assert moe is not None
        width, ffn = cfg.hidden_size, moe.intermediate_size
        tokens = x.reshape(-1, width)
        scores = product(tokens, self.param("router", PROJECTION_INIT, (width, moe.num_experts), self.param_dtype), jnp.float32)
        if moe.router_bias:
            bias = self.param("router_bias", nn.initializers.zeros, (moe.num_experts,), self.param_dtype)
            scores = scores + bias.astype(jnp.float32)
        weights, experts = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), moe.num_experts_per_token)
        if moe.normalise:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        biases: dict[str, jax.Array] = {}
        if cfg.mlp_bias:
            biases["gate_up_bias"] = self.param("expert_gate_up_bias", nn.initializers.zeros, (moe.num_experts, 2, ffn), self.param_dtype)
            biases["down_bias"] = self.param("expert_down_bias", nn.initializers.zeros, (moe.num_experts, width), self.param_dtype)
        out = expert_products(
            tokens,
            experts,
            weights,
            self.param("expert_gate_up", PROJECTION_INIT, (moe.num_experts, width, 2, ffn), self.param_dtype),
            self.param("expert_down", PROJECTION_INIT, (moe.num_experts, ffn, width), self.param_dtype),
            activation=functools.partial(gated, cfg),
            implementation=self.implementation,
            **biases,
        )
        return out.reshape(x.shape)
