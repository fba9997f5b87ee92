"""config.json of published EAGLE-3 drafters: what is read, and what would be computed wrongly is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax import RopeConfig
from specjax.checkpoints.formats.drafters import open_drafter
from specjax.checkpoints.source import read_params
from specjax.drafting.heads import LowRankHead
from tests.checkpoints.published_drafters import (
    FFN,
    VOCAB_SIZE,
    WIDTH,
    eagle3_tensors,
    official_config,
    opened,
    random_tensor,
    speculators_config,
    target,
    write_drafter,
)

FULL = dict(draft_vocab_size=VOCAB_SIZE)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("ids", "where", "num_layers", "expected"),
    [
        ([2, 18, 33], "top", None, (2, 18, 33)),
        ([0, 3, 6], "top", 6, (0, 3, 6)),
        ([1, 3, 5], "top", 6, (1, 3, 5)),
        ([2, 16, 29], "nested", 32, (2, 16, 29)),  # the default, as inputs
        ([2, 30, 58], "nested", None, (2, 30, 58)),
        ([1, 15, 28], "nested", 32, (2, 16, 29)),  # the default, as outputs
        ([1, 29, 57], "nested", None, (2, 30, 58)),
        ([24, 30, 36], "nested", 36, (24, 30, 36)),  # the state after the last layer
        ([1, 17, 33], "nested", 36, (2, 18, 34)),
        (None, "top", None, None),
        (None, "nested", 32, (2, 16, 29)),
        (None, "top", 6, (2, 3, 4)),
        (None, "top", 2, (0, 1, 2)),
    ],
)
def test_layer_ids_are_boundaries_of_the_target(
    tmp_path: Path, ids: list[int] | None, where: str, num_layers: int | None, expected: tuple[int, ...] | None
) -> None:
    changes = {LAYER_IDS: ids} if where == "top" else dict(eagle_config={LAYER_IDS: ids, "use_aux_hidden_state": True})
    folder = write_drafter(tmp_path, official_config(**changes), eagle3_tensors())
    assert opened(folder, target=None if num_layers is None else target(num_layers)).config.feature_layers == expected
    assert opened(folder, feature_layers=(1, 3, 5)).config.feature_layers == (1, 3, 5)


def test_layer_ids_that_fit_both_conventions_or_no_target_are_refused(tmp_path: Path) -> None:
    cases = [
        (dict(eagle_config={LAYER_IDS: [4, 20, 40]}), {}, r"pass feature_layers=\(4, 20, 40\) or feature_layers=\(5, 21, 41\)"),
        (dict(eagle_config={LAYER_IDS: [2, 16, 29]}, **{LAYER_IDS: [3, 17, 30]}), {}, "at the top level is .*, in eagle_config"),
        ({LAYER_IDS: [-1, 2, 3]}, {}, "should hold layers from 0 on"),
        ({LAYER_IDS: [2, 16]}, {}, "fuses features of 3 boundaries, but there are 2 layer ids: pass feature_layers"),
        (dict(num_aux_hidden_states=2), {}, "num_aux_hidden_states is 2"),
        ({LAYER_IDS: [2, 16, 29]}, dict(target=target(16)), "boundaries from 0 to the target's 16"),
        ({}, dict(target=target(1)), "a target of 1 layers has only 2"),
        ({}, dict(target=target(vocab_size=97)), "vocabulary of 96 tokens, the target has 97"),
        (dict(target_hidden_size=64), {}, "fc.weight takes 96 features, no multiple"),
    ]
    for changes, options, message in cases:
        with pytest.raises(ValueError, match=message):
            open_drafter(write_drafter(tmp_path, official_config(**changes), eagle3_tensors()), **options)
    # Converted drafters are published with ids of the other convention.
    folder = write_drafter(tmp_path, speculators_config(**{LAYER_IDS: [1, 46, 90]}), eagle3_tensors(first_layer="layers.0"))
    with pytest.warns(UserWarning, match=r"pass feature_layers=\(2, 47, 91\)"):
        assert opened(folder).config.feature_layers == (1, 46, 90)


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, RopeConfig()),
        (dict(rope_theta=500.0), RopeConfig(theta=500.0)),
        (dict(rope_scaling=dict(type="linear", factor=2.0)), RopeConfig(rope_type="linear", factor=2.0)),
        (dict(rope_theta=500.0, rope_scaling=YARN), RopeConfig(theta=500.0, **YARN)),
        (dict(rope_theta=500.0, rope_parameters=dict(rope_type="default", rope_theta=7.0)), RopeConfig(theta=7.0)),
        (dict(rope_parameters=YARN | dict(rope_theta=7.0)), RopeConfig(theta=7.0, **YARN)),
    ],
)
def test_the_rotary_embedding_is_the_drafters_own_in_every_layout(tmp_path: Path, fields: dict[str, Any], expected: RopeConfig) -> None:
    theirs = target(rope=RopeConfig(theta=1e6))
    source = opened(write_drafter(tmp_path / "a", official_config(**fields), eagle3_tensors()), target=theirs)
    assert source.config.decoder.rope == expected
    raw = speculators_config()
    raw["transformer_layer_config"] = {**official_config(draft_vocab_size=...), **fields}
    source = opened(write_drafter(tmp_path / "b", raw, eagle3_tensors(first_layer="layers.0")), target=theirs)
    assert source.config.decoder.rope == expected


def test_fields_of_eagle_3_1_are_read_where_they_are_written(tmp_path: Path) -> None:
    norms = {f"fc_norm.{index}.weight": random_tensor("norm", (WIDTH,), seed=index) for index in range(3)}
    input_norm = {"input_norm.weight": random_tensor("norm", (3 * WIDTH,), seed=9)}
    flat = opened(write_drafter(tmp_path / "a", official_config(fc_norm=True, norm_output=True), eagle3_tensors() | norms)).config
    assert (flat.fc_norm, flat.norm_before_fc, flat.norm_before_residual, flat.norm_output) == (True, False, False, True)
    nvidia = dict(eagle_config=dict(norm_before_fc=True, return_hidden_post_norm=True))
    nested = opened(write_drafter(tmp_path / "b", official_config(**nvidia), eagle3_tensors() | input_norm)).config
    assert (nested.fc_norm, nested.norm_before_fc, nested.norm_before_residual, nested.norm_output) == (False, True, False, True)
    params = read_params(opened(tmp_path / "a"), "float32")
    np.testing.assert_array_equal(params["fc_norm_2"]["scale"], norms["fc_norm.2.weight"])
    # A tensor without its flag would otherwise be left out of the computation.
    for tensors in (norms, input_norm):
        with pytest.raises(ValueError, match="Unmapped source tensors: .*norm"):
            opened(write_drafter(tmp_path / "c", official_config(), eagle3_tensors() | tensors))
    with pytest.raises(ValueError, match=r"Parameters left unfilled: fc_norm_0.scale \(from fc_norm.0.weight\)"):
        opened(write_drafter(tmp_path / "c", official_config(fc_norm=True), eagle3_tensors()))


def test_query_norms_biases_windows_and_more_layers_are_read(tmp_path: Path) -> None:
    tensors = eagle3_tensors(num_layers=2, first_layer="layers.0", head_dim=16)
    for layer in ("layers.0", "layers.1"):
        tensors |= {f"{layer}.self_attn.{name}_norm.weight": random_tensor("norm", (16,), seed=1) for name in "qk"}
        tensors |= {
            f"{layer}.self_attn.{name}_proj.bias": random_tensor("b", (size,), seed=2)
            for name, size in zip("qkv", (64, 32, 32), strict=True)
        }
        tensors |= {
            f"{layer}.mlp.{name}_proj.bias": random_tensor("b", (size,), seed=3)
            for name, size in (("gate", FFN), ("up", FFN), ("down", WIDTH))
        }
    changes = dict(num_hidden_layers=2, head_dim=16, attention_bias=True, mlp_bias=True, sliding_window=8)
    raw = official_config(**changes, layer_types=["sliding_attention", "full_attention"])
    decoder = opened(write_drafter(tmp_path, raw, tensors)).config.decoder
    assert (decoder.num_layers, decoder.head_dim, decoder.qk_norm, decoder.qkv_bias, decoder.output_bias) == (2, 16, "head", True, False)
    assert decoder.layer_windows == (8, None)
    assert decoder.mlp_bias


def test_speculators_leaves_out_what_equals_its_classes_defaults(tmp_path: Path) -> None:
    raw = speculators_config()
    layer = raw["transformer_layer_config"]
    raw["transformer_layer_config"] = {
        name: layer[name]
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "num_hidden_layers")
    }
    decoder = opened(write_drafter(tmp_path, raw, eagle3_tensors(first_layer="layers.0"))).config.decoder
    assert (decoder.rms_norm_eps, decoder.max_position_embeddings, decoder.rope) == (1e-6, 2048, RopeConfig())


@pytest.mark.parametrize("divisor", [2, 4, WIDTH])
def test_the_low_rank_head_is_read(tmp_path: Path, divisor: int) -> None:
    raw = official_config(lm_head_rank_divisor=divisor, **FULL)
    source = opened(write_drafter(tmp_path, raw, eagle3_tensors(rank=WIDTH // divisor)))
    assert source.config.head == LowRankHead(rank=WIDTH // divisor)
    head = read_params(source, "float32")["draft_head"]
    assert (head["down"].shape, head["up"].shape) == ((WIDTH // divisor, WIDTH), (VOCAB_SIZE, WIDTH // divisor))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lm_head_rank_divisor=1), "lm_head_rank_divisor should be an int of at least 2, got 1"),
        (dict(lm_head_rank_divisor=2.0), "lm_head_rank_divisor should be an int"),
        (dict(lm_head_rank_divisor=3), "lm_head_rank_divisor should divide hidden_size 32, got 3"),
        (dict(lm_head_rank_divisor=64), "lm_head_rank_divisor should divide hidden_size 32, got 64"),
        (dict(lm_head_rank_divisor=4, draft_vocab_size=40), "a pruned vocabulary .* cannot be had with lm_head_rank_divisor"),
        (dict(lm_head_rank_divisor=8), r"lm_head.down.weight should have shape \(4, 32\) by the configuration, got \(8, 32\)"),
        ({}, "Unmapped source tensors: lm_head.down.weight, lm_head.up.weight"),
    ],
)
def test_bad_ranks_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened(write_drafter(tmp_path, official_config(**FULL | changes), eagle3_tensors(rank=8)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(some_new_norm=True), "config.json sets some_new_norm = True, which is not supported"),
        (dict(embedding_multiplier=12.0), "embedding_multiplier = 12.0"),
        (dict(num_local_experts=8), "num_local_experts = 8"),
        (dict(eagle_config=dict(eh_proj_before_attn=True)), "eagle_config sets eh_proj_before_attn"),
        (dict(eagle_config=dict(use_mtp_layernorm=True)), "eagle_config sets use_mtp_layernorm"),
        (dict(eagle_config=dict(use_aux_hidden_state=False)), "use_aux_hidden_state=false"),
        (dict(eagle_config=dict(use_last_layernorm=False)), "eagle_config.use_last_layernorm=false"),
        (dict(eagle_config=dict(parallel_draft_step=4)), "parallel_draft_step = 4"),
        (dict(eagle_config=dict(next_layer_regular=False), num_hidden_layers=2), "next_layer_regular=false"),
        (dict(eagle_config=dict(norm_output=True), norm_output=False), "norm_output is both true and false"),
        (dict(fc_norm=True, norm_before_fc=True), "exclude each other"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu'"),
        (dict(model_type="gemma3_text"), "model_type 'gemma3_text'"),
        (dict(quantization_config=dict(quant_method="fp8")), "quantization_config"),
        (dict(use_sliding_window=True, sliding_window=8), "sliding_window needs layer_types"),
        (dict(layer_types=["chunked_attention"]), "layer_types should hold"),
        (dict(layer_types=["sliding_attention"], sliding_window=8, use_sliding_window=False), "use_sliding_window is false"),
        (dict(rope_scaling=dict(type="mystery", factor=2.0)), "rotary embedding of type 'mystery'"),
        (dict(speculators_model_type="dflash"), "speculators_model_type 'dflash'"),
        (dict(hidden_size=...), "hidden_size"),
        (dict(vocab_size=...), "vocab_size"),
    ],
)
def test_settings_that_change_the_computation_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_drafter(tmp_path / "drafter", official_config(**changes), eagle3_tensors())
    with pytest.raises(ValueError, match=message) as caught:
        opened(folder)
    assert str(caught.value).startswith("drafter: ")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (speculators_config(norm_before_residual=...), "norm_before_residual is missing: readers of this format disagree"),
        (
            speculators_config(transformer_layer_config=dict(model_type="deepseek_v3")),
            "transformer_layer_config of model_type 'deepseek_v3'",
        ),
        (
            speculators_config(transformer_layer_config=dict(hidden_size=WIDTH, logit_scale=2.0)),
            "transformer_layer_config sets logit_scale",
        ),
    ],
)
def test_speculators_settings_are_refused_by_name(tmp_path: Path, raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_drafter(write_drafter(tmp_path, raw, eagle3_tensors(first_layer="layers.0")))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", 5),
        ("eagle_config", "x"),
        ("transformer_layer_config", [1]),
        (LAYER_IDS, 3),
        ("rms_norm_eps", [1e-5]),
        ("norm_output", "false"),
        ("layer_types", 1),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path: Path, field: str, value: Any) -> None:
    folder = write_drafter(tmp_path, official_config(**{field: value}), eagle3_tensors())
    with pytest.raises(ValueError, match=field):
        opened(folder)


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight"])
def test_a_matrix_without_axes_is_named(tmp_path: Path, name: str) -> None:
    folder = write_drafter(tmp_path, official_config(), eagle3_tensors() | {name: np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=f"tensor {name} should have two axes"):
        opened(folder)
