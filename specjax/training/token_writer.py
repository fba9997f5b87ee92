"""Writes token files, shard by shard: in bounded memory, whole or not at all, and so that an interrupted run can be gone on with."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.atomic import UNFINISHED, atomic_folder
from specjax.training.token_files import PARTS, TokenSequence, file_name, token_dtype
from specjax.training.token_manifest import FORMAT_VERSION, MANIFEST, Shard, TokenManifest

# 8 or 16 MB of ids: what is held in memory, and at most what an interruption loses.
MAX_SHARD_TOKENS = 1 << 22


@dataclasses.dataclass(frozen=True)
class _State:
    """Replaced as a whole, so that an interruption finds the old one or the new one."""

    shards: tuple[Shard, ...] = ()
    buffer: tuple[TokenSequence, ...] = ()
    position: int = 0
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)


class TokenWriter:
    """Takes sequences, in groups; see `writing_token_files`, which makes one.

    Args:
        folder: Where.
        vocab_size: V.
        tokenizer: `tokenizer_fingerprint`.
        made: How the sequences are made.
        max_shard_tokens: A shard holds no more.
        resume: A later run can go on: `save` notes where.
    """

    def __init__(
        self, folder: Path, *, vocab_size: int, tokenizer: str, made: Mapping[str, Any], max_shard_tokens: int, resume: bool
    ) -> None:
        if max_shard_tokens < 1:
            raise ValueError(f"max_shard_tokens must be at least 1, got {max_shard_tokens}")
        self._folder, self._max_shard_tokens, self._resume = folder, max_shard_tokens, resume
        # As JSON gives it back: what an interrupted run wrote is compared with it.
        self._identity = json.loads(json.dumps({"vocab_size": vocab_size, "tokenizer": tokenizer, "made": dict(made)}))
        self._vocab_size = vocab_size
        self._state = _State()

    @property
    def position(self) -> int:
        """Where in its input the run is: what the last `extend` said; after a restart, where to go on."""
        return self._state.position

    @property
    def dropped(self) -> dict[str, int]:
        """How many sequences were left out so far, by reason."""
        return dict(self._state.dropped)

    @property
    def num_sequences(self) -> int:
        """Taken so far, those of an earlier run included."""
        return sum(shard.num_sequences for shard in self._state.shards) + len(self._state.buffer)

    @property
    def num_tokens(self) -> int:
        """Taken so far, likewise."""
        return sum(shard.num_tokens for shard in self._state.shards) + _num_tokens(self._state.buffer)

    def written(self) -> Iterator[TokenSequence]:
        """The sequences in the shards, from an earlier run too."""
        for shard in self._state.shards:
            tokens, loss_mask, offsets = (np.load(self._folder / file_name(shard.name, part)) for part in PARTS)
            for start, stop in itertools.pairwise(offsets):
                yield TokenSequence(tokens=tokens[start:stop], loss_mask=loss_mask[start:stop])

    def extend(self, sequences: Iterable[TokenSequence], *, position: int = 0, dropped: Mapping[str, int] | None = None) -> None:
        """Takes a group of sequences. A run that is gone on with makes a group again from its first sequence, or not at all.

        Args:
            sequences: Tokens `[L]` and loss masks `[L]`, L at least 1.
            position: Where in the input the run is behind them.
            dropped: How many were left out of this group, by reason.

        Raises:
            ValueError: A sequence that is empty, longer than a shard, has a mask of another shape, or an id outside the vocabulary.
        """
        taken = tuple(self._checked(sequence) for sequence in sequences)
        if _num_tokens(self._state.buffer) + _num_tokens(taken) > self._max_shard_tokens:
            self.save()
        counts = self.dropped
        for reason, number in (dropped or {}).items():
            counts[reason] = counts.get(reason, 0) + number
        self._state = dataclasses.replace(self._state, buffer=self._state.buffer + taken, position=position, dropped=counts)

    def save(self) -> None:
        """Writes out what is in memory, and notes where a later run can go on, if one can."""
        shards, shard, size = list(self._state.shards), [], 0
        for sequence in self._state.buffer:
            if size + len(sequence.tokens) > self._max_shard_tokens:
                shards.append(_write_shard(self._folder, f"shard-{len(shards):05}", shard, self._vocab_size))
                shard, size = [], 0
            shard.append(sequence)
            size += len(sequence.tokens)
        if shard:
            shards.append(_write_shard(self._folder, f"shard-{len(shards):05}", shard, self._vocab_size))
        self._state = dataclasses.replace(self._state, shards=tuple(shards), buffer=())
        if not self._resume:
            return
        noted = {"shards": [dataclasses.asdict(shard) for shard in shards], "position": self.position, "dropped": self.dropped}
        partial = self._folder / f"{UNFINISHED}.partial"
        partial.write_text(json.dumps(self._identity | noted), encoding="utf-8")
        os.replace(partial, self._folder / UNFINISHED)

    def finish(self) -> TokenManifest:
        """Writes the manifest.

        Raises:
            ValueError: There are no sequences.
        """
        if not self.num_sequences:
            raise ValueError(f"there are no sequences to write (dropped: {self.dropped or 'none'})")
        self.save()
        manifest = TokenManifest(**self._identity, dropped=self.dropped, shards=self._state.shards, format_version=FORMAT_VERSION)
        (self._folder / MANIFEST).write_text(json.dumps(manifest.to_json(), indent=1) + "\n", encoding="utf-8")
        (self._folder / UNFINISHED).unlink(missing_ok=True)
        return manifest

    def take_up(self, *, force: bool) -> None:
        """Goes on from what an interrupted run left, and removes what it had not noted.

        Args:
            force: Start over if it was another run; otherwise refuse.

        Raises:
            ValueError: It was another run, or what it wrote is damaged.
        """
        file = self._folder / UNFINISHED
        noted = _read_unfinished(file) if file.is_file() else None
        differing = [] if noted is None else [name for name, value in self._identity.items() if noted.get(name) != value]
        if noted is not None and differing:
            if not force:
                raise ValueError(
                    f"{file} is of an unfinished run with {_differences(self._identity, noted)}: go on with that, or pass --force"
                )
            noted = None
        if noted is not None:
            shards = tuple(Shard(**shard) for shard in noted["shards"])
            self._state = _State(shards=shards, position=noted["position"], dropped=noted["dropped"])
        kept = {file_name(shard.name, part): shard.num_bytes[part] for shard in self._state.shards for part in PARTS}
        for name, size in kept.items():
            found = (self._folder / name).stat().st_size if (self._folder / name).is_file() else None
            if found != size:
                raise ValueError(f"{self._folder / name} of an unfinished run should have {size} bytes, got {found}: remove {self._folder}")
        for entry in self._folder.iterdir():
            if entry.name not in kept and (entry != file or noted is None):
                entry.unlink()

    def _checked(self, sequence: TokenSequence) -> TokenSequence:
        tokens, loss_mask = np.asarray(sequence.tokens), np.asarray(sequence.loss_mask)
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or tokens.size == 0:
            raise ValueError(f"a sequence must be ints of shape [L], L at least 1, got {tokens.dtype} {list(tokens.shape)}")
        if loss_mask.dtype != bool or loss_mask.shape != tokens.shape:
            raise ValueError(
                f"the loss mask of {tokens.size} tokens must be bool [{tokens.size}], got {loss_mask.dtype} {list(loss_mask.shape)}"
            )
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ValueError(f"token ids must be from 0 to {self._vocab_size - 1}, got ids from {tokens.min()} to {tokens.max()}")
        if tokens.size > self._max_shard_tokens:
            raise ValueError(f"a sequence must fit into a shard of {self._max_shard_tokens} tokens, got {tokens.size}")
        return TokenSequence(tokens=tokens.astype(token_dtype(self._vocab_size)), loss_mask=loss_mask)


@contextlib.contextmanager
def writing_token_files(
    destination: str | Path,
    *,
    vocab_size: int,
    tokenizer: str,
    made: Mapping[str, Any],
    force: bool = False,
    resume: bool = False,
    max_shard_tokens: int = MAX_SHARD_TOKENS,
) -> Iterator[TokenWriter]:
    """Token files to fill, which appear at the destination when the block ends without an error.

    Example:
        >>> with writing_token_files("data/text", vocab_size=49152, tokenizer=fingerprint, made={"kind": "text"}) as writer:
        ...     writer.extend(sequences)

    Args:
        destination: The folder to create.
        vocab_size: V; every id is below it.
        tokenizer: `tokenizer_fingerprint` of the tokenizer.
        made: How the sequences are made, JSON values, `kind` among them: with `resume`, all that they depend on.
        force: Replace token files that exist, and an unfinished run that made others.
        resume: Keep what was made when the block fails or the process ends, and go on from there: at `writer.position`.
        max_shard_tokens: A shard holds no more; so much is held in memory, or a group of `TokenWriter.extend`, if that is more.

    Yields:
        The writer.

    Raises:
        ValueError: No sequence was written; or an unfinished run made others, and not `force`.
        OSError: The destination exists, or cannot be written, or another process is writing it.
    """
    with atomic_folder(destination, force=force, marker=MANIFEST, keep_unfinished=resume) as folder:
        writer = TokenWriter(
            folder, vocab_size=vocab_size, tokenizer=tokenizer, made=made, max_shard_tokens=max_shard_tokens, resume=resume
        )
        if resume:
            writer.take_up(force=force)
        try:
            yield writer
        except BaseException:
            if resume and writer.num_sequences:
                writer.save()
            raise
        writer.finish()


def _write_shard(folder: Path, name: str, sequences: list[TokenSequence], vocab_size: int) -> Shard:
    arrays = {
        "tokens": np.concatenate([sequence.tokens for sequence in sequences]).astype(token_dtype(vocab_size)),
        "loss_mask": np.concatenate([sequence.loss_mask for sequence in sequences]),
        "offsets": np.cumsum([0, *(len(sequence.tokens) for sequence in sequences)], dtype=np.int64),
    }
    num_bytes, digests = {}, {}
    for part in PARTS:
        path = folder / file_name(name, part)
        np.save(path, arrays[part])
        num_bytes[part] = path.stat().st_size
        with path.open("rb") as file:
            digests[part] = hashlib.file_digest(file, "sha256").hexdigest()
    return Shard(
        name=name,
        num_sequences=len(sequences),
        num_tokens=arrays["tokens"].size,
        num_loss_tokens=int(arrays["loss_mask"].sum()),
        num_bytes=num_bytes,
        sha256=digests,
    )


def _read_unfinished(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): remove {file.parent}") from error


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """`temperature [0.7], not [1.0]`, for each setting that differs."""
    flat = [
        {**{k: v for k, v in values.items() if k in ("vocab_size", "tokenizer")}, **values.get("made", {})} for values in (found, wanted)
    ]
    names = [name for name in flat[0] | flat[1] if flat[0].get(name) != flat[1].get(name)]
    return ", ".join(f"{name} {flat[0].get(name)!r}, not {flat[1].get(name)!r}" for name in names)


def _num_tokens(sequences: Iterable[TokenSequence]) -> int:
    return sum(len(sequence.tokens) for sequence in sequences)
