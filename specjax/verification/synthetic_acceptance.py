"""Synthetic acceptance: SYNTHETIC, for timing only: draft tokens are kept by a coin, whatever the target says.

The passes run are the real ones, so the time of a step is real, and how many tokens a step yields is what was asked for. The text is
meaningless: outputs carry `statistics.synthetic`, and nothing here prints or scores them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.sampling import split_row_keys
from specjax.state import Draft, Verification
from specjax.verification.rejection_sampling import assemble, drafted_mask, leading_true, uniforms


@dataclasses.dataclass(frozen=True)
class SyntheticAcceptance:
    """SYNTHETIC. Keeps draft token j, given that those before it were kept, with probability `rates[j]`.

    Attributes:
        rates: G conditional acceptance probabilities in [0, 1].
        dense_rate: With two-level verification, the probability of a token that sparse steps committed to be kept by the dense pass, if
            all before it were. `None`: this rule is not for two levels.

    Raises:
        ValueError: No rates, or one outside [0, 1].
    """

    rates: tuple[float, ...]
    dense_rate: float | None = None
    lossless = False
    synthetic = True

    def __post_init__(self) -> None:
        if not isinstance(self.rates, tuple) or not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise ValueError(f"SyntheticAcceptance.rates must be a non-empty tuple of probabilities, got {self.rates!r}")
        if self.dense_rate is not None and not 0 <= self.dense_rate <= 1:
            raise ValueError(f"SyntheticAcceptance.dense_rate must be None or a probability, got {self.dense_rate!r}")

    def of_dense_pass(self, num_tokens: int) -> SyntheticAcceptance:
        """The rule of the dense level, for up to so many tokens that sparse steps committed."""
        if self.dense_rate is None:
            raise ValueError("SyntheticAcceptance has no dense_rate: two-level verification needs one")
        return SyntheticAcceptance(rates=(self.dense_rate,) * num_tokens)

    @classmethod
    def from_mean_acceptance_length(cls, mean_acceptance_length: float, num_speculative_tokens: int) -> SyntheticAcceptance:
        """One rate r for every position such that 1 + r + r² + … + r^G is `mean_acceptance_length` (the bonus included).

        Raises:
            ValueError: A mean outside [1, G + 1].
        """
        if not 1 <= mean_acceptance_length <= num_speculative_tokens + 1:
            raise ValueError(
                f"mean_acceptance_length must be in [1, {num_speculative_tokens + 1}] for {num_speculative_tokens} draft tokens, "
                f"got {mean_acceptance_length!r}"
            )
        low, high = 0.0, 1.0
        for _ in range(60):  # bisection to well below float precision
            middle = (low + high) / 2
            reached = sum(middle**power for power in range(num_speculative_tokens + 1))
            low, high = (middle, high) if reached < mean_acceptance_length else (low, middle)
        return cls(rates=((low + high) / 2,) * num_speculative_tokens)

    def __call__(self, draft: Draft, target_probs: jax.Array, row_keys: jax.Array) -> Verification:
        """See `VerificationRule`; only the arg-max of the target's distributions is used."""
        if len(self.rates) != draft.tokens.shape[1]:
            raise ValueError(f"SyntheticAcceptance has {len(self.rates)} rates for drafts of {draft.tokens.shape[1]} tokens")
        (accept_keys,) = split_row_keys(row_keys, 1)
        accepted = uniforms(accept_keys, draft) < jnp.asarray(self.rates)
        num_accepted = leading_true(accepted & drafted_mask(draft))
        target_tokens = jnp.argmax(target_probs, axis=-1).astype(jnp.int32)
        next_token = jnp.take_along_axis(target_tokens, num_accepted[:, None], axis=1)[:, 0]
        return assemble(draft, num_accepted, next_token)
