"""Refreshing: every so many steps one is dense, and replaces what the sparse steps since the last one wrote to the cache.

Keys and values that a sparse pass writes come from hidden states that are approximate, so errors add up along a text. Here the dense step
reads the tokens committed since the last one together with the pending token and the draft: it costs no pass of its own, only more rows,
`refresh_every * (G + 1)` of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp

from specjax.at_most_once import at_most_once
from specjax.state import DecodeState, SinceDense


def take_step(step: Callable[..., DecodeState], state: DecodeState, *, refresh_every: int) -> DecodeState:
    """One step, dense if it is time for that.

    Args:
        step: `step(state, refresh=...)`; `refresh` is static.
        state: Its `since_dense` is not `None`.
        refresh_every: Static.
    """
    assert state.since_dense is not None
    is_due = state.since_dense.num_steps >= refresh_every - 1

    if refresh_every > 1:
        state = at_most_once(~is_due, partial(step, refresh=False), state)
    return at_most_once(is_due, partial(step, refresh=True), state)


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
