"""One draft token from a draft LM head's scores: what every drafter that samples does at each step of its chain."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.drafting.heads import HeadScores
from specjax.sampling import SamplingParams, filtered_probs, sample_from_probs
from specjax.state import Draft


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pick:
    """One position of a draft.

    Attributes:
        tokens: `[B]` int32, in the target's vocabulary.
        probs: `[B,V]` float32, what they were sampled from; `None` if they are the arg-max.
        usable: `[B]` bool; a distribution that cannot be sampled ends the draft before it.
    """

    tokens: jax.Array
    probs: jax.Array | None
    usable: jax.Array


def pick(
    scores: HeadScores, sampling: SamplingParams | None, row_keys: jax.Array, *, vocab_size: int, implementation: str = "auto"
) -> Pick:
    """The arg-max, or a sample with the call's own temperature, top-k and top-p, of the tokens that have scores.

    Args:
        scores: `[B,M]`.
        sampling: Fields `[B]`, or `None` for the arg-max.
        row_keys: `[B]` typed keys.
        vocab_size: V.
        implementation: Of the arg-max; see `HeadScores.best`.
    """
    if sampling is None:
        tokens, usable = scores.best(implementation=implementation)
        return Pick(tokens=tokens, probs=None, usable=usable)
    usable = jnp.isfinite(scores.logits.max(axis=-1))
    logits = jnp.where(usable[:, None], scores.logits, 0.0)
    probs = filtered_probs(logits[:, None], sampling)[:, 0]
    tokens = scores.tokens(sample_from_probs(row_keys, probs))
    return Pick(tokens=tokens, probs=scores.over_vocabulary(probs, vocab_size), usable=usable)


def draft_of(picks: list[Pick]) -> Draft:
    """The draft that G picks make: each row up to its first unusable position."""
    usable = jnp.stack([one.usable for one in picks], axis=1)
    probs = [one.probs for one in picks if one.probs is not None]
    return Draft(
        tokens=jnp.stack([one.tokens for one in picks], axis=1),
        num_drafted=jnp.cumprod(usable.astype(jnp.int32), axis=1).sum(axis=1),
        probs=jnp.stack(probs, axis=1) if probs else None,
    )
