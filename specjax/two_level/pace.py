"""How many sparse steps to take before the next dense pass: a running estimate of what dense passes accept, and the model's best answer.

The estimate sees settled tokens only, all rows of the batch together, and is formed before a cycle begins: so it cannot bias what the cycle
emits. Evidence fades towards a hopeful prior, so that a batch which fell back to dense verification tries sparse steps again after a while.
The prior is above the break-even of any check that may pay, and outweighs one early rejection: half the cycles of eight steps end with one
where 97 % of the tokens pass. Steps that were verified densely show nothing, and leave more of what was seen before, or a batch for which
sparse steps do not pay would try them all the time.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.two_level.lossless import Lossless
from specjax.two_level.two_level_cost import expected_settled

# What is taken for granted before anything was seen: this acceptance, with the weight of so many tokens.
_PRIOR_ACCEPTANCE, _PRIOR_TOKENS = 0.99, 20.0
# What a cycle leaves of the evidence before it, a checked one and one verified densely: about the last 30 and 100 count.
_MEMORY, _DENSE_MEMORY = 0.97, 0.99
# 1 - a of the formula in float32: below this the quotient is rounding.
_LEAST_REJECTION = 1e-4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pace:
    """Fading counts over the whole batch.

    Attributes:
        examined: Scalar float32, tokens that dense passes judged.
        accepted: Scalar float32, those that they kept.
        tokens: Scalar float32, tokens that steps committed, in all rows.
        steps: Scalar float32, steps that rows took.
    """

    examined: jax.Array
    accepted: jax.Array
    tokens: jax.Array
    steps: jax.Array

    @classmethod
    def unknown(cls) -> Pace:
        """Before anything was seen."""
        return cls(*(jnp.float32(0) for _ in dataclasses.fields(cls)))

    def after(self, *, examined: jax.Array, accepted: jax.Array, tokens: jax.Array, steps: jax.Array) -> Pace:
        """With what one more cycle showed; scalars."""
        new = Pace(examined=examined, accepted=accepted, tokens=tokens, steps=steps)
        memory = jnp.where(examined > 0, _MEMORY, _DENSE_MEMORY)
        return jax.tree.map(lambda old, more: memory * old + more.astype(jnp.float32), self, new)

    @property
    def acceptance(self) -> jax.Array:
        """The chance of a token to be kept by the dense level."""
        return (self.accepted + _PRIOR_ACCEPTANCE * _PRIOR_TOKENS) / (self.examined + _PRIOR_TOKENS)

    @property
    def tokens_per_step(self) -> jax.Array:
        """A step's mean acceptance length; 1 before any step."""
        return jnp.maximum(self.tokens, 1.0) / jnp.maximum(self.steps, 1.0)

    def best_num_steps(self, step_cost: jax.Array, settings: Lossless, *, draft_length: int) -> jax.Array:
        """The number of sparse steps, from 1 to `max_steps`, that the model finds fastest; 0 where dense verification is faster.

        Args:
            step_cost: Scalar, time of a sparse step over that of a dense one.
            settings: How many are allowed, and what a dense pass costs.
            draft_length: G.
        """
        num_steps = jnp.arange(1, settings.max_steps + 1, dtype=jnp.float32)
        acceptance = jnp.minimum(self.acceptance, 1 - _LEAST_REJECTION)
        settled = expected_settled(acceptance, num_steps * self.tokens_per_step)
        speedup = settled / (self.tokens_per_step * (num_steps * step_cost + settings.check_cost))
        speedup = jnp.where(num_steps <= settings.most_steps(draft_length, self.tokens_per_step), speedup, 0)
        return jnp.where(speedup.max() > 1, jnp.argmax(speedup) + 1, 0).astype(jnp.int32)
