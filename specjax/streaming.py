"""Streaming generation for interactive use: the same steps as `speculative_generate`, a few at a time, yielded as they are committed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.drafting.drafter import Drafter
from specjax.generate import decode_step, finish, is_running, prepare_call, trim
from specjax.generate_config import GenerateConfig
from specjax.models.transformer import Transformer
from specjax.prefill import prefill
from specjax.state import DecodeState, FinishReason, GenerateOutput


@dataclasses.dataclass(frozen=True)
class StreamUpdate:
    """What a few steps committed.

    Attributes:
        new_tokens: B lists of ints: what each row received since the last update; may be empty.
        output: The whole `GenerateOutput`, in the last update only.
    """

    new_tokens: list[list[int]]
    output: GenerateOutput | None


def stream_generate(
    target: Transformer,
    target_params: Any,
    drafter: Drafter | None,
    drafter_params: Any,
    prompt_tokens: Any,
    *,
    config: GenerateConfig,
    steps_per_update: int = 1,
    **arguments: Any,
) -> Iterator[StreamUpdate]:
    """Generates and yields tokens as they are committed; all of them together equal one call of `speculative_generate`.

    Not for use inside `jit`: after every `steps_per_update` steps the host reads what is new.

    Example:
        >>> for update in stream_generate(target, params, PromptLookup(), None, [[1, 5, 9]], config=config):
        ...     print(tokenizer.decode(update.new_tokens[0]), end="")

    Args:
        target: The target model.
        target_params: Its params.
        drafter: Proposes tokens; `None` decodes plainly.
        drafter_params: Its params.
        prompt_tokens: `[B,P]` int or a list of B lists of ints.
        config: Static choices and sizes.
        steps_per_update: Draft-and-verify steps between two updates.
        **arguments: `prompt_lengths`, `sampling`, `eos_token_ids`, `ignore_eos`, `max_new_tokens`, `rng`, `continue_from`, as in
            `speculative_generate`.

    Yields:
        A `StreamUpdate` after the prefill and after each few steps.

    Raises:
        ValueError: `steps_per_update` below 1; otherwise as `speculative_generate`, at the call rather than at the first update.
        TypeError: As `speculative_generate`.
    """
    if steps_per_update < 1:
        raise ValueError(f"steps_per_update must be at least 1, got {steps_per_update}")
    defaults = dict(
        prompt_lengths=None, sampling=None, eos_token_ids=(), ignore_eos=False, max_new_tokens=None, rng=None, continue_from=None
    )
    unknown = arguments.keys() - defaults.keys()
    if unknown:
        raise TypeError(f"stream_generate does not take {sorted(unknown)}; expected some of {sorted(defaults)}")
    arguments = defaults | arguments
    request, static = prepare_call(target, drafter, drafter_params, prompt_tokens, config=config, **arguments)
    models = (target, drafter, static, target_params, drafter_params, request)
    return _updates(models, arguments["continue_from"], steps_per_update, config.max_new_tokens)


def _updates(models: tuple, continue_from: Any, steps_per_update: int, max_new_tokens: int) -> Iterator[StreamUpdate]:
    state = _prefill(*models, continue_from)
    static = models[2]
    delivered = np.zeros_like(np.asarray(state.num_generated))
    while True:
        new_tokens, delivered = _new_tokens(state, delivered)
        if not (np.asarray(state.finish_reason) == FinishReason.RUNNING).any():
            yield StreamUpdate(new_tokens, trim(_finish(state, static), max_new_tokens))
            return
        yield StreamUpdate(new_tokens, None)
        state = _advance(*models, steps_per_update, state)


def _new_tokens(state: DecodeState, delivered: np.ndarray) -> tuple[list[list[int]], np.ndarray]:
    tokens, length = np.asarray(state.context.tokens), np.asarray(state.context.length)
    num_generated = np.asarray(state.num_generated)
    new = num_generated - delivered
    return [tokens[row, length[row] - new[row] : length[row]].tolist() for row in range(len(length))], num_generated


_prefill = partial(jax.jit, static_argnums=(0, 1, 2))(prefill)
_finish = partial(jax.jit, static_argnums=(1,))(finish)


@partial(jax.jit, static_argnums=(0, 1, 2, 6), donate_argnums=(7,))
def _advance(target, drafter, config, target_params, drafter_params, request, num_steps, state) -> DecodeState:
    step = partial(decode_step, target, drafter, config, target_params, drafter_params, request)

    def is_unfinished(carry):
        return (carry[0] < num_steps) & is_running(carry[1])

    return lax.while_loop(is_unfinished, lambda carry: (carry[0] + 1, step(carry[1])), (jnp.int32(0), state))[1]
