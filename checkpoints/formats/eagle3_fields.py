"""From a published EAGLE-3 drafter's config.json to ours. A setting that is not known is refused by name, never ignored.

Layouts: flat (the official one, SpecForge, TorchSpec), flat with `eagle_config` (NVIDIA Model-Optimizer, SpecForge), and
`transformer_layer_config` inside a `speculators` configuration. Sizes that the tensors show are taken from them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.checkpoints.formats.fields import flag, needed_size, optional_list, optional_number, optional_object, optional_size
from specjax.checkpoints.formats.rope_settings import rope_config, usable_window
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads import DraftHead, FullHead, LowRankHead, TrimmedHead
from specjax.model_config import ModelConfig

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
# What the classes behind `transformer_layer_config` fill in: speculators leaves out what equals it.
_LAYER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_attention_heads=32, max_position_embeddings=2048),
    "qwen3": dict(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=22016,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=32768,
    ),
}
_MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")
_READ = {
    *_FLAGS,
    *(_LAYER_IDS, "num_aux_hidden_states", "eagle_config", "transformer_layer_config", "target_hidden_size", "draft_vocab_size"),
    *("lm_head_rank_divisor", "tie_word_embeddings", "model_type", "hidden_act", "vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    *("attention_bias", "mlp_bias", "layer_types", "sliding_window", "use_sliding_window", "rope_theta", "rope_scaling"),
    *("rope_parameters", "original_max_position_embeddings", "partial_rotary_factor"),
}
# They say where a file comes from, how it was trained or how text is sampled: nothing of what a pass computes.
_HARMLESS = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "name_or_path", "has_no_defaults_at_init"),
    *("speculators_config", "speculators_model_type", "speculators_version", "embed_requires_grad"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "initializer_range", "attention_dropout"),
    *("use_cache", "pretraining_tp", "max_window_layers", "return_dict", "output_hidden_states", "output_attentions", "is_decoder"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "max_length", "num_beams", "num_beam_groups"),
    *("num_return_sequences", "diversity_penalty", "id2label", "label2id", "torchscript", "use_bfloat16", "tf_legacy_loss"),
}
_EAGLE_READ = {*_FLAGS, _LAYER_IDS, "use_aux_hidden_state", "return_hidden_post_norm", "next_layer_regular"}
_EAGLE_READ |= {"use_input_layernorm_in_first_layer", "use_last_layernorm", "parallel_draft_step", "parallel_draft_heads_num_layers"}


def eagle3_config(
    raw: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    first_layer: str,
    target: ModelConfig | None = None,
    feature_layers: Sequence[int] | None = None,
) -> Eagle3Config:
    """Our configuration for a published one.

    Args:
        raw: The contents of config.json.
        shapes: The file's tensors, `model.` in front of their names removed.
        first_layer: What the names of layer 0's tensors begin with.
        target: The target's shape, if it is known: then `feature_layers` is settled and the drafter checked against it.
        feature_layers: Overrides the layer ids of config.json, as boundaries (see `Transformer.__call__`).

    Raises:
        ValueError: A setting that is not supported or a missing field, by name; layer ids that can be read in two ways.
    """
    eagle = optional_object(raw, "eagle_config")
    layer = optional_object(raw, "transformer_layer_config")
    flat = raw.get("transformer_layer_config") is None
    body = dict(raw) if flat else _with_defaults(layer)
    for values, where in ((raw, "config.json"), (body, "config.json" if flat else "transformer_layer_config")):
        _refuse_unknown(values, _READ | _HARMLESS, where)
    _refuse_unknown(eagle, _EAGLE_READ, "eagle_config")
    num_layers = optional_size(body, "num_hidden_layers", 1)
    assert num_layers is not None
    _refuse_unsupported(raw, body, eagle, shapes, num_layers)
    decoder = _decoder(body, shapes, first_layer, num_layers, qk_norm_by_type=not flat)
    target_width = optional_size(raw, "target_hidden_size", decoder.hidden_size)
    assert target_width is not None
    if feature_layers is None:
        feature_layers = _feature_layers(raw, eagle, None if target is None else target.num_layers)
    _check_num_features(raw, shapes, target_width, feature_layers)
    config = Eagle3Config(
        decoder=decoder,
        target_hidden_size=target_width,
        head=_head(raw, shapes, decoder),
        feature_layers=None if feature_layers is None else tuple(feature_layers),
        own_embedding="embed_tokens.weight" in shapes,
        **_flags(raw, eagle, flat=flat),
    )
    return config if target is None else config.for_target(target)


def _with_defaults(layer: Mapping[str, Any]) -> dict[str, Any]:
    model_type = layer.get("model_type", "llama")
    if model_type not in _LAYER_DEFAULTS:
        raise ValueError(f"transformer_layer_config of model_type {model_type!r} is not supported; supported: {', '.join(_LAYER_DEFAULTS)}")
    return {**_LAYER_DEFAULTS[model_type], **{field: value for field, value in layer.items() if value is not None}}


def _refuse_unknown(values: Mapping[str, Any], known: set[str], where: str) -> None:
    for field, value in values.items():
        if field not in known and not field.startswith("_") and value not in (None, False, 0, "", [], {}):
            raise ValueError(
                f"{where} sets {field} = {value!r:.80}, which is not supported: it may change what the drafter computes (if it does not, "
                "take it out)"
            )


def _refuse_unsupported(
    raw: Mapping[str, Any],
    body: Mapping[str, Any],
    eagle: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    num_layers: int,
) -> None:
    model_type = body.get("model_type")
    if model_type is not None and model_type not in _MODEL_TYPES:
        raise ValueError(f"a drafter of model_type {model_type!r} is not supported; supported: {', '.join(_MODEL_TYPES)}")
    if body.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {body['hidden_act']!r} is not supported for a drafter; supported: 'silu'")
    if eagle.get("use_aux_hidden_state") is False or "fc.weight" not in shapes:
        raise ValueError("use_aux_hidden_state=false (a drafter without fc, on the target's last hidden state) is not supported")
    for field in ("use_input_layernorm_in_first_layer", "use_last_layernorm"):
        if eagle.get(field) is False:
            raise ValueError(f"eagle_config.{field}=false is not supported")
    if eagle.get("next_layer_regular") is False and num_layers > 1:
        raise ValueError("eagle_config.next_layer_regular=false is not supported: layers after the first attend over the residual stream")
    if (eagle.get("parallel_draft_step") or 1) != 1:
        raise ValueError(f"eagle_config.parallel_draft_step = {eagle['parallel_draft_step']!r} is not supported: one token a step")
    if (raw.get("tie_word_embeddings") or body.get("tie_word_embeddings")) and "lm_head.weight" not in shapes:
        raise ValueError("tie_word_embeddings=true without an lm_head.weight is not supported for a drafter")


def _decoder(
    body: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], first_layer: str, num_layers: int, *, qk_norm_by_type: bool
) -> ModelConfig:
    hidden_size, num_heads = needed_size(body, "hidden_size"), needed_size(body, "num_attention_heads")
    attention = f"{first_layer}.self_attn"
    # Drafters of Qwen3 targets are mostly plain llamas: the tensors tell.
    has_qk_norm = f"{attention}.q_norm.weight" in shapes or (qk_norm_by_type and body.get("model_type") == "qwen3")
    attention_bias = flag(body, "attention_bias")
    rope, window = rope_config(body), optional_size(body, "max_position_embeddings", 2048)
    assert window is not None
    num_kv_heads = optional_size(body, "num_key_value_heads", num_heads)
    head_dim = optional_size(body, "head_dim", hidden_size // num_heads)
    assert num_kv_heads is not None
    assert head_dim is not None
    return ModelConfig(
        vocab_size=needed_size(body, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=needed_size(body, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=usable_window(rope, window),
        rope=rope,
        # transformers' default, where llama's config.json has none.
        rms_norm_eps=optional_number(body, "rms_norm_eps", 1e-6),
        qkv_bias=attention_bias,
        output_bias=attention_bias and f"{attention}.o_proj.bias" in shapes,
        qk_norm="head" if has_qk_norm else None,
        layer_windows=_windows(body, num_layers),
        mlp_bias=flag(body, "mlp_bias"),
    )


def _windows(body: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    kinds = optional_list(body, "layer_types", str)
    if kinds is None:
        # Which layers those would be is for each family to say; a drafter's file has to.
        if body.get("use_sliding_window") or (body.get("model_type") == "mistral" and body.get("sliding_window")):
            raise ValueError("a drafter with sliding_window needs layer_types")
        return ()
    kinds = kinds[:num_layers]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != num_layers:
        raise ValueError(f"layer_types should hold full_attention or sliding_attention for each of {num_layers} layers, got {kinds}")
    if "sliding_attention" not in kinds:
        return ()
    if body.get("use_sliding_window") is False:
        raise ValueError("layer_types has sliding_attention, but use_sliding_window is false")
    size = needed_size(body, "sliding_window")
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def _flags(raw: Mapping[str, Any], eagle: Mapping[str, Any], *, flat: bool) -> dict[str, bool]:
    if not flat and raw.get("norm_before_residual") is None and eagle.get("norm_before_residual") is None:
        raise ValueError("norm_before_residual is missing: readers of this format disagree on its default; write it into config.json")
    flags = {}
    # SpecForge once meant another thing by norm_output (its pull request 879). Nothing in a file tells; such a drafter accepts few tokens.
    for name in _FLAGS:
        found = {flag(values, name) for values in (eagle, raw) if values.get(name) is not None}
        if name == "norm_output" and eagle.get("return_hidden_post_norm") is not None:
            found.add(flag(eagle, "return_hidden_post_norm", where="eagle_config"))
        if len(found) == 2:
            raise ValueError(f"{name} is both true and false in config.json: at its top level and in eagle_config")
        flags[name] = found == {True}
    return flags


def _feature_layers(raw: Mapping[str, Any], eagle: Mapping[str, Any], num_layers: int | None) -> tuple[int, ...] | None:
    """Boundaries of the target. Ids at the top level are boundaries; those in `eagle_config` may be layers whose output is meant."""
    top, nested = (optional_list(values, _LAYER_IDS, int) or None for values in (raw, eagle))
    ids = nested if top is None else top
    if ids is None:
        return None
    if top is not None and nested is not None and top != nested:
        raise ValueError(f"{_LAYER_IDS} at the top level is {top}, in eagle_config {nested}: pass feature_layers")
    if not all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in ids):
        raise ValueError(f"{_LAYER_IDS} should hold layers from 0 on, got {ids}")
    ids = tuple(ids)
    outputs = tuple(index + 1 for index in ids)
    if top is not None:
        if _is_default(outputs, num_layers):
            warnings.warn(
                f"{_LAYER_IDS} = {list(ids)} is read as boundaries, but would be the default if it named layers whose output is meant: if "
                f"few drafts are accepted, pass feature_layers={outputs}"
            )
        return ids
    if _is_default(ids, num_layers) or num_layers in ids:
        return ids
    if _is_default(outputs, num_layers) or ids[0] == 1:
        return outputs
    raise ValueError(
        f"{_LAYER_IDS} in eagle_config is {list(ids)}, which may mean the input of those layers or their output: pass feature_layers="
        f"{ids} or feature_layers={outputs}"
    )


def _is_default(boundaries: tuple[int, ...], num_layers: int | None) -> bool:
    """Whether these are `(2, L//2, L-3)`, for the target's L or, where it is not known, for some L."""
    if len(boundaries) != 3:
        return False
    depth = boundaries[2] + 3 if num_layers is None else num_layers
    return boundaries == (2, depth // 2, depth - 3)


def _check_num_features(
    raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target_width: int, feature_layers: Sequence[int] | None
) -> None:
    width = shapes["fc.weight"][-1]
    if width % target_width:
        raise ValueError(f"fc.weight takes {width} features, no multiple of the target's hidden size {target_width} (target_hidden_size)")
    found = width // target_width
    expected = 3 if feature_layers is None else len(feature_layers)
    declared = optional_size(raw, "num_aux_hidden_states", expected)
    if not found == expected == declared:
        raise ValueError(
            f"fc.weight fuses features of {found} boundaries, but there are {expected} layer ids"
            + (" by default" if feature_layers is None else "")
            + ("" if declared == expected else f", and num_aux_hidden_states is {declared}")
            + ": pass feature_layers"
        )


def _head(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], decoder: ModelConfig) -> DraftHead:
    """The head that is there; what config.json says of its vocabulary counts only where the tensors do not."""
    divisor, declared = raw.get("lm_head_rank_divisor"), optional_size(raw, "draft_vocab_size", decoder.vocab_size)
    if "lm_head.weight" in shapes and not divisor:
        rows = shapes["lm_head.weight"][0]
        return FullHead() if rows == decoder.vocab_size else TrimmedHead(num_tokens=rows)
    if declared != decoder.vocab_size:
        why = "cannot be had with lm_head_rank_divisor" if divisor else "needs an lm_head.weight, and there is none"
        raise ValueError(f"a pruned vocabulary (draft_vocab_size {declared} of {decoder.vocab_size}) {why}")
    if not divisor:
        return FullHead(shared=True)
    if not isinstance(divisor, int) or isinstance(divisor, bool) or divisor < 2:
        raise ValueError(f"lm_head_rank_divisor should be an int of at least 2, got {divisor!r}")
    if decoder.hidden_size % divisor:
        raise ValueError(f"lm_head_rank_divisor should divide hidden_size {decoder.hidden_size}, got {divisor}")
    return LowRankHead(rank=decoder.hidden_size // divisor)
