"""Chats, prompts and documents from files: JSON lines in the layouts that data sets have, and plain text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

# ShareGPT's names for two roles.
_ROLES = {"human": "user", "gpt": "assistant"}
_BLOCK = 1 << 20


def read_records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with `"NAME, line N"` for messages about it.

    Raises:
        ValueError: A line that is not a JSON object, or a file that is not UTF-8.
    """
    path = Path(path)
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(_decoded(file, path), start=1):
            where = f"{path.name}, line {number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not valid JSON ({error})") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where}: expected an object, got {line.strip()[:80]}")
            yield where, record


def messages_of(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The messages of a record, `role` and `content` each.

    Args:
        record: With `messages` (`role`, `content`), `conversations` (ShareGPT's `from`, `value`), `turns` (a user's; the first is taken) or
            `prompt` (a user's); in this order, if it has several.
        where: Stands before what an error says.

    Raises:
        ValueError: None of them, one that is not as described, or text with half a surrogate pair.
    """
    if "messages" in record:
        messages = [_message(entry, "role", "content", where) for entry in _entries(record, "messages", where)]
    elif "conversations" in record:
        messages = [_message(entry, "from", "value", where) for entry in _entries(record, "conversations", where)]
    elif "turns" in record:
        messages = [{"role": "user", "content": _entries(record, "turns", where)[0]}]
    elif "prompt" in record:
        messages = [{"role": "user", "content": record["prompt"]}]
    else:
        raise ValueError(f"{where}: expected messages, conversations, turns or prompt, got {', '.join(record) or 'an empty object'}")
    for message in messages:
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise ValueError(f"{where}: the role and content of a message must be text, got {message!r:.80}")
        for text in message.values():
            _require_characters(text, where)
    return [{**message, "role": _ROLES.get(message["role"], message["role"])} for message in messages]


def prompt_of(messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The messages up to the user's last.

    Raises:
        ValueError: There is none of the user's.
    """
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise ValueError(f"{where}: there is no message of the user's to answer")
    return messages[: last + 1]


def read_documents(path: str | Path, *, separator: str | None = None) -> Iterator[Iterable[str]]:
    """The documents of a file, each as pieces of text to be read one after the other.

    Args:
        path: JSON lines (a name that ends in `.jsonl`), whose objects have a `text`; or else text.
        separator: What stands between two documents of a text file; `None`: the file is one document.

    Raises:
        ValueError: A line without a `text` or with half a surrogate pair in it, a file that is not UTF-8, or an empty separator.
    """
    path = Path(path)
    if separator is not None and not separator:
        raise ValueError("the separator of documents must not be empty")
    if path.suffix == ".jsonl":
        for where, record in read_records(path):
            if not isinstance(record.get("text"), str):
                raise ValueError(f"{where}: expected a text, got {', '.join(record) or 'an empty object'}")
            _require_characters(record["text"], where)
            yield [record["text"]]
    elif separator is None:
        yield _pieces(path)
    else:
        rest = ""
        for piece in _pieces(path):
            *documents, rest = (rest + piece).split(separator)
            yield from ([document] for document in documents)
        yield [rest]


def _pieces(path: Path) -> Iterator[str]:
    """About a million characters at a time, cut behind a line or a word where there is one."""
    rest = ""
    with path.open(encoding="utf-8", newline="") as file:
        for block in _decoded(iter(lambda: file.read(_BLOCK), ""), path):
            rest += block
            end = rest.rfind("\n") + 1 or max(rest.rfind(" "), 0) or len(rest)
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def _require_characters(text: str, where: str) -> None:
    """Refuses what JSON can write and no tokenizer takes, such as an emoji that was cut in two."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"{where}: expected characters, got half a surrogate pair, {half!r}, at {error.start} of {text!r:.80}") from error


def _decoded(parts: Iterable[str], path: Path) -> Iterator[str]:
    try:
        yield from parts
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8 text: {error}") from error


def _entries(record: Mapping[str, Any], name: str, where: str) -> list[Any]:
    entries = record[name]
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{where}: {name} must be a list with something in it, got {entries!r:.80}")
    return entries


def _message(entry: Any, role: str, content: str, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict) or role not in entry or content not in entry:
        raise ValueError(f"{where}: a message must have {role} and {content}, got {entry!r:.80}")
    return {"role": entry[role], "content": entry[content]}
