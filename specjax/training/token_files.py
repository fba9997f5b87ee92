"""Token files: sequences of token ids in memory-mapped shards, with a manifest that says how they were made.

```
dataset/
├── tokens.json                  the manifest: sizes, checksums, vocabulary, tokenizer, how it was made
├── shard-00000.tokens.npy       [N] uint16 (V up to 65,536) or uint32, the sequences one behind the other
├── shard-00000.loss_mask.npy    [N] bool, true where a token is one to learn to predict; elsewhere it is context only
├── shard-00000.offsets.npy      [sequences + 1] int64, where each sequence begins, and where the last one ends
└── shard-00001.tokens.npy …
```

`specjax.training.token_writer` writes them. A mask of a byte a token, rather than spans: a chat of any number of turns is no special case.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specjax.training.token_manifest import merged, read_token_manifest

# What a shard consists of, in files `NAME.PART.npy`.
PARTS = ("tokens", "loss_mask", "offsets")
# Each open shard holds two file descriptors, and a process has 1024 of them by default.
_MAX_OPEN_SHARDS = 256


@dataclasses.dataclass(frozen=True, eq=False)
class TokenSequence:
    """One document or dialogue.

    Attributes:
        tokens: `[L]` int.
        loss_mask: `[L]` bool, true where a token is one to learn to predict.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class OpenShard:
    """What is in a shard.

    Attributes:
        tokens: `[N]` uint16 or uint32.
        loss_mask: `[N]` bool.
        offsets: `[sequences + 1]` int64.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype that ids are stored in."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of a `transformers` tokenizer's vocabulary: equal where the same ids mean the same tokens."""
    entries = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


class TokenFiles:
    """Token files, open for reading: a sequence of `TokenSequence`s, memory-mapped.

    Sizes are checked when the files are opened, ids when they are read, checksums on demand (`verify`).

    Example:
        >>> files = TokenFiles("data/sampled")
        >>> len(files), files[0].tokens, files.manifest.made["kind"]

    Args:
        paths: Folders that `specjax distill` or `specjax tokenize` made; of several, the sequences follow each other.

    Attributes:
        paths: The folders.
        manifest: What it says of itself, or what theirs say together.
        lengths: `[len(self)]` int64 tokens.

    Raises:
        ValueError: No token files, another version, a file that is missing, truncated or not what the manifest says, or folders that were
            made with different tokenizers.
    """

    def __init__(self, *paths: str | Path) -> None:
        self.paths = tuple(Path(path) for path in paths)
        manifests = [read_token_manifest(path) for path in paths]
        self.manifest = merged(self.paths, manifests)
        self._folders = [path for path, manifest in zip(self.paths, manifests, strict=True) for _ in manifest.shards]
        numbers = range(len(self.manifest.shards))
        for number in numbers:
            self._check_sizes(number)
        self._offsets = [self._read_offsets(number) for number in numbers]
        # The index of each shard's first sequence.
        self._starts = np.cumsum([0, *(shard.num_sequences for shard in self.manifest.shards)])
        self.lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(offsets) for offsets in self._offsets)])
        self._maps = functools.lru_cache(maxsize=_MAX_OPEN_SHARDS)(self._open)

    @property
    def name(self) -> str:
        """The folders, for messages."""
        return " and ".join(map(str, self.paths))

    def __len__(self) -> int:
        return self.manifest.num_sequences

    def __getitem__(self, index: int) -> TokenSequence:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has sequences 0 to {len(self) - 1}, not {index}")
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        start, stop = self._offsets[number][index - self._starts[number] :][:2]
        tokens, loss_mask = (part[start:stop] for part in self._maps(number))
        self._check_ids(tokens, number)
        return TokenSequence(tokens=tokens, loss_mask=loss_mask)

    def shards(self) -> Iterator[OpenShard]:
        """What is in each shard, memory-mapped. Ids are not checked."""
        for number, offsets in enumerate(self._offsets):
            tokens, loss_mask = self._maps(number)
            yield OpenShard(tokens=tokens, loss_mask=loss_mask, offsets=offsets)

    def verify(self) -> None:
        """Reads everything, and compares checksums.

        Raises:
            ValueError: A file is not the one that was written, or holds an id outside the vocabulary.
        """
        for number, shard in enumerate(self.manifest.shards):
            for part in PARTS:
                with self._file(number, part).open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != shard.sha256.get(part):
                    raise ValueError(f"{self._file(number, part)} is damaged: its SHA-256 should be {shard.sha256.get(part)}, got {found}")
        for number, shard in enumerate(self.shards()):
            self._check_ids(shard.tokens, number)

    def _file(self, number: int, part: str) -> Path:
        return self._folders[number] / file_name(self.manifest.shards[number].name, part)

    def _check_sizes(self, number: int) -> None:
        shard = self.manifest.shards[number]
        for part in PARTS:
            file = self._file(number, part)
            if not file.is_file():
                raise ValueError(f"{file} is missing: the manifest names it. Is the copy whole?")
            if file.stat().st_size != shard.num_bytes.get(part):
                raise ValueError(f"{file} should have {shard.num_bytes.get(part)} bytes, got {file.stat().st_size}. Is the copy whole?")

    def _array(self, number: int, part: str, dtype: Any, size: int) -> np.ndarray:
        file = self._file(number, part)
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"{file} is damaged: it should hold {np.dtype(dtype)} [{size}], but {error}") from error
        if (array.shape, array.dtype) != ((size,), np.dtype(dtype)):
            raise ValueError(f"{file} should hold {np.dtype(dtype)} [{size}], got {array.dtype} {list(array.shape)}")
        return array.view(np.ndarray)  # slices of a memmap cost more, and are memmaps

    def _read_offsets(self, number: int) -> np.ndarray:
        shard = self.manifest.shards[number]
        offsets = np.array(self._array(number, "offsets", np.int64, shard.num_sequences + 1))
        if offsets[0] != 0 or offsets[-1] != shard.num_tokens or np.any(np.diff(offsets) <= 0):
            raise ValueError(f"{self._file(number, 'offsets')} should rise from 0 to {shard.num_tokens}, got {offsets[0]} to {offsets[-1]}")
        return offsets

    def _open(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        shard = self.manifest.shards[number]
        tokens = self._array(number, "tokens", token_dtype(self.manifest.vocab_size), shard.num_tokens)
        return tokens, self._array(number, "loss_mask", bool, shard.num_tokens)

    def _check_ids(self, tokens: np.ndarray, number: int) -> None:
        if int(tokens.max()) >= self.manifest.vocab_size:
            raise ValueError(f"{self._file(number, 'tokens')} should hold ids below {self.manifest.vocab_size}, got {int(tokens.max())}")


def file_name(shard: str, part: str) -> str:
    """Of one part of a shard."""
    return f"{shard}.{part}.npy"
