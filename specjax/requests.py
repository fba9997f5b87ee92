"""From what a user passes to what the compiled loop takes: checks, left-alignment, padding to buckets. Host code, NumPy only.

Nothing here runs a JAX operation on concrete input, so that a call is one executable. Arrays that are traced (a call inside the caller's
own `jit`) are passed on as they are: their values cannot be checked, and must keep the contract that `speculative_generate` states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from specjax.config import GenerateConfig, ModelConfig
from specjax.sampling import SamplingParams
from specjax.state import Continuation, Stopping

# Capacities are rounded up to a multiple of this.
_CAPACITY_STEP = 64
# The EOS ids are padded to a multiple of this, so that another number of them compiles nothing.
_EOS_STEP = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """The traced half of a call.

    Attributes:
        prompt_tokens: `[B,P]` int32, left-aligned.
        prompt_lengths: `[B]` int32.
        sampling: Fields `[B]` or scalar.
        stopping: When rows end.
        rng: One typed key, or `[B]` of them.
    """

    prompt_tokens: jax.Array
    prompt_lengths: jax.Array
    sampling: SamplingParams
    stopping: Stopping
    rng: jax.Array


def bucket(size: int, smallest: int = 16) -> int:
    """The bucket that `size` falls into: powers of two and the halves between them (16, 24, 32, 48, 64, 96, …).

    So at most a third of a bucket is padding, and a range of sizes compiles a handful of programs.
    """
    power = smallest
    while power < size:
        if power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power


def _is_traced(x: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x))


def left_align(tokens: jax.Array, attention_mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Turns a padded batch with a mask (Hugging Face's layout, padded left or right) into the `(prompt_tokens, prompt_lengths)` of a call.

    Args:
        tokens: `[B,P]` int.
        attention_mask: `[B,P]`, nonzero where a token counts. Never guessed from a pad id.

    Returns:
        Tokens `[B,P]` with the counted ones first, in order, and their number `[B]`. NumPy arrays for NumPy input.
    """
    xp: Any = np if isinstance(tokens, np.ndarray) and isinstance(attention_mask, np.ndarray) else jnp
    counted = attention_mask != 0
    # A stable sort on "does not count" moves the counted tokens to the front and keeps their order.
    order = np.argsort(~counted, axis=1, kind="stable") if xp is np else jnp.argsort(~counted, axis=1, stable=True)
    return xp.take_along_axis(tokens, order, axis=1), counted.sum(axis=1).astype(np.int32)


def prepare(  # noqa: D417 - the rest is documented where users call it
    model: ModelConfig,
    prompt_tokens: Any,
    *,
    draft_length: int,
    config: GenerateConfig,
    prompt_lengths: Any,
    sampling: SamplingParams | None,
    eos_token_ids: Any,
    ignore_eos: Any,
    max_new_tokens: Any,
    rng: Any,
    continue_from: Continuation | None,
) -> tuple[Request, GenerateConfig]:
    """Checks a call's arguments and packs them.

    Args:
        model: The target's shape.
        draft_length: G, 0 for plain decoding.
        (the rest): As `speculative_generate`.

    Returns:
        The traced request, and the config with `max_new_tokens` rounded up to its bucket and `cache_capacity` filled in.

    Raises:
        ValueError: Whatever `speculative_generate` says that it raises.
        TypeError: `rng` is not a key.
    """
    _check_static(model, config)
    tokens, lengths = _prompts(model, prompt_tokens, prompt_lengths, may_be_empty=continue_from is not None)
    batch_size, width = tokens.shape
    limit = _per_row_limit(config, max_new_tokens, batch_size)
    start = np.zeros((batch_size,), np.int32)
    if continue_from is not None:
        start = _continuation_lengths(continue_from, batch_size)
    _check_window(model, start, lengths, limit)

    traced = _is_traced((tokens, lengths, limit, start))
    capacity_tokens = config.max_new_tokens
    if not traced and config.max_new_tokens:
        width = bucket(width)
        tokens = np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
        capacity_tokens = bucket(config.max_new_tokens)
    capacity = _capacity(config, continue_from, start, width=width, num_new=capacity_tokens, draft_length=draft_length)
    request = Request(
        prompt_tokens=cast(jax.Array, tokens),  # a NumPy array until the jitted call takes it
        prompt_lengths=lengths,
        sampling=_sampling(sampling, batch_size),
        stopping=Stopping(
            eos_token_ids=_eos(model, eos_token_ids), ignore_eos=_per_row(ignore_eos, batch_size, bool, "ignore_eos"), max_new_tokens=limit
        ),
        rng=_key(rng, config, batch_size),
    )
    return request, dataclasses.replace(config, max_new_tokens=capacity_tokens, cache_capacity=capacity)


def _check_static(model: ModelConfig, config: GenerateConfig) -> None:
    if config.pad_token_id >= model.vocab_size:
        raise ValueError(f"GenerateConfig.pad_token_id must be below the vocabulary size {model.vocab_size}, got {config.pad_token_id}")


def _prompts(model: ModelConfig, prompt_tokens: Any, prompt_lengths: Any, *, may_be_empty: bool) -> tuple[Any, Any]:
    is_ragged = isinstance(prompt_tokens, Sequence) and all(isinstance(row, Sequence) for row in prompt_tokens)
    if is_ragged:
        if prompt_lengths is not None:
            raise ValueError("prompt_lengths must be None where prompt_tokens is a list of lists: each list has its length")
        prompt_lengths = [len(row) for row in prompt_tokens]
        width = max([1, *prompt_lengths])
        prompt_tokens = np.array([[*row, *[0] * (width - len(row))] for row in prompt_tokens]).reshape(len(prompt_lengths), width)
    if not isinstance(prompt_tokens, Tracer):
        prompt_tokens = np.asarray(prompt_tokens)
    if prompt_tokens.ndim != 2 or 0 in prompt_tokens.shape or not jnp.issubdtype(prompt_tokens.dtype, jnp.integer):
        raise ValueError(
            f"prompt_tokens must be a non-empty integer array [batch, length] or a list of lists of ints, "
            f"got shape {prompt_tokens.shape} and dtype {prompt_tokens.dtype}"
        )
    batch_size, width = prompt_tokens.shape
    lengths = _per_row(width if prompt_lengths is None else prompt_lengths, batch_size, np.int32, "prompt_lengths")
    if not _is_traced(lengths):
        smallest = 0 if may_be_empty else 1
        if lengths.min() < smallest or lengths.max() > width:
            hint = "an empty prompt has nothing to continue" if lengths.min() < smallest else f"prompt_tokens has {width} columns"
            raise ValueError(f"prompt lengths must be from {smallest} to {width}, got {lengths.tolist()}: {hint}")
        if not _is_traced(prompt_tokens):
            counted = prompt_tokens[np.arange(width) < lengths[:, None]]
            if counted.size and (counted.min() < 0 or counted.max() >= model.vocab_size):
                raise ValueError(
                    f"prompt token ids must be from 0 to {model.vocab_size - 1}, got ids from {counted.min()} to {counted.max()}: "
                    "is this another model's tokenizer?"
                )
            prompt_tokens = np.where(np.arange(width) < lengths[:, None], prompt_tokens, 0)
    return prompt_tokens.astype(np.int32), lengths


def _per_row(value: Any, batch_size: int, dtype: Any, name: str) -> Any:
    """A scalar or `[B]` as `[B]`."""
    traced = _is_traced(value)
    value = jnp.asarray(value) if traced else np.asarray(value)
    if value.shape not in ((), (batch_size,)):
        raise ValueError(f"{name} must be a scalar or have one value for each of the {batch_size} rows, got shape {value.shape}")
    kind_ok = value.dtype == bool if dtype is bool else jnp.issubdtype(value.dtype, jnp.integer)
    if not kind_ok:
        raise ValueError(f"{name} must be {'bool' if dtype is bool else 'int'}, got {value.dtype}")
    return (jnp if traced else np).broadcast_to(value, (batch_size,)).astype(dtype)


def _per_row_limit(config: GenerateConfig, max_new_tokens: Any, batch_size: int) -> Any:
    limit = _per_row(config.max_new_tokens if max_new_tokens is None else max_new_tokens, batch_size, np.int32, "max_new_tokens")
    if not _is_traced(limit) and (limit.min() < 0 or limit.max() > config.max_new_tokens):
        raise ValueError(
            f"max_new_tokens must be from 0 to GenerateConfig.max_new_tokens = {config.max_new_tokens} in each row, got {limit.tolist()}"
        )
    return limit


def _continuation_lengths(continue_from: Continuation, batch_size: int) -> Any:
    length = continue_from.context.length
    if length.shape != (batch_size,):
        raise ValueError(f"continue_from holds {length.shape[0]} rows, prompt_tokens {batch_size}")
    # The pending token is fed again, in front of the new prompt.
    return length - 1 if _is_traced(length) else np.asarray(length) - 1


def _check_window(model: ModelConfig, start: Any, lengths: Any, limit: Any) -> None:
    if _is_traced((start, lengths, limit)):
        return
    window = model.max_position_embeddings
    for row, (before, length, new) in enumerate(zip(start, lengths, limit, strict=True)):
        if before + length + new > window:
            earlier = f" after {before + 1} earlier ones" if before else ""
            raise ValueError(
                f"row {row}: a prompt of {length} tokens{earlier} and up to {new} new ones exceed the model's window of {window} tokens"
            )


def _capacity(
    config: GenerateConfig, continue_from: Continuation | None, start: Any, *, width: int, num_new: int, draft_length: int
) -> int:
    """Slots for the context, the last draft and the padding of the last prefill chunk."""
    pending = 0 if continue_from is None else 1
    chunk = min(config.prefill_chunk_size, width + pending)
    padded = -(-(width + pending) // chunk) * chunk
    needed = max(padded, width + pending + num_new + draft_length + 1)
    present = 0 if continue_from is None else continue_from.target_cache.capacity
    # Traced lengths may be anything up to what the cache holds.
    needed += present if _is_traced(start) and config.cache_capacity is None else 0 if _is_traced(start) else int(start.max(initial=0))
    if config.cache_capacity is not None and config.cache_capacity < needed and not _is_traced(start):
        raise ValueError(
            f"GenerateConfig.cache_capacity = {config.cache_capacity} slots are too few: this call needs {needed} "
            f"(prompt padded to {padded}, {num_new} new tokens, a draft of {draft_length} and the token before it)"
        )
    if present >= needed:
        return present
    return max(config.cache_capacity or 0, present, -(-needed // _CAPACITY_STEP) * _CAPACITY_STEP if config.cache_capacity is None else 0)


def _eos(model: ModelConfig, eos_token_ids: Any) -> Any:
    if _is_traced(eos_token_ids):
        return jnp.atleast_1d(eos_token_ids).astype(jnp.int32)
    ids = np.atleast_1d(np.asarray(() if eos_token_ids is None else eos_token_ids))
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"eos_token_ids must be an int or a list of ints, got {eos_token_ids!r}")
    if ids.size and (ids.min() < 0 or ids.max() >= model.vocab_size):
        raise ValueError(f"eos_token_ids must be from 0 to {model.vocab_size - 1}, got {ids.tolist()}")
    padded = -(-max(ids.size, 1) // _EOS_STEP) * _EOS_STEP
    return np.pad(ids, (0, padded - ids.size), constant_values=-1).astype(np.int32)


def _sampling(sampling: SamplingParams | None, batch_size: int) -> SamplingParams:
    """Checks the concrete fields: NaN fails every comparison."""
    sampling = SamplingParams() if sampling is None else sampling
    rules = {
        "temperature": (np.float32, "0 (greedy) or a positive finite number", lambda x: (x >= 0) & (x < np.inf)),
        "top_k": (np.int32, "an int of at least 0 (0 keeps all)", lambda x: x >= 0),
        "top_p": (np.float32, "in (0, 1]", lambda x: (x > 0) & (x <= 1)),
    }
    fields = {}
    for name, (dtype, expected, is_valid) in rules.items():
        value = getattr(sampling, name)
        if _is_traced(value):
            fields[name] = value
            continue
        array = np.asarray(value)
        fits = array.shape in ((), (batch_size,)) and (dtype != np.int32 or np.issubdtype(array.dtype, np.integer))
        if not fits or not np.issubdtype(array.dtype, np.number) or not np.all(is_valid(array)):
            raise ValueError(f"SamplingParams.{name} must be {expected}, a scalar or one for each of {batch_size} rows, got {value!r}")
        fields[name] = np.broadcast_to(array, (batch_size,)).astype(dtype)
    return SamplingParams(**fields)


def _key(rng: Any, config: GenerateConfig, batch_size: int) -> Any:
    if rng is None:
        if config.do_sample:
            raise ValueError("do_sample=True needs rng, a key from jax.random.key(seed)")
        return np.zeros((2,), np.uint32)
    is_array = isinstance(rng, jax.Array | np.ndarray)
    typed = is_array and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    legacy = is_array and rng.dtype == np.uint32 and rng.shape[-1:] == (2,)
    if not typed and not legacy:
        raise TypeError(f"rng must be a key such as jax.random.key(0), or one for each row, got {type(rng).__name__} {rng!r}")
    shape = rng.shape if typed else rng.shape[:-1]
    if shape not in ((), (batch_size,)):
        raise ValueError(f"rng must be one key or {batch_size} of them, one for each row, got shape {shape}")
    return rng


def row_keys(rng: jax.Array, batch_size: int) -> jax.Array:
    """One typed key a row `[B]`: `fold_in(rng, row)` of a single key, or the keys themselves."""
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.wrap_key_data(jnp.asarray(rng), impl="threefry2x32")
    if rng.ndim == 1:
        return rng
    return jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(batch_size))
