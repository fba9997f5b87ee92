"""What a drafter is trained to lower: how far its distribution q is from the target's p, position by position.

Forward KL, as EAGLE-3, arXiv:2503.01840. LK losses, which aim at the acceptance rate itself: arXiv:2602.23881.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafting.heads import HeadScores

LOSS_KINDS = ("forward_kl", "lk_alpha", "lk_lambda")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftLoss:
    """Which loss, and how much each step of the chain counts.

    With alpha = sum over v of min(p_v, q_v), the chance that a token sampled from q is accepted, and lambda = exp(-eta alpha), taken as a
    constant:

    ```
    forward_kl   KL(p, q)
    lk_alpha     -log alpha
    lk_lambda    lambda KL(p, q) + (1 - lambda) (1 - alpha)
    ```

    Attributes:
        kind: One of `LOSS_KINDS`.
        eta: How fast `lk_lambda` turns from the KL divergence to the acceptance.
        decay: Step i of the chain counts `decay ** i`.

    Raises:
        ValueError: An unknown kind, or a number outside its range.
    """

    kind: str = "forward_kl"
    eta: float = 3.0
    decay: float = 0.8

    def __post_init__(self) -> None:
        if self.kind not in LOSS_KINDS:
            raise ValueError(f"DraftLoss.kind must be one of {LOSS_KINDS}, got {self.kind!r}")
        if not self.eta >= 0:
            raise ValueError(f"DraftLoss.eta must be at least 0, got {self.eta!r}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"DraftLoss.decay must be above 0 and at most 1, got {self.decay!r}")

    def step_weights(self, num_steps: int) -> np.ndarray:
        """`[num_steps]` float32."""
        return (self.decay ** np.arange(num_steps)).astype(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PositionLosses:
    """Of every position by itself.

    Attributes:
        loss: `[...]` float32, differentiable with respect to the drafter's scores.
        acceptance: `[...]` float32, alpha: the expected acceptance of a draft token sampled from q. No gradient.
    """

    loss: jax.Array
    acceptance: jax.Array


def position_losses(loss: DraftLoss, target_logits: jax.Array, scores: HeadScores) -> PositionLosses:
    """The loss of each position.

    Where the head scores a part of the vocabulary, the KL divergence compares with p renormalised over that part (it would be infinite
    otherwise), while alpha takes p as it is: a token that is never drafted is never accepted.

    Args:
        loss: Which.
        target_logits: `[..., V]` float32; no gradient flows into them.
        scores: `[..., M]` of the draft head. Its leading axes may be more than the target's, which then count for each of them.
    """
    target_logits = jax.lax.stop_gradient(target_logits)
    log_total = jax.nn.logsumexp(target_logits, axis=-1, keepdims=True)
    part = _where_scored(target_logits, scores)
    log_p, log_scored = part - log_total, jax.nn.logsumexp(scores.logits, axis=-1, keepdims=True)
    log_q = scores.logits - log_scored
    lower = jnp.minimum(log_p, log_q)
    if loss.kind == "lk_alpha":
        # Its logarithm, so that it says where to go where p and q hardly meet, and alpha is below what float32 holds.
        log_alpha = jax.nn.logsumexp(lower, axis=-1)
        return PositionLosses(loss=-log_alpha, acceptance=jax.lax.stop_gradient(jnp.exp(log_alpha)))
    alpha = jnp.exp(lower).sum(axis=-1)
    acceptance = jax.lax.stop_gradient(alpha)
    divergence = _kl(log_p if scores.token_ids is None else jax.nn.log_softmax(part, axis=-1), scores.logits, log_scored)
    if loss.kind == "forward_kl":
        return PositionLosses(loss=divergence, acceptance=acceptance)
    share = jnp.exp(-loss.eta * acceptance)
    return PositionLosses(loss=share * divergence + (1 - share) * (1 - alpha), acceptance=acceptance)


def _where_scored(target_logits: jax.Array, scores: HeadScores) -> jax.Array:
    """`[..., M]`, the target's logits of the tokens that the head scores."""
    ids = scores.token_ids
    if ids is None:
        return target_logits
    if ids.ndim == 1:
        return jnp.take(target_logits, ids, axis=-1)
    shape = jnp.broadcast_shapes(target_logits.shape[:-1], ids.shape[:-1])
    return jnp.take_along_axis(jnp.broadcast_to(target_logits, (*shape, target_logits.shape[-1])), ids, axis=-1)


def _kl(log_p: jax.Array, logits: jax.Array, log_total: jax.Array) -> jax.Array:
    """Sum over the last axis of `p (log p - log q)`; a token that p excludes adds nothing.

    With q = softmax(logits) its gradient is q - p, because p sums to 1. Derived from the sum itself it would be q sum(p) - p, and sum(p)
    one more pass over all of p.
    """
    possible = log_p > -jnp.inf
    log_p = jnp.where(possible, log_p, 0.0)
    log_q = logits - jax.lax.stop_gradient(log_total)
    value = jnp.where(possible, jnp.exp(log_p) * (log_p - log_q), 0.0).sum(axis=-1)
    return value + (log_total - jax.lax.stop_gradient(log_total))[..., 0]
