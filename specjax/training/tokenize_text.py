"""Text as token sequences of bounded length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from specjax.training.token_files import TokenSequence


def chunk_document(pieces: Iterable[str], tokenizer: Any, *, max_tokens: int) -> Iterator[TokenSequence]:
    """Cuts a document into sequences of `max_tokens` tokens; the last may be shorter, and is left out if nothing can be predicted in it.

    What the tokenizer puts before a text (a beginning-of-text token, if any) stands before every sequence, and is not one to predict: a
    model that was trained with it needs it to attend to.

    Args:
        pieces: The document's text, in pieces that are tokenized one by one.
        tokenizer: A `transformers` tokenizer.
        max_tokens: L at most, what stands before included.

    Yields:
        Sequences; the loss counts everywhere else.

    Raises:
        ValueError: `max_tokens` leaves no room for two tokens.
    """
    before = list(tokenizer("")["input_ids"])
    room = max_tokens - len(before)
    if max_tokens < 2 or room < 1:
        raise ValueError(f"sequences must have room for {max(2, len(before) + 1)} tokens, got max_tokens {max_tokens}")
    pending: list[int] = []
    for piece in pieces:
        pending += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        whole = len(pending) // room * room
        for start in range(0, whole, room):
            yield _sequence(before, pending[start : start + room])
        pending = pending[whole:]
    if pending and len(before) + len(pending) >= 2:
        yield _sequence(before, pending)


def _sequence(before: list[int], tokens: list[int]) -> TokenSequence:
    ids = np.array([*before, *tokens], np.int64)
    return TokenSequence(tokens=ids, loss_mask=np.arange(len(ids)) >= len(before))
