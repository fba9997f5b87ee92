"""From the target's logits to what is committed: greedy, or by the rule that the config names; rows of invalid logits are caught here."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.sampling import SamplingParams, filtered_probs, sample_from_probs
from specjax.state import Draft, Verification
from specjax.verification.rejection_sampling import assemble, drafted_mask, leading_true
from specjax.verification.rule import VerificationRule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CheckedVerification:
    """A verification, and whether its last token may be used.

    Attributes:
        verification: The rule's decision.
        nonfinite: `[B]` bool: the logits behind the token after the accepted ones hold NaN, +inf or nothing but -inf, so that token means
            nothing. The accepted tokens before it are good.
    """

    verification: Verification
    nonfinite: jax.Array


def verify(
    rule: VerificationRule, draft: Draft, target_logits: jax.Array, sampling: SamplingParams, row_keys: jax.Array, *, do_sample: bool
) -> CheckedVerification:
    """Verifies a draft.

    Args:
        rule: Static.
        draft: G proposed tokens a row (G may be 0).
        target_logits: `[B,G+1,V]` float32.
        sampling: Fields `[B]`; unused unless `do_sample`.
        row_keys: `[B]` typed keys.
        do_sample: Static.

    Returns:
        A `CheckedVerification`. A draft token that invalid logits would have to judge is rejected.
    """
    finite = jnp.isfinite(target_logits.max(axis=-1))  # [B,G+1]; a NaN anywhere makes the maximum NaN
    target_logits = jnp.where(finite[..., None], target_logits, 0.0)
    draft = dataclasses.replace(draft, num_drafted=jnp.minimum(draft.num_drafted, leading_true(finite)))
    if draft.tokens.shape[1] == 0:
        verification = _without_draft(draft, target_logits, sampling, row_keys, do_sample=do_sample)
    elif rule.synthetic:
        # Greedy decoding forms no distribution, and neither does what only stands for it in timings: arg-max is all it reads.
        verification = rule(draft, jax.nn.softmax(target_logits, axis=-1) if do_sample else target_logits, row_keys)
    elif do_sample:
        verification = rule(draft, filtered_probs(target_logits, sampling), row_keys)
    else:
        verification = verify_greedy(draft, jnp.argmax(target_logits, axis=-1).astype(jnp.int32))
    nonfinite = ~jnp.take_along_axis(finite, verification.num_accepted[:, None], axis=1)[:, 0]
    return CheckedVerification(verification=verification, nonfinite=nonfinite)


def verify_greedy(draft: Draft, target_tokens: jax.Array) -> Verification:
    """Keeps the longest draft prefix that equals the target's arg-max tokens `[B,G+1]`. Lossless."""
    num_accepted = leading_true((draft.tokens == target_tokens[:, :-1]) & drafted_mask(draft))
    next_token = jnp.take_along_axis(target_tokens, num_accepted[:, None], axis=1)[:, 0]
    return assemble(draft, num_accepted, next_token)


def _without_draft(
    draft: Draft, target_logits: jax.Array, sampling: SamplingParams, row_keys: jax.Array, *, do_sample: bool
) -> Verification:
    """Plain decoding: one token a row, from the only row of logits."""
    if do_sample:
        token = sample_from_probs(row_keys, filtered_probs(target_logits, sampling)[:, 0])
    else:
        token = jnp.argmax(target_logits[:, 0], axis=-1).astype(jnp.int32)
    return Verification(tokens=token[:, None], num_accepted=jnp.zeros_like(draft.num_drafted))
