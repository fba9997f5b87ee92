"""In what precision references multiply."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def full_precision(x: jax.Array) -> jax.lax.Precision | None:
    """The `precision` of a product with `x`: all of float32, where it is float32 (TF32 would change which token wins)."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
