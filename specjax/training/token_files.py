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

MANIFEST = "tokens.json"
FORMAT_VERSION = 1
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """What the manifest says of a shard.

    Attributes:
        name: The beginning of its files' names.
        num_sequences: How many it holds.
        num_tokens: N.
        num_loss_tokens: Those of them where the loss counts.
        num_bytes: Size of each file, by part.
        sha256: Of each file, by part.
    """

    name: str
    num_sequences: int
    num_tokens: int
    num_loss_tokens: int
    num_bytes: dict[str, int]
    sha256: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenManifest:
    """What a folder of token files says of itself.

    Attributes:
        vocab_size: V; every id is below it.
        tokenizer: `tokenizer_fingerprint` of the tokenizer that made the ids.
        made: How: `kind` (`"sampled"`, `"text"` or `"chat"`) and what else there is to know, JSON values.
        dropped: How many sequences were left out, by reason.
        shards: In order.
        format_version: Of the files.
    """

    vocab_size: int
    tokenizer: str
    made: dict[str, Any]
    dropped: dict[str, int]
    shards: tuple[Shard, ...]
    format_version: int = FORMAT_VERSION

    @property
    def num_sequences(self) -> int:
        """Over all shards."""
        return sum(shard.num_sequences for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Over all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_loss_tokens(self) -> int:
        """Over all shards."""
        return sum(shard.num_loss_tokens for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        totals = {name: getattr(self, name) for name in ("num_sequences", "num_tokens", "num_loss_tokens")}
        return dataclasses.asdict(self) | totals


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype that ids are stored in."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of a `transformers` tokenizer's vocabulary: equal where the same ids mean the same tokens."""
    entries = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def read_token_manifest(path: str | Path) -> TokenManifest:
    """Reads `tokens.json`.

    Raises:
        ValueError: No token files, those of another version, or a damaged manifest.
    """
    file = Path(path) / MANIFEST
    if not file.is_file():
        raise ValueError(f"{path} holds no token files: there is no {MANIFEST}; make some with specjax distill or specjax tokenize")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from error
    version = values.get("format_version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"{file} has format version {version!r}, this version of specjax reads {FORMAT_VERSION}")
    totals = ("num_sequences", "num_tokens", "num_loss_tokens")
    try:
        fields: dict[str, Any] = {name: value for name, value in values.items() if name not in totals}
        fields["shards"] = tuple(Shard(**shard) for shard in fields["shards"])
        manifest = TokenManifest(**fields)
        found = {name: getattr(manifest, name) for name in totals}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(manifest.vocab_size, int) or manifest.vocab_size < 1 or not isinstance(manifest.made, dict):
        raise ValueError(f"{file} is damaged: vocab_size = {manifest.vocab_size!r}, made = {manifest.made!r:.80}")
    if any(values.get(name) != found[name] for name in totals):
        raise ValueError(f"{file} is damaged: it should add up to {found}, got {[values.get(name) for name in totals]}")
    return manifest


class TokenFiles:
    """Token files, open for reading: a sequence of `TokenSequence`s, memory-mapped.

    Sizes are checked when the files are opened, ids when they are read, checksums on demand (`verify`).

    Example:
        >>> files = TokenFiles("data/sampled")
        >>> len(files), files[0].tokens, files.manifest.made["kind"]

    Args:
        path: A folder that `specjax distill` or `specjax tokenize` made.

    Attributes:
        path: The folder.
        manifest: What it says of itself.
        lengths: `[len(self)]` int64 tokens.

    Raises:
        ValueError: No token files, another version, or a file that is missing, truncated or not what the manifest says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = read_token_manifest(path)
        for shard in self.manifest.shards:
            self._check_sizes(shard)
        self._offsets = [self._read_offsets(shard) for shard in self.manifest.shards]
        # The index of each shard's first sequence.
        self._starts = np.cumsum([0, *(shard.num_sequences for shard in self.manifest.shards)])
        self.lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(offsets) for offsets in self._offsets)])
        self._maps = functools.lru_cache(maxsize=_MAX_OPEN_SHARDS)(self._open)

    def __len__(self) -> int:
        return self.manifest.num_sequences

    def __getitem__(self, index: int) -> TokenSequence:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} has sequences 0 to {len(self) - 1}, not {index}")
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
        for shard in self.manifest.shards:
            for part in PARTS:
                with self._file(shard, part).open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != shard.sha256.get(part):
                    raise ValueError(f"{self._file(shard, part)} is damaged: its SHA-256 should be {shard.sha256.get(part)}, got {found}")
        for number, shard in enumerate(self.shards()):
            self._check_ids(shard.tokens, number)

    def _file(self, shard: Shard, part: str) -> Path:
        return self.path / file_name(shard.name, part)

    def _check_sizes(self, shard: Shard) -> None:
        for part in PARTS:
            file = self._file(shard, part)
            if not file.is_file():
                raise ValueError(f"{file} is missing: the manifest names it. Is the copy whole?")
            if file.stat().st_size != shard.num_bytes.get(part):
                raise ValueError(f"{file} should have {shard.num_bytes.get(part)} bytes, got {file.stat().st_size}. Is the copy whole?")

    def _array(self, shard: Shard, part: str, dtype: Any, size: int) -> np.ndarray:
        file = self._file(shard, part)
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"{file} is damaged: it should hold {np.dtype(dtype)} [{size}], but {error}") from error
        if (array.shape, array.dtype) != ((size,), np.dtype(dtype)):
            raise ValueError(f"{file} should hold {np.dtype(dtype)} [{size}], got {array.dtype} {list(array.shape)}")
        return array.view(np.ndarray)  # slices of a memmap cost more, and are memmaps

    def _read_offsets(self, shard: Shard) -> np.ndarray:
        offsets = np.array(self._array(shard, "offsets", np.int64, shard.num_sequences + 1))
        if offsets[0] != 0 or offsets[-1] != shard.num_tokens or np.any(np.diff(offsets) <= 0):
            raise ValueError(f"{self._file(shard, 'offsets')} should rise from 0 to {shard.num_tokens}, got {offsets[0]} to {offsets[-1]}")
        return offsets

    def _open(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        shard = self.manifest.shards[number]
        tokens = self._array(shard, "tokens", token_dtype(self.manifest.vocab_size), shard.num_tokens)
        return tokens, self._array(shard, "loss_mask", bool, shard.num_tokens)

    def _check_ids(self, tokens: np.ndarray, number: int) -> None:
        if int(tokens.max()) >= self.manifest.vocab_size:
            file = self._file(self.manifest.shards[number], "tokens")
            raise ValueError(f"{file} should hold ids below {self.manifest.vocab_size}, got {int(tokens.max())}")


def file_name(shard: str, part: str) -> str:
    """Of one part of a shard."""
    return f"{shard}.{part}.npy"
