"""A conditional step of a state with caches."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from specjax.kernels.varying import varying_as
from specjax.state import DecodeState


def at_most_once(condition: jax.Array, function: Callable[[DecodeState], DecodeState], state: DecodeState) -> DecodeState:
    """`function(state)` if the condition holds: a loop of no turn or one, because XLA copies caches that the branches of a `cond` write."""

    def once(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        return varying_as(jnp.bool_(False), condition), function(carry[1])

    return lax.while_loop(lambda carry: carry[0], once, (condition, state))[1]
