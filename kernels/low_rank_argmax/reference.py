"""The arg-max of a low-rank LM head: the specification, in plain jnp. Memory: the scores, `[M,V]` float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.precision import full_precision, rounded


def low_rank_argmax_reference(hidden: jax.Array, down: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `specjax.kernels.low_rank_argmax.low_rank_argmax`."""
    scores = _product(inner_product(hidden, down), up)
    tokens = jnp.argmax(scores, axis=-1)
    return tokens.astype(jnp.int32), jnp.take_along_axis(scores, tokens[:, None], axis=-1)[:, 0]


def inner_product(hidden: jax.Array, down: jax.Array) -> jax.Array:
    """`[M,D]` → `[M,R]`, rounded to the dtype of `hidden`."""
    return rounded(_product(hidden, down), hidden.dtype)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    precision = full_precision(x)
    return jnp.einsum("mi,oi->mo", x, weight.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)
