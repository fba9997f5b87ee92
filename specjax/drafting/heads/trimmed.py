"""A draft LM head over a part of the vocabulary: the tokens that are frequent in some text.

In a corpus: FR-Spec, arXiv:2502.14856. In the target's own text: VocabTrim, arXiv:2506.22694. Trained so from the start: EAGLE-3,
arXiv:2503.01840.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from specjax.checks import require_size
from specjax.drafting.heads.draft_head import TOKEN_IDS, HeadScores
from specjax.models.layers import PROJECTION_INIT, head_product


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrimmedHead:
    """Scores of Vd of the V tokens; no other is ever drafted. Params: `lm_head [Vd,D]`, `token_ids [Vd]` int32, distinct.

    Attributes:
        num_tokens: Vd, at most V.
    """

    num_tokens: int
    shared = False

    def __post_init__(self) -> None:
        require_size("TrimmedHead.num_tokens", self.num_tokens)

    def check_sizes(self, *, hidden_size: int, vocab_size: int) -> None:
        """See `DraftHead.check_sizes`."""
        require_size("TrimmedHead.num_tokens", self.num_tokens, vocab_size, "vocab_size")

    def init_params(self, rng: jax.Array, *, hidden_size: int, vocab_size: int, dtype: jnp.dtype) -> dict[str, jax.Array]:
        """See `DraftHead.init_params`; the tokens are the first ones, until the frequent ones are put in their place."""
        self.check_sizes(hidden_size=hidden_size, vocab_size=vocab_size)
        return {
            "lm_head": PROJECTION_INIT(rng, (self.num_tokens, hidden_size), dtype),
            TOKEN_IDS: jnp.arange(self.num_tokens, dtype=jnp.int32),
        }

    def scores(self, params: Mapping[str, jax.Array], hidden: jax.Array, shared_head: jax.Array | None = None) -> HeadScores:
        """See `DraftHead.scores`."""
        return HeadScores(head_product(hidden, params["lm_head"]), params[TOKEN_IDS])

    def training_scores(
        self, params: Mapping[str, jax.Array], hidden: jax.Array, shared_head: jax.Array | None = None
    ) -> tuple[HeadScores, ...]:
        """See `DraftHead.training_scores`."""
        return (self.scores(params, hidden),)
