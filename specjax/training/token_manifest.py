"""The manifest of token files: sizes, checksums, vocabulary, tokenizer, and how they were made."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MANIFEST = "tokens.json"
FORMAT_VERSION = 1


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


def merged(paths: Sequence[Path], manifests: Sequence[TokenManifest]) -> TokenManifest:
    """One manifest for all."""
    if not manifests:
        raise ValueError("token files are in folders, none is named")
    first = manifests[0]
    for path, manifest in zip(paths, manifests, strict=True):
        if (manifest.tokenizer, manifest.vocab_size) != (first.tokenizer, first.vocab_size):
            raise ValueError(
                f"{path} was made with another tokenizer than {paths[0]}: expected {first.tokenizer[:16]}, got {manifest.tokenizer[:16]}"
            )
    if len(manifests) == 1:
        return first
    dropped = sum((Counter(manifest.dropped) for manifest in manifests), Counter())
    return dataclasses.replace(
        first,
        made={"kind": "mixed", "parts": [manifest.made for manifest in manifests]},
        dropped=dict(dropped),
        shards=tuple(shard for manifest in manifests for shard in manifest.shards),
    )
