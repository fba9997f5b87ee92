"""A draft LM head in two stages: low-rank scores choose k candidates, which the full head then scores exactly.

With k = 2048 and factors trained along with the drafter: SpecVocab, arXiv:2602.13836. With a small k and factors fitted to a finished full
head: the candidate head of later EAGLE drafters.

Every position has candidates of its own, so what is gathered grows with the positions: k rows of the full head for each, against all V rows
once for any number of them. Many positions at a time, such as a large batch, are therefore scored by the full head, from whose scores the
candidates' are taken. The head then costs its screening more than a full head and cannot be the faster one: it is for small batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from specjax.checks import require_size
from specjax.drafting.heads.draft_head import HeadScores, matrix
from specjax.drafting.heads.low_rank import LowRankHead, low_rank_logits
from specjax.kernels.largest import largest
from specjax.kernels.precision import full_precision
from specjax.models.layers import PROJECTION_INIT, head_product


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScreenedHead:
    """Exact scores of k candidates, another set for every position. Params: `down [R,D]`, `up [V,R]`, and `lm_head [V,D]` unless shared.

    The draft distribution is the softmax over the candidates alone, zero elsewhere: recording the full softmax, or the low-rank one, would
    bias what is sampled.

    Attributes:
        rank: R of the screening factors, at most D.
        num_candidates: k, at most V.
        shared: The full head lies elsewhere.
    """

    rank: int
    num_candidates: int = 2048
    shared: bool = False

    def __post_init__(self) -> None:
        require_size("ScreenedHead.rank", self.rank)
        require_size("ScreenedHead.num_candidates", self.num_candidates)

    def check_sizes(self, *, hidden_size: int, vocab_size: int) -> None:
        """See `DraftHead.check_sizes`."""
        require_size("ScreenedHead.rank", self.rank, hidden_size, "hidden_size")
        require_size("ScreenedHead.num_candidates", self.num_candidates, vocab_size, "vocab_size")

    def init_params(self, rng: jax.Array, *, hidden_size: int, vocab_size: int, dtype: jnp.dtype) -> dict[str, jax.Array]:
        """See `DraftHead.init_params`."""
        self.check_sizes(hidden_size=hidden_size, vocab_size=vocab_size)
        screen_rng, full_rng = jax.random.split(rng)
        params = LowRankHead(rank=self.rank).init_params(screen_rng, hidden_size=hidden_size, vocab_size=vocab_size, dtype=dtype)
        return params if self.shared else params | {"lm_head": PROJECTION_INIT(full_rng, (vocab_size, hidden_size), dtype)}

    def scores(self, params: Mapping[str, jax.Array], hidden: jax.Array, shared_head: jax.Array | None = None) -> HeadScores:
        """See `DraftHead.scores`."""
        full = matrix(params, shared_head, shared=self.shared)
        # With a NaN in the hidden state any ids may come out; the exact scores are then NaN, and say so.
        ids = largest(low_rank_logits(params, hidden), self.num_candidates)
        # Each candidate's row is read for its position, the full head's rows once for all of them.
        if math.prod(ids.shape) >= full.shape[0]:
            return HeadScores(jnp.take_along_axis(head_product(hidden, full), ids, axis=-1), ids)
        rows = jnp.take(full, ids, axis=0).astype(hidden.dtype)
        exact = jnp.einsum("...d,...kd->...k", hidden, rows, precision=full_precision(hidden), preferred_element_type=jnp.float32)
        return HeadScores(exact, ids)

    def training_scores(
        self, params: Mapping[str, jax.Array], hidden: jax.Array, shared_head: jax.Array | None = None
    ) -> tuple[HeadScores, ...]:
        """See `DraftHead.training_scores`: those of the full head, and of the screening, which does not pull at the drafter's body."""
        full = matrix(params, shared_head, shared=self.shared)
        screening = low_rank_logits(params, jax.lax.stop_gradient(hidden))
        return HeadScores(head_product(hidden, full)), HeadScores(screening)
