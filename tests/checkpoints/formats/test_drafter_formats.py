"""Published EAGLE-3 drafters: every layout loads into the same drafter, and tensors that do not fit are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.checkpoints.formats.draft_vocabulary import target_ids
from specjax.checkpoints.formats.drafters import open_drafter
from specjax.checkpoints.source import read_params
from specjax.drafting.heads import FullHead, TrimmedHead
from tests.checkpoints.published_drafters import (
    DRAFT_VOCAB_SIZE,
    KEPT_IDS,
    VOCAB_SIZE,
    WIDTH,
    eagle3_tensors,
    official_config,
    opened,
    speculators_config,
    target,
    write_drafter,
)

FULL = dict(draft_vocab_size=VOCAB_SIZE)


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
    assert (neither.config.own_embedding, neither.config.head) == (False, FullHead(shared=True))
    both = opened(write_drafter(tmp_path / "b", official_config(**FULL), eagle3_tensors(draft_vocab_size=VOCAB_SIZE, embedding=True)))
    assert (both.config.own_embedding, both.config.head) == (True, FullHead())
    assert read_params(both, "float32")["draft_head"].keys() == {"lm_head"}
    wide = eagle3_tensors(target_width=64, embedding=True)
    other_width = opened(write_drafter(tmp_path / "c", official_config(target_hidden_size=64), wide))
    assert read_params(other_width, "float32")["fc"].shape == (192, WIDTH)


def test_the_head_is_as_large_as_in_the_file_whatever_config_json_says(tmp_path: Path) -> None:
    for declared in (..., None, DRAFT_VOCAB_SIZE, VOCAB_SIZE):
        source = opened(write_drafter(tmp_path, official_config(draft_vocab_size=declared), eagle3_tensors()), target=target())
        assert source.config.head == TrimmedHead(num_tokens=DRAFT_VOCAB_SIZE)
        assert read_params(source, "float32")["draft_head"]["lm_head"].shape == (DRAFT_VOCAB_SIZE, WIDTH)


def test_a_trivial_map_of_the_whole_vocabulary_is_the_identity(tmp_path: Path) -> None:
    tensors = eagle3_tensors(draft_vocab_size=VOCAB_SIZE)
    tensors |= {"d2t": np.zeros(VOCAB_SIZE, np.int64), "t2d": np.ones(VOCAB_SIZE, bool)}
    assert opened(write_drafter(tmp_path, official_config(**FULL), tensors)).config.head == FullHead()
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
        found.append(read_params(source, "float32")["draft_head"]["token_ids"])
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
        ids = read_params(opened(folder, draft_ids=reading), "float32")["draft_head"]["token_ids"]
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
        ({}, ("d2t",), r"draft_head.token_ids \(from d2t\)"),
        ({}, ("fc.weight",), "a drafter without fc"),
        ({}, ("lm_head.weight",), r"a pruned vocabulary \(draft_vocab_size 40 of 96\) needs an lm_head.weight"),
        ({}, ("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"), "EAGLE and EAGLE-2 drafters are not supported"),
        ({}, tuple(name for name in complete if name.startswith("midlayer.")), "has a layer midlayer or layers.0, found neither"),
    ]
    for added, removed, message in cases:
        tensors = {name: tensor for name, tensor in (complete | added).items() if name not in removed}
        with pytest.raises(ValueError, match=message):
            opened(write_drafter(tmp_path, official_config(), tensors))
