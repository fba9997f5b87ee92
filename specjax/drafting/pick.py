"""One draft token from a draft LM head's scores: what every drafter that samples does at each step of its chain."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.sampling import SamplingParams, filtered_probs, sample_from_probs
from specjax.state import Draft


@dataclasses.dataclass(frozen=True)
class Pick:
    """One position of a draft.

    Attributes:
        tokens: `[B]` int32, rows of the scores.
        probs: `[B,V]` float32, what they were sampled from; `None` if they are the arg-max.
        usable: `[B]` bool; a distribution that cannot be sampled ends the draft before it.
    """

    tokens: jax.Array
    probs: jax.Array | None
    usable: jax.Array


def pick(logits: jax.Array, sampling: SamplingParams | None, row_keys: jax.Array) -> Pick:
    """The arg-max, or a sample with the call's own temperature, top-k and top-p.

    Args:
        logits: `[B,V]` float32.
        sampling: Fields `[B]`, or `None` for the arg-max.
        row_keys: `[B]` typed keys.
    """
    usable = jnp.isfinite(logits.max(axis=-1))
    logits = jnp.where(usable[:, None], logits, 0.0)
    if sampling is None:
        return Pick(tokens=jnp.argmax(logits, axis=-1).astype(jnp.int32), probs=None, usable=usable)
    probs = filtered_probs(logits[:, None], sampling)[:, 0]
    return Pick(tokens=sample_from_probs(row_keys, probs), probs=probs, usable=usable)


def draft_of(picks: list[Pick]) -> Draft:
    """The draft that G picks make: each row up to its first unusable position."""
    usable = jnp.stack([one.usable for one in picks], axis=1)
    probs = [one.probs for one in picks if one.probs is not None]
    return Draft(
        tokens=jnp.stack([one.tokens for one in picks], axis=1),
        num_drafted=jnp.cumprod(usable.astype(jnp.int32), axis=1).sum(axis=1),
        probs=jnp.stack(probs, axis=1) if probs else None,
    )
