"""The product of every LM head here: weights stored `[V,D]`, a row a token, scores in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.models.layers import full_precision


def head_product(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """`hidden [..., D] × weight [V,D]` → `[..., V]` float32, accumulated in float32."""
    weight = weight.astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, weight, precision=full_precision(hidden), preferred_element_type=jnp.float32)
