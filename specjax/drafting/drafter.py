"""What a drafter is: anything with `feature_layers`, `check`, `init`, `grow`, `prefill`, `propose` and `commit`.

A drafter is a frozen, hashable dataclass (static under jit). Its arrays are its params (an argument of the call) and its state (a pytree in
the loop's carry); it is free to choose both.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax

from specjax.model_config import ModelConfig
from specjax.sampling import SamplingParams
from specjax.state import Commit, Context, Draft, PrefillChunk


class Drafter(Protocol):
    """Proposes the next tokens; the target decides.

    Attributes:
        feature_layers: Boundaries of the target whose residual stream `prefill` and `commit` receive (see `Transformer.__call__`); empty if
            the drafter needs none.
    """

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Boundaries of the target that the drafter reads."""
        ...

    def check(self, params: Any, *, target: ModelConfig, max_length: int | None) -> None:
        """Refuses what does not fit, before anything is compiled.

        Args:
            params: The drafter's params.
            target: The target's shape.
            max_length: Longest context that the call may reach, in tokens; `None` where lengths are traced.

        Raises:
            ValueError: The drafter does not fit the target, its params do not fit it, or its own window is shorter.
        """
        ...

    def init(self, params: Any, *, batch_size: int, capacity: int, context_limit: jax.Array | None = None) -> Any:
        """The state of an empty context.

        Args:
            params: The drafter's params.
            batch_size: B.
            capacity: Positions a row to have room for.
            context_limit: `[B]` int32, tokens that each row may come to hold; `None` is the capacity.
        """
        ...

    def grow(self, params: Any, state: Any, context: Context, *, capacity: int) -> Any:
        """The same state with room for `capacity` positions a row; called when a call continues an earlier one.

        The prefill that follows begins at the pending last token of `context`: what stands before it must be in the state.
        """
        ...

    def prefill(self, params: Any, state: Any, chunk: PrefillChunk) -> Any:
        """Takes in C prompt positions. Called in order of position; the last chunk may hold padding behind a row's prompt."""
        ...

    def propose(
        self,
        params: Any,
        state: Any,
        context: Context,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams | None,
        row_keys: jax.Array,
    ) -> tuple[Draft, Any]:
        """Drafts what follows `context` (its pending last token included).

        Args:
            params: The drafter's params.
            state: The drafter's state.
            context: At least two tokens in every row that is still running: a prompt and the first token emitted after it.
            num_speculative_tokens: G, static.
            sampling: Fields `[B]`, or `None` for greedy (then `Draft.probs` is `None`).
            row_keys: `[B]` typed keys.

        Returns:
            The draft, and the state to hand to `commit`.
        """
        ...

    def commit(self, params: Any, state: Any, commit: Commit) -> Any:
        """Brings the state in line with what was committed, which may be less than was drafted, or go back several steps.

        A `rechecked` commit goes back: its context may be shorter than that of the commits since the last such one, whose tokens it
        replaces, and longer than they reached by one token. What came from their features is to be made anew from these.
        """
        ...


class StatelessDrafter:
    """Base of drafters that need nothing but the context: no params, no state, no features. What is left to write is `propose`."""

    feature_layers = ()

    def check(self, params: Any, *, target: ModelConfig, max_length: int | None) -> None:
        """Fits every target."""

    def init(self, params: Any, *, batch_size: int, capacity: int, context_limit: jax.Array | None = None) -> None:
        """See `Drafter.init`."""

    def grow(self, params: Any, state: None, context: Context, *, capacity: int) -> None:
        """See `Drafter.grow`."""

    def prefill(self, params: Any, state: None, chunk: PrefillChunk) -> None:
        """See `Drafter.prefill`."""

    def commit(self, params: Any, state: None, commit: Commit) -> None:
        """See `Drafter.commit`."""
