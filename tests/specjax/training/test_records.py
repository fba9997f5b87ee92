"""Records, documents and their pieces: every layout, every line that is wrong, and no text lost."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from specjax.training.records import messages_of, prompt_of, read_documents, read_records
from specjax.training.tokenize_text import chunk_document
from tests.tiny_checkpoint import byte_tokenizer

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [USER, ANSWER], "prompt": "other"}, [USER, ANSWER]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, [USER, ANSWER]),
        ({"turns": ["hi", "and then?"]}, [USER]),
        ({"prompt": "hi"}, [USER]),
    ],
)
def test_every_layout_of_messages_is_read(record: dict, messages: list) -> None:
    assert messages_of(record, "here") == messages


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "hi"}, "here: expected messages, conversations, turns or prompt, got text"),
        ({}, "here: expected messages, .* got an empty object"),
        ({"messages": []}, r"here: messages must be a list with something in it, got \[\]"),
        ({"turns": "hi"}, "here: turns must be a list with something in it, got 'hi'"),
        ({"turns": [1]}, "here: the role and content of a message must be text, got .*1"),
        ({"messages": ["hi"]}, "here: a message must have role and content, got 'hi'"),
        ({"messages": [{"role": "user"}]}, "here: a message must have role and content"),
        ({"conversations": [USER]}, "here: a message must have from and value"),
        ({"prompt": "hi \ud83d"}, r"here: expected characters, got half a surrogate pair, '\\ud83d', at 3 of 'hi \\ud83d'"),
        ({"messages": [USER, {"role": "\ude00", "content": "hi"}]}, "here: expected characters, got half a surrogate pair"),
        ({"messages": [{"role": None, "content": "hi"}]}, "here: the role and content of a message must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "here: the role and content of a message must be text"),
    ],
)
def test_wrong_messages_are_said(record: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        messages_of(record, "here")


def test_a_prompt_is_what_comes_up_to_the_users_last_message() -> None:
    assert prompt_of([USER, ANSWER, USER, ANSWER], "here") == [USER, ANSWER, USER]
    with pytest.raises(ValueError, match="here: there is no message of the user's to answer"):
        prompt_of([ANSWER], "here")


def test_records_carry_their_line_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\n\n  \n{"b": "é"}')
    assert list(read_records(file)) == [("a.jsonl, line 1", {"a": 1}), ("a.jsonl, line 4", {"b": "é"})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}\n{", "a.jsonl, line 2: not valid JSON"),
        (b"[1]", r"a.jsonl, line 1: expected an object, got \[1\]"),
        (b"\xff", "a.jsonl is not UTF-8 text"),
    ],
)
def test_a_line_that_is_no_record_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_records(tmp_path / "a.jsonl"))


def documents(path: Path, **arguments: Any) -> list[list[str]]:
    return [list(document) for document in read_documents(path, **arguments)]


def test_documents_of_text_and_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specjax.training.records._BLOCK", 8)
    text = "one two\nthree\r\nfour<|>five six seven eight-nine-ten-eleven\n<|>\n\ntwelve"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (document,) = documents(tmp_path / "a.txt")
    assert "".join(document) == text
    assert len(document) > 5
    assert document[0] == "one two\n"
    assert all(piece[-1] == "\n" or after[0] == " " or len(piece) >= 8 for piece, after in itertools.pairwise(document))
    assert ["".join(document) for document in documents(tmp_path / "a.txt", separator="<|>")] == text.split("<|>")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": part}) for part in text.split("<|>")))
    assert documents(tmp_path / "a.jsonl") == [[part] for part in text.split("<|>")]


def test_documents_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": []}')
    with pytest.raises(ValueError, match="a.jsonl, line 1: expected a text, got messages"):
        documents(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d", "title": "a"}')
    with pytest.raises(ValueError, match="a.jsonl, line 2: expected characters, got half a surrogate pair"):
        documents(tmp_path / "a.jsonl")
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match="a.txt is not UTF-8 text"):
        documents(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="the separator of documents must not be empty"):
        documents(tmp_path / "a.txt", separator="")


def test_a_document_is_cut_into_sequences_and_a_single_token_is_left_out() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("abcdefghijk")
    cut = list(chunk_document(["abcd", "efg", "", "hijk"], tokenizer, max_tokens=4))
    assert [one.tokens.tolist() for one in cut] == [ids[:4], ids[4:8], ids[8:]]
    assert all(one.loss_mask.all() for one in cut)
    assert [one.tokens.tolist() for one in chunk_document(["abcdefghijk"], tokenizer, max_tokens=5)] == [ids[:5], ids[5:10]]
    assert list(chunk_document([], tokenizer, max_tokens=4)) == []


def test_what_a_tokenizer_puts_before_a_text_stands_before_every_sequence_without_loss() -> None:
    tokenizer = byte_tokenizer()
    begin = tokenizer.convert_tokens_to_ids("<u>")

    def with_begin(text: str, add_special_tokens: bool = True, **arguments: Any) -> dict:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": [begin, *ids] if add_special_tokens else ids}

    ids = tokenizer.encode("abcdefg")
    cut = list(chunk_document(["abcd", "efg"], with_begin, max_tokens=4))
    assert [one.tokens.tolist() for one in cut] == [[begin, *ids[:3]], [begin, *ids[3:6]], [begin, *ids[6:]]]
    assert [one.loss_mask.tolist() for one in cut] == [[False, True, True, True]] * 2 + [[False, True]]
    with pytest.raises(ValueError, match="must have room for 2 tokens, got max_tokens 1"):
        list(chunk_document(["a"], with_begin, max_tokens=1))
