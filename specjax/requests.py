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

from specjax.capacity import bucket, choose_capacity, slots_needed
from specjax.continuing import check_context_limit, earlier_lengths
from specjax.generate_config import GenerateConfig
from specjax.model_config import ModelConfig
from specjax.sampling import SamplingParams
from specjax.state import Continuation, Stopping
from specjax.traced import is_traced

# The EOS ids are padded to a multiple of this, so that another number of them compiles nothing.
_EOS_STEP = 8
_THREEFRY = "threefry2x32"
_NO_KEY = np.zeros((2,), np.uint32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """The traced half of a call.

    Attributes:
        prompt_tokens: `[B,P]` int32, left-aligned.
        prompt_lengths: `[B]` int32.
        sampling: Fields `[B]` or scalar.
        stopping: When rows end.
        context_limits: `[B]` int32, tokens that each row may come to hold, in this call or those that continue it.
        rng: One key, typed or threefry data `[2]`, or B of them.
    """

    prompt_tokens: jax.Array
    prompt_lengths: jax.Array
    sampling: SamplingParams
    stopping: Stopping
    context_limits: jax.Array
    rng: jax.Array


def left_align(tokens: Any, attention_mask: Any) -> tuple[jax.Array, jax.Array]:
    """Turns a padded batch with a mask (Hugging Face's layout, padded left or right) into the `(prompt_tokens, prompt_lengths)` of a call.

    Args:
        tokens: `[B,P]` int, an array or lists.
        attention_mask: `[B,P]`, nonzero where a token counts. Never guessed from a pad id.

    Returns:
        Tokens `[B,P]` with the counted ones first, in order, and their number `[B]`. NumPy arrays for lists and NumPy input.

    Raises:
        ValueError: Shapes that disagree.
    """
    tokens, attention_mask = (x if isinstance(x, jax.Array) else np.asarray(x) for x in (tokens, attention_mask))
    if tokens.ndim != 2 or tokens.shape != attention_mask.shape:
        raise ValueError(f"left_align needs tokens and attention_mask of one shape [B,P], got {tokens.shape} and {attention_mask.shape}")
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
    prompt_lengths: Any = None,
    sampling: SamplingParams | None = None,
    eos_token_ids: Any = (),
    ignore_eos: Any = False,
    max_new_tokens: Any = None,
    rng: Any = None,
    continue_from: Continuation | None = None,
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
    earlier = np.zeros((batch_size,), np.int32) if continue_from is None else earlier_lengths(continue_from, batch_size)
    _check_window(model, earlier, lengths, limit)
    # An explicit capacity says how far the call, and those that continue it, may go.
    context_limits = earlier + lengths + limit
    if config.cache_capacity is not None:
        context_limits = np.full((batch_size,), config.cache_capacity, np.int32)
    if continue_from is not None:
        check_context_limit(model, continue_from, earlier + lengths + limit)

    # A continuation feeds the pending last token of the earlier context once more, in front of the new prompt.
    pending, present = (0, 0) if continue_from is None else (1, continue_from.target_cache.capacity)
    start = None if is_traced(earlier) else int(earlier.max()) - pending

    def needed(width: int, num_new: int) -> int:
        sizes = {"num_columns": width + pending, "num_new": num_new, "chunk_size": config.prefill_chunk_size}
        behind = {"draft_length": config.max_unsettled(draft_length), "refresh_rows": config.sparsity.refresh_rows(draft_length)}
        return slots_needed(start=start or 0, **sizes, **behind)

    num_new = config.max_new_tokens
    bucketed = bucket(width), num_new if num_new == 1 else bucket(num_new)  # one token needs no loop: a program of its own
    concrete = not is_traced((tokens, lengths, limit, earlier)) and config.max_new_tokens > 0
    if concrete and (config.cache_capacity is None or needed(*bucketed) <= config.cache_capacity):
        tokens = np.pad(tokens, ((0, 0), (0, bucketed[0] - width)))
        width, num_new = bucketed
    capacity = choose_capacity(config, needed=needed(width, num_new), present=present, start=start)
    request = Request(
        prompt_tokens=cast(jax.Array, tokens),  # a NumPy array until the jitted call takes it
        prompt_lengths=lengths,
        sampling=_sampling(sampling, batch_size, do_sample=config.do_sample),
        stopping=Stopping(
            eos_token_ids=_eos(model, eos_token_ids), ignore_eos=_per_row(ignore_eos, batch_size, bool, "ignore_eos"), max_new_tokens=limit
        ),
        context_limits=cast(jax.Array, context_limits),
        rng=_key(rng, config, batch_size),
    )
    return request, dataclasses.replace(config, max_new_tokens=num_new, cache_capacity=capacity)


def _check_static(model: ModelConfig, config: GenerateConfig) -> None:
    if config.pad_token_id >= model.vocab_size:
        raise ValueError(f"GenerateConfig.pad_token_id must be below the vocabulary size {model.vocab_size}, got {config.pad_token_id}")


def _prompts(model: ModelConfig, prompt_tokens: Any, prompt_lengths: Any, *, may_be_empty: bool) -> tuple[Any, Any]:
    if isinstance(prompt_tokens, Sequence) and not is_traced(prompt_tokens):
        if prompt_lengths is not None:
            raise ValueError("prompt_lengths must be None where prompt_tokens is a list of lists: each list has its length")
        prompt_tokens, prompt_lengths = _pad_rows(prompt_tokens)
    if not isinstance(prompt_tokens, Tracer):
        prompt_tokens = np.asarray(prompt_tokens)
    if prompt_tokens.ndim != 2 or 0 in prompt_tokens.shape or not jnp.issubdtype(prompt_tokens.dtype, jnp.integer):
        raise ValueError(
            f"prompt_tokens must be a non-empty integer array [batch, length] or a list of lists of ints, "
            f"got shape {prompt_tokens.shape} and dtype {prompt_tokens.dtype}"
        )
    batch_size, width = prompt_tokens.shape
    lengths = _per_row(width if prompt_lengths is None else prompt_lengths, batch_size, np.int32, "prompt_lengths")
    if not is_traced(lengths):
        smallest = 0 if may_be_empty else 1
        if lengths.min() < smallest or lengths.max() > width:
            hint = "an empty prompt has nothing to continue" if lengths.min() < smallest else f"prompt_tokens has {width} columns"
            raise ValueError(f"prompt lengths must be from {smallest} to {width}, got {lengths.tolist()}: {hint}")
        if not is_traced(prompt_tokens):
            counted = prompt_tokens[np.arange(width) < lengths[:, None]]
            if counted.size and (counted.min() < 0 or counted.max() >= model.vocab_size):
                raise ValueError(
                    f"prompt token ids must be from 0 to {model.vocab_size - 1}, got ids from {counted.min()} to {counted.max()}: "
                    "is this another model's tokenizer?"
                )
            prompt_tokens = np.where(np.arange(width) < lengths[:, None], prompt_tokens, 0)
    return prompt_tokens.astype(np.int32), lengths


def _pad_rows(prompts: Sequence[Any]) -> tuple[np.ndarray, list[int]]:
    """Rows of ints of any lengths, lists or arrays, as one array."""
    rows = [np.asarray(row) for row in prompts]
    for index, row in enumerate(rows):
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(f"prompt {index} must be a list of ints, got {prompts[index]!r}")
    lengths = [len(row) for row in rows]
    padded = np.zeros((len(rows), max([1, *lengths])), np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded, lengths


def _per_row(value: Any, batch_size: int, dtype: Any, name: str) -> Any:
    """A scalar or `[B]` as `[B]`."""
    traced = is_traced(value)
    value = jnp.asarray(value) if traced else np.asarray(value)
    if value.shape not in ((), (batch_size,)):
        raise ValueError(f"{name} must be a scalar or have one value for each of the {batch_size} rows, got shape {value.shape}")
    kind_ok = value.dtype == bool if dtype is bool else jnp.issubdtype(value.dtype, jnp.integer)
    if not kind_ok:
        raise ValueError(f"{name} must be {'bool' if dtype is bool else 'int'}, got {value.dtype}")
    return (jnp if traced else np).broadcast_to(value, (batch_size,)).astype(dtype)


def _per_row_limit(config: GenerateConfig, max_new_tokens: Any, batch_size: int) -> Any:
    limit = _per_row(config.max_new_tokens if max_new_tokens is None else max_new_tokens, batch_size, np.int32, "max_new_tokens")
    if is_traced(limit):
        return jnp.clip(limit, 0, config.max_new_tokens)
    if limit.min() < 0 or limit.max() > config.max_new_tokens:
        raise ValueError(
            f"max_new_tokens must be from 0 to GenerateConfig.max_new_tokens = {config.max_new_tokens} in each row, got {limit.tolist()}"
        )
    return limit


def _check_window(model: ModelConfig, earlier: Any, lengths: Any, limit: Any) -> None:
    if is_traced((earlier, lengths, limit)):
        return
    window = model.max_position_embeddings
    for row, (before, length, new) in enumerate(zip(earlier, lengths, limit, strict=True)):
        if before + length + new > window:
            after = f" after {before} earlier ones" if before else ""
            raise ValueError(
                f"row {row}: a prompt of {length} tokens{after} and up to {new} new ones exceed the model's window of {window} tokens"
            )


def _eos(model: ModelConfig, eos_token_ids: Any) -> Any:
    if is_traced(eos_token_ids):
        return jnp.atleast_1d(eos_token_ids).astype(jnp.int32)
    ids = np.atleast_1d(np.asarray(() if eos_token_ids is None else eos_token_ids))
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"eos_token_ids must be an int or a list of ints, got {eos_token_ids!r}")
    if ids.size and (ids.min() < 0 or ids.max() >= model.vocab_size):
        raise ValueError(f"eos_token_ids must be from 0 to {model.vocab_size - 1}, got {ids.tolist()}")
    padded = -(-max(ids.size, 1) // _EOS_STEP) * _EOS_STEP
    return np.pad(ids, (0, padded - ids.size), constant_values=-1).astype(np.int32)


def _sampling(sampling: SamplingParams | None, batch_size: int, *, do_sample: bool) -> SamplingParams:
    """Checks the concrete fields: NaN fails every comparison. Greedy decoding filters nothing: with and without top-k it is one program."""
    sampling = SamplingParams() if sampling is None else sampling
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"sampling must be SamplingParams(temperature, top_k, top_p), got {sampling!r}")
    rules = {
        "temperature": (np.float32, "0 (greedy) or a positive finite number", lambda x: (x >= 0) & (x < np.inf)),
        "top_k": (np.int32, "an int of at least 0 (0 keeps all)", lambda x: x >= 0),
        "top_p": (np.float32, "in (0, 1]", lambda x: (x > 0) & (x <= 1)),
    }
    fields = {}
    for name, (dtype, expected, is_valid) in rules.items():
        value = getattr(sampling, name)
        if value is None and name != "temperature":
            continue
        if is_traced(value):
            fields[name] = value
            continue
        array = np.asarray(value)
        fits = array.shape in ((), (batch_size,)) and (dtype != np.int32 or jnp.issubdtype(array.dtype, jnp.integer))
        if not fits or not jnp.issubdtype(array.dtype, jnp.number) or not np.all(is_valid(array)):
            raise ValueError(f"SamplingParams.{name} must be {expected}, a scalar or one for each of {batch_size} rows, got {value!r}")
        if dtype == np.int32:
            array = np.minimum(array, np.iinfo(np.int32).max)
        fields[name] = np.broadcast_to(array, (batch_size,)).astype(dtype)
    return SamplingParams(**fields) if do_sample else SamplingParams(temperature=fields["temperature"])


def _key(rng: Any, config: GenerateConfig, batch_size: int) -> Any:
    if rng is None:
        if config.do_sample:
            raise ValueError("do_sample=True needs rng, a key from jax.random.key(seed)")
        return _NO_KEY
    is_array = isinstance(rng, jax.Array | np.ndarray)
    typed = is_array and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    legacy = is_array and rng.dtype == np.uint32 and rng.shape[-1:] == (2,)
    if not typed and not legacy:
        raise TypeError(
            f"rng must be a key such as jax.random.key(0), or one for each row (old-style uint32 keys must be threefry's), "
            f"got {type(rng).__name__} {rng!r}"
        )
    shape = rng.shape if typed else rng.shape[:-1]
    if shape not in ((), (batch_size,)):
        raise ValueError(f"rng must be one key or {batch_size} of them, one for each row, got shape {shape}")
    # Greedy decoding draws nothing: with and without a key it is one program.
    return rng if config.do_sample or config.verification.synthetic else _NO_KEY


def row_keys(rng: jax.Array, batch_size: int) -> jax.Array:
    """One threefry key a row `[B]`: `fold_in(rng, row)` of a single key, or the keys themselves.

    Keys of another kind seed threefry ones: under `vmap`, which draws for each row here, others draw everything from the first row's key.
    """
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.wrap_key_data(jnp.asarray(rng), impl=_THREEFRY)
    elif rng.dtype != jax.eval_shape(lambda: jax.random.key(0, impl=_THREEFRY)).dtype:
        bits = jax.lax.map(lambda key: jax.random.bits(key, (2,), jnp.uint32), jnp.atleast_1d(rng))
        rng = jax.random.wrap_key_data(bits.reshape(*rng.shape, 2), impl=_THREEFRY)
    if rng.ndim == 1:
        return rng
    return jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(batch_size))
