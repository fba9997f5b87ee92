"""Prompt lookup: copy what followed the last tokens when they stood in the context before. No model, no training.

The longest n-gram (from `max_ngram` down to `min_ngram`) that ends the context and occurred earlier decides; among its occurrences the one
with the most tokens behind it, up to G, and of those the latest. Where none occurred, nothing is proposed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafting.drafter import StatelessDrafter
from specjax.sampling import SamplingParams
from specjax.state import Context, Draft


@dataclasses.dataclass(frozen=True)
class PromptLookup(StatelessDrafter):
    """Drafts by n-gram match in the context; its params are `None`.

    Attributes:
        max_ngram: Longest suffix to look for, in tokens.
        min_ngram: Shortest.

    Raises:
        ValueError: Unless 1 ≤ min_ngram ≤ max_ngram.
    """

    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"PromptLookup needs 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")

    def propose(
        self,
        params: Any,
        state: None,
        context: Context,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams | None,
        row_keys: jax.Array,
    ) -> tuple[Draft, None]:
        """See `Drafter.propose`. The draft is a point mass."""
        source, num_drafted = self._find(context, num_speculative_tokens)
        index = jnp.minimum(source[:, None] + jnp.arange(num_speculative_tokens), context.tokens.shape[1] - 1)
        return Draft(tokens=jnp.take_along_axis(context.tokens, index, axis=1), num_drafted=num_drafted, probs=None), None

    def _find(self, context: Context, num_speculative_tokens: int) -> tuple[jax.Array, jax.Array]:
        """Where to copy from `[B]`, and how many tokens `[B]`."""
        capacity = context.tokens.shape[1]
        # ends[b, s]: the n tokens that end just before slot s equal the n that end the context. Grown from n = 1 upwards.
        slots = jnp.arange(capacity)
        length = context.length[:, None]
        available = jnp.clip(length - slots, 0, num_speculative_tokens)
        ends = available > 0
        source = jnp.zeros_like(context.length)
        num_drafted = jnp.zeros_like(context.length)
        for ngram in range(1, self.max_ngram + 1):
            last = jnp.take_along_axis(context.tokens, jnp.maximum(length - ngram, 0), axis=1)
            shifted = jnp.pad(context.tokens, ((0, 0), (ngram, 0)), constant_values=-1)[:, :capacity]
            ends = ends & (shifted == last) & (length >= ngram)
            if ngram >= self.min_ngram:
                best = jnp.argmax(jnp.where(ends, available * capacity + slots, -1), axis=1).astype(jnp.int32)
                found = jnp.take_along_axis(ends, best[:, None], axis=1)[:, 0]
                source = jnp.where(found, best, source)
                num_drafted = jnp.where(found, jnp.take_along_axis(available, best[:, None], axis=1)[:, 0], num_drafted)
        return source, num_drafted
