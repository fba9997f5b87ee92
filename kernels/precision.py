"""In what precision references multiply, and to what they round in between."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def full_precision(x: jax.Array) -> jax.lax.Precision | None:
    """The `precision` of a product with `x`: all of float32, where it is float32 (TF32 would change which token wins)."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x.astype(dtype)` of floats whose digits are really dropped.

    A cast alone promises that to nobody: where what is cast is widened again, such as for a product of a single row on a GPU, XLA leaves
    both casts out and keeps more digits than the dtype has. Another program that rounds then computes something else.

    Args:
        x: Floats.
        dtype: Of floats, of no more digits. Of float16 the subnormal numbers become zero.
    """
    if x.dtype == dtype:
        return x
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant).astype(dtype)
