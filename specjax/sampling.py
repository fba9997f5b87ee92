"""Logits to probabilities to tokens, with temperature, top-k and top-p a row.

The order is Hugging Face's: temperature, then top-k, then top-p. Whatever draws a token, and whatever judges it, uses the distribution that
`filtered_probs` returns: that is what makes speculative sampling exact.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Below this temperature a row is greedy: dividing by it would overflow, and the arg-max holds all the mass anyway.
MIN_TEMPERATURE = 1e-5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample; each a scalar or one value a row. All traced: changing them compiles nothing.

    But `None` is static: where neither top-k nor top-p is given, the program has no part for them. With values that keep everything it has,
    and asks for every token whether to skip it, for which a GPU may have to ask the host.

    Attributes:
        temperature: Scalar or `[B]` float; 0 (anything below 1e-5) is greedy.
        top_k: Scalar or `[B]` int; keep the k most likely tokens; 0 keeps all, more than V too. `None` keeps all.
        top_p: Scalar or `[B]` float in (0, 1]; keep the smallest set of most likely tokens whose probability reaches it. `None` keeps all.
    """

    temperature: jax.Array | float = 1.0
    top_k: jax.Array | int | None = None
    top_p: jax.Array | float | None = None

    def broadcast(self, batch_size: int) -> SamplingParams:
        """Every field that there is as `[B]`."""

        def rows(value: jax.Array | float | None, dtype: Any) -> jax.Array | None:
            return None if value is None else jnp.broadcast_to(jnp.asarray(value, dtype), (batch_size,))

        temperature = jnp.broadcast_to(jnp.asarray(self.temperature, jnp.float32), (batch_size,))
        return SamplingParams(temperature=temperature, top_k=rows(self.top_k, jnp.int32), top_p=rows(self.top_p, jnp.float32))


def filtered_probs(logits: jax.Array, sampling: SamplingParams) -> jax.Array:
    """The distribution to sample from.

    Tokens tied with the last one kept are kept too. The most likely token is always kept.

    Args:
        logits: `[B,T,V]` float32.
        sampling: Fields `[B]`.

    Returns:
        `[B,T,V]` float32 probabilities; one-hot at the arg-max in greedy rows.
    """
    greedy = jnp.less(sampling.temperature, MIN_TEMPERATURE)
    temperature = jnp.where(greedy, 1.0, sampling.temperature)[:, None, None]
    # The largest logit becomes 0 first, so that a small temperature cannot overflow.
    below = logits - logits.max(axis=-1, keepdims=True)
    finite = below > -jnp.inf  # the quotient of others has no derivative by the temperature
    scaled = jnp.where(finite, jnp.where(finite, below, 0.0) / temperature, below)
    if sampling.top_k is not None or sampling.top_p is not None:
        scaled = _filter_where_asked(scaled, sampling, greedy)
    one_hot = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    return jnp.where(greedy[:, None, None], one_hot, jax.nn.softmax(scaled, axis=-1))


def _filter_where_asked(scaled: jax.Array, sampling: SamplingParams, greedy: jax.Array) -> jax.Array:
    vocab_size = scaled.shape[-1]
    top_k = jnp.full(greedy.shape, vocab_size) if sampling.top_k is None else jnp.asarray(sampling.top_k)
    top_k = jnp.where(top_k <= 0, vocab_size, jnp.minimum(top_k, vocab_size))
    top_p = jnp.ones(greedy.shape) if sampling.top_p is None else jnp.asarray(sampling.top_p)
    filtering = jnp.any(~greedy & ((top_k < vocab_size) | (top_p < 1.0)))
    # The sort is skipped where no row asks for it: over a large vocabulary it costs as much as a small model's step.
    return lax.cond(filtering, _filter, lambda x, *_: x, scaled, top_k, top_p)


def _filter(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Sets to -inf what top-k and then top-p drop."""
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    in_top_k = jnp.arange(scaled.shape[-1]) < top_k[:, None, None]
    probs = jax.nn.softmax(jnp.where(in_top_k, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    keep = in_top_k & ((before < top_p[:, None, None]) | (top_p >= 1.0)[:, None, None])
    smallest_kept = jnp.min(jnp.where(keep, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= smallest_kept, scaled, -jnp.inf)


def sample_from_probs(row_keys: jax.Array, probs: jax.Array) -> jax.Array:
    """One token a row.

    Args:
        row_keys: `[B]` typed keys.
        probs: `[B,V]`, unnormalised is fine; a token of probability 0 is never drawn.

    Returns:
        `[B]` int32.
    """
    log_probs = jnp.where(probs > 0, jnp.log(jnp.where(probs > 0, probs, 1.0)), -jnp.inf)
    return jax.vmap(jax.random.categorical)(row_keys, log_probs).astype(jnp.int32)


def split_row_keys(row_keys: jax.Array, num: int) -> tuple[jax.Array, ...]:
    """Splits each row's key into `num` keys: a tuple of `[B]` key arrays."""
    children = jax.vmap(lambda key: jax.random.split(key, num))(row_keys)
    return tuple(children[:, index] for index in range(num))
