"""A drafter that proposes nothing: plain decoding, in verification passes of G + 1 rows.

In reduced precision a pass of G + 1 rows and one of a single row round differently, so greedy speculative and greedy plain output may part
where two tokens are nearly tied. Plain decoding with this drafter runs the very passes that a speculative run does: its output is the one
to compare with, token for token, in bfloat16 as well.
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
class NoDraft(StatelessDrafter):
    """Never proposes a token; its params are `None`."""

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
        """See `Drafter.propose`."""
        batch_size = context.length.shape[0]
        tokens = jnp.zeros((batch_size, num_speculative_tokens), jnp.int32)
        return Draft(tokens=tokens, num_drafted=jnp.zeros((batch_size,), jnp.int32), probs=None), None
