"""Refreshing: every so many steps one is dense, and replaces what the sparse steps since the last one wrote to the cache.

Keys and values that a sparse pass writes come from hidden states that are approximate, so errors add up along a text. Here the dense step
reads the tokens committed since the last one together with the pending token and the draft: it costs no pass of its own, only more rows,
`refresh_every * (G + 1)` of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from specjax.state import DecodeState, SinceDense


def take_step(step: Callable[..., DecodeState], state: DecodeState, *, refresh_every: int) -> DecodeState:
    """One step, dense if it is time for that.

    Args:
        step: `step(state, refresh=...)`; `refresh` is static.
        state: Its `since_dense` is not `None`.
        refresh_every: Static.
    """
    # Loops of no turn or one, not branches: XLA copies caches that the branches of a conditional write.
    assert state.since_dense is not None
    is_due = state.since_dense.num_steps >= refresh_every - 1

    def run_if(wanted, state: DecodeState, *, refresh: bool) -> DecodeState:
        def once(carry):
            return jnp.bool_(False), step(carry[1], refresh=refresh)

        return lax.while_loop(lambda carry: carry[0], once, (wanted, state))[1]

    if refresh_every > 1:
        state = run_if(~is_due, state, refresh=False)
    return run_if(is_due, state, refresh=True)


def counted_step(state: DecodeState, *, refresh: bool) -> DecodeState:
    """Notes that a step is over: how much of the cache is dense now."""
    since = state.since_dense
    if since is None:
        return state
    if refresh:
        since = SinceDense(dense_length=state.context.length - 1, num_steps=jnp.zeros_like(since.num_steps))
    else:
        since = dataclasses.replace(since, num_steps=since.num_steps + 1)
    return dataclasses.replace(state, since_dense=since)
