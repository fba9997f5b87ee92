"""`specjax distill`, on a tiny checkpoint whose turns end soon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specjax.checkpoints.store import abstract_checkpoint
from specjax.commands.main import app
from specjax.training.token_files import TokenFiles, tokenizer_fingerprint
from specjax.training.token_writer import TokenWriter
from tests.tiny_checkpoint import write_checkpoint

TEMPLATE = (
    "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{% for m in messages %}{{ '<a>' if m['role'] == 'assistant' else '<u>' }}{{ m['content'] }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
# One in five tokens ends a turn.
SMALL = ("--batch-size", 4, "--max-user-tokens", 12, "--max-answer-tokens", 16, "--max-prompt-tokens", 16)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "target", template=TEMPLATE, eos_token_ids=tuple(range(0, 250, 5)))


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["distill", *map(str, words)])


def values(path: Path) -> list:
    files = TokenFiles(path)
    files.verify()
    return [(files[index].tokens.tolist(), files[index].loss_mask.tolist()) for index in range(len(files))]


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_dialogues_are_sampled_until_there_are_enough(target: Path, tmp_path: Path) -> None:
    done = run(target, tmp_path / "data", "--num-sequences", 6, *SMALL)
    assert done.exit_code == 0, done.output
    files = TokenFiles(tmp_path / "data")
    manifest, tokenizer = files.manifest, abstract_checkpoint(target).tokenizer()
    assert manifest.num_sequences == len(values(tmp_path / "data")) == 6
    assert f"6 sequences, {manifest.num_tokens} tokens, the loss counts on {manifest.num_loss_tokens}; dropped: " in done.stdout
    assert "tokens/s written by the target" in done.stdout
    assert "Sampling" in done.stderr
    assert manifest.vocab_size == 259
    assert manifest.tokenizer == tokenizer_fingerprint(tokenizer)
    expected = {"kind": "sampled", "target": "target", "temperatures": [1.0], "max_user_tokens": 12, "seed": 0, "prompts": None}
    assert expected.items() <= manifest.made.items()
    opening, closing = tokenizer.convert_tokens_to_ids("<u>"), tokenizer.encode("<e><a>")
    for index in range(6):
        tokens, loss_from = files[index].tokens.tolist(), files[index].loss_mask.tolist().index(True)
        assert tokens[0] == opening
        assert tokens[loss_from - 2 : loss_from] == closing
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]

    refused = run(target, tmp_path / "data", "--num-sequences", 6, *SMALL)
    assert refused.exit_code == 1
    assert "exists; pass --force" in refused.stderr
    other = run(target, tmp_path / "data", "--num-tokens", 100, "--seed", 1, "--force", *SMALL)
    assert other.exit_code == 0, other.output
    lengths = TokenFiles(tmp_path / "data").lengths
    assert lengths[:-1].sum() < 100 <= lengths.sum()


@pytest.mark.full
def test_an_interrupted_run_goes_on_where_it_was(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--num-sequences", 10, "--temperature", 0, "--temperature", 1.2, "--system", "be brief", "--user-loss", *SMALL)
    assert run(target, tmp_path / "straight", *words).exit_code == 0
    extend, calls = TokenWriter.extend, []

    def interrupted(self: TokenWriter, *arguments: Any, **keywords: Any) -> None:
        calls.append(self.position)
        if len(calls) == 3:
            raise KeyboardInterrupt
        extend(self, *arguments, **keywords)

    monkeypatch.setattr(TokenWriter, "extend", interrupted)
    assert run(target, tmp_path / "data", *words).exit_code != 0
    assert not (tmp_path / "data").exists()
    other = run(target, tmp_path / "data", *words, "--seed", 3)
    assert other.exit_code == 1
    assert "is of an unfinished run with seed 0, not 3: go on with that, or pass --force" in other.stderr

    assert run(target, tmp_path / "data", *words).exit_code == 0
    assert calls[:4] == [0, 4, 8, 8]
    assert values(tmp_path / "data") == values(tmp_path / "straight")
    straight, resumed = (TokenFiles(tmp_path / name).manifest for name in ("straight", "data"))
    assert (straight.made, straight.dropped) == (resumed.made, resumed.dropped)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data", "straight"]


def test_given_prompts_are_answered(target: Path, tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}
    prompts = write_lines(
        tmp_path / "prompts.jsonl",
        {"turns": ["hello", "and"]},
        {"messages": [user, answer, user, answer]},
        {"messages": [{"role": "tool", "content": "x"}, user]},
        {"prompt": "hi"},
        {"prompt": "x" * 17},
        {"prompt": "hi"},
        {"prompt": "yo"},
    )
    done = run(target, tmp_path / "data", "--prompts", prompts, "--temperature", 0, "--temperature", 1, *SMALL)
    assert done.exit_code == 0, done.output
    tokenizer = abstract_checkpoint(target).tokenizer()
    given = ["<u>hello<e><a>", "<u>ab<e><a>cd<e><u>ab<e><a>", "<u>hi<e><a>", "<u>hi<e><a>", "<u>yo<e><a>"]
    for (tokens, loss_mask), prompt in zip(values(tmp_path / "data"), given, strict=True):
        assert tokens[: loss_mask.index(True)] == tokenizer.encode(prompt)
        assert all(loss_mask[loss_mask.index(True) :])
    assert "dropped: refused by the chat template 1, too long 1" in done.stdout
    manifest = TokenFiles(tmp_path / "data").manifest
    assert len(manifest.made["prompts"]) == 64

    some = run(target, tmp_path / "some", "--prompts", prompts, "--num-sequences", 2, "--temperature", 0, "--temperature", 1, *SMALL)
    assert some.exit_code == 0, some.output
    assert values(tmp_path / "some") == values(tmp_path / "data")[:2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "distill needs one of num_sequences and num_tokens, at least 1"),
        (["--num-sequences", 0], "distill needs one of num_sequences and num_tokens, at least 1"),
        (["--num-sequences", 1, "--num-tokens", 1], "distill needs one of num_sequences and num_tokens, at least 1"),
        (["--num-sequences", 1, "--dtype", "int8"], "--dtype must be bfloat16 or float32, got 'int8'"),
        (["--num-sequences", 1, "--batch-size", 0], "DialogueConfig.batch_size must be a positive int, got 0"),
        (["--num-sequences", 1, "--temperature", "-1"], "DialogueConfig.temperatures must be 0 (greedy) or positive and finite, got -1.0"),
        (["--num-sequences", 1, "--max-answer-tokens", 600], "exceed the model's window of 512 tokens"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (
            ["--prompts", "good.jsonl", "--max-prompt-tokens", 500],
            "a prompt of up to 500 tokens (max_prompt_tokens) and an answer of up to",
        ),
        (["--prompts", "bad.jsonl"], "bad.jsonl, line 2: expected messages, conversations, turns or prompt, got text"),
        (["--prompts", "cut.jsonl"], "cut.jsonl, line 2: expected characters, got half a surrogate pair, '\\ud83d'"),
        (["--prompts", "good.jsonl", "--system", "x"], "system_prompts and user_loss are for turns that the target writes"),
        (["--prompts", "good.jsonl", "--user-loss"], "system_prompts and user_loss are for turns that the target writes"),
        (["--prompts", "tools.jsonl"], "there are no sequences to write (dropped: {'refused by the chat template': 1})"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "good.jsonl", {"prompt": "hi"})
    write_lines(tmp_path / "bad.jsonl", {"prompt": "hi"}, {"text": "hi"})
    write_lines(tmp_path / "cut.jsonl", {"prompt": "hi"}, {"prompt": "\ud83d"})
    write_lines(tmp_path / "tools.jsonl", {"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "x"}]})
    done = run(target, tmp_path / "data", *SMALL, *words)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix != ".jsonl"] == []


def test_targets_that_cannot_be_sampled_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, tmp_path / "data", "--num-sequences", 1)
    assert "is not a specjax checkpoint" in done.stderr
    plain = write_checkpoint(tmp_path / "plain", template=None)
    done = run(plain, tmp_path / "data", "--num-sequences", 1)
    assert done.exit_code == 1
    assert "the tokenizer has no chat template" in done.stderr
    done = run(plain, plain, "--num-sequences", 1, "--force")
    assert "holds no tokens.json" in done.stderr


@pytest.mark.full
def test_two_devices_share_a_batch(target: Path, tmp_path: Path) -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}

    def on_two_devices(*words: object) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "specjax.commands.main", "distill", *words]
        return subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=600, check=False)

    done = on_two_devices(target, tmp_path / "two", "--num-sequences", 6, *SMALL)
    assert done.returncode == 0, done.stderr
    assert run(target, tmp_path / "one", "--num-sequences", 6, *SMALL).exit_code == 0
    assert values(tmp_path / "one") == values(tmp_path / "two")
    odd = on_two_devices(target, tmp_path / "odd", "--num-sequences", 6, *SMALL, "--batch-size", 3)
    assert odd.returncode == 1
    assert "batch_size must be a multiple of the 2 devices, got 3" in odd.stderr
