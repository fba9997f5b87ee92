"""Published drafters: every layout loads into the same drafter, and what would be computed wrongly is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax import ModelConfig, RopeConfig
from specjax.checkpoints.draft_vocabulary import target_ids
from specjax.checkpoints.drafters import open_drafter
from specjax.checkpoints.source import WeightSource, check_source, read_params
from tests.checkpoints.published_drafters import (
    DRAFT_VOCAB_SIZE,
    FFN,
    KEPT_IDS,
    VOCAB_SIZE,
    WIDTH,
    eagle3_tensors,
    official_config,
    random_tensor,
    speculators_config,
    write_drafter,
)

FULL = dict(draft_vocab_size=VOCAB_SIZE)


def opened(folder: Path, **options: Any) -> WeightSource:
    source = open_drafter(folder, **options)
    assert source is not None
    check_source(source)
    return source


def target(num_layers: int = 32, **changes: Any) -> ModelConfig:
    sizes = dict(vocab_size=VOCAB_SIZE, hidden_size=WIDTH, intermediate_size=FFN, num_heads=4, num_kv_heads=2, head_dim=8)
    return ModelConfig(**sizes | dict(num_layers=num_layers, max_position_embeddings=128) | changes)


def assert_same(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert_same(value, right[name]) if isinstance(value, dict) else np.testing.assert_array_equal(value, right[name])


def test_every_spelling_of_the_names_gives_the_same_drafter(tmp_path: Path) -> None:
    official = opened(write_drafter(tmp_path / "official", official_config(), eagle3_tensors()))
    expected = read_params(official, "float32")
    assert official.name == "official"
    assert official.format == "safetensors"
    layers_0 = eagle3_tensors(first_layer="layers.0")
    prefixed = {name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}": tensor for name, tensor in layers_0.items()}
    spellings = {
        "speculators": (speculators_config(), layers_0 | {"verifier_norm.weight": np.ones(WIDTH, np.float32)}),
        "a prefix on all but the head": (official_config(), prefixed),
        "without t2d, as Model-Optimizer": (official_config(), {name: value for name, value in layers_0.items() if name != "t2d"}),
        "with rotary frequencies": (
            official_config(),
            eagle3_tensors() | {"midlayer.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)},
        ),
    }
    for name, (raw, tensors) in spellings.items():
        source = opened(write_drafter(tmp_path / name, raw, tensors))
        assert source.config == official.config
        assert_same(read_params(source, "float32"), expected)


def test_a_drafter_in_shards_is_read(tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    folder = write_drafter(tmp_path, official_config(), {name: value for name, value in tensors.items() if "mlp" not in name})
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    write_drafter(folder, official_config(), {name: value for name, value in tensors.items() if "mlp" in name}, file="b.safetensors")
    weight_map = {name: "b.safetensors" if "mlp" in name else "a.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(opened(folder).files) == 2


def test_a_torch_drafter_in_shards_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(np.ascontiguousarray(tensor)) for name, tensor in eagle3_tensors().items()}
    weight_map = {name: f"pytorch_model-0000{1 + ('mlp' in name)}-of-00002.bin" for name in tensors}
    for file in set(weight_map.values()):
        torch.save({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(official_config()))
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = opened(tmp_path)
    assert source.format == "torch"
    assert len(source.files) == 2
    expected = read_params(opened(write_drafter(tmp_path / "other", official_config(), eagle3_tensors())), "bfloat16")
    assert_same(read_params(source, "bfloat16"), expected)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map | {"x": source.files[0].name}}))
    with pytest.raises(ValueError, match="promises tensor x in pytorch_model-00001-of-00002.bin"):
        open_drafter(tmp_path)


def test_what_is_no_drafter_is_left_to_others(tmp_path: Path) -> None:
    assert open_drafter(tmp_path) is None
    raw = dict(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=8)
    assert open_drafter(write_drafter(tmp_path, raw, {"model.embed_tokens.weight": np.zeros((8, 4), np.float32)})) is None
    (tmp_path / "model.safetensors").unlink()
    assert open_drafter(tmp_path) is None


def test_embedding_and_head_are_the_drafters_own_where_the_file_has_them(tmp_path: Path) -> None:
    neither = opened(write_drafter(tmp_path / "a", official_config(**FULL), eagle3_tensors(draft_vocab_size=None)))
    assert (neither.config.own_embedding, neither.config.own_head) == (False, False)
    both = opened(write_drafter(tmp_path / "b", official_config(**FULL), eagle3_tensors(draft_vocab_size=VOCAB_SIZE, embedding=True)))
    assert (both.config.own_embedding, both.config.own_head) == (True, True)
    assert "draft_to_target" not in read_params(both, "float32")
    wide = eagle3_tensors(target_width=64, embedding=True)
    other_width = opened(write_drafter(tmp_path / "c", official_config(target_hidden_size=64), wide))
    assert read_params(other_width, "float32")["fc"].shape == (192, WIDTH)


def test_the_head_is_as_large_as_in_the_file_whatever_config_json_says(tmp_path: Path) -> None:
    for declared in (..., None, DRAFT_VOCAB_SIZE, VOCAB_SIZE):
        source = opened(write_drafter(tmp_path, official_config(draft_vocab_size=declared), eagle3_tensors()), target=target())
        assert source.config.draft_vocab_size == DRAFT_VOCAB_SIZE
        assert read_params(source, "float32")["lm_head"].shape == (DRAFT_VOCAB_SIZE, WIDTH)


def test_a_trivial_map_of_the_whole_vocabulary_is_the_identity(tmp_path: Path) -> None:
    tensors = eagle3_tensors(draft_vocab_size=VOCAB_SIZE)
    tensors |= {"d2t": np.zeros(VOCAB_SIZE, np.int64), "t2d": np.ones(VOCAB_SIZE, bool)}
    assert not opened(write_drafter(tmp_path, official_config(**FULL), tensors)).config.trimmed
    tensors["d2t"][:2] = 1, -1
    with pytest.raises(ValueError, match="should be the identity"):
        open_drafter(write_drafter(tmp_path, official_config(**FULL), tensors))


@pytest.mark.parametrize("with_t2d", [True, False])
def test_offsets_and_absolute_ids_give_the_same_drafts(tmp_path: Path, with_t2d: bool) -> None:
    tensors = eagle3_tensors()
    if not with_t2d:
        del tensors["t2d"]
    found = []
    for name, d2t in (("offsets", KEPT_IDS - np.arange(DRAFT_VOCAB_SIZE)), ("absolute", KEPT_IDS)):
        source = opened(write_drafter(tmp_path / name, official_config(), tensors | {"d2t": d2t.astype(np.int32)}))
        found.append(read_params(source, "float32")["draft_to_target"])
        assert found[-1].dtype == np.int32
    np.testing.assert_array_equal(found, [KEPT_IDS] * 2)


def test_a_map_that_can_be_read_in_two_ways_is_refused_until_the_reading_is_named(tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    absolute = np.arange(0, DRAFT_VOCAB_SIZE)  # as offsets: every second token
    tensors["d2t"] = absolute + 1
    del tensors["t2d"]
    folder = write_drafter(tmp_path, official_config(), tensors)
    with pytest.raises(ValueError, match="pass draft_ids='offsets' .* or draft_ids='absolute'"):
        open_drafter(folder)
    for reading, expected in (("offsets", 2 * absolute + 1), ("absolute", absolute + 1)):
        ids = read_params(opened(folder, draft_ids=reading), "float32")["draft_to_target"]
        np.testing.assert_array_equal(ids, expected)
    with pytest.raises(ValueError, match="draft_ids must be one of"):
        open_drafter(folder, draft_ids="relative")


@pytest.mark.parametrize(
    ("d2t", "options", "message"),
    [
        ([0, 5, 9], {}, "as offsets, token 11 lies outside the 10 of the vocabulary; as absolute, .*"),
        ([-1, 0, 0], {}, "as offsets, token -1 lies outside"),
        ([1, 0, 1], {}, "as offsets, two rows stand for the same token; as absolute, two rows"),
        ([9, 9, 9], dict(reading="absolute"), "target's vocabulary: as absolute, two rows"),
        ([0, 0, 5], dict(kept=np.isin(np.arange(10), [0, 1, 8])), "as offsets, the tokens are not those of t2d"),
        ([0, 0, 5], dict(kept=np.ones(9, bool)), r"t2d should have shape \(10,\)"),
    ],
)
def test_maps_into_nowhere_are_refused(d2t: list[int], options: dict[str, Any], message: str) -> None:
    if d2t == [0, 5, 9]:
        options = options | dict(kept=np.isin(np.arange(10), [0, 1, 2]))
    with pytest.raises(ValueError, match=message):
        target_ids(np.asarray(d2t), 10, **options)


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
    assert source.config.lm_head_rank == WIDTH // divisor
    params = read_params(source, "float32")
    assert (params["lm_head_down"].shape, params["lm_head_up"].shape) == ((WIDTH // divisor, WIDTH), (VOCAB_SIZE, WIDTH // divisor))


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


def test_tensors_that_fit_nowhere_or_are_missing_are_refused_by_name(tmp_path: Path) -> None:
    complete, extra = eagle3_tensors(), np.ones(4, np.float32)
    cases = [
        ({"mask_hidden": extra}, (), r"a parallel drafter \(P-EAGLE\) \(tensor mask_hidden\)"),
        ({"parallel_draft_heads.0.medusa_layers.0.linear.weight": extra}, (), "parallel draft heads"),
        ({"midlayer.self_attn.kv_a_proj_with_mqa.weight": extra}, (), "multi-head latent attention"),
        ({"midlayer.self_attn.q_proj.weight_scale": extra}, (), "quantised weights"),
        ({"layers.0.mlp.up_proj.weight": extra}, (), "found midlayer and layers.0"),
        ({"fc.bias": extra}, (), "Unmapped source tensors: fc.bias"),
        ({"model.fc.weight": extra}, (), "both fc.weight and model.fc.weight"),
        ({"norm.weight": np.ones(4, np.float32)}, (), r"norm.weight should have shape \(32,\)"),
        ({"norm.weight": np.ones(WIDTH, np.int64)}, (), "norm.weight should be BF16 or F16 or F32 or F64, got I64"),
        ({"d2t": extra}, (), "d2t should hold 40 integers"),
        ({}, ("norm.weight",), r"Parameters left unfilled: final_norm.scale \(from norm.weight\)"),
        ({}, ("d2t",), r"draft_to_target \(from d2t\)"),
        ({}, ("fc.weight",), "a drafter without fc"),
        ({}, ("lm_head.weight",), r"a pruned vocabulary \(draft_vocab_size 40 of 96\) needs an lm_head.weight"),
        ({}, ("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"), "EAGLE and EAGLE-2 drafters are not supported"),
        ({}, tuple(name for name in complete if name.startswith("midlayer.")), "has a layer midlayer or layers.0, found neither"),
    ]
    for added, removed, message in cases:
        tensors = {name: tensor for name, tensor in (complete | added).items() if name not in removed}
        with pytest.raises(ValueError, match=message):
            opened(write_drafter(tmp_path, official_config(), tensors))


def medusa_tensors(num_heads: int = 2, *, head: bool = True) -> dict[str, np.ndarray]:
    shapes = {f"{index}.0.linear.weight": (WIDTH, WIDTH) for index in range(num_heads)}
    if head:
        shapes |= {f"{index}.1.weight": (VOCAB_SIZE, WIDTH) for index in range(num_heads)}
    return {name: random_tensor(name, shape, seed=index) for index, (name, shape) in enumerate(shapes.items())}


def test_medusa_heads_without_lm_heads_take_the_targets_vocabulary(tmp_path: Path) -> None:
    raw = dict(medusa_num_heads=2, medusa_num_layers=1, version="2")
    folder = write_drafter(tmp_path, raw, medusa_tensors(head=False), file="medusa_lm_head.safetensors")
    config = opened(folder, target=target()).config
    assert (config.own_head, config.block_bias, config.vocab_size) == (False, False, VOCAB_SIZE)
    with pytest.raises(ValueError, match="its vocabulary has to be known"):
        open_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        (dict(truncated_vocab_size=50), {}, "truncated_vocab_size = 50"),
        (dict(original_lm_head=True), {}, "original_lm_head = True"),
        (dict(logit_scale=0.5), {}, "logit_scale = 0.5"),
        (dict(medusa_num_heads=3), {}, "Parameters left unfilled: head_2.block_0"),
        (dict(medusa_num_layers=...), {}, "medusa_num_layers"),
        ({}, {"token_map": np.arange(4)}, "Unmapped source tensors: token_map"),
        ({}, {"heads.0.0.linear.weight": np.zeros((WIDTH, WIDTH), np.float32)}, "twice, under two names"),
    ],
)
def test_medusa_heads_that_compute_something_else_are_refused(
    tmp_path: Path, changes: dict[str, Any], tensors: dict[str, np.ndarray], message: str
) -> None:
    raw = {name: value for name, value in (dict(medusa_num_heads=2, medusa_num_layers=1) | changes).items() if value is not ...}
    with pytest.raises(ValueError, match=message):
        opened(write_drafter(tmp_path, raw, medusa_tensors() | tensors, file="medusa_lm_head.safetensors"))


def test_heads_for_another_target_or_without_weights_are_refused(tmp_path: Path) -> None:
    raw = dict(medusa_num_heads=2, medusa_num_layers=1)
    folder = write_drafter(tmp_path, raw, medusa_tensors(), file="medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match="hidden size 32 and 96 tokens, the target has 32 and 97"):
        open_drafter(folder, target=target(vocab_size=97))
    (folder / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ValueError, match="needs medusa_lm_head.safetensors, medusa_lm_head.pt or model.safetensors"):
        open_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hydra_head_arch="prefix-mlp"), "hydra_head_arch 'prefix-mlp' is not supported"),
        (dict(hydra_head_arch="eagle-attn"), "hydra_head_arch 'eagle-attn'"),
        (dict(hidden_state_offset=1), "hidden_state_offset = 1"),
        (dict(hydra_num_heads=2), "Parameters left unfilled: .*hydra_mlp.1"),
        (dict(grounded_heads=False), "res_connection"),
    ],
)
def test_hydra_heads_that_compute_something_else_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    shapes = {f"hydra_mlp.0.0.{name}": (WIDTH, 2 * WIDTH) for name in ("linear", "res_connection")} | {
        "hydra_lm_head.0": (VOCAB_SIZE, WIDTH)
    }
    tensors = {f"{name}.weight": random_tensor("w", shape, seed=1) for name, shape in shapes.items()}
    tensors |= {f"{name}.bias": random_tensor("b", shape[:1], seed=2) for name, shape in shapes.items()}
    raw = dict(hydra_head_arch="mlp", hydra_num_heads=1, hydra_num_layers=1, grounded_heads=True)
    assert opened(write_drafter(tmp_path / "a", raw, tensors, file="hydra_lm_head.safetensors")).config.grounded
    with pytest.raises(ValueError, match=message):
        opened(write_drafter(tmp_path / "b", raw | changes, tensors, file="hydra_lm_head.safetensors"))
