"""Medusa: K heads on the target's last hidden state, each for one token further ahead. arXiv:2401.10774.

Head i at position t predicts token t + 2 + i; the target's own LM head gives t + 1.
"""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.models.layers import PROJECTION_INIT, PureModule, head_product, product


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Shape of the heads.

    Attributes:
        hidden_size: D, that of the target.
        vocab_size: V, that of the target.
        num_draft_heads: How many tokens ahead, beyond the target's own next one.
        num_layers: Residual blocks in each head.
        block_bias: The blocks have biases.
        own_head: Each head has an LM head; otherwise all use the target's.

    Raises:
        ValueError: A size that is not a positive int.
    """

    hidden_size: int
    vocab_size: int
    num_draft_heads: int
    num_layers: int = 1
    block_bias: bool = True
    own_head: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_draft_heads", "num_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"MedusaConfig.{name} must be a positive int, got {value!r}")


class Medusa(PureModule):
    """The heads. `apply({"params": p}, hidden)` gives the scores of all of them.

    Attributes:
        config: Sizes.
        dtype: Compute dtype; logits are float32.
        param_dtype: Dtype that `init` gives the parameters.
    """

    config: MedusaConfig
    dtype: jnp.dtype = jnp.bfloat16
    param_dtype: jnp.dtype = jnp.bfloat16

    def setup(self) -> None:
        """Declares the parameters."""
        self.heads = [_Head(self.config, self.param_dtype, name=f"head_{index}") for index in range(self.config.num_draft_heads)]

    def __call__(self, hidden: jax.Array, target_head: jax.Array | None = None) -> jax.Array:
        """Scores of every head.

        Args:
            hidden: `[..., D]`, the target's, after its final norm.
            target_head: `[V,D]`, the target's own array; needed where `own_head` is false, not read otherwise.

        Returns:
            `[..., num_draft_heads, V]` float32.
        """
        if not self.config.own_head and target_head is None:
            raise ValueError("these Medusa heads have no LM heads of their own: pass the target's as target_head")
        return jnp.stack([head(hidden.astype(self.dtype), target_head) for head in self.heads], axis=-2)

    def init_params(self, rng: jax.Array) -> dict:
        """Random parameters; see `Transformer.init_params`."""
        cfg = self.config
        hidden = jnp.zeros((1, cfg.hidden_size), self.dtype)
        return self.init(rng, hidden, None if cfg.own_head else jnp.zeros((cfg.vocab_size, cfg.hidden_size), self.dtype))["params"]


class _Head(nn.Module):
    config: MedusaConfig
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, target_head: jax.Array | None) -> jax.Array:
        """`x + silu(x W + b)` for each block, then the LM head."""
        cfg = self.config
        for index in range(cfg.num_layers):
            inner = product(x, self.param(f"block_{index}", PROJECTION_INIT, (cfg.hidden_size, cfg.hidden_size), self.param_dtype))
            if cfg.block_bias:
                bias = self.param(f"block_{index}_bias", nn.initializers.zeros, (cfg.hidden_size,), self.param_dtype)
                inner = inner + bias.astype(x.dtype)
            x = x + nn.silu(inner)
        if cfg.own_head:
            target_head = self.param("lm_head", PROJECTION_INIT, (cfg.vocab_size, cfg.hidden_size), self.param_dtype)
        assert target_head is not None
        return head_product(x, target_head)
