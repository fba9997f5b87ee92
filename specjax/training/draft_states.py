"""What a drafter in training hands to the loss: hidden states, and the head that turns them into scores."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from specjax.drafting.heads import DraftHead


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftStates:
    """The hidden states of I steps of a chain that one draft head reads. A drafter has one such group, or one for each of its heads.

    Attributes:
        hidden: `[I,B,T,D]`, what the head reads.
        head_params: The head's arrays.
        shared_head: `[V,D]`, the LM head that a shared head multiplies by, which is not trained; `None` for others.
        head: The head. Static.
        ahead: I ints: row t of step i predicts what the target does at position t + ahead[i], token t + ahead[i] + 1. Static.
    """

    hidden: jax.Array
    head_params: Any
    shared_head: jax.Array | None
    head: DraftHead = dataclasses.field(metadata=dict(static=True))
    ahead: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
