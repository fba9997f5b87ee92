"""Draft LM heads: from the draft model's hidden state to scores over the target's vocabulary."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from specjax.models.transformer import Transformer


class DraftHead(Protocol):
    """A frozen, hashable dataclass; its arrays are found in the drafter's params."""

    def logits(self, model: Transformer, params: Any, hidden: jax.Array) -> jax.Array:
        """Scores of every token.

        Args:
            model: The draft model.
            params: The drafter's params.
            hidden: `[B,D]`, after the final norm.

        Returns:
            `[B,V]` float32.
        """
        ...


@dataclasses.dataclass(frozen=True)
class FullHead:
    """The draft model's own LM head: `z = W h`."""

    def logits(self, model: Transformer, params: Any, hidden: jax.Array) -> jax.Array:
        """See `DraftHead.logits`."""
        return model.apply({"params": params}, hidden, method="logits")
