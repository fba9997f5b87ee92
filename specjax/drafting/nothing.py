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

from specjax.config import ModelConfig
from specjax.sampling import SamplingParams
from specjax.state import Commit, Context, Draft, PrefillChunk


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """Never proposes a token; its params are `None`."""

    feature_layers = ()

    def check(self, params: Any, *, target: ModelConfig, max_length: int | None) -> None:
        """See `Drafter.check`; fits every target."""

    def init(self, params: Any, *, batch_size: int, capacity: int) -> None:
        """See `Drafter.init`."""

    def grow(self, params: Any, state: None, context: Context, *, capacity: int) -> None:
        """See `Drafter.grow`."""

    def prefill(self, params: Any, state: None, chunk: PrefillChunk) -> None:
        """See `Drafter.prefill`."""

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

    def commit(self, params: Any, state: None, commit: Commit) -> None:
        """See `Drafter.commit`."""
