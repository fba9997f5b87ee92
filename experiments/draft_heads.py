"""Draft LM heads by name, with random weights, what they have to read, and the head that costs nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from experiments.experiment import ExperimentError
from experiments.presets import random_array
from specjax.drafting.heads import DraftHead, FullHead, HeadScores, LowRankHead, ScreenedHead, TrimmedHead
from specjax.drafting.heads.named_head import named_head as library_named_head

FULL = "full"
# The `init` of a head that was made from a trained one and not trained itself.
CUT_FROM_FULL, OF_SCREENED = "cut from full", "that of the screened head"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenToken:
    """Stands where a draft head would, and gives a token without scoring any: what a chain of drafts takes without its heads.

    The token comes from the bits of one number of the hidden state. So each step still waits for the one before it, and looks up another
    embedding than that; a constant token's would be looked up once, outside the loop.

    Attributes:
        vocab_size: V.
    """

    vocab_size: int
    shared = False

    def check_sizes(self, *, hidden_size: int, vocab_size: int) -> None: ...

    def init_params(self, rng: jax.Array, *, hidden_size: int, vocab_size: int, dtype: jnp.dtype) -> dict[str, jax.Array]:
        return {}

    def scores(self, params: Mapping[str, jax.Array], hidden: jax.Array, shared_head: jax.Array | None = None) -> HeadScores:
        first = hidden[..., :1].astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(first, jnp.int32) >> 16  # all that a bfloat16 has
        return HeadScores(first, jnp.abs(bits) % self.vocab_size)

    def training_scores(
        self, params: Mapping[str, jax.Array], hidden: jax.Array, shared_head: jax.Array | None = None
    ) -> tuple[HeadScores, ...]:
        raise NotImplementedError("there is nothing to train")


def named_head(name: str, *, hidden_size: int, vocab_size: int) -> DraftHead:
    """The head of a name, as `specjax.drafting.heads.named_head` has it.

    Raises:
        ExperimentError: No such head, or one that does not fit these sizes.
    """
    try:
        return library_named_head(name, hidden_size=hidden_size, vocab_size=vocab_size)
    except ValueError as error:
        raise ExperimentError(str(error)) from None


def describe(head: DraftHead, vocab_size: int) -> dict[str, Any]:
    """What rows say of a head: its kind, its rank R, and the rows of the vocabulary that it scores."""
    kinds = {FullHead: FULL, LowRankHead: "low_rank", TrimmedHead: "trimmed", ScreenedHead: "screened"}
    rows = head.num_tokens if isinstance(head, TrimmedHead) else vocab_size
    return {"head": kinds[type(head)], "rank": getattr(head, "rank", None), "rows": rows}


def label(row: Mapping[str, Any]) -> str:
    """A head as the terminal and the tables show it."""
    rank = "" if row["rank"] is None else f", R {row['rank']}"
    return f"{row['head']}{rank}" + (f", {row['rows']} rows" if row["head"] == "trimmed" else "")


def random_head(head: DraftHead, *, hidden_size: int, vocab_size: int, dtype: Any, made: dict) -> dict[str, jax.Array]:
    """Random arrays of a head.

    Args:
        head: The head.
        hidden_size: D.
        vocab_size: V.
        dtype: Of its matrices.
        made: Matrices so far, by name and shape; what is there is used again, and what is made is put there. Only sizes count.
    """
    shapes = jax.eval_shape(
        lambda rng: head.init_params(rng, hidden_size=hidden_size, vocab_size=vocab_size, dtype=dtype), jax.random.key(0)
    )
    for name, leaf in shapes.items():
        if (name, leaf.shape) not in made:
            integers = jnp.issubdtype(leaf.dtype, jnp.integer)
            rng = jax.random.fold_in(jax.random.key(7), len(made))
            made[name, leaf.shape] = jnp.arange(leaf.size) if integers else random_array(rng, leaf.shape, leaf.dtype, 0.02)
    return {name: made[name, leaf.shape] for name, leaf in shapes.items()}


def bytes_read(head: DraftHead, *, hidden_size: int, vocab_size: int, itemsize: int, batch: int) -> int:
    """Bytes of weights that the head reads for one draft token of each row: all of them, but of a screened full matrix the candidates.

    Scores are not counted: they need not leave the chip. Which candidates the rows share is not known: each row reads its own.
    """
    shapes = jax.eval_shape(
        lambda rng: head.init_params(rng, hidden_size=hidden_size, vocab_size=vocab_size, dtype=jnp.float32), jax.random.key(0)
    )
    sizes = {name: leaf.size for name, leaf in shapes.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    if isinstance(head, FullHead):
        sizes["lm_head"] = vocab_size * hidden_size  # wherever it lies
    if isinstance(head, ScreenedHead):
        sizes["lm_head"] = min(batch * head.num_candidates, vocab_size) * hidden_size
    return itemsize * sum(sizes.values())
