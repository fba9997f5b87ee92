"""SlimSpec's low-rank draft LM head: `z = W_up W_down h`. arXiv:2605.10453."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from specjax.checks import require_size
from specjax.drafting.heads.draft_head import HeadScores, LowRankFactors
from specjax.kernels.precision import rounded
from specjax.models.layers import PROJECTION_INIT, head_product


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankHead:
    """Scores of all V tokens through two thin products; `W_up W_down` is never formed. Params: `down [R,D]`, `up [V,R]`.

    Attributes:
        rank: R, at most D.
    """

    rank: int
    shared = False

    def __post_init__(self) -> None:
        require_size("LowRankHead.rank", self.rank)

    @classmethod
    def divided(cls, hidden_size: int, divisor: int) -> LowRankHead:
        """A head of rank `hidden_size / divisor`.

        Args:
            hidden_size: D.
            divisor: At least 1; must divide D.

        Raises:
            ValueError: It does not.
        """
        require_size("the divisor of a low-rank head", divisor)
        if hidden_size % divisor:
            raise ValueError(f"the divisor of a low-rank head must divide hidden_size = {hidden_size}, got {divisor}")
        return cls(rank=hidden_size // divisor)

    def check_sizes(self, *, hidden_size: int, vocab_size: int) -> None:
        """See `DraftHead.check_sizes`."""
        require_size("LowRankHead.rank", self.rank, hidden_size, "hidden_size")

    def init_params(self, rng: jax.Array, *, hidden_size: int, vocab_size: int, dtype: jnp.dtype) -> dict[str, jax.Array]:
        """See `DraftHead.init_params`."""
        self.check_sizes(hidden_size=hidden_size, vocab_size=vocab_size)
        down_rng, up_rng = jax.random.split(rng)
        # Variance 1/fan-in: the factors' product then starts with the scores of a full head, not with rank times smaller ones.
        return {
            "down": jax.random.normal(down_rng, (self.rank, hidden_size), dtype) * hidden_size**-0.5,
            "up": PROJECTION_INIT(up_rng, (vocab_size, self.rank), dtype) * (hidden_size / self.rank) ** 0.5,
        }

    def scores(self, params: Mapping[str, jax.Array], hidden: jax.Array, shared_head: jax.Array | None = None) -> HeadScores:
        """See `DraftHead.scores`."""
        return HeadScores(low_rank_logits(params, hidden), factors=LowRankFactors(hidden, params["down"], params["up"]))

    def training_scores(
        self, params: Mapping[str, jax.Array], hidden: jax.Array, shared_head: jax.Array | None = None
    ) -> tuple[HeadScores, ...]:
        """See `DraftHead.training_scores`."""
        return (HeadScores(low_rank_logits(params, hidden)),)


def low_rank_logits(params: Mapping[str, jax.Array], hidden: jax.Array) -> jax.Array:
    """`[..., D]` → `[..., V]` float32; the inner product is rounded to the dtype of `hidden` before the outer one reads it."""
    return head_product(rounded(head_product(hidden, params["down"]), hidden.dtype), params["up"])
