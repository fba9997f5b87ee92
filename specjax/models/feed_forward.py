"""The gated feed-forward network. arXiv:2002.05202."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.config import ModelConfig
from specjax.kernels.few_row_linear import Normed, few_row_linear, value_of
from specjax.models.layers import PROJECTION_INIT
from specjax.models.projections import Projections
from specjax.sparsity.histogram import histogram
from specjax.sparsity.sparse_ffn import FeedForwardWork, sparse_feed_forward
from specjax.sparsity.sparse_mlp import SparseMLP


def gate_activation(config: ModelConfig, gate: jax.Array) -> jax.Array:
    """What the gate's half becomes before up multiplies it; see `ModelConfig.activation`."""
    if config.activation == "silu":
        return nn.silu(gate)
    assert config.activation == "clamped_swiglu", config.activation
    gate = jnp.minimum(gate, config.swiglu_limit)
    return gate * nn.sigmoid(config.swiglu_alpha * gate)


def gated(config: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The inner activation from its two halves."""
    return gate_times_up(config, gate_activation(config, gate), up)


def gate_times_up(config: ModelConfig, activated: jax.Array, up: jax.Array) -> jax.Array:
    """The inner activation from the activated gate and up."""
    if config.activation == "silu":
        return activated * up
    return (jnp.clip(up, -config.swiglu_limit, config.swiglu_limit) + 1) * activated


class FeedForward(nn.Module):
    """`gated(x W_gate, x W_up) W_down`; SwiGLU where the activation is `"silu"`. Params may be those of `split_gate_up`.

    `[B,T,D]`, perhaps still to be normed → the same, added to `residual` if there is one, and what a sparse pass kept (`None` of a dense
    one). Captured among the intermediates, where they are asked for: `gates`, a histogram of the activated gate.

    Attributes:
        config: Sizes, activation, biases.
        param_dtype: Dtype of the parameters.
        implementation: Passed to `few_row_linear`, in dense passes.
    """

    config: ModelConfig
    param_dtype: jnp.dtype
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self, x: Normed | jax.Array, sparse: SparseMLP | None = None, residual: jax.Array | None = None
    ) -> tuple[jax.Array, FeedForwardWork | None]:
        cfg = self.config
        weights = self._weights(x.shape[-1])
        counted = None if sparse is None else sparse.counted
        if self.is_mutable_collection("intermediates"):
            sizes = jnp.abs(gate_activation(cfg, weights.halves(value_of(x))[0]))
            self.sow("intermediates", "gates", histogram(sizes, None if counted is None else counted[..., None]))
        if sparse is None or sparse.ffn is None or sparse.ffn.exact:
            inner = self._inner(x, weights)
            out = few_row_linear(inner, weights.down, bias=weights.down_bias, residual=residual, implementation=self.implementation)
            return out, None
        activate, combine = functools.partial(gate_activation, cfg), functools.partial(gate_times_up, cfg)
        options: dict[str, Any] = dict(activate=activate, combine=combine, tau=sparse.tau, counted=counted)
        out, work = sparse_feed_forward(value_of(x), weights, sparse.ffn, **options)
        return out if residual is None else residual + out, work

    def _inner(self, x: Normed | jax.Array, weights: Projections) -> jax.Array:
        """The inner activation of all channels."""
        if weights.gate_up is None:
            return gated(self.config, *weights.halves(value_of(x)))
        options: dict[str, Any] = dict(bias=weights.gate_up_bias, implementation=self.implementation)
        if self.config.activation == "silu":
            return few_row_linear(x, weights.gate_up, gated=True, **options)
        both = few_row_linear(x, weights.gate_up, **options)
        return gated(self.config, both[..., 0, :], both[..., 1, :])

    def _weights(self, width: int) -> Projections:
        cfg, ffn = self.config, self.config.intermediate_size

        def projection(name: str, *shape: int) -> jax.Array:
            return self.param(name, PROJECTION_INIT, shape, self.param_dtype)

        def bias(name: str, *shape: int) -> jax.Array | None:
            return self.param(name, nn.initializers.zeros, shape, self.param_dtype) if cfg.mlp_bias else None

        if self.has_variable("params", "gate"):
            halves = dict(gate=projection("gate", width, ffn), up=projection("up", ffn, width))
        else:
            halves = dict(gate_up=projection("gate_up", width, 2, ffn))
        return Projections(
            **halves,
            gate_up_bias=bias("gate_up_bias", 2, ffn),
            down=projection("down", ffn, cfg.hidden_size),
            down_bias=bias("down_bias", cfg.hidden_size),
        )
