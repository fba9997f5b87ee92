"""The rotary embedding of a Hugging Face config.json, in any of its layouts: flat, `rope_scaling`, `rope_parameters`.

Defaults of absent fields are those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.formats.fields import flag, needed, needed_number, optional_list, optional_number, optional_object
from specjax.model_config import ROPE_TYPES, RopeConfig

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
    settings = optional_object(raw, key)
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise ValueError(f"{key} with a rotary embedding for each kind of layer is not supported: {sorted(settings)}")
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    rope_type = _SYNONYMS.get(str(rope_type), rope_type)
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rotary embedding of type {rope_type!r} ({key} in config.json) is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if settings.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if settings.get("mrope_section"):
        raise ValueError(f"mrope_section in {key} (positions of images) is not supported")
    theta = optional_number(settings, "rope_theta", optional_number(raw, "rope_theta", default_theta), key)
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
        return needed_number(settings, field, key)

    if rope_type == "default":
        return {}
    if rope_type == "linear":
        return {"factor": number("factor")}
    if rope_type == "dynamic":
        return {"factor": number("factor"), "original_max_position_embeddings": _length(raw, "max_position_embeddings")}
    original = _original_length(settings, raw)
    if rope_type == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return {name: number(name) for name in names} | {"original_max_position_embeddings": original}
    factor = _length(raw, "max_position_embeddings") / original if settings.get("factor") is None else number("factor")
    attention_factor = None if settings.get("attention_factor") is None else number("attention_factor")
    if rope_type == "yarn":
        return {
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": optional_number(settings, "beta_fast", 32.0, key) or 32.0,
            "beta_slow": optional_number(settings, "beta_slow", 1.0, key) or 1.0,
            "truncate": flag(settings, "truncate", True, key),
            "attention_factor": _yarn_attention_factor(settings, factor, key) if attention_factor is None else attention_factor,
        }
    assert rope_type == "longrope", rope_type
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "original_max_position_embeddings": original,
        "attention_factor": attention_factor,
        **{name: _numbers(settings, name, key) for name in ("short_factor", "long_factor")},
    }


def _original_length(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    """Beside the rotary settings, in them, or else the model's own window."""
    name = "original_max_position_embeddings"
    found = next((values for values in (raw, settings) if values.get(name) is not None), None)
    return _length(raw, "max_position_embeddings") if found is None else _length(found, name)


def _length(values: Mapping[str, Any], field: str) -> int:
    """A number of tokens; some write it as 4096.0."""
    number = needed_number(values, field)
    # 1 would be divided by: by its logarithm, for longrope.
    if number < 2 or number % 1:
        raise ValueError(f"{field} in config.json should be a number of tokens, at least 2, got {number!r}")
    return int(number)


def _numbers(settings: Mapping[str, Any], field: str, key: str) -> tuple[float, ...]:
    needed(settings, field, key)
    return tuple(float(value) for value in optional_list(settings, field, int | float, key) or ())


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float, key: str) -> float:
    """`0.1 m ln(factor) + 1`, or the quotient of two such where both of DeepSeek's m's are given. arXiv:2309.00071, section 3.4."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all_dim = (optional_number(settings, name, 0.0, key) for name in ("mscale", "mscale_all_dim"))
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)
