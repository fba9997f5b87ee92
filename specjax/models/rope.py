"""Rotary position embedding, half-split layout. RoFormer, arXiv:2104.09864; the `llama3` stretching as published with Llama 3.1.

Angles are computed from integer positions in float32 at each call, whatever the model's dtype: a bfloat16 position is wrong above 256.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Angular frequencies, in radians per position.

    Args:
        config: Rotary configuration.
        head_dim: H.

    Returns:
        `[H/2]` float32. `default`: `theta^(-2i/H)`. `llama3`: wavelengths longer than the original context are stretched by `factor`, short
        ones stay, and those between are interpolated linearly in the inverse wavelength.
    """
    frequencies = config.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if config.rope_type == "llama3":
        wavelengths = 2 * math.pi / frequencies
        rotations = config.original_max_position_embeddings / wavelengths
        keep = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        frequencies = keep * frequencies + (1.0 - keep) * frequencies / config.factor
    return frequencies.astype(np.float32)


def rotary_angles(config: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for integer positions.

    Args:
        config: Rotary configuration.
        head_dim: H.
        positions: `[B,T]` int32.

    Returns:
        `cos` and `sin`, each `[B,T,H/2]` float32.
    """
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs `(x[i], x[i + H/2])`.

    Args:
        x: `[B,T,heads,H]`.
        cos: `[B,T,H/2]` float32.
        sin: `[B,T,H/2]` float32.

    Returns:
        `[B,T,heads,H]` in the dtype of `x`; the arithmetic is float32.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
