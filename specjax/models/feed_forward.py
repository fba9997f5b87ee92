"""The gated feed-forward network. arXiv:2002.05202."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.kernel_settings import Kernels
from specjax.kernels.few_row_linear import Normed, few_row_linear, value_of
from specjax.kernels.gated_unit import GatedUnit
from specjax.model_config import ModelConfig
from specjax.models.layers import PROJECTION_INIT
from specjax.models.projections import Projections
from specjax.sparsity.histogram import histogram
from specjax.sparsity.sparse_ffn import FeedForwardWork, sparse_feed_forward
from specjax.sparsity.sparse_mlp import SparseMLP


def gated_unit(config: ModelConfig) -> GatedUnit:
    """The inner activation; see `ModelConfig.activation`."""
    if config.activation == "silu":
        return GatedUnit()
    assert config.activation == "clamped_swiglu", config.activation
    return GatedUnit(limit=config.swiglu_limit, alpha=config.swiglu_alpha)


class FeedForward(nn.Module):
    """`unit(x W_gate, x W_up) W_down` with the unit of `gated_unit`. Params may be those of `split_gate_up`.

    `[B,T,D]`, perhaps still to be normed → the same, added to `residual` if there is one, and what a sparse pass kept (`None` of a dense
    one). Captured among the intermediates, where they are asked for: `gates`, a histogram of the activated gate.

    Attributes:
        config: Sizes, activation, biases.
        param_dtype: Dtype of the parameters.
        kernels: Its `projections` of dense passes, its `channels` of sparse ones.
    """

    config: ModelConfig
    param_dtype: jnp.dtype
    kernels: Kernels = Kernels()

    @nn.compact
    def __call__(
        self, x: Normed | jax.Array, sparse: SparseMLP | None = None, residual: jax.Array | None = None
    ) -> tuple[jax.Array, FeedForwardWork | None]:
        unit, weights = gated_unit(self.config), self._weights(x.shape[-1])
        counted = None if sparse is None else sparse.counted
        if self.is_mutable_collection("intermediates"):
            sizes = jnp.abs(unit.activate(weights.halves(value_of(x))[0]))
            self.sow("intermediates", "gates", histogram(sizes, None if counted is None else counted[..., None]))
        if sparse is None or sparse.ffn is None or sparse.ffn.exact:
            options: dict[str, Any] = dict(bias=weights.down_bias, residual=residual, implementation=self.kernels.projections)
            return few_row_linear(self._inner(x, weights, unit), weights.down, **options), None
        options = dict(unit=unit, tau=sparse.tau, counted=counted, implementation=self.kernels.channels)
        out, work = sparse_feed_forward(value_of(x), weights, sparse.ffn, **options)
        return out if residual is None else residual + out, work

    def _inner(self, x: Normed | jax.Array, weights: Projections, unit: GatedUnit) -> jax.Array:
        """The inner activation of all channels."""
        if weights.gate_up is None:
            return unit(*weights.halves(value_of(x)))
        options: dict[str, Any] = dict(bias=weights.gate_up_bias, implementation=self.kernels.projections)
        if unit == GatedUnit():
            return few_row_linear(x, weights.gate_up, gated=True, **options)
        both = few_row_linear(x, weights.gate_up, **options)
        return unit(both[..., 0, :], both[..., 1, :])

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
