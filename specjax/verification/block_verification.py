"""Block verification: judges the draft as a whole and accepts at least as much as token-wise rejection. Lossless. arXiv:2403.10444.

With p_i, q_i the target and draft probabilities of draft token i = 1 … n: w_0 = 1, w_i = min(1, w_{i−1} p_i / q_i);
S_i = Σ_x max(w_i p_{i+1}(x) − q_{i+1}(x), 0); h_i = S_i / (S_i + 1 − w_i) for i < n (0/0 is 1), h_n = w_n. The accepted length τ is the
largest i whose u_i < h_i, else 0; the next token is drawn from max(w_τ p_{τ+1} − q_{τ+1}, 0), or from p after the whole draft. It gains
nothing over token-wise rejection when the draft is a point mass.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.sampling import sample_from_probs, split_row_keys
from specjax.state import Draft, Verification
from specjax.verification.rejection_sampling import assemble, drafted_mask, residual_weights, token_probs, uniforms


@dataclasses.dataclass(frozen=True)
class BlockVerification:
    """Accepts the longest prefix that a joint test allows. Lossless."""

    lossless = True
    synthetic = False

    def __call__(self, draft: Draft, target_probs: jax.Array, row_keys: jax.Array) -> Verification:
        """See `VerificationRule`."""
        accept_keys, recover_keys = split_row_keys(row_keys, 2)
        p, q = token_probs(draft, target_probs)
        weights = _prefix_weights(p, q)  # [B,G]: w_1 ... w_G
        acceptance = _acceptance(draft, target_probs, weights)
        accepted = (uniforms(accept_keys, draft) < acceptance) & drafted_mask(draft)
        lengths = jnp.arange(1, draft.tokens.shape[1] + 1)
        num_accepted = jnp.max(jnp.where(accepted, lengths, 0), axis=1)
        all_weights = jnp.pad(weights, ((0, 0), (1, 0)), constant_values=1.0)  # w_0 = 1
        scale = jnp.take_along_axis(all_weights, num_accepted[:, None], axis=1)[:, 0]
        return assemble(draft, num_accepted, sample_from_probs(recover_keys, residual_weights(draft, target_probs, num_accepted, scale)))


def _prefix_weights(p: jax.Array, q: jax.Array) -> jax.Array:
    ratio = jnp.where(q > 0, p / jnp.where(q > 0, q, 1.0), 0.0)
    weight, weights = jnp.ones(p.shape[:1]), []
    for position in range(p.shape[1]):
        weight = jnp.minimum(1.0, weight * ratio[:, position])
        weights.append(weight)
    return jnp.stack(weights, axis=1)


def _acceptance(draft: Draft, target_probs: jax.Array, weights: jax.Array) -> jax.Array:
    """`[B,G]`: h_1 ... h_G, with h_n = w_n at the row's own draft length n."""
    num_tokens = draft.tokens.shape[1]
    if draft.probs is None:
        next_token = draft.tokens[:, 1:, None]
        following_q = (jnp.arange(target_probs.shape[-1]) == next_token).astype(target_probs.dtype)
    else:
        following_q = draft.probs[:, 1:]
    inner = weights[:, : num_tokens - 1]
    mass = jnp.maximum(inner[..., None] * target_probs[:, 1:num_tokens] - following_q, 0.0).sum(axis=-1)
    denominator = mass + 1.0 - inner
    h = jnp.where(denominator > 0, mass / jnp.where(denominator > 0, denominator, 1.0), 1.0)
    h = jnp.concatenate([h, weights[:, -1:]], axis=1)
    is_last = jnp.arange(1, num_tokens + 1) == draft.num_drafted[:, None]
    return jnp.where(is_last, weights, h)
