"""`specjax tokenize`, on hand-made text and chats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from specjax.checkpoints.store import abstract_checkpoint
from specjax.commands.main import app
from specjax.training.token_files import TokenFiles
from tests.commands.test_distill_command import TEMPLATE, write_lines
from tests.tiny_checkpoint import write_checkpoint

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo!"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "target", template=TEMPLATE)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["tokenize", *map(str, words)])


def texts(path: Path, target: Path) -> list[tuple[str, str]]:
    """Each sequence, and what of it counts."""
    files, tokenizer = TokenFiles(path), abstract_checkpoint(target).tokenizer()
    files.verify()
    sequences = [files[index] for index in range(len(files))]
    return [(tokenizer.decode(one.tokens), tokenizer.decode(one.tokens[one.loss_mask])) for one in sequences]


def test_text_is_cut_into_documents_and_sequences(target: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij")
    (tmp_path / "b.txt").write_text("klm|n|opqrstu")
    write_lines(tmp_path / "c.jsonl", {"text": "vwx"})
    done = run(
        target, tmp_path / "data", *(tmp_path / name for name in ("a.txt", "b.txt", "c.jsonl")), "--max-tokens", 4, "--separator", "|"
    )
    assert done.exit_code == 0, done.output
    parts = ["abcd", "efgh", "ij", "klm", "opqr", "stu", "vwx"]
    assert texts(tmp_path / "data", target) == [(part, part) for part in parts]
    assert "data: 7 sequences, 23 tokens, the loss counts on 23; dropped: none" in done.stdout
    made = TokenFiles(tmp_path / "data").manifest.made
    assert {"kind": "text", "target": "target", "files": ["a.txt", "b.txt", "c.jsonl"], "separator": "|"}.items() <= made.items()


def test_the_loss_of_chats_counts_on_the_assistants_turns(target: Path, tmp_path: Path) -> None:
    chats = write_lines(
        tmp_path / "chats.jsonl",
        {"messages": [USER, ANSWER, USER, ANSWER]},
        {"messages": [USER]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"messages": [{"role": "tool", "content": "x"}, ANSWER]},
        {"messages": [{"role": "user", "content": "x" * 12}, ANSWER]},
    )
    done = run(target, tmp_path / "data", chats, "--chat", "--max-tokens", 14)
    assert done.exit_code == 0, done.output
    assert texts(tmp_path / "data", target) == [("<u>hi<e><a>yo!<e><u>hi<e><a>", "yo!<e>"), ("<u>a<e><a>b<e>", "b<e>")]
    assert "dropped: no answer 2, refused by the chat template 1" in done.stdout
    again = run(target, tmp_path / "data", chats, "--chat")
    assert again.exit_code == 1
    assert "exists; pass --force" in again.stderr
    assert run(target, tmp_path / "data", chats, "--chat", "--force").exit_code == 0
    assert texts(tmp_path / "data", target)[0] == ("<u>hi<e><a>yo!<e><u>hi<e><a>yo!<e>", "yo!<e>yo!<e>")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.txt"], "there is no file nowhere.txt"),
        (["a.txt", "--max-tokens", 1], "max_tokens must be at least 2, got 1"),
        (["a.txt", "--chat", "--separator", "|"], "a separator is for documents of text, not for chats"),
        (["a.txt", "--separator", ""], "the separator of documents must not be empty"),
        (["a.txt", "--chat"], "a.txt, line 1: not valid JSON"),
        (["chats.jsonl"], "chats.jsonl, line 1: expected a text, got messages"),
        (["cut.jsonl"], "cut.jsonl, line 2: expected characters, got half a surrogate pair, '\\ud83d'"),
        (["empty.txt"], "there are no sequences to write (dropped: none)"),
        (["chats.jsonl", "--chat"], "there are no sequences to write (dropped: {'no answer': 1})"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [USER]}))
    write_lines(tmp_path / "cut.jsonl", {"text": "abc"}, {"text": "\ud83d"})
    done = run(target, tmp_path / "data", *words)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.txt", "chats.jsonl", "cut.jsonl", "empty.txt"]


def test_an_unfinished_run_of_the_target_is_lost_by_force_alone(target: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    unfinished = tmp_path / ".data.incomplete" / "unfinished.json"
    unfinished.parent.mkdir()
    unfinished.write_text("{}")
    done = run(target, tmp_path / "data", tmp_path / "a.txt")
    assert done.exit_code == 1
    assert ".data.incomplete holds an unfinished run (unfinished.json): go on with it, choose another destination" in done.stderr
    assert unfinished.read_text() == "{}"
    assert run(target, tmp_path / "data", tmp_path / "a.txt", "--force").exit_code == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.txt", "data"]


def test_what_is_read_is_not_replaced(target: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    assert run(target, tmp_path / "data", tmp_path / "a.txt").exit_code == 0
    inside = tmp_path / "data" / "b.txt"
    inside.write_text("abc")
    done = run(target, tmp_path / "data", inside, "--force")
    assert done.exit_code == 1
    assert "is what is read from" in done.stderr
