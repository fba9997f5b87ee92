"""Speculative sampling: accept a draft token with probability min(1, p/q), otherwise resample from max(p − q, 0). Lossless.

arXiv:2211.17192 and arXiv:2302.01318; our `target_probs` and `draft_probs` are their p and q. For a point-mass draft q is 1 at the token:
accept with p, and resample from p without that token.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.sampling import sample_from_probs, split_row_keys
from specjax.state import Draft, Verification


@dataclasses.dataclass(frozen=True)
class RejectionSampling:
    """The default rule. Lossless: every emitted token follows the target's distribution."""

    lossless = True
    synthetic = False

    def __call__(self, draft: Draft, target_probs: jax.Array, row_keys: jax.Array) -> Verification:
        """See `VerificationRule`."""
        accept_keys, recover_keys = split_row_keys(row_keys, 2)
        p, q = token_probs(draft, target_probs)
        # u < p/q without the division: p = 0 is never accepted, even at u = 0.
        accepted = uniforms(accept_keys, draft) * q < p
        num_accepted = leading_true(accepted & drafted_mask(draft))
        weights = residual_weights(draft, target_probs, num_accepted, jnp.ones(num_accepted.shape))
        return assemble(draft, num_accepted, sample_from_probs(recover_keys, weights))


def uniforms(row_keys: jax.Array, draft: Draft) -> jax.Array:
    """`[B,G]` float32 in [0, 1)."""
    return jax.vmap(lambda key: jax.random.uniform(key, (draft.tokens.shape[1],)))(row_keys)


def drafted_mask(draft: Draft) -> jax.Array:
    """`[B,G]` bool: positions that hold a draft token."""
    return jnp.arange(draft.tokens.shape[1]) < draft.num_drafted[:, None]


def token_probs(draft: Draft, target_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """p and q of the draft tokens themselves, each `[B,G]`."""
    index = draft.tokens[..., None]
    p = jnp.take_along_axis(target_probs[:, :-1], index, axis=-1)[..., 0]
    q = jnp.ones_like(p) if draft.probs is None else jnp.take_along_axis(draft.probs, index, axis=-1)[..., 0]
    return p, q


def leading_true(flags: jax.Array) -> jax.Array:
    """`[B]` int32: how many of the first flags in each row `[B,G]` are all true."""
    return jnp.cumprod(flags.astype(jnp.int32), axis=1).sum(axis=1)


def residual_weights(draft: Draft, target_probs: jax.Array, num_accepted: jax.Array, scale: jax.Array) -> jax.Array:
    """Weights `[B,V]` of the token that follows `num_accepted` accepted ones: `max(scale · p − q, 0)`, or p after the whole draft.

    Where p equals q (no mass is left, not even by rounding) the weights fall back to p.

    Args:
        draft: The draft.
        target_probs: `[B,G+1,V]`.
        num_accepted: `[B]` int32.
        scale: `[B]`, 1 for token-wise rejection sampling.
    """
    p = jnp.take_along_axis(target_probs, num_accepted[:, None, None], axis=1)[:, 0]
    index = jnp.minimum(num_accepted, draft.tokens.shape[1] - 1)
    if draft.probs is None:
        rejected = jnp.take_along_axis(draft.tokens, index[:, None], axis=1)
        q = (jnp.arange(p.shape[-1]) == rejected).astype(p.dtype)
    else:
        q = jnp.take_along_axis(draft.probs, index[:, None, None], axis=1)[:, 0]
    residual = jnp.maximum(scale[:, None] * p - q, 0.0)
    use_target = (num_accepted >= draft.num_drafted) | (residual.sum(axis=-1) <= 0)
    return jnp.where(use_target[:, None], p, residual)


def assemble(draft: Draft, num_accepted: jax.Array, next_token: jax.Array) -> Verification:
    """The accepted draft tokens followed by `next_token` `[B]`."""
    slots = jnp.arange(draft.tokens.shape[1] + 1)
    padded = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(slots == num_accepted[:, None], next_token[:, None], padded)
    return Verification(tokens=tokens, num_accepted=num_accepted)
