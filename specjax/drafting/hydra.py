"""Hydra: Medusa-like heads that also see the tokens drafted before them. arXiv:2402.05109.

Head i at position t predicts token t + 2 + i from the target's last hidden state at t and the embeddings of tokens t + 1 ... t + 1 + i.
"""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.models.layers import PROJECTION_INIT, PureModule, head_product, product


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraConfig:
    """Shape of the heads (the published `mlp` architecture).

    Attributes:
        hidden_size: D, that of the target.
        vocab_size: V, that of the target.
        num_draft_heads: How many tokens ahead, beyond the target's own next one.
        num_layers: Residual blocks in each head.
        grounded: The heads see the tokens drafted before them; otherwise they are Medusa's.

    Raises:
        ValueError: A size that is not a positive int.
    """

    hidden_size: int
    vocab_size: int
    num_draft_heads: int
    num_layers: int = 1
    grounded: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_draft_heads", "num_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"HydraConfig.{name} must be a positive int, got {value!r}")


class Hydra(PureModule):
    """The heads. `apply({"params": p}, hidden, embeddings)` gives the scores of one, by the number of embeddings.

    Attributes:
        config: Sizes.
        dtype: Compute dtype; logits are float32.
        param_dtype: Dtype that `init` gives the parameters.
    """

    config: HydraConfig
    dtype: jnp.dtype = jnp.bfloat16
    param_dtype: jnp.dtype = jnp.bfloat16

    def setup(self) -> None:
        """Declares the parameters."""
        self.heads = [_Head(self.config, self.param_dtype, name=f"head_{index}") for index in range(self.config.num_draft_heads)]

    def __call__(self, hidden: jax.Array, embeddings: jax.Array) -> jax.Array:
        """Scores of head i, which is the one that i + 1 tokens are known to.

        Args:
            hidden: `[..., D]`, the target's at position t, after its final norm.
            embeddings: `[..., i + 1, D]`, the target's of tokens t + 1 ... t + 1 + i: the one that its own LM head gave, then the drafts.

        Returns:
            `[..., V]` float32.

        Raises:
            ValueError: No such head.
        """
        num_tokens = embeddings.shape[-2]
        if not 1 <= num_tokens <= len(self.heads):
            raise ValueError(f"embeddings must hold 1 to {len(self.heads)} tokens, got {num_tokens}")
        x = hidden.astype(self.dtype)
        if self.config.grounded:
            flat = embeddings.astype(self.dtype).reshape(*embeddings.shape[:-2], -1)
            x = jnp.concatenate([x, flat], axis=-1)
        return self.heads[num_tokens - 1](x)

    def init_params(self, rng: jax.Array) -> dict:
        """Random parameters; see `Transformer.init_params`."""
        return self.init(rng, jnp.zeros((1, self.config.hidden_size), self.dtype), method="_touch_all")["params"]

    def _touch_all(self, hidden: jax.Array) -> list[jax.Array]:
        return [self(hidden, jnp.zeros((1, index + 1, hidden.shape[-1]), self.dtype)) for index in range(len(self.heads))]


class _Head(nn.Module):
    config: HydraConfig
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`residual(x) + silu(linear(x))` for each block, then the LM head with its bias."""
        cfg = self.config
        for index in range(cfg.num_layers):
            inner = nn.silu(self._linear(f"block_{index}", x))
            # Only the grounded first block narrows its input, and so needs weights on its residual branch.
            x = inner + (self._linear("residual", x) if index == 0 and cfg.grounded else x)
        head = self.param("lm_head", PROJECTION_INIT, (cfg.vocab_size, cfg.hidden_size), self.param_dtype)
        bias = self.param("lm_head_bias", nn.initializers.zeros, (cfg.vocab_size,), self.param_dtype)
        return head_product(x, head) + bias.astype(jnp.float32)

    def _linear(self, name: str, x: jax.Array) -> jax.Array:
        width = self.config.hidden_size
        bias = self.param(f"{name}_bias", nn.initializers.zeros, (width,), self.param_dtype)
        return product(x, self.param(name, PROJECTION_INIT, (x.shape[-1], width), self.param_dtype)) + bias.astype(x.dtype)
