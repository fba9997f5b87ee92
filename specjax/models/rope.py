"""Rotary position embedding, half-split layout, and its stretchings for long contexts.

RoFormer, arXiv:2104.09864. `linear`: arXiv:2306.15595; `dynamic`: NTK-aware scaling by the length at hand; `llama3`: as published with
Llama 3.1; `yarn`: arXiv:2309.00071; `longrope`: arXiv:2402.13753. Angles are computed from integer positions in float32 at each call,
whatever the model's dtype: a bfloat16 position is wrong above 256.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from specjax.model_config import LENGTH_DEPENDENT_ROPE_TYPES, RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int, context_limit: jax.Array | None = None) -> np.ndarray | jax.Array:
    """Angular frequencies, in radians per position.

    Args:
        config: Rotary configuration.
        head_dim: H.
        context_limit: `[B]` int32, tokens that each row may come to hold. Read by `dynamic` and `longrope` alone, which choose frequencies
            by it, for a row as a whole: keys rotated by one set cannot be compared with queries rotated by another.

    Returns:
        `[H/2]` float32 (NumPy), or `[B,H/2]` for the types that depend on `context_limit`.

    Raises:
        ValueError: A type that depends on `context_limit`, and none was given.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = config.theta**-exponents
    if config.rope_type in LENGTH_DEPENDENT_ROPE_TYPES:
        if context_limit is None:
            raise ValueError(f"rotary embedding of type {config.rope_type!r} needs context_limit")
        return _by_length(config, exponents, jnp.asarray(context_limit))
    if config.rope_type == "linear":
        frequencies = frequencies / config.factor
    elif config.rope_type == "llama3":
        wavelengths = 2 * math.pi / frequencies
        rotations = config.original_max_position_embeddings / wavelengths
        keep = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        frequencies = _interpolated(config, frequencies, keep)
    elif config.rope_type == "yarn":
        first, last = (_dimension_turning(config, head_dim, turns) for turns in (config.beta_fast, config.beta_slow))
        if config.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        # An empty range would divide by zero; this is the step that transformers takes in its place.
        width = last - first if last != first else 0.001
        frequencies = _interpolated(config, frequencies, 1.0 - (np.arange(head_dim // 2) - first) / width)
    return frequencies.astype(np.float32)


def _interpolated(config: RopeConfig, frequencies: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """`keep`, clipped to 0 ... 1, of each frequency as it is; the rest of it stretched by `factor`."""
    keep = np.clip(keep, 0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / config.factor


def _dimension_turning(config: RopeConfig, head_dim: int, turns: float) -> float:
    """The (fractional) index of the frequency that turns this often within the original context."""
    original = config.original_max_position_embeddings
    return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


def _by_length(config: RopeConfig, exponents: np.ndarray, context_limit: jax.Array) -> jax.Array:
    original = config.original_max_position_embeddings
    if config.rope_type == "dynamic":
        head_dim = 2 * len(exponents)
        stretch = config.factor * jnp.maximum(context_limit, original).astype(jnp.float32) / original - (config.factor - 1)
        # theta * stretch^(H / (H - 2)) is the new base; only its stretched part depends on the row.
        growth = np.asarray(exponents * head_dim / max(head_dim - 2, 1), np.float32)
        return jnp.asarray(config.theta**-exponents, jnp.float32) * stretch[:, None] ** -growth
    sets = [(config.theta**-exponents / np.asarray(factor)).astype(np.float32) for factor in (config.short_factor, config.long_factor)]
    return jnp.where((context_limit > original)[:, None], sets[1], sets[0])


def rotary_angles(
    config: RopeConfig, head_dim: int, positions: jax.Array, context_limit: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for integer positions, times `attention_factor` where the type has one.

    Args:
        config: Rotary configuration.
        head_dim: H.
        positions: `[B,T]` int32.
        context_limit: As in `inverse_frequencies`.

    Returns:
        `cos` and `sin`, each `[B,T,H/2]` float32.
    """
    frequencies = inverse_frequencies(config, head_dim, context_limit)
    angles = positions[..., None].astype(jnp.float32) * (frequencies[:, None] if frequencies.ndim == 2 else frequencies)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if config.rope_type in ("yarn", "longrope"):
        cos, sin = cos * config.attention_factor, sin * config.attention_factor
    return cos, sin
