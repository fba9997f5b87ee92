"""Running text as token ids of one length: pieces of text files or of token files, or random ids where only the sizes count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.experiment import ExperimentError
from experiments.models import Model
from specjax.training.token_files import TokenFiles
from specjax.training.token_manifest import MANIFEST

# Characters that are encoded for each token that is wanted; more are taken where they turn out to be too few.
_CHARACTERS_A_TOKEN = 8


def running_texts(paths: Sequence[str], target: Model, *, number: int, length: int, seed: int) -> np.ndarray:
    """Pieces of text, spread evenly over all paths.

    Args:
        paths: Text files (UTF-8), or folders of token files made for this target's tokenizer; none draws random ids.
        target: Its tokenizer encodes text.
        number: How many pieces; each path gives as many, but for the first few, which give one more.
        length: Tokens of each.
        seed: For random ids.

    Returns:
        `[number, length]` int32.

    Raises:
        ExperimentError: No piece is wanted, a path that is not there, is no text or holds too little, or text for a target without a
            tokenizer.
    """
    if number < 1:
        raise ExperimentError(f"at least one piece of text is needed, got {number}")
    if not paths:
        return np.random.default_rng(seed).integers(0, target.model.config.vocab_size, (number, length)).astype(np.int32)
    pieces = []
    for index, name in enumerate(paths):
        path, count = Path(name).expanduser(), len(range(index, number, len(paths)))
        if not count:
            continue
        if not path.exists():
            raise ExperimentError(f"there is no text file or folder of token files {name}")
        pieces += _of_token_files(path, count, length) if (path / MANIFEST).is_file() else _of_text(path, target, count, length)
    return np.asarray(pieces, np.int32)


def _of_text(path: Path, target: Model, count: int, length: int) -> list[np.ndarray]:
    if target.checkpoint is None:
        raise ExperimentError(f"{path.name} is text, and the preset {target.name!r} has no tokenizer: give no data, or a checkpoint")
    try:
        text, tokenizer = path.read_text(encoding="utf-8"), target.checkpoint.tokenizer()
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path.name} is neither a text file (UTF-8) nor a folder of token files: {error}") from None
    pieces = []
    for number in range(count):
        start, size = number * len(text) // count, length * _CHARACTERS_A_TOKEN
        end = (number + 1) * len(text) // count
        ids: list[int] = []
        while len(ids) < length:
            ids = tokenizer.encode(text[start : min(start + size, end)])
            if start + size >= end and len(ids) < length:
                raise ExperimentError(f"{path.name} holds too little text for {count} pieces of {length} tokens")
            size *= 2
        pieces.append(np.asarray(ids[:length]))
    return pieces


def _of_token_files(path: Path, count: int, length: int) -> list[np.ndarray]:
    files = TokenFiles(path)
    pieces = []
    for number in range(count):
        first, end = number * len(files) // count, (number + 1) * len(files) // count
        parts: list[np.ndarray] = []
        while sum(map(len, parts)) < length and first < end:
            parts.append(np.asarray(files[first].tokens))
            first += 1
        if sum(map(len, parts)) < length:
            raise ExperimentError(f"{path.name} holds too few tokens for {count} pieces of {length}")
        pieces.append(np.concatenate(parts)[:length])
    return pieces
