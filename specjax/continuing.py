"""What a call that continues an earlier one is held to, as far as it can be read before compiling."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from specjax.drafting.drafter import Drafter
from specjax.model_config import ModelConfig
from specjax.models.transformer import Transformer
from specjax.state import Continuation
from specjax.traced import is_traced


def check_continuation(target: Transformer, drafter: Drafter | None, drafter_params: Any, continue_from: Continuation | None) -> None:
    """A continuation fits the models that made it, and no others. Plain decoding can go on from any drafter's."""
    if continue_from is None:
        return
    sizes: dict[str, Any] = {"batch_size": continue_from.context.length.shape[0], "capacity": continue_from.target_cache.capacity}
    wanted = {"target_cache": jax.eval_shape(lambda: target.init_cache(**sizes))}
    if drafter is not None:
        wanted["drafter_state"] = jax.eval_shape(lambda: drafter.init(drafter_params, **sizes))
    given_cache = dataclasses.replace(continue_from.target_cache, summaries=None)  # made anew where a sparse call needs others
    for name, expected in wanted.items():
        given = given_cache if name == "target_cache" else continue_from.drafter_state
        given = jax.tree.map(lambda x: (x.shape, x.dtype), given)
        expected = jax.tree.map(lambda x: (x.shape, x.dtype), expected)
        if given != expected:
            raise ValueError(
                f"continue_from.{name} comes from a call with another {'target' if name == 'target_cache' else 'drafter'}: "
                f"expected {_shapes(expected)}, got {_shapes(given)}"
            )


def _shapes(tree: Any) -> str:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], tuple))
    return f"{len(leaves)} arrays, the first of shape {leaves[0][0]} and dtype {leaves[0][1]}" if leaves else "nothing"


def earlier_lengths(continue_from: Continuation, batch_size: int) -> Any:
    """`[B]` tokens of each row's context; 1 of a row whose context was lost, which ends at once with `NO_CAPACITY` again."""
    if not isinstance(continue_from, Continuation):
        raise ValueError(f"continue_from must be an earlier output's `continuation`, got {type(continue_from).__name__}")
    length = continue_from.context.length
    if length.shape != (batch_size,):
        raise ValueError(f"continue_from holds {length.shape[0]} rows, prompt_tokens {batch_size}")
    if is_traced(length):
        return length
    earlier, capacity = np.asarray(length), continue_from.context.tokens.shape[1]
    is_lost = earlier > capacity
    if is_lost.all():
        raise ValueError(
            f"every row of continue_from ended with NO_CAPACITY and lost its context of up to {capacity} tokens: continue the call before "
            "that one, with a larger cache_capacity"
        )
    return np.where(is_lost, 1, earlier)


def check_context_limit(model: ModelConfig, continue_from: Continuation, wanted: Any) -> None:
    """Rotary frequencies that depend on the length were chosen when the context began."""
    planned, original = continue_from.target_cache.context_limit, model.rope.original_max_position_embeddings
    if planned is None or is_traced((planned, wanted)):
        return
    for row, (reached, limit) in enumerate(zip(wanted, np.asarray(planned), strict=True)):
        if reached > max(int(limit), original):
            raise ValueError(
                f"row {row}: this call may reach {reached} tokens, but the rotary frequencies ({model.rope.rope_type!r}) of the context "
                f"that it continues were chosen for {limit}: give the first call a GenerateConfig.cache_capacity of at least {reached}"
            )
