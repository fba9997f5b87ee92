"""config.json of every supported family, rotary settings in every layout, and a clear refusal of what would run wrongly."""

from __future__ import annotations

import re
from typing import Any

import pytest

from specjax import MoEConfig, RopeConfig
from specjax.checkpoints.formats.families import model_config
from tests.checkpoints.sources import raw_config

LLAMA3 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
EXPERTS = dict(num_experts_per_tok=2, num_local_experts=4)


@pytest.mark.parametrize(
    "layout",
    [
        dict(rope_theta=500000.0, rope_scaling=LLAMA3),
        dict(rope_theta=500000.0, rope_scaling={"type" if key == "rope_type" else key: value for key, value in LLAMA3.items()}),
        dict(rope_theta=..., rope_parameters=dict(rope_theta=500000.0, **LLAMA3)),
        dict(rope_theta=500000.0, rope_parameters=LLAMA3),
    ],
    ids=["rope_scaling", "rope_scaling with type", "rope_parameters", "rope_parameters without theta"],
)
def test_all_layouts_of_the_rotary_settings_mean_the_same(layout: dict[str, Any]) -> None:
    assert model_config(raw_config(**layout)).rope == RopeConfig(theta=500000.0, **LLAMA3)


@pytest.mark.parametrize(
    "layout", [{}, dict(rope_scaling=None), dict(rope_theta=..., rope_parameters=dict(rope_theta=10000.0, rope_type="default"))]
)
def test_plain_rotary_settings(layout: dict[str, Any]) -> None:
    assert model_config(raw_config(**layout)).rope == RopeConfig(theta=10000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(architectures=["MambaForCausalLM"]),
            "MambaForCausalLM is not supported; supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3",
        ),
        (dict(architectures=None, model_type="gpt2"), "gpt2"),
        (dict(architectures=["LlamaForCausalLM"], model_type="mistral"), "names LlamaForCausalLM, but model_type is 'mistral'"),
        (dict(hidden_act="gelu"), "'gelu'"),
        (dict(architectures=["MistralForCausalLM"], model_type="mistral", mlp_bias=True), "mlp_bias=true is not supported for mistral"),
        (dict(architectures=["MixtralForCausalLM"], attention_bias=True), "attention_bias=true is not supported for mixtral"),
        (dict(layer_types=["full_attention", "sliding_attention"]), "sliding_attention is not supported for llama"),
        (dict(layer_types=["full_attention", "linear_attention"]), "layer_types with linear_attention is not supported"),
        (dict(layer_types=["full_attention"]), "layer_types in config.json should have num_hidden_layers = 2 entries, got 1"),
        (dict(architectures=["MistralForCausalLM"], sliding_window=0), "positive int, got 0"),
        (dict(rope_scaling=dict(rope_type="ntk-by-parts", factor=4.0)), "'ntk-by-parts'"),
        (dict(rope_scaling=dict(type="linear")), "rope_scaling lacks the field 'factor'"),
        (dict(rope_scaling=dict(type="dynamic", factor=0.5)), "RopeConfig.factor must be at least 1, got 0.5"),
        (dict(rope_scaling=dict(rope_type="longrope", factor=4.0, long_factor=[1.0])), "rope_scaling lacks the field 'short_factor'"),
        (
            dict(rope_scaling=dict(rope_type="longrope", factor=4.0, short_factor=[1.0], long_factor=[1.0])),
            "head_dim / 2 = 16 numbers, got 1",
        ),
        (dict(rope_scaling=dict(type="default", mrope_section=[8, 4, 4])), "mrope_section"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "rope_scaling lacks the field 'low_freq_factor'"),
        (dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), "each kind of layer"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(quantization_config=dict(quant_method="awq")), "'awq'"),
        (dict(num_hidden_layers=...), "config.json lacks the field 'num_hidden_layers'"),
        (dict(rms_norm_eps=None), "'rms_norm_eps'"),
        (dict(num_key_value_heads=3), "got 4 and 3"),
        (dict(num_attention_heads=0), "num_attention_heads in config.json should be a positive int, got 0"),
        (dict(hidden_size="64"), "hidden_size in config.json should be a positive int, got '64'"),
    ],
)
def test_what_would_run_wrongly_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        model_config(raw_config(**changes))


def test_qwen3_needs_its_own_head_size_and_qwen2_its_kv_heads() -> None:
    with pytest.raises(ValueError, match="'head_dim'"):
        model_config(raw_config("qwen3", head_dim=...))
    with pytest.raises(ValueError, match="'num_key_value_heads'"):
        model_config(raw_config("qwen2", num_key_value_heads=...))
    config = model_config(raw_config("llama", num_key_value_heads=..., head_dim=...))
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


def test_each_family_has_its_own_fields() -> None:
    raw = raw_config(architectures=["GptOssForCausalLM"], num_hidden_layers=3, rope_theta=..., rope_scaling=LLAMA3, **EXPERTS)
    gpt_oss = model_config(raw)
    assert gpt_oss.layer_windows == (128, None, 128)
    assert (gpt_oss.attention_sinks, gpt_oss.qkv_bias, gpt_oss.output_bias, gpt_oss.mlp_bias) == (True,) * 4
    assert gpt_oss.activation == "clamped_swiglu"
    assert gpt_oss.rope.theta == 150000.0
    assert gpt_oss.moe == MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=96, router_bias=True)
    olmoe = model_config(raw_config(architectures=["OlmoeForCausalLM"], clip_qkv=8.0, num_experts=64, num_experts_per_tok=8))
    assert (olmoe.qk_norm, olmoe.clip_qkv, olmoe.moe.normalise) == ("projection", 8.0, False)
    mixtral = model_config(raw_config(architectures=["MixtralForCausalLM"], rope_theta=..., **EXPERTS))
    assert (mixtral.rope.theta, mixtral.moe.normalise, mixtral.layer_windows) == (1e6, True, ())
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True, num_hidden_layers=4)
    qwen = model_config(raw_config(architectures=["Qwen3MoeForCausalLM"], decoder_sparse_step=2, mlp_only_layers=[3], **moe))
    assert qwen.moe.dense_layers == (0, 2, 3)
    assert [qwen.has_experts(layer) for layer in range(4)] == [False, True, False, False]


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("MistralForCausalLM", {}, (4096,) * 2),
        ("MistralForCausalLM", dict(sliding_window=None), ()),
        ("MistralForCausalLM", dict(sliding_window=7), (7, 7)),
        ("Qwen2ForCausalLM", dict(sliding_window=7), ()),
        ("Qwen2ForCausalLM", dict(sliding_window=7, use_sliding_window=True), ()),  # the windowed layers begin at 28
        ("Qwen2ForCausalLM", dict(sliding_window=7, use_sliding_window=True, max_window_layers=1), (None, 7)),
        ("Qwen3ForCausalLM", dict(use_sliding_window=True, max_window_layers=0), (4096, 4096)),
        (
            "Qwen3ForCausalLM",
            dict(use_sliding_window=True, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
            (5, None),
        ),
        ("LlamaForCausalLM", dict(sliding_window=7), ()),
    ],
)
def test_windows_are_those_of_the_family(family: str, changes: dict[str, Any], expected: tuple) -> None:
    assert model_config(raw_config(architectures=[family], **changes)).layer_windows == expected


def test_a_sliding_layer_without_a_window_is_refused() -> None:
    layers = dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=None)
    with pytest.raises(ValueError, match="needs a sliding_window in config.json that is a positive int, got None"):
        model_config(raw_config("qwen3", **layers))


def test_a_stretched_window_may_be_used() -> None:
    # Switched on as Qwen's model cards say: the settings are added, max_position_embeddings stays.
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=256)
    config = model_config(raw_config(rope_scaling=yarn))
    assert config.max_position_embeddings == 1024
    assert config.rope.attention_factor == pytest.approx(1.1386294)
    dynamic = model_config(raw_config(rope_scaling=dict(type="dynamic", factor=2.0)))
    assert (dynamic.max_position_embeddings, dynamic.rope.original_max_position_embeddings) == (512, 256)
    assert model_config(raw_config(rope_scaling=dict(type="linear", factor=2.0))).max_position_embeddings == 256


def test_an_old_name_and_defaults_of_longrope_and_yarn() -> None:
    factors = dict(short_factor=[1.0] * 16, long_factor=[4.0] * 16)
    raw = raw_config(rope_scaling=dict(type="su", **factors), original_max_position_embeddings=64)
    rope = model_config(raw).rope
    assert (rope.rope_type, rope.original_max_position_embeddings) == ("longrope", 64)
    assert rope.attention_factor == pytest.approx((1 + 1 / 3) ** 0.5)  # log(4) / log(64)
    yarn = model_config(raw_config(rope_scaling=dict(rope_type="yarn", factor=None, original_max_position_embeddings=64))).rope
    assert (yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (4.0, 32.0, 1.0, True)


def test_mxfp4_is_accepted_for_gpt_oss_alone() -> None:
    quantised = dict(quantization_config=dict(quant_method="mxfp4"), rope_scaling=LLAMA3, **EXPERTS)
    assert model_config(raw_config(architectures=["GptOssForCausalLM"], **quantised)).moe is not None
    with pytest.raises(ValueError, match="quantised with 'mxfp4' are not supported"):
        model_config(raw_config(**quantised))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", [["LlamaForCausalLM"]]),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1e-5),
        ("rope_theta", "10000"),
        ("rope_scaling", "yarn"),
        ("layer_types", 5),
        ("layer_types", [1, 2]),
        ("quantization_config", "fp8"),
        ("tie_word_embeddings", "false"),
        ("num_hidden_layers", 10**30),
    ],
)
def test_a_value_of_another_kind_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        model_config(raw_config(**{field: value}))


@pytest.mark.parametrize(
    ("field", "value"), [("factor", [4.0]), ("factor", float("inf")), ("short_factor", 1.0), ("original_max_position_embeddings", 0)]
)
def test_a_rotary_setting_of_another_kind_is_named(field: str, value: Any) -> None:
    settings = dict(rope_type="longrope", factor=4.0, short_factor=[1.0] * 16, long_factor=[2.0] * 16, original_max_position_embeddings=64)
    with pytest.raises(ValueError, match=field):
        model_config(raw_config(rope_scaling=settings | {field: value}))


def test_gpt_oss_without_rotary_settings_is_refused() -> None:
    with pytest.raises(ValueError, match="gpt_oss needs rope_scaling or rope_parameters"):
        model_config(raw_config(architectures=["GptOssForCausalLM"], **EXPERTS))
