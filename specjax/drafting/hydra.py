"""Hydra: Medusa-like heads that also see the tokens drafted before them. arXiv:2402.05109.

Head i at position t predicts token t + 2 + i from the target's last hidden state at t and the embeddings of tokens t + 1 ... t + 1 + i.
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
class HydraConfig:
    """Shape of the heads (the published `mlp` architecture).

    Attributes:
        hidden_size: D, that of the target.
        vocab_size: V, that of the target.
        num_draft_heads: K, how many tokens ahead, beyond the target's own next one.
        head: The LM head of each of them, with its own arrays; a shared one is the target's. The published ones have a bias.
        num_layers: Residual blocks in each head.
        grounded: The heads see the tokens drafted before them; otherwise they are Medusa's.

    Raises:
        ValueError: A size that is not a positive int, or an LM head that does not fit.
    """

    hidden_size: int
    vocab_size: int
    num_draft_heads: int
    head: DraftHead = FullHead(bias=True)
    num_layers: int = 1
    grounded: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_draft_heads", "num_layers"):
            require_size(f"HydraConfig.{name}", getattr(self, name))
        require_head("HydraConfig.head", self.head, hidden_size=self.hidden_size, vocab_size=self.vocab_size)


class Hydra(PureModule):
    """The heads. `apply({"params": p}, hidden, embeddings)` gives the scores of one, by the number of embeddings.

    Attributes:
        config: Sizes.
        dtype: Compute dtype; scores are float32.
        param_dtype: Dtype that `init` gives the parameters; token ids are int32 whatever it is.
        kernels: Its `projections` for the blocks, its `draft_head` for a greedy pick.
    """

    config: HydraConfig
    dtype: jnp.dtype = jnp.bfloat16
    param_dtype: jnp.dtype = jnp.bfloat16
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        """Declares the parameters."""
        own = self.config, self.param_dtype, self.kernels.projections
        self.heads = [_Head(*own, index, name=f"head_{index}") for index in range(self.config.num_draft_heads)]

    def __call__(self, hidden: jax.Array, embeddings: jax.Array, target_head: jax.Array | None = None) -> HeadScores:
        """Scores of head i, which is the one that i + 1 tokens are known to.

        Args:
            hidden: `[..., D]`, the target's at position t, after its final norm.
            embeddings: `[..., i + 1, D]`, the target's of tokens t + 1 ... t + 1 + i: the one that its own LM head gave, then the drafts.
            target_head: `[V,D]`, the target's own array; needed where the LM heads are shared, not read otherwise.

        Returns:
            `[..., M]`.

        Raises:
            ValueError: No such head.
        """
        head, x = self._inputs(hidden, embeddings)
        return head(x, target_head)

    def state(self, hidden: jax.Array, embeddings: jax.Array) -> jax.Array:
        """`[..., D]`, what the LM head of head i reads; arguments as those of a call."""
        head, x = self._inputs(hidden, embeddings)
        return head.blocks_of(x)

    def init_params(self, rng: jax.Array) -> dict:
        """Random parameters; see `Transformer.init_params`."""
        return self.init(rng, jnp.zeros((1, self.config.hidden_size), self.dtype), method="_touch_all")["params"]

    def _touch_all(self, hidden: jax.Array) -> list[HeadScores]:
        cfg = self.config
        target_head = jnp.zeros((cfg.vocab_size, cfg.hidden_size), self.dtype) if cfg.head.shared else None
        return [self(hidden, jnp.zeros((1, index + 1, cfg.hidden_size), self.dtype), target_head) for index in range(len(self.heads))]

    def _inputs(self, hidden: jax.Array, embeddings: jax.Array) -> tuple[_Head, jax.Array]:
        num_tokens = embeddings.shape[-2]
        if not 1 <= num_tokens <= len(self.heads):
            raise ValueError(f"embeddings must hold 1 to {len(self.heads)} tokens, got {num_tokens}")
        x = hidden.astype(self.dtype)
        if self.config.grounded:
            flat = embeddings.astype(self.dtype).reshape(*embeddings.shape[:-2], -1)
            x = jnp.concatenate([x, flat], axis=-1)
        return self.heads[num_tokens - 1], x


class _Head(nn.Module):
    config: HydraConfig
    param_dtype: jnp.dtype
    implementation: str  # of the blocks' products
    index: int

    def setup(self) -> None:
        cfg, width = self.config, self.config.hidden_size
        first_width = width * (self.index + 2) if cfg.grounded else width
        self.blocks = [self._declare(f"block_{index}", width if index else first_width) for index in range(cfg.num_layers)]
        # Only the grounded first block narrows its input, and so needs weights on its residual branch.
        self.residual = self._declare("residual", first_width) if cfg.grounded else None
        self.draft_head = declare_head(self, cfg.head, hidden_size=width, vocab_size=cfg.vocab_size, dtype=self.param_dtype)

    def __call__(self, x: jax.Array, target_head: jax.Array | None) -> HeadScores:
        return self.config.head.scores(self.draft_head, self.blocks_of(x), target_head)

    def blocks_of(self, x: jax.Array) -> jax.Array:
        """`residual(x) + silu(linear(x))` for each block."""
        for index, block in enumerate(self.blocks):
            inner = nn.silu(self._linear(x, *block))
            x = inner + (x if index or self.residual is None else self._linear(x, *self.residual))
        return x

    def _declare(self, name: str, num_inputs: int) -> tuple[jax.Array, jax.Array]:
        width, dtype = self.config.hidden_size, self.param_dtype
        weight = self.param(name, PROJECTION_INIT, (num_inputs, width), dtype)
        return weight, self.param(f"{name}_bias", nn.initializers.zeros, (width,), dtype)

    def _linear(self, x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        return few_row_linear(x, weight, bias=bias, implementation=self.implementation)
