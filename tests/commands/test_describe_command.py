"""`specjax describe`: every format, what is missing and left over, and the memory that a run would need."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from specjax.checkpoints.formats.families import model_config
from specjax.checkpoints.kinds import build_model, config_from_dict
from specjax.checkpoints.store import load_checkpoint, save_checkpoint
from specjax.commands.describe import describe
from specjax.commands.main import app
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads import TrimmedHead
from tests.checkpoints.published_drafters import write_drafter
from tests.checkpoints.sources import random_tensors, raw_config, write_folder, write_gguf
from tests.helpers import tiny_config, tiny_target


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["describe", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_a_checkpoint_of_ours_is_described(tmp_path: Path) -> None:
    model, params = tiny_target()
    save_checkpoint(tmp_path / "saved", model.config, params, {"source": "tiny", "architecture": "LlamaForCausalLM"})
    code, output = run(tmp_path / "saved", "--json", "--batch", 3, "--context", 100, "--dtype", "float32")
    assert code == 0
    found = json.loads(output)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert found["num_parameters"] == size
    assert found["params_bytes"] == 4 * size == found["stored"]["float32"]
    # Keys and values of 2 layers, 3 rows, 2 heads of 8 numbers, 100 tokens.
    assert found["cache_bytes"] == 2 * 2 * 3 * 2 * 8 * 100 * 4
    assert (found["name"], found["architecture"], found["kind"], found["is_whole"]) == ("tiny", "LlamaForCausalLM", "transformer", True)
    assert found["format"] == "specjax, format 3"
    assert config_from_dict(found["config"]) == model.config


def test_a_checkpoint_that_does_not_fit_its_own_manifest_is_not_whole(tmp_path: Path) -> None:
    model, params = tiny_target()
    save_checkpoint(tmp_path / "saved", model.config, params)
    manifest = tmp_path / "saved" / "specjax.json"
    values = json.loads(manifest.read_text())
    values["config"] |= dict(qkv_bias=True, num_layers=1, intermediate_size=40)
    manifest.write_text(json.dumps(values))
    code, output = run(tmp_path / "saved")
    assert code == 1
    assert "missing: layer_0.attention.qkv_bias" in output
    assert "left over: layer_1.mlp.down" in output
    assert "wrong: parameter layer_0.mlp.down should have shape (40, 32) and dtype float32, got (48, 32) and float32" in output
    assert "NOT whole" in output


def saved(folder: Path) -> Path:
    model, params = tiny_target()
    save_checkpoint(folder, model.config, params)
    return max((file for file in (folder / "params").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def test_a_checkpoint_whose_weights_are_gone_or_cut_is_not_whole(tmp_path: Path) -> None:
    largest = saved(tmp_path / "saved")
    name, size = largest.relative_to(tmp_path / "saved"), largest.stat().st_size
    assert run(tmp_path / "saved")[0] == 0
    os.truncate(largest, size - 1)
    code, output = run(tmp_path / "saved")
    assert code == 1
    assert f"wrong: file {name} should have {size} bytes, got {size - 1}: is the copy whole?" in output
    largest.unlink()
    code, output = run(tmp_path / "saved")
    assert code == 1
    assert f"missing: file {name}\n" in output
    assert output.endswith("NOT whole\n")


def test_a_checkpoint_that_noted_no_file_sizes_is_read_and_said_to_be_unchecked(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    manifest = tmp_path / "saved" / "specjax.json"
    values = json.loads(manifest.read_text())
    del values["files"]
    manifest.write_text(json.dumps(values))
    code, output = run(tmp_path / "saved")
    assert code == 0
    assert output.endswith("whole, but weights not checked: this checkpoint does not say how large its files are\n")
    assert not describe(tmp_path / "saved").files_checked
    load_checkpoint(tmp_path / "saved")


def test_a_hugging_face_folder_is_described_with_what_is_missing_and_left_over(tmp_path: Path) -> None:
    raw = raw_config("qwen2")
    tensors = random_tensors(raw)
    write_folder(tmp_path, raw, tensors)
    code, output = run(tmp_path)
    assert code == 0
    assert "transformer (Qwen2ForCausalLM)" in output
    assert "qkv_bias" in output
    tensors["model.layers.0.visual.weight"] = tensors.pop("model.layers.1.self_attn.k_proj.bias")
    tensors["model.norm.weight"] = np.ones((63,), np.float32)
    write_folder(tmp_path, raw, tensors)
    code, output = run(tmp_path)
    assert code == 1
    assert "missing: model.layers.1.self_attn.k_proj.bias" in output
    assert "left over: model.layers.0.visual.weight" in output
    assert "wrong: tensor model.norm.weight should have shape (64,) by the configuration, got (63,)" in output


def test_names_with_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    raw = raw_config()
    code, output = run(write_folder(tmp_path / "a [b]", raw, random_tensors(raw) | {"extra[red][/nope]": np.ones(1, np.float32)}))
    assert code == 1
    assert "a [b]" in output
    assert "left over: extra[red][/nope]" in output


def test_a_gguf_file_is_described(tmp_path: Path) -> None:
    raw = raw_config()
    write_gguf(tmp_path / "m.gguf", "llama", model_config(raw), random_tensors(raw), quantisation="Q8_0")
    found = describe(tmp_path / "m.gguf")
    assert (found.format, found.quantisation, found.kind, found.is_whole) == ("gguf", "Q8_0", "transformer", True)
    assert found.context == 256
    assert found.params_bytes == 2 * found.num_parameters


def test_a_drafter_is_described(tmp_path: Path) -> None:
    config = Eagle3Config(decoder=tiny_config(num_layers=1), target_hidden_size=32, head=TrimmedHead(num_tokens=16))
    model = build_model(config, np.float32)
    save_checkpoint(tmp_path / "drafter", config, model.init_params(jax.random.key(0)))
    found = describe(tmp_path / "drafter", context=10, dtype="float32")
    assert (found.kind, found.is_whole) == ("eagle3", True)
    assert found.cache_bytes == 2 * 2 * 8 * 10 * 4
    assert set(found.stored) == {"float32", "int32"}
    assert found.to_json()["config"]["head"] == {"kind": "trimmed", "num_tokens": 16}
    code, output = run(tmp_path / "drafter")
    assert code == 0
    assert re.search(r"head +trimmed *\n *head.num_tokens +16 *\n", output)


def test_a_drafter_that_comes_with_specjax_is_described_by_its_name() -> None:
    found = describe("smollm2_135m_instruct_eagle3")
    assert (found.kind, found.is_whole, found.files_checked) == ("eagle3", True, True)


def test_heads_that_use_the_targets_lm_head_are_described_with_the_target(tmp_path: Path) -> None:
    tensors = {"0.0.linear.weight": np.ones((32, 32), np.float32)}
    heads = write_drafter(tmp_path / "heads", dict(medusa_num_heads=1, medusa_num_layers=1), tensors, file="medusa_lm_head.safetensors")
    saved(tmp_path / "target")
    assert "its vocabulary has to be known (target)" in run(heads)[1]
    code, output = run(heads, "--target", tmp_path / "target", "--json")
    assert code == 0
    assert json.loads(output)["config"]["vocab_size"] == tiny_config().vocab_size


def test_options_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    message = "is a specjax checkpoint, in which everything is settled: target, feature_layers does not apply to it"
    assert message in run(tmp_path / "saved", "--target", tmp_path / "saved", "--feature-layers", "1,2")[1]
    raw = raw_config()
    write_folder(tmp_path / "model", raw, random_tensors(raw))
    assert "is a language model and no drafter: draft_ids does not apply to it" in run(tmp_path / "model", "--draft-ids", "offsets")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "is neither a folder nor the id of a model"),
        (["no-such.gguf"], "no-such.gguf is not there"),
        (["--batch", 0, "."], "batch_size and context must be at least 1, got 0"),
        (["--dtype", "float16", "."], "got 'float16'"),
    ],
)
def test_what_cannot_be_described_is_one_line(arguments: list[Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    code, output = run(*arguments)
    assert code == 1
    assert output.count("\n") == 1
    assert message in output
