"""The command: a folder or a file in, a checkpoint out; errors on one line; nothing written when anything is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import typer

from specjax.checkpoints.convert import convert, num_source_bytes, one_line_errors
from specjax.checkpoints.formats import hugging_face
from specjax.checkpoints.formats.any_source import open_any_source
from specjax.checkpoints.formats.families import model_config
from specjax.checkpoints.source import read_params, stream_params
from specjax.checkpoints.store import load_checkpoint
from tests.checkpoints.sources import random_tensors, raw_config, write_folder, write_gguf, write_tokenizer

ROOT = Path(__file__).parents[2]


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return _run("-m", "specjax.checkpoints.convert", *map(str, arguments))


def run_python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return _run("-c", textwrap.dedent(script), *map(str, arguments))


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    raw = raw_config("qwen3", tie_word_embeddings=True)
    folder = write_folder(tmp_path / "source", raw, random_tensors(raw), num_shards=2)
    write_tokenizer(folder)
    return folder


def test_the_command_converts_a_folder_with_its_tokenizer(tmp_path: Path, source: Path) -> None:
    done = run_command(source, tmp_path / "out", "--dtype", "float32", "--no-check")
    assert done.returncode == 0, done.stderr
    assert "parameters in float32" in done.stdout
    checkpoint = load_checkpoint(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, checkpoint.params, read_params(hugging_face.open_source(source), "float32"))
    assert checkpoint.tokenizer().encode("hello") == [256 + 3]
    assert checkpoint.tokenizer().apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|start|>hi<|end|>"
    metadata = checkpoint.metadata
    assert (metadata["source"], metadata["source_format"], metadata["quantisation"]) == ("source", "safetensors", "none")
    assert sorted(metadata["source_sha256"]) == [f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]
    assert str(tmp_path) not in (tmp_path / "out" / "specjax.json").read_text()


def test_an_error_is_one_line_and_writes_nothing(tmp_path: Path, source: Path) -> None:
    (source / "config.json").write_text(json.dumps(raw_config("qwen3", hidden_act="gelu")))
    done = run_command(source, tmp_path / "out", "--no-check")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["error: hidden_act 'gelu' is not supported; supported: 'silu'"]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_gguf_file_is_converted_and_its_quantisation_remembered(tmp_path: Path) -> None:
    raw = raw_config("qwen2")
    file = write_gguf(tmp_path / "m.gguf", "qwen2", model_config(raw), random_tensors(raw), quantisation="Q8_0")
    done = convert(file, tmp_path / "out", check=False, progress=False)
    assert (done.quantisation, done.has_tokenizer, done.check_skipped) == ("Q8_0", True, "not asked for")
    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.metadata["quantisation"] == "Q8_0"
    assert checkpoint.params["embedding"].dtype == "bfloat16"


def test_an_existing_destination_is_noticed_before_the_source_is_read(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "out", check=False, progress=False)
    (source / "config.json").unlink()
    with pytest.raises(FileExistsError, match="pass --force"):
        convert(source, tmp_path / "out", check=False, progress=False)


@pytest.mark.parametrize("destination", ["source", "source/..", "link"])
def test_what_is_read_is_never_replaced(tmp_path: Path, destination: str) -> None:
    source = write_folder(tmp_path / "source", raw_config(), random_tensors(raw_config()))
    (tmp_path / "link").symlink_to(source)
    for folder in (tmp_path, source):
        (folder / "specjax.json").touch()  # a checkpoint, for all that --force can tell
    before = sorted(path.name for path in source.iterdir())
    with pytest.raises(FileExistsError, match="is what is read from"):
        convert(source, tmp_path / destination, force=True, check=False, progress=False)
    assert sorted(path.name for path in source.iterdir()) == before


def test_the_progress_bar_counts_what_is_read(tmp_path: Path) -> None:
    raw = raw_config(tie_word_embeddings=True)
    tensors = random_tensors(raw)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # there, and not needed
    source = open_any_source(write_folder(tmp_path, raw, tensors))
    read = []
    for _ in stream_params(source, "float32", read.append):
        pass
    assert sum(read) == pytest.approx(num_source_bytes(source))


def test_other_dtypes_are_refused(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of \['bfloat16', 'float32'\], got 'float16'"):
        convert(source, tmp_path / "out", dtype="float16")


def test_a_source_without_tokenizer_is_converted(tmp_path: Path) -> None:
    raw = raw_config()
    done = convert(write_folder(tmp_path / "source", raw, random_tensors(raw)), tmp_path / "out", check=False, progress=False)
    assert not done.has_tokenizer
    assert load_checkpoint(tmp_path / "out").tokenizer_path is None


def test_the_check_says_why_it_did_not_run(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert convert(source, tmp_path / "out", progress=False).check_skipped == "torch not installed"
    with pytest.raises(ValueError, match="the logit check needs torch"):
        convert(source, tmp_path / "checked", check=True, progress=False)
    assert not (tmp_path / "checked").exists()


def test_a_check_that_cannot_run_is_refused_before_anything_is_read(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specjax.checkpoints.convert.stream_params", lambda *arguments: pytest.fail("the source was read"))
    with pytest.raises(ValueError, match="transformers has no implementation of this drafter: pass --no-check"):
        convert("smollm2_135m_instruct_eagle3", tmp_path / "out", check=True, progress=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the logit check needs torch"):
        convert(source, tmp_path / "out", check=True, progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with one_line_errors():
        warnings.warn("the head differs")
    assert capsys.readouterr().err == "warning: the head differs\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FloatingPointError("the loss is nan"), "error: the loss is nan\n"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.\nBufferAssignment:\n…"),
            "error: out of memory on the device: RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.\n",
        ),
    ],
)
def test_a_training_that_diverged_and_a_full_device_are_one_line(error: Exception, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), one_line_errors():
        raise error
    assert capsys.readouterr().err == line


def test_an_error_of_the_devices_own_is_no_users() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), one_line_errors():
        raise jax.errors.JaxRuntimeError("INTERNAL: no such kernel")


# Converts argv[1] to argv[2], and kills itself when so many parameters have been read.
KILLED_CONVERSION = """
    import os, signal, sys
    from specjax.checkpoints import convert

    def interrupted(*arguments, stream=convert.stream_params):
        for index, leaf in enumerate(stream(*arguments)):
            if index == int(sys.argv[3]):
                os.kill(os.getpid(), signal.SIGKILL)
            yield leaf

    convert.stream_params = interrupted
    convert.convert(sys.argv[1], sys.argv[2], dtype="float32", check=False, progress=False, force=sys.argv[4] == "force")
"""


@pytest.mark.parametrize(
    "earlier", [pytest.param(False, id="no earlier checkpoint", marks=pytest.mark.full), pytest.param(True, id="an earlier checkpoint")]
)
def test_a_conversion_killed_twice_leaves_what_was_there_and_can_be_run_again(tmp_path: Path, source: Path, earlier: bool) -> None:
    destination, force = tmp_path / "out", "force" if earlier else ""
    if earlier:
        convert(source, destination, dtype="bfloat16", check=False, progress=False)
    for num_read in (2, 11):
        done = run_python(KILLED_CONVERSION, source, destination, num_read, force)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert destination.exists() == earlier
        if earlier:
            assert load_checkpoint(destination).metadata["dtype"] == "bfloat16"
    convert(source, destination, dtype="float32", check=False, progress=False, force=earlier)
    expected = read_params(hugging_face.open_source(source), "float32")
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(destination).params, expected)
    assert [path.name for path in tmp_path.iterdir() if path != source] == ["out"]


def test_a_disk_that_is_full_is_said_in_one_line_and_nothing_is_lost(tmp_path: Path, source: Path) -> None:
    destination = tmp_path / "out"
    convert(source, destination, dtype="bfloat16", check=False, progress=False)
    full = """
        import resource, signal, sys
        from specjax.checkpoints.convert import app

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # no file may grow beyond this
        app([sys.argv[1], sys.argv[2], "--dtype", "float32", "--force", "--no-check"])
    """
    done = run_python(full, source, destination)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "File too large" in errors[0]
    assert "Traceback" not in done.stderr
    assert load_checkpoint(destination).metadata["dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.iterdir() if path != source] == ["out"]


def test_too_little_space_is_noticed_before_anything_is_read(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1000, used=0, free=1000))

    def read(*arguments: object) -> Iterator[None]:
        pytest.fail("the source was read")
        yield

    monkeypatch.setattr("specjax.checkpoints.convert.stream_params", read)
    with pytest.raises(OSError, match=r"bytes are needed and .* free"):
        convert(source, tmp_path / "out", check=False, progress=False)
    assert not (tmp_path / "out").exists()
