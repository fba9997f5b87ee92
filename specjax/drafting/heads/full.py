"""The full draft LM head: `z = W h`, or `W h + b`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from specjax.drafting.heads.draft_head import HeadScores, matrix
from specjax.models.layers import PROJECTION_INIT, head_product


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullHead:
    """Scores of all V tokens. Params: `lm_head [V,D]` unless shared, `bias [V]` if there is one.

    Attributes:
        shared: W lies elsewhere.
        bias: There is a bias, the head's own.
    """

    shared: bool = False
    bias: bool = False

    def check_sizes(self, *, hidden_size: int, vocab_size: int) -> None:
        """See `DraftHead.check_sizes`: all fit."""

    def init_params(self, rng: jax.Array, *, hidden_size: int, vocab_size: int, dtype: jnp.dtype) -> dict[str, jax.Array]:
        """See `DraftHead.init_params`."""
        params = {} if self.shared else {"lm_head": PROJECTION_INIT(rng, (vocab_size, hidden_size), dtype)}
        return params | {"bias": jnp.zeros((vocab_size,), dtype)} if self.bias else params

    def scores(self, params: Mapping[str, jax.Array], hidden: jax.Array, shared_head: jax.Array | None = None) -> HeadScores:
        """See `DraftHead.scores`."""
        logits = head_product(hidden, matrix(params, shared_head, shared=self.shared))
        return HeadScores(logits + params["bias"].astype(jnp.float32) if self.bias else logits)

    def training_scores(
        self, params: Mapping[str, jax.Array], hidden: jax.Array, shared_head: jax.Array | None = None
    ) -> tuple[HeadScores, ...]:
        """See `DraftHead.training_scores`."""
        return (self.scores(params, hidden, shared_head),)
