"""`specjax tokenize`: training data for drafters from files of text or chats."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from specjax.atomic import check_destination, check_keeps
from specjax.checkpoints.convert import one_line_errors
from specjax.checkpoints.manifest import read_transformer_config
from specjax.checkpoints.store import abstract_checkpoint
from specjax.commands.token_data import origin, summary, token_progress, tokenizer_and_ends
from specjax.training.chat_template import ChatTemplateError, encode_chat
from specjax.training.records import messages_of, read_documents, read_records
from specjax.training.token_files import TokenSequence, tokenizer_fingerprint
from specjax.training.token_manifest import MANIFEST, TokenManifest, read_token_manifest
from specjax.training.token_writer import writing_token_files
from specjax.training.tokenize_text import chunk_document

KINDS = ("text", "chat")
_GROUP = 256


def tokenize(
    target: str | Path,
    destination: str | Path,
    files: Sequence[str | Path],
    *,
    kind: str = "text",
    max_tokens: int = 2048,
    separator: str | None = None,
    force: bool = False,
    progress: bool = True,
) -> TokenManifest:
    """Tokenizes files into token files.

    Example:
        >>> tokenize("models/target", "data/chats", ["chats.jsonl"], kind="chat")

    Args:
        target: The checkpoint of the target, for its tokenizer and vocabulary.
        destination: The folder to create.
        files: `"text"`: text, or JSON lines with a `text` each. `"chat"`: JSON lines with `messages` or `conversations`.
        kind: `"text"`: documents in pieces of at most `max_tokens`, the loss everywhere. `"chat"`: through the chat template, the loss on
            the assistant's turns.
        max_tokens: The longest sequence. What a chat has beyond it is cut off.
        separator: `"text"`: what stands between the documents of a text file; `None`: a file is a document.
        force: Replace token files that exist, and an unfinished run of `distill`.
        progress: Show a progress bar on stderr.

    Returns:
        The manifest.

    Raises:
        ValueError: A file that cannot be read as it should be, or nothing in them to learn from.
        OSError: The destination exists, holds what is read, or cannot be written; or there is no such file.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    if kind == "chat" and separator is not None:
        raise ValueError("a separator is for documents of text, not for chats")
    if max_tokens < 2:
        raise ValueError(f"max_tokens must be at least 2, got {max_tokens}")
    check_destination(destination, force=force, marker=MANIFEST)
    check_keeps(destination, target, *files)
    missing = [str(file) for file in files if not Path(file).is_file()]
    if missing or not files:
        raise FileNotFoundError(f"there is no file {', '.join(missing)}" if missing else "there are no files to tokenize")
    vocab_size = read_transformer_config(target).vocab_size
    checkpoint = abstract_checkpoint(target)
    tokenizer, ends = tokenizer_and_ends(checkpoint)
    made = {"kind": kind, **origin(target, checkpoint), "files": [Path(file).name for file in files], "max_tokens": max_tokens}
    if kind == "text":
        made["separator"] = separator
        sequences = _of_text(tokenizer, files, max_tokens, separator)
    else:
        sequences = _of_chats(tokenizer, ends, files, max_tokens)
    with (
        writing_token_files(
            destination, vocab_size=vocab_size, tokenizer=tokenizer_fingerprint(tokenizer), made=made, force=force
        ) as writer,
        token_progress("Tokenizing", total=None, shown=progress) as update,
    ):
        for group in _groups(sequences):
            kept = [one for one in group if isinstance(one, TokenSequence)]
            writer.extend(kept, dropped=Counter(one for one in group if isinstance(one, str)))
            update(writer.num_sequences, sum(len(one.tokens) for one in kept))
    return read_token_manifest(destination)


def _groups(sequences: Iterator[Any]) -> Iterator[list[Any]]:
    while group := list(itertools.islice(sequences, _GROUP)):
        yield group


def _of_text(tokenizer: Any, files: Sequence[str | Path], max_tokens: int, separator: str | None) -> Iterator[TokenSequence]:
    for file in files:
        for document in read_documents(file, separator=separator):
            yield from chunk_document(document, tokenizer, max_tokens=max_tokens)


def _of_chats(tokenizer: Any, ends: Sequence[int], files: Sequence[str | Path], max_tokens: int) -> Iterator[TokenSequence | str]:
    """Sequences, or why there is none of a chat."""
    for file in files:
        for where, record in read_records(file):
            messages = messages_of(record, where)
            try:
                chat = encode_chat(tokenizer, messages, end_token_ids=ends)
            except ChatTemplateError:
                yield "refused by the chat template"
                continue
            # Position 0 is predicted by nothing.
            has_loss = chat.loss_mask[1:max_tokens].any()
            yield TokenSequence(tokens=chat.tokens[:max_tokens], loss_mask=chat.loss_mask[:max_tokens]) if has_loss else "no answer"


def tokenize_command(
    target: Annotated[Path, typer.Argument(help="The target's checkpoint, made by `specjax convert`, for its tokenizer.")],
    destination: Annotated[Path, typer.Argument(help="The folder of token files to create.")],
    files: Annotated[list[Path], typer.Argument(help="Text, or JSON lines with a text each; with --chat JSON lines with messages.")],
    chat: Annotated[bool, typer.Option("--chat", help="The files hold chats: the loss counts on the assistant's turns.")] = False,
    max_tokens: Annotated[int, typer.Option(help="The longest sequence: documents are split, chats cut.")] = 2048,
    separator: Annotated[str | None, typer.Option(help="What stands between documents of a text file. Default: a file is one.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace token files that exist, and an unfinished distill.")] = False,
) -> None:
    """Tokenizes text or chats to training data."""
    jax.config.update("jax_platforms", "cpu")
    with one_line_errors():
        manifest = tokenize(
            target, destination, files, kind="chat" if chat else "text", max_tokens=max_tokens, separator=separator, force=force
        )
    typer.echo(summary(destination, manifest))
