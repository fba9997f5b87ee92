"""Which models are supported, and how each family's config.json becomes a `ModelConfig`.

Families differ in fields of our configuration, never in code. What the decoder would run wrongly is refused by name. Defaults of absent
fields are those of the family's class in transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.formats.fields import (
    flag,
    needed_number,
    needed_size,
    optional_list,
    optional_number,
    optional_object,
    optional_size,
)
from specjax.checkpoints.formats.rope_settings import rope_config, usable_window
from specjax.model_config import ModelConfig, MoEConfig


@dataclasses.dataclass(frozen=True)
class _Family:
    """What sets a family apart.

    Attributes:
        model_type: Its `model_type` in config.json.
        head_dim_needed: The head size is its own, and has to be written.
        num_kv_heads_needed: Likewise the number of key/value heads; otherwise it is that of the query heads.
        qkv_bias: Biases on query, key and value, and none on the output; `None`: `attention_bias` puts one on all four or none.
        qk_norm: As in `ModelConfig`.
        windowed: Layers with a sliding window, where there is one: `"all"`, `"late"` (from `max_window_layers` on), `"alternating"`, or
            none; the middle two may be overridden by `layer_types`.
        sliding_window: The default where config.json has no such field; `None`: none.
        default_theta: The rotary base where none is written.
        has_experts: Whether its layers are mixtures of experts.
    """

    model_type: str
    head_dim_needed: bool = False
    num_kv_heads_needed: bool = True
    qkv_bias: bool | None = None
    qk_norm: str | None = None
    windowed: str = ""
    sliding_window: int | None = None
    default_theta: float = 10000.0
    has_experts: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", num_kv_heads_needed=False),
    "MistralForCausalLM": _Family("mistral", windowed="all", sliding_window=4096),
    "Qwen2ForCausalLM": _Family("qwen2", qkv_bias=True, windowed="late", sliding_window=4096),
    # Qwen3's head size is never hidden_size / num_attention_heads.
    "Qwen3ForCausalLM": _Family("qwen3", head_dim_needed=True, qk_norm="head", windowed="late", sliding_window=4096),
    "Qwen3MoeForCausalLM": _Family("qwen3_moe", qk_norm="head", windowed="all", sliding_window=4096, has_experts=True),
    "MixtralForCausalLM": _Family("mixtral", windowed="all", default_theta=1e6, has_experts=True),
    "OlmoeForCausalLM": _Family("olmoe", num_kv_heads_needed=False, qk_norm="projection", has_experts=True),
    "GptOssForCausalLM": _Family(
        "gpt_oss",
        head_dim_needed=True,
        windowed="alternating",
        sliding_window=128,
        default_theta=150000.0,
        has_experts=True,
    ),
}
SUPPORTED = tuple(_FAMILIES)

# No model comes near; lists of so many would fill the memory before the tensors show that it is a mistake.
_MOST_LAYERS, _MOST_EXPERTS = 1000, 10_000

_FULL, _SLIDING = "full_attention", "sliding_attention"


def model_config(raw: Mapping[str, Any], *, tie_embeddings: bool | None = None) -> ModelConfig:
    """Our configuration for a Hugging Face one.

    Args:
        raw: The contents of config.json.
        tie_embeddings: Overrides its `tie_word_embeddings`.

    Returns:
        The model's shape.

    Raises:
        ValueError: A family or a setting that is not supported, or a missing field; the message names it.
    """
    family = _FAMILIES[architecture(raw)]
    _refuse_unsupported(raw, family)
    num_heads, hidden_size = needed_size(raw, "num_attention_heads"), needed_size(raw, "hidden_size")
    head_dim = optional_size(raw, "head_dim")
    if head_dim is None:
        head_dim = needed_size(raw, "head_dim") if family.head_dim_needed else hidden_size // num_heads
    num_kv_heads = optional_size(raw, "num_key_value_heads")
    if num_kv_heads is None:
        num_kv_heads = needed_size(raw, "num_key_value_heads") if family.num_kv_heads_needed else num_heads
    num_layers = _bounded(raw, "num_hidden_layers", _MOST_LAYERS)
    bias = flag(raw, "attention_bias", family.model_type == "gpt_oss")
    rope = rope_config(raw, default_theta=family.default_theta)
    return ModelConfig(
        vocab_size=needed_size(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=needed_size(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=usable_window(rope, needed_size(raw, "max_position_embeddings")),
        rope=rope,
        rms_norm_eps=needed_number(raw, "rms_norm_eps"),
        tie_word_embeddings=flag(raw, "tie_word_embeddings") if tie_embeddings is None else tie_embeddings,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.qkv_bias is None else False,
        qk_norm=family.qk_norm,
        clip_qkv=None if family.model_type != "olmoe" or raw.get("clip_qkv") is None else needed_number(raw, "clip_qkv"),
        layer_windows=_layer_windows(raw, family, num_layers),
        attention_sinks=family.model_type == "gpt_oss",
        activation="clamped_swiglu" if family.model_type == "gpt_oss" else "silu",
        swiglu_alpha=optional_number(raw, "swiglu_alpha", 1.702),
        swiglu_limit=optional_number(raw, "swiglu_limit", 7.0),
        mlp_bias=family.model_type == "gpt_oss" or flag(raw, "mlp_bias"),
        moe=_moe(raw, family, num_layers) if family.has_experts else None,
    )


def architecture(raw: Mapping[str, Any]) -> str:
    """The name of the family's class in transformers.

    Raises:
        ValueError: It is not one of `SUPPORTED`, or not that of `model_type`.
    """
    architectures = optional_list(raw, "architectures", str) or []
    by_type = {family.model_type: name for name, family in _FAMILIES.items()}
    found = architectures[0] if architectures else by_type.get(str(raw.get("model_type")), f"model_type {raw.get('model_type')!r}")
    if found not in _FAMILIES:
        raise ValueError(f"architecture {found} is not supported; supported: {', '.join(SUPPORTED)}")
    # Readers disagree on which of the two counts.
    if raw.get("model_type") not in (None, _FAMILIES[found].model_type):
        raise ValueError(f"architectures names {found}, but model_type is {raw['model_type']!r}: which of them is it?")
    return found


def _moe(raw: Mapping[str, Any], family: _Family, num_layers: int) -> MoEConfig:
    is_qwen = family.model_type == "qwen3_moe"
    dense: tuple[int, ...] = ()
    if is_qwen:
        step, listed = optional_size(raw, "decoder_sparse_step", 1) or 1, optional_list(raw, "mlp_only_layers", int) or []
        dense = tuple(index for index in range(num_layers) if index in listed or (index + 1) % step)
    # Which of the two names is written changed from version to version of transformers.
    field = "num_local_experts" if raw.get("num_experts") is None else "num_experts"
    return MoEConfig(
        num_experts=_bounded(raw, field, _MOST_EXPERTS),
        num_experts_per_token=needed_size(raw, "num_experts_per_tok"),
        intermediate_size=needed_size(raw, "moe_intermediate_size" if is_qwen else "intermediate_size"),
        normalise=flag(raw, "norm_topk_prob") if is_qwen or family.model_type == "olmoe" else True,
        router_bias=family.model_type == "gpt_oss",
        dense_layers=dense,
    )


def _layer_windows(raw: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """The attention window of each layer; empty where all see everything."""
    window = raw.get("sliding_window", family.sliding_window)
    if not family.windowed or (family.model_type.startswith("qwen") and not flag(raw, "use_sliding_window")):
        window = None
    first = optional_number(raw, "max_window_layers", 28)
    is_windowed = {"late": lambda index: index >= first, "alternating": lambda index: index % 2 == 0}.get(
        family.windowed, lambda index: True
    )
    kinds = optional_list(raw, "layer_types", str)
    if kinds is None:
        kinds = [_SLIDING if window is not None and is_windowed(index) else _FULL for index in range(num_layers)]
    unknown = sorted(set(kinds) - {_FULL, _SLIDING})
    if unknown:
        raise ValueError(f"layer_types with {', '.join(unknown)} is not supported; supported: {_FULL}, {_SLIDING}")
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types in config.json should have num_hidden_layers = {num_layers} entries, got {len(kinds)}")
    if _SLIDING not in kinds:
        return ()
    if family.windowed in ("", "all") and (not family.windowed or _FULL in kinds):
        raise ValueError(
            f"layer_types with {_SLIDING} is not supported for {family.model_type}: its class in transformers does not read it"
        )
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"layer_types with {_SLIDING} needs a sliding_window in config.json that is a positive int, got {window!r}")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _bounded(raw: Mapping[str, Any], field: str, most: int) -> int:
    size = needed_size(raw, field)
    if size > most:
        raise ValueError(f"{field} in config.json should be at most {most}, got {size}")
    return size


def _refuse_unsupported(raw: Mapping[str, Any], family: _Family) -> None:
    if needed_number(raw, "rms_norm_eps") < 0:
        raise ValueError(f"rms_norm_eps in config.json should not be negative, got {raw['rms_norm_eps']!r}")
    if family.model_type == "gpt_oss" and not (raw.get("rope_scaling") or raw.get("rope_parameters")):
        # Its class in transformers stretches 32 times where nothing is written, earlier versions of it not at all.
        raise ValueError("config.json of gpt_oss needs rope_scaling or rope_parameters: versions of transformers disagree on their default")
    quantisation = optional_object(raw, "quantization_config")
    method = quantisation.get("quant_method", "unknown") if quantisation else None
    if method is not None and not (method == "mxfp4" and family.model_type == "gpt_oss"):
        raise ValueError(
            f"quantization_config: checkpoints quantised with {method!r} are not supported; take the unquantised one, or a GGUF file"
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: 'silu'")
    if raw.get("mlp_bias") and family.model_type != "llama":
        raise ValueError(f"mlp_bias=true is not supported for {family.model_type}: its class in transformers has no such setting")
    if raw.get("attention_bias") and family.model_type in ("mistral", "mixtral"):
        raise ValueError(f"attention_bias=true is not supported for {family.model_type}: its class in transformers has no such setting")
