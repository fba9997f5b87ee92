"""Hugging Face folders: every tensor in its place, and a clear refusal of what does not fit."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import warnings
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.checkpoints.formats import hugging_face
from specjax.checkpoints.formats.any_source import open_any_source
from specjax.checkpoints.source import check_source, read_params
from tests.checkpoints.published_drafters import eagle3_tensors, official_config, write_drafter
from tests.checkpoints.sources import random_tensors, raw_config, write_folder


def opened(folder: Path, **options: Any) -> Any:
    source = hugging_face.open_source(folder, **options)
    check_source(source)
    return source


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_tensor_is_found_at_its_place(tmp_path: Path, family: str, num_shards: int) -> None:
    raw = raw_config(family)
    tensors = random_tensors(raw)
    source = opened(write_folder(tmp_path / "model", raw, tensors, num_shards=num_shards))
    params = read_params(source, "float32")
    head_dim, layer, theirs = source.config.head_dim, params["layer_1"], "model.layers.1"
    for head in range(4):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        query = tensors[f"{theirs}.self_attn.q_proj.weight"][rows].T
        np.testing.assert_array_equal(layer["attention"]["qkv"][:, head // 2, head % 2], query)
    for head in range(2):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        for slot, name in ((2, "k_proj"), (3, "v_proj")):
            np.testing.assert_array_equal(layer["attention"]["qkv"][:, head, slot], tensors[f"{theirs}.self_attn.{name}.weight"][rows].T)
            if family == "qwen2":
                np.testing.assert_array_equal(layer["attention"]["qkv_bias"][head, slot], tensors[f"{theirs}.self_attn.{name}.bias"][rows])
    if family == "qwen3":
        np.testing.assert_array_equal(layer["attention"]["query_norm"]["scale"], tensors[f"{theirs}.self_attn.q_norm.weight"])
        np.testing.assert_array_equal(layer["attention"]["key_norm"]["scale"], tensors[f"{theirs}.self_attn.k_norm.weight"])
    np.testing.assert_array_equal(layer["attention"]["output"], tensors[f"{theirs}.self_attn.o_proj.weight"].T)
    np.testing.assert_array_equal(layer["mlp"]["gate_up"][:, 0], tensors[f"{theirs}.mlp.gate_proj.weight"].T)
    np.testing.assert_array_equal(layer["mlp"]["gate_up"][:, 1], tensors[f"{theirs}.mlp.up_proj.weight"].T)
    np.testing.assert_array_equal(params["lm_head"], tensors["lm_head.weight"])
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == sum(math.prod(tensor.shape) for tensor in tensors.values())


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_leaf_has_the_dtype_asked_for_after_one_rounding(tmp_path: Path, stored: Any, dtype: str) -> None:
    raw = raw_config()
    # Values that float16 cannot hold: a way through it would show.
    tensors = {name: tensor.astype(stored) for name, tensor in random_tensors(raw).items()}
    if stored != np.float16:
        tensors["model.norm.weight"] = (np.arange(1, 65) * 3e37 / 16).astype(stored)
    params = read_params(opened(write_folder(tmp_path, raw, tensors)), dtype)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {dtype}
    np.testing.assert_array_equal(params["final_norm"]["scale"], tensors["model.norm.weight"].astype(params["embedding"].dtype))
    np.testing.assert_array_equal(params["embedding"], tensors["model.embed_tokens.weight"].astype(params["embedding"].dtype))


def test_unmapped_and_unfilled_are_listed_together(tmp_path: Path) -> None:
    raw = raw_config()
    tensors = {f"language_model.{name}": tensor for name, tensor in random_tensors(raw).items()}
    with pytest.raises(ValueError, match=r"Unmapped source tensors: language_model\.\S+.*Parameters left unfilled: embedding \(from "):
        opened(write_folder(tmp_path, raw, tensors))


def test_one_missing_tensor_is_named_with_its_parameter(tmp_path: Path) -> None:
    raw = raw_config()
    tensors = random_tensors(raw)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(
        ValueError,
        match=r"tensors: none\. Parameters left unfilled: layer_1\.attention\.qkv \(from model\.layers\.1\.self_attn\.k_proj\.weight\)",
    ):
        opened(write_folder(tmp_path, raw, tensors))


def test_a_bias_on_the_output_projection_is_not_dropped(tmp_path: Path) -> None:
    raw = raw_config()
    tensors = random_tensors(raw) | {"model.layers.0.self_attn.o_proj.bias": np.ones(64, np.float32)}
    with pytest.raises(ValueError, match=r"Unmapped source tensors: model\.layers\.0\.self_attn\.o_proj\.bias"):
        opened(write_folder(tmp_path, raw, tensors))


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    raw = raw_config()
    tensors = random_tensors(raw) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    opened(write_folder(tmp_path, raw, tensors))


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    raw = raw_config()
    tensors = random_tensors(raw) | {"model.layers.0.mlp.up_proj.weight": np.ones((95, 64), np.float32)}
    with pytest.raises(
        ValueError, match=re.escape("model.layers.0.mlp.up_proj.weight should have shape (96, 64) by the configuration, got (95, 64)")
    ):
        opened(write_folder(tmp_path, raw, tensors))


def test_an_integer_tensor_is_refused(tmp_path: Path) -> None:
    raw = raw_config()
    tensors = random_tensors(raw) | {"model.layers.0.mlp.up_proj.weight": np.ones((96, 64), np.int8)}
    with pytest.raises(ValueError, match=r"up_proj\.weight should be BF16 or F16 or F32 or F64, got I8: is the checkpoint quantised"):
        read_params(opened(write_folder(tmp_path, raw, tensors)), "float32")


@pytest.mark.parametrize("share_of_file", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, share_of_file: float) -> None:
    raw = raw_config()
    file = write_folder(tmp_path, raw, random_tensors(raw)) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share_of_file)])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        opened(tmp_path)


def test_a_missing_shard_and_a_shard_without_its_tensor_are_named(tmp_path: Path) -> None:
    raw = raw_config()
    tensors = random_tensors(raw)
    write_folder(tmp_path, raw, tensors, num_shards=2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    save_file({"other": np.ones(1, np.float32)}, second)
    with pytest.raises(ValueError, match=r"promises tensor \S+ in model-00002-of-00002"):
        opened(tmp_path)
    second.unlink()
    with pytest.raises(ValueError, match=r"files that are not there: model-00002-of-00002\.safetensors"):
        opened(tmp_path)


@pytest.mark.parametrize("weight_map", [[], {}, "a", {"a": 5}, {"a": "../other/model.safetensors"}, {"a": "/etc/passwd"}, {"a": ""}])
def test_an_index_names_files_in_its_own_folder_only(tmp_path: Path, weight_map: Any) -> None:
    write_folder(tmp_path, raw_config(), random_tensors(raw_config()), num_shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json should"):
        opened(tmp_path)


def test_a_tensor_in_two_shards_is_named_with_both(tmp_path: Path) -> None:
    raw = raw_config()
    write_folder(tmp_path, raw, random_tensors(raw), num_shards=2)
    first, second = sorted(tmp_path.glob("model-*.safetensors"))
    tensors = load_file(first) | {"model.norm.weight": np.ones(64, np.float32)}
    save_file(tensors, first)
    save_file(load_file(second) | {"model.norm.weight": np.zeros(64, np.float32)}, second)
    with pytest.raises(ValueError, match=r"tensor model\.norm\.weight is in two shards, model-00001-of-00002\.safetensors and model-00002"):
        opened(tmp_path)


def test_a_whole_file_counts_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    raw = raw_config()
    tensors = random_tensors(raw)
    write_folder(tmp_path, raw, {name: tensor + 1 for name, tensor in tensors.items()}, num_shards=2)
    write_folder(tmp_path, raw, tensors)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    np.testing.assert_array_equal(read_params(opened(tmp_path), "float32")["embedding"], tensors["model.embed_tokens.weight"])


def test_a_tied_model_loads_without_a_head(tmp_path: Path) -> None:
    raw = raw_config(tie_word_embeddings=True)
    tensors = random_tensors(raw)
    assert "lm_head.weight" not in tensors
    assert "lm_head" not in read_params(opened(write_folder(tmp_path, raw, tensors)), "float32")


def test_a_tied_model_loads_with_its_head_shipped(tmp_path: Path) -> None:
    raw = raw_config(tie_word_embeddings=True)
    tensors = random_tensors(raw)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert "lm_head" not in read_params(opened(write_folder(tmp_path, raw, tensors)), "float32")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 2
    write_folder(tmp_path, raw, tensors)
    with pytest.warns(UserWarning, match=r"lm_head\.weight that differs from the embedding"):
        opened(tmp_path)
    assert "lm_head" in read_params(opened(tmp_path, tie_embeddings=False), "float32")


def test_an_untied_model_without_a_head_is_told_the_option(tmp_path: Path) -> None:
    raw = raw_config()
    tensors = random_tensors(raw)
    del tensors["lm_head.weight"]
    write_folder(tmp_path, raw, tensors)
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing, but tie_word_embeddings is false.*--tie-embeddings"):
        opened(tmp_path)
    assert opened(tmp_path, tie_embeddings=True).config.tie_word_embeddings


def test_what_is_neither_a_folder_nor_a_hub_id_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for asked in ("nobody/no-such-model", str(tmp_path / "absent")):
        with pytest.raises(ValueError, match=f"{re.escape(repr(asked))} is neither a folder nor the id of a model"):
            hugging_face.open_source(asked)


@dataclasses.dataclass
class Hub:
    """In the place of the Hugging Face hub: one folder, of which a download copies what is asked for."""

    folder: Path
    cache: Path
    asked: list[str] = dataclasses.field(default_factory=list)

    def download(self, name: str, *, allow_patterns: list[str], revision: str | None = None) -> str:
        assert revision in (None, self.cache.name)
        self.cache.mkdir(exist_ok=True)
        self.asked += allow_patterns
        for file in self.folder.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copyfile(file, self.cache / file.name)
        return str(self.cache)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "model", tmp_path / "0123abcd")
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.download)
    return hub


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(architectures=["Gemma3ForCausalLM"]), "architecture Gemma3ForCausalLM is not supported"),
        (dict(quantization_config=dict(quant_method="awq")), "checkpoints quantised with 'awq' are not supported"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    ],
)
def test_an_unsupported_configuration_on_the_hub_is_refused_before_weights_are_fetched(hub: Hub, changes: dict, message: str) -> None:
    raw = raw_config()
    write_folder(hub.folder, raw, random_tensors(raw), num_shards=2)
    (hub.folder / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ValueError, match=message):
        open_any_source("someone/model")
    assert "config.json" in hub.asked
    assert sorted(file.name for file in hub.cache.iterdir()) == ["config.json", "model.safetensors.index.json"]
    assert not any(fnmatch(file, pattern) for file in ("model.safetensors", "pytorch_model.bin") for pattern in hub.asked)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_supported_model_on_the_hub_is_fetched(hub: Hub, num_shards: int) -> None:
    raw = raw_config()
    write_folder(hub.folder, raw, random_tensors(raw), num_shards=num_shards)
    source = open_any_source("someone/model")
    check_source(source)
    assert source.name == "someone/model"
    assert not any(pattern.endswith(".bin") for pattern in hub.asked)


@pytest.mark.parametrize("told_by", ["field", "class", "index", "file"])
def test_a_drafter_on_the_hub_is_fetched_though_its_configuration_is_no_language_models(hub: Hub, told_by: str) -> None:
    raw = official_config(architectures=["LlamaForCausalLMEagle3" if told_by == "class" else "Strange"])
    file, tensors = "model.safetensors", eagle3_tensors()
    if told_by != "field":
        del raw["draft_vocab_size"]
        tensors = eagle3_tensors(draft_vocab_size=None)
    if told_by == "file":
        raw |= dict(medusa_num_layers=1, num_heads=1)
        file = "medusa_lm_head.safetensors"
        tensors = {"0.0.linear.weight": np.ones((8, 8), np.float32), "0.1.weight": np.ones((16, 8), np.float32)}
    write_drafter(hub.folder, raw, tensors, file=file)
    if told_by == "index":
        (hub.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file)}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = open_any_source("someone/drafter")
    assert type(source.config).__name__ == ("MedusaConfig" if told_by == "file" else "Eagle3Config")


def test_a_folder_without_config_or_weights_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json in the folder"):
        hugging_face.open_source(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw_config()))
    (tmp_path / "weights.pth").touch()
    with pytest.raises(ValueError, match=r"needs model\.safetensors, pytorch_model\.bin or an index of shards, found weights\.pth"):
        hugging_face.open_source(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        hugging_face.open_source(tmp_path)
