"""Mixture of experts, dropless: each token goes through its best few experts, whatever the other tokens chose.

Routing as in Switch and Mixtral (arXiv:2101.03961, 2401.04088): a softmax over the router's scores, the k largest, normalised or not.
Taking the k largest scores first and a softmax over those (GPT-OSS) is the same as normalising.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.kernel_settings import Kernels
from specjax.kernels.expert_choice import expert_choice
from specjax.kernels.expert_products import expert_products
from specjax.kernels.varying import varying_as
from specjax.model_config import ModelConfig
from specjax.models.feed_forward import gated_unit
from specjax.models.layers import PROJECTION_INIT, product
from specjax.sparsity.histogram import NUM_BINS, histogram
from specjax.sparsity.sparse_ffn import keep_channels
from specjax.sparsity.sparse_mlp import SparseMLP
from specjax.sparsity.sparse_moe import ExpertChoice, ExpertWork, choose_experts, expert_work

# The collection in which router probabilities are captured.
ROUTER = "router"


class MixtureOfExperts(nn.Module):
    """In the place of the feed-forward network.

    `[B,T,D]` → the same, and what a sparse pass used (`None` of a dense one). Captured among the intermediates, where they are
    asked for: `gates`, a histogram of the chosen experts' activated gates, and `routing`, the weights `[B,T,k]` of the chosen ones; in the
    collection `ROUTER`, likewise: `probs` `[B T,E]`, for a training that keeps experts equally busy.

    Attributes:
        config: Sizes; `config.moe` is set.
        param_dtype: Dtype of the parameters.
        kernels: Its `experts` and `expert_choice`.
    """

    config: ModelConfig
    param_dtype: jnp.dtype
    kernels: Kernels = Kernels()

    @nn.compact
    def __call__(self, x: jax.Array, sparse: SparseMLP | None = None) -> tuple[jax.Array, ExpertWork | None]:
        cfg, moe = self.config, self.config.moe
        assert moe is not None
        width, ffn = cfg.hidden_size, moe.intermediate_size
        tokens = x.reshape(-1, width)
        scores = product(tokens, self.param("router", PROJECTION_INIT, (width, moe.num_experts), self.param_dtype), jnp.float32)
        if moe.router_bias:
            bias = self.param("router_bias", nn.initializers.zeros, (moe.num_experts,), self.param_dtype)
            scores = scores + bias.astype(jnp.float32)
        work, may_skip, own = None, False, None
        if self.is_mutable_collection(ROUTER):
            self.sow(ROUTER, "probs", jax.nn.softmax(scores, axis=-1))
        counted = None if sparse is None else sparse.counted
        if sparse is None or sparse.moe is None or sparse.moe.exact(moe):
            chosen: dict[str, Any] = dict(choices=moe.num_experts_per_token, normalise=moe.normalise)
            weights, experts = expert_choice(scores, **chosen, implementation=self.kernels.expert_choice)
        else:
            probs = jax.nn.softmax(scores, axis=-1)
            choice = choose_experts(probs.reshape(*x.shape[:-1], -1), moe, sparse.moe, beta=sparse.beta, counted=counted)
            experts, weights, own, may_skip = choice.experts, choice.weights, choice.own, choice.may_skip
        thins_out = sparse is not None and sparse.ffn is not None and not sparse.ffn.exact  # leaves channels of experts out
        biases: dict[str, Any] = {}
        if cfg.mlp_bias:
            biases["gate_up_bias"] = self.param("expert_gate_up_bias", nn.initializers.zeros, (moe.num_experts, 2, ffn), self.param_dtype)
            biases["down_bias"] = self.param("expert_down_bias", nn.initializers.zeros, (moe.num_experts, width), self.param_dtype)
        gate_up = self.param("expert_gate_up", PROJECTION_INIT, (moe.num_experts, width, 2, ffn), self.param_dtype)
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "routing", weights.reshape(*x.shape[:-1], -1))
            counts = jnp.ones(tokens.shape[:1], bool) if counted is None else counted.reshape(-1)
            self.sow("intermediates", "gates", _gates(cfg, tokens, experts, counts, gate_up, biases.get("gate_up_bias")))
        down = self.param("expert_down", PROJECTION_INIT, (moe.num_experts, ffn, width), self.param_dtype)
        options: dict[str, Any] = dict(implementation=self.kernels.experts, may_skip=may_skip)
        activation = functools.partial(_gated_above, cfg, sparse) if sparse is not None and thins_out else gated_unit(cfg)
        out = expert_products(tokens, experts, weights, gate_up, down, activation=activation, **options, **biases)
        if thins_out or (sparse is not None and sparse.moe is not None and not sparse.moe.exact(moe)):
            kept = None
            if thins_out and sparse is not None:
                # The same products with a one for each channel kept, and the sum of them in the place of the down projection.
                taken = (experts < moe.num_experts).astype(jnp.float32)
                ones = jnp.ones((moe.num_experts, ffn, 1), x.dtype)
                options |= dict(activation=functools.partial(_is_above, cfg, sparse), gate_up_bias=biases.get("gate_up_bias"))
                number = expert_products(tokens, experts, taken, gate_up, ones, **options)[:, 0].astype(jnp.float32)
                # bfloat16 may have rounded the number up.
                kept = jnp.minimum(number / (ffn * taken.sum(axis=-1)), 1.0)
            choice = ExpertChoice(experts=experts, weights=weights, own=own, may_skip=may_skip)
            work = expert_work(choice, moe.num_experts, (x.shape[0], x.shape[1]), counted, kept)
        return out.reshape(x.shape), work


def _gated_above(config: ModelConfig, sparse: SparseMLP, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The inner activation, zero below the threshold."""
    return jnp.where(_above(config, sparse, gate), gated_unit(config)(gate, up), 0)


def _is_above(config: ModelConfig, sparse: SparseMLP, gate: jax.Array, up: jax.Array) -> jax.Array:
    """One where a channel is kept, and zero elsewhere."""
    return _above(config, sparse, gate).astype(up.dtype)


def _above(config: ModelConfig, sparse: SparseMLP, gate: jax.Array) -> jax.Array:
    assert sparse.ffn is not None
    assert sparse.ffn.select == "threshold", sparse.ffn
    return keep_channels(jnp.abs(gated_unit(config).activate(gate).astype(jnp.float32)), sparse.ffn, sparse.tau)


def _gates(
    config: ModelConfig, tokens: jax.Array, experts: jax.Array, counted: jax.Array, gate_up: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """The histogram of the activated gates of all pairs of a token and an expert that it chose, expert by expert."""

    def of_expert(counts: jax.Array, expert: jax.Array) -> tuple[jax.Array, None]:
        gate = product(tokens, gate_up[expert][:, 0])
        if bias is not None:
            gate = gate + bias[expert, 0].astype(gate.dtype)
        chose = (experts == expert).any(axis=-1) & counted
        return counts + histogram(jnp.abs(gated_unit(config).activate(gate)), chose[:, None]), None

    none = varying_as(jnp.zeros((NUM_BINS,), jnp.int32), tokens, experts, counted, gate_up, bias)
    return jax.lax.scan(of_expert, none, jnp.arange(gate_up.shape[0]))[0]
