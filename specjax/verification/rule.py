"""What a verification rule is.

A rule decides which draft tokens stay. It is a frozen, hashable dataclass (static under jit) and is called with the distributions of the
target. With greedy decoding no rule but a synthetic one is asked, since all others keep the longest prefix that equals the target's arg-max
(`specjax.verification.verify`).
"""

from __future__ import annotations

from typing import Protocol

import jax

from specjax.state import Draft, Verification


class VerificationRule(Protocol):
    """Keeps or rejects draft tokens.

    Attributes:
        lossless: The output follows the target's distribution exactly.
        synthetic: The acceptance is made up; outputs are marked and must not be read as text.
    """

    @property
    def lossless(self) -> bool:
        """The output follows the target's distribution exactly."""
        ...

    @property
    def synthetic(self) -> bool:
        """The acceptance is made up."""
        ...

    def __call__(self, draft: Draft, target_probs: jax.Array, row_keys: jax.Array) -> Verification:
        """Verifies one draft.

        Args:
            draft: G proposed tokens a row.
            target_probs: `[B,G+1,V]` float32, the target's distributions after temperature, top-k and top-p: row j judges draft token j,
                row `num_drafted` gives the bonus token. A synthetic rule is given logits in their place where decoding is greedy.
            row_keys: `[B]` typed keys.

        Returns:
            A `Verification`.
        """
        ...
