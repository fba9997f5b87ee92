"""Two-level verification: sparse passes verify drafts, and now and then one dense pass verifies all that they committed. Lossless.

A *cycle* is N sparse steps and one dense pass. Tokens that sparse steps commit are *provisional*; the dense pass *settles* them. To it they
are one long draft: each is a sample of the sparse target's distribution, which the LM head gives once more from the hidden state that the
token came from. So the dense pass is a verification like any other, by rejection sampling against those distributions. It also replaces the
approximate keys and values that sparse passes wrote, and the features that the drafter had of them. Between cycles everything is settled.

Exact for sampling because (1) all provisional tokens are kept and judged by the sparse target's own distribution, neither the drafter's
nor the residual; (2) that distribution depends on nothing drafted behind the token (`SparsityConfig.sees_later_rows` is refused, and the
context alone decides how many tokens a drafter drafts); (3) when a cycle ends depends on what is committed, never on a draft; (4) every
step and pass draws with new keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.at_most_once import at_most_once
from specjax.catch_up import catch_up
from specjax.committing import commit_tokens, write_tokens
from specjax.drafting.drafter import Drafter
from specjax.generate_config import GenerateConfig
from specjax.kernels.varying import varying_as
from specjax.models.transformer import Transformer
from specjax.requests import Request
from specjax.sampling import filtered_probs, split_row_keys
from specjax.sparsity.sparsity_config import SparsityConfig
from specjax.sparsity.step_cost import step_cost_from_bytes
from specjax.state import Commit, Context, DecodeState, Draft, FinishReason
from specjax.two_level.level_counts import LevelCounts
from specjax.two_level.lossless import Lossless
from specjax.two_level.pace import Pace
from specjax.verification.rejection_sampling import RejectionSampling
from specjax.verification.rule import VerificationRule
from specjax.verification.synthetic_acceptance import SyntheticAcceptance
from specjax.verification.verify import verify

# One step under a config: the state after it, and the hidden states `[B,G+1,D]` that its tokens came from.
Step = Callable[[GenerateConfig, DecodeState], tuple[DecodeState, jax.Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Settled:
    """What a cycle must be able to go back to.

    Attributes:
        length: `[B]` int32, settled tokens of the context.
        num_generated: `[B]` int32, those of this call.
        finish_reason: `[B]` int32.
        log_probs: `[B,M]` float32; only settled tokens have one.
    """

    length: jax.Array
    num_generated: jax.Array
    finish_reason: jax.Array
    log_probs: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cycle:
    """A cycle over a state; or, where two levels would be slower, one step of dense verification.

    Attributes:
        target: The target.
        drafter: The drafter, or `None`.
        config: With `sparsity.lossless`.
        target_params: The target's params.
        drafter_params: The drafter's.
        request: The call.
        step: One step of draft, verification and commit.
    """

    target: Transformer
    drafter: Drafter | None
    config: GenerateConfig
    target_params: Any
    drafter_params: Any
    request: Request
    step: Step

    def __call__(self, state: DecodeState) -> DecodeState:
        """The next state, all of it settled, from one that is: every row that runs receives at least one token, or ends."""
        settings = self._settings
        step_cost = self._step_cost(state)
        settled = Settled(
            length=state.context.length, num_generated=state.num_generated, finish_reason=state.finish_reason, log_probs=state.log_probs
        )
        num_steps = jnp.int32(settings.max_steps)
        if settings.adapt:
            num_steps = _pace(state).best_num_steps(step_cost, settings, draft_length=state.statistics.draft_length)
        state, hidden = self._sparse_steps(state, settled, num_steps)
        if not settings.adapt:
            return self._settle(state, settled, hidden, step_cost)
        state = at_most_once(num_steps > 0, lambda state: self._settle(state, settled, hidden, step_cost), state)
        return at_most_once(num_steps == 0, self._dense_step, state)

    @property
    def _settings(self) -> Lossless:
        settings = self.config.sparsity.lossless
        assert settings is not None
        return settings

    def _step_cost(self, state: DecodeState) -> jax.Array:
        if self._settings.step_cost is not None:
            return jnp.float32(self._settings.step_cost)
        return step_cost_from_bytes(self.config.sparsity, self.target.config, self.target_params, state.target_cache, state.context.length)

    def _logits(self, hidden: jax.Array) -> jax.Array:
        return self.target.apply({"params": self.target_params}, hidden, method="logits")

    def _dense_rule(self, num_tokens: int) -> VerificationRule:
        """Rejection sampling, whatever the steps verify by; made up only where theirs is."""
        rule = self.config.verification
        return rule.of_dense_pass(num_tokens) if isinstance(rule, SyntheticAcceptance) else RejectionSampling()

    def _sparse_steps(self, state: DecodeState, settled: Settled, num_steps: jax.Array) -> tuple[DecodeState, jax.Array]:
        """Up to `num_steps` steps, and the hidden state of each provisional token, `[B,W,D]`.

        Fewer where every row has ended, or one that runs has no room for another step's tokens: by what is committed, in any row, alone.
        """
        do_sample, draft_length = self.config.do_sample, state.statistics.draft_length
        most = self._settings.max_provisional(draft_length)
        # Arg-max needs no distribution: nothing is kept then.
        hidden = jnp.zeros((settled.length.shape[0], most if do_sample else 0, self.target.config.hidden_size), self.target.dtype)

        def goes_on(carry: tuple) -> jax.Array:
            index, state, _ = carry
            runs = state.finish_reason == FinishReason.RUNNING
            waiting = jnp.where(runs, state.context.length - settled.length, 0).max()
            return (index < num_steps) & jnp.any(runs) & (waiting + draft_length + 1 <= most)

        def sparse_step(carry: tuple) -> tuple:
            index, before, hidden = carry
            after, new = self.step(self.config, before)
            if do_sample:
                hidden = write_tokens(hidden, before.context.length - settled.length, new, after.context.length - before.context.length)
            return index + 1, after, hidden

        state = dataclasses.replace(state, log_probs=state.log_probs[:, :0])  # those are the dense target's
        hidden = varying_as(hidden, state)
        _, state, hidden = lax.while_loop(goes_on, sparse_step, (jnp.int32(0), state, hidden))
        return dataclasses.replace(state, log_probs=settled.log_probs), hidden

    def _settle(self, state: DecodeState, settled: Settled, hidden: jax.Array, step_cost: jax.Array) -> DecodeState:
        """The dense pass: over the token that is pending after the settled ones, and all provisional ones behind it."""
        sampling, context = self.request.sampling.broadcast(settled.length.shape[0]), state.context
        num_provisional = context.length - settled.length
        width = self._settings.max_provisional(state.statistics.draft_length)
        columns = settled.length[:, None] + jnp.arange(width)
        tokens = jnp.take_along_axis(context.tokens, jnp.minimum(columns, context.tokens.shape[1] - 1), axis=1)
        dense = catch_up(
            self.target,
            self.target_params,
            context.tokens,
            state.target_cache,
            settled.length - 1,
            num_rows=width + 1,  # the capacity has room for them, so that the first row is the token that is pending
            feature_layers=() if self.drafter is None else self.drafter.feature_layers,
        )
        logits = self._logits(dense.hidden)
        sparse_probs = filtered_probs(self._logits(hidden), sampling) if self.config.do_sample else None
        draft = Draft(tokens=tokens, num_drafted=num_provisional, probs=sparse_probs)
        next_keys, verify_keys = split_row_keys(state.row_keys, 2)
        checked = verify(self._dense_rule(width), draft, logits, sampling, verify_keys, do_sample=self.config.do_sample)

        state = dataclasses.replace(
            state,
            context=Context(tokens=context.tokens, length=settled.length),
            num_generated=settled.num_generated,
            finish_reason=settled.finish_reason,
            target_cache=dense.cache,
            row_keys=next_keys,
        )
        state, num_settled = commit_tokens(state, checked, logits, self.request)
        accepted = jnp.minimum(checked.verification.num_accepted, num_settled).astype(jnp.int32)  # none in rows that had ended
        state = _recorded(state, settled, num_provisional=num_provisional, accepted=accepted, step_cost=step_cost)
        if self.drafter is None:
            return state
        commit = Commit(context=state.context, num_committed=num_settled, features=dense.features, rechecked=True)
        return dataclasses.replace(state, drafter_state=self.drafter.commit(self.drafter_params, state.drafter_state, commit))

    def _dense_step(self, before: DecodeState) -> DecodeState:
        """A step of dense verification, which settles what it commits."""
        after, _ = self.step(dataclasses.replace(self.config, sparsity=SparsityConfig()), before)
        active = before.finish_reason == FinishReason.RUNNING
        levels = _levels(after)
        levels = dataclasses.replace(levels, dense_steps=levels.dense_steps + active)
        none, tokens = jnp.float32(0), (after.context.length - before.context.length).sum()
        return dataclasses.replace(
            after,
            statistics=dataclasses.replace(after.statistics, levels=levels),
            pace=_pace(before).after(examined=none, accepted=none, tokens=tokens, steps=active.sum()),
        )


def _pace(state: DecodeState) -> Pace:
    assert state.pace is not None
    return state.pace


def _levels(state: DecodeState) -> LevelCounts:
    assert state.statistics.levels is not None
    return state.statistics.levels


def _recorded(
    state: DecodeState, settled: Settled, *, num_provisional: jax.Array, accepted: jax.Array, step_cost: jax.Array
) -> DecodeState:
    """With a cycle's counts."""
    levels, active = _levels(state), settled.finish_reason == FinishReason.RUNNING
    examined = accepted + (accepted < num_provisional)
    sparse_steps = state.statistics.steps_per_row - levels.sparse_steps - levels.dense_steps
    levels = dataclasses.replace(
        levels,
        sparse_steps=levels.sparse_steps + sparse_steps,
        dense_passes=levels.dense_passes + active,
        provisional=levels.provisional + num_provisional,
        accepted=levels.accepted + accepted,
        examined=levels.examined + examined,
        step_costs=levels.step_costs + jnp.where(active, step_cost, 0.0),
    )
    totals = dict(examined=examined.sum(), accepted=accepted.sum(), tokens=num_provisional.sum(), steps=sparse_steps.sum())
    return dataclasses.replace(state, statistics=dataclasses.replace(state.statistics, levels=levels), pace=_pace(state).after(**totals))
