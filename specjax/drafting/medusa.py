"""Medusa: K heads on the target's last hidden state, each for one token further ahead. arXiv:2401.10774.

Head i at position t predicts token t + 2 + i; the target's own LM head gives t + 1.
"""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.checks import require_size
from specjax.drafting.heads import DraftHead, FullHead, HeadScores
from specjax.drafting.heads.draft_head import declare_head, require_head
from specjax.kernel_settings import Kernels
from specjax.kernels.few_row_linear import few_row_linear
from specjax.models.layers import PROJECTION_INIT, PureModule


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Shape of the heads.

    Attributes:
        hidden_size: D, that of the target.
        vocab_size: V, that of the target.
        num_draft_heads: K, how many tokens ahead, beyond the target's own next one.
        head: The LM head of each of them, with its own arrays; a shared one is the target's.
        num_layers: Residual blocks in each head.
        block_bias: The blocks have biases.

    Raises:
        ValueError: A size that is not a positive int, or an LM head that does not fit.
    """

    hidden_size: int
    vocab_size: int
    num_draft_heads: int
    head: DraftHead = FullHead()
    num_layers: int = 1
    block_bias: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_draft_heads", "num_layers"):
            require_size(f"MedusaConfig.{name}", getattr(self, name))
        require_head("MedusaConfig.head", self.head, hidden_size=self.hidden_size, vocab_size=self.vocab_size)


class Medusa(PureModule):
    """The heads. `apply({"params": p}, hidden)` gives the scores of all of them.

    Attributes:
        config: Sizes.
        dtype: Compute dtype; scores are float32.
        param_dtype: Dtype that `init` gives the parameters; token ids are int32 whatever it is.
        kernels: Its `projections` for the blocks, its `draft_head` for a greedy pick.
    """

    config: MedusaConfig
    dtype: jnp.dtype = jnp.bfloat16
    param_dtype: jnp.dtype = jnp.bfloat16
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        """Declares the parameters."""
        own = self.config, self.param_dtype, self.kernels.projections
        self.heads = [_Head(*own, name=f"head_{index}") for index in range(self.config.num_draft_heads)]

    def __call__(self, hidden: jax.Array, target_head: jax.Array | None = None) -> tuple[HeadScores, ...]:
        """Scores of every head.

        Args:
            hidden: `[..., D]`, the target's, after its final norm.
            target_head: `[V,D]`, the target's own array; needed where the LM heads are shared, not read otherwise.

        Returns:
            K scores of `[..., M]`.
        """
        if self.config.head == FullHead(shared=True):
            # All heads multiply by the same matrix: one product reads it once.
            logits = self.config.head.scores({}, jnp.stack(self.states(hidden), axis=-2), target_head).logits
            return tuple(HeadScores(logits[..., index, :]) for index in range(self.config.num_draft_heads))
        return tuple(head(hidden.astype(self.dtype), target_head) for head in self.heads)

    def states(self, hidden: jax.Array) -> tuple[jax.Array, ...]:
        """`[..., D]` of each head: what its LM head reads."""
        return tuple(head.blocks_of(hidden.astype(self.dtype)) for head in self.heads)

    def init_params(self, rng: jax.Array) -> dict:
        """Random parameters; see `Transformer.init_params`."""
        cfg = self.config
        hidden = jnp.zeros((1, cfg.hidden_size), self.dtype)
        target_head = jnp.zeros((cfg.vocab_size, cfg.hidden_size), self.dtype) if cfg.head.shared else None
        return self.init(rng, hidden, target_head)["params"]


class _Head(nn.Module):
    config: MedusaConfig
    param_dtype: jnp.dtype
    implementation: str  # of the blocks' products

    def setup(self) -> None:
        cfg, dtype = self.config, self.param_dtype
        width, indices = cfg.hidden_size, range(cfg.num_layers)
        self.blocks = [self.param(f"block_{index}", PROJECTION_INIT, (width, width), dtype) for index in indices]
        zeros = nn.initializers.zeros
        self.biases = [self.param(f"block_{index}_bias", zeros, (width,), dtype) for index in indices] if cfg.block_bias else []
        self.draft_head = declare_head(self, cfg.head, hidden_size=width, vocab_size=cfg.vocab_size, dtype=dtype)

    def __call__(self, x: jax.Array, target_head: jax.Array | None) -> HeadScores:
        return self.config.head.scores(self.draft_head, self.blocks_of(x), target_head)

    def blocks_of(self, x: jax.Array) -> jax.Array:
        """`x + silu(x W + b)` for each block."""
        for index, weight in enumerate(self.blocks):
            bias = self.biases[index] if self.config.block_bias else None
            x = x + nn.silu(few_row_linear(x, weight, bias=bias, implementation=self.implementation))
        return x
