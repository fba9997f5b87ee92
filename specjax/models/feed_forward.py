"""The gated feed-forward network. arXiv:2002.05202."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.config import ModelConfig
from specjax.models.layers import PROJECTION_INIT, product


def gated(config: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The inner activation from its two halves; see `ModelConfig.activation`."""
    if config.activation == "silu":
        return nn.silu(gate) * up
    assert config.activation == "clamped_swiglu", config.activation
    gate = jnp.minimum(gate, config.swiglu_limit)
    up = jnp.clip(up, -config.swiglu_limit, config.swiglu_limit)
    return (up + 1) * (gate * nn.sigmoid(config.swiglu_alpha * gate))


class FeedForward(nn.Module):
    """`gated(x W_gate, x W_up) W_down`; SwiGLU where the activation is `"silu"`."""

    config: ModelConfig
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        gate_up = product(x, self.param("gate_up", PROJECTION_INIT, (x.shape[-1], 2, cfg.intermediate_size), self.param_dtype))
        if cfg.mlp_bias:
            bias = self.param("gate_up_bias", nn.initializers.zeros, (2, cfg.intermediate_size), self.param_dtype)
            gate_up = gate_up + bias.astype(x.dtype)
        inner = gated(cfg, gate_up[..., 0, :], gate_up[..., 1, :])
        out = product(inner, self.param("down", PROJECTION_INIT, (cfg.intermediate_size, cfg.hidden_size), self.param_dtype))
        if cfg.mlp_bias:
            out = out + self.param("down_bias", nn.initializers.zeros, (cfg.hidden_size,), self.param_dtype).astype(x.dtype)
        return out
