"""The rotary embedding of a Hugging Face config.json, in any of its layouts: flat, `rope_scaling`, `rope_parameters`.

Defaults of absent fields are those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.fields import needed
from specjax.config import ROPE_TYPES, RopeConfig

# An old name, written by Phi-3 and those who followed.
_SYNONYMS = {"su": "longrope"}


def rope_config(raw: Mapping[str, Any], *, default_theta: float = 10000.0) -> RopeConfig:
    """Our rotary configuration.

    Args:
        raw: The contents of config.json.
        default_theta: The family's base where none is written.

    Raises:
        ValueError: A type that is not supported, or a missing field; the message names it.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    settings = raw.get(key) or {}
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise ValueError(f"{key} with a rotary embedding for each kind of layer is not supported: {sorted(settings)}")
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    rope_type = _SYNONYMS.get(rope_type, rope_type)
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rotary embedding of type {rope_type!r} ({key} in config.json) is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if settings.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if settings.get("mrope_section"):
        raise ValueError(f"mrope_section in {key} (positions of images) is not supported")
    theta = settings.get("rope_theta")
    theta = raw.get("rope_theta") if theta is None else theta
    theta = default_theta if theta is None else float(theta)
    return RopeConfig(theta=theta, rope_type=rope_type, **_settings_of(rope_type, settings, raw, key))


def usable_window(rope: RopeConfig, max_position_embeddings: int) -> int:
    """The context window in tokens: what config.json says, or what the stretching makes of the original one, if that is more.

    `dynamic` has the original length in `max_position_embeddings` by its definition; `yarn` is often switched on by adding its settings,
    with that field left as it was.
    """
    if rope.rope_type in ("dynamic", "yarn"):
        return max(max_position_embeddings, int(rope.factor * rope.original_max_position_embeddings))
    return max_position_embeddings


def _settings_of(rope_type: str, settings: Mapping[str, Any], raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    def number(field: str) -> float:
        return float(needed(settings, field, key))

    if rope_type == "default":
        return {}
    if rope_type == "linear":
        return {"factor": number("factor")}
    if rope_type == "dynamic":
        return {"factor": number("factor"), "original_max_position_embeddings": int(needed(raw, "max_position_embeddings"))}
    original = _original_length(settings, raw)
    if rope_type == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return {name: number(name) for name in names} | {"original_max_position_embeddings": original}
    factor = settings.get("factor")
    factor = needed(raw, "max_position_embeddings") / original if factor is None else float(factor)
    attention_factor = settings.get("attention_factor")
    if rope_type == "yarn":
        return {
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": float(settings.get("beta_fast") or 32),
            "beta_slow": float(settings.get("beta_slow") or 1),
            "truncate": bool(settings.get("truncate", True)),
            "attention_factor": _yarn_attention_factor(settings, factor) if attention_factor is None else float(attention_factor),
        }
    assert rope_type == "longrope", rope_type
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "original_max_position_embeddings": original,
        "attention_factor": float(attention_factor),
        "short_factor": tuple(float(value) for value in needed(settings, "short_factor", key)),
        "long_factor": tuple(float(value) for value in needed(settings, "long_factor", key)),
    }


def _original_length(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    """Beside the rotary settings, in them, or else the model's own window."""
    value = raw.get("original_max_position_embeddings")
    value = settings.get("original_max_position_embeddings") if value is None else value
    return int(needed(raw, "max_position_embeddings") if value is None else value)


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    """`0.1 m ln(factor) + 1`, or the quotient of two such where both of DeepSeek's m's are given. arXiv:2309.00071, section 3.4."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)
