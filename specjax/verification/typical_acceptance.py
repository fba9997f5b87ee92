"""Typical acceptance (Medusa): LOSSY at temperature above 0: the output does not follow the target's distribution. arXiv:2401.10774.

A draft token stays if its target probability exceeds min(ε, δ·exp(−H)), with H the entropy of the target's distribution there; our
`posterior_threshold` is ε, `posterior_alpha` δ. The token after the accepted ones is drawn from the target.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.sampling import sample_from_probs
from specjax.state import Draft, Verification
from specjax.verification.rejection_sampling import assemble, drafted_mask, leading_true, token_probs


@dataclasses.dataclass(frozen=True)
class TypicalAcceptance:
    """LOSSY at temperature above 0. Accepts whatever the target finds plausible; at temperature 0 it is greedy like every rule.

    Attributes:
        posterior_threshold: ε in (0, 1]; 0.09 is Medusa's default.
        posterior_alpha: δ in (0, 1]; 0.3 is Medusa's default.

    Raises:
        ValueError: A value outside its range.
    """

    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    lossless = False
    synthetic = False

    def __post_init__(self) -> None:
        for name in ("posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"TypicalAcceptance.{name} must be in (0, 1], got {value!r}")

    def __call__(self, draft: Draft, target_probs: jax.Array, row_keys: jax.Array) -> Verification:
        """See `VerificationRule`."""
        p, _ = token_probs(draft, target_probs)
        log_probs = jnp.log(jnp.where(target_probs > 0, target_probs, 1.0))
        entropy = -(target_probs * log_probs).sum(axis=-1)[:, :-1]
        accepted = p > jnp.minimum(self.posterior_threshold, self.posterior_alpha * jnp.exp(-entropy))
        num_accepted = leading_true(accepted & drafted_mask(draft))
        following = jnp.take_along_axis(target_probs, num_accepted[:, None, None], axis=1)[:, 0]
        return assemble(draft, num_accepted, sample_from_probs(row_keys, following))
