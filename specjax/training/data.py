"""Batches of fixed shape from token files, shuffled and resumable. Grain: https://github.com/google/grain.

Every row is one sequence, or a piece of one, padded on the right; or, packed, as many sequences one behind the other as fill it. Packed
rows waste nothing on padding, and show a drafter distances longer than one dialogue. But a pass over a row has one causal mask, through
which a dialogue attends to those before it: what the target predicts there is still what the drafter learns, though not quite what it
predicts of the dialogue alone.

The pipeline is stateless: which rows batch n holds follows from the seed and n alone. So the state of an iterator is n, and going on from
it gives the very same batches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import grain
import jax
import numpy as np

from specjax.training.token_files import TokenFiles

LONG_SEQUENCES = ("cut", "split")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """What a training step takes.

    Attributes:
        tokens: `[B,T]` int32, 0 where a row is padded.
        loss_mask: `[B,T]` bool, true where the prediction *of this token* counts: never on padding, never at position 0, which nothing
            predicts. Every row has such a token.
    """

    tokens: jax.Array | np.ndarray
    loss_mask: jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How batches are made.

    Attributes:
        batch_size: B, over all hosts.
        sequence_length: T.
        long_sequences: Those beyond T tokens: `"cut"` drops what is behind, `"split"` makes further rows of it. A further row starts at
            position 0, without what came before it.
        packed: Rows hold several sequences, whole but for what does not fit at a row's end, which is dropped. Which ones stand together
            follows from the seed, and stays so in every epoch.
        shuffle: In another order each epoch; otherwise in that of the files.
        seed: Of the shuffle, 0 to 2^32 - 1.
        num_epochs: How often the rows come; `None` never ends. An epoch does not end a batch, which may hold rows of two: no row is left
            out, but for those of the last, incomplete batch of the last epoch, which is dropped.

    Raises:
        ValueError: A value outside its range.
    """

    batch_size: int
    sequence_length: int
    long_sequences: str = "cut"
    packed: bool = False
    shuffle: bool = True
    seed: int = 0
    num_epochs: int | None = None

    def __post_init__(self) -> None:
        smallest = {"batch_size": 1, "sequence_length": 2, "seed": 0} | ({} if self.num_epochs is None else {"num_epochs": 1})
        for name, least in smallest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"DataConfig.{name} must be an int of at least {least}, got {value!r}")
        if self.seed >= 1 << 32:
            raise ValueError(f"DataConfig.seed must be below 2^32, got {self.seed}")
        if self.long_sequences not in LONG_SEQUENCES:
            raise ValueError(f"DataConfig.long_sequences must be one of {LONG_SEQUENCES}, got {self.long_sequences!r}")
        if self.packed and self.long_sequences != "cut":
            raise ValueError(f'packed rows cut what is too long: DataConfig.long_sequences must be "cut", got {self.long_sequences!r}')


class TokenBatches:
    """An iterator over `TokenBatch`es, whose state can be saved and restored at any batch.

    Example:
        >>> batches = TokenBatches(TokenFiles("data/sampled"), DataConfig(batch_size=64, sequence_length=1024))
        >>> batch = next(batches)
        >>> saved = json.dumps(batches.get_state())
        >>> batches.set_state(json.loads(saved))

    Args:
        files: What to read.
        config: How.
        host: This process, `jax.process_index()` where there are several.
        num_hosts: `jax.process_count()`. Host h gets rows h, h + num_hosts, … of every batch: the batches as a whole, and what a saved
            state means, do not depend on the number of hosts.

    Attributes:
        sequence_length: T.
        num_rows: Rows an epoch. Pieces in which the loss counts nowhere are left out.
        num_batches: How many batches there are; `None` without end.

    Raises:
        ValueError: Fewer rows than a batch holds, or a batch that hosts cannot share evenly.
    """

    def __init__(self, files: TokenFiles, config: DataConfig, *, host: int = 0, num_hosts: int = 1) -> None:
        if not 0 <= host < num_hosts or config.batch_size % num_hosts:
            raise ValueError(f"a batch of {config.batch_size} rows must be shared evenly by hosts 0 to {num_hosts - 1}, host is {host}")
        rows: _Rows | _PackedRows
        if config.packed:
            rows = _PackedRows(files, config.sequence_length, seed=config.seed)
        else:
            rows = _Rows(files, config.sequence_length, split=config.long_sequences == "split")
        self.num_rows = len(rows)
        if self.num_rows < config.batch_size:
            raise ValueError(
                f"{files.name} has {self.num_rows} rows of up to {config.sequence_length} tokens in which the loss counts somewhere, "
                f"fewer than a batch of {config.batch_size}"
            )
        self.sequence_length = config.sequence_length
        self.num_batches = None if config.num_epochs is None else config.num_epochs * self.num_rows // config.batch_size
        dataset = grain.MapDataset.source(rows)
        dataset = dataset.shuffle(seed=config.seed) if config.shuffle else dataset
        dataset = dataset.repeat(config.num_epochs)
        if self.num_batches is not None:
            # Before the hosts take their rows: of an incomplete batch one host could have a whole share, and another none.
            dataset = dataset[: self.num_batches * config.batch_size]
        dataset = dataset[host::num_hosts].batch(config.batch_size // num_hosts, drop_remainder=True)
        # No threads: a row takes some 60 µs of the host, and JAX runs steps behind it.
        self._iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
        self._fingerprint = _fingerprint(files, config)

    def __iter__(self) -> TokenBatches:
        return self

    def __next__(self) -> TokenBatch:
        return TokenBatch(**next(self._iterator))

    def get_state(self) -> dict[str, Any]:
        """Where the iterator is, as JSON values."""
        return {"next_batch": self._iterator.get_state()["next_index"], "fingerprint": self._fingerprint}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where an iterator over the same data was.

        Raises:
            ValueError: It was an iterator over other files, or one with another `DataConfig` (but for `num_epochs`).
        """
        if state.get("fingerprint") != self._fingerprint:
            raise ValueError(
                f"this state is of other token files or another DataConfig: expected fingerprint {self._fingerprint}, "
                f"got {state.get('fingerprint')}"
            )
        self._iterator.set_state({"next_index": state["next_batch"]})


class _Rows:
    """Grain's source: the rows of an epoch, by number."""

    def __init__(self, files: TokenFiles, length: int, *, split: bool) -> None:
        self._files, self._length = files, length
        num_pieces = -(-files.lengths // length) if split else np.ones_like(files.lengths)
        first_pieces = np.cumsum(num_pieces) - num_pieces
        sequence = np.repeat(np.arange(len(files)), num_pieces)
        begin = (np.arange(len(sequence)) - first_pieces[sequence]) * length
        length_of_piece = np.minimum(files.lengths[sequence] - begin, length)
        start = (np.cumsum(files.lengths) - files.lengths)[sequence] + begin
        kept = _has_loss(files, start, start + length_of_piece)
        self._sequence, self._begin = sequence[kept], begin[kept]

    def __len__(self) -> int:
        return len(self._sequence)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        sequence, begin = self._files[int(self._sequence[index])], int(self._begin[index])
        piece = slice(begin, begin + self._length)
        tokens, loss_mask = np.zeros(self._length, np.int32), np.zeros(self._length, bool)
        size = len(sequence.tokens[piece])
        tokens[:size], loss_mask[:size] = sequence.tokens[piece], sequence.loss_mask[piece]
        loss_mask[0] = False
        return {"tokens": tokens, "loss_mask": loss_mask}

    def __repr__(self) -> str:
        return f"rows of {self._files.name}"


class _PackedRows:
    """Grain's source: rows of several sequences each."""

    def __init__(self, files: TokenFiles, length: int, *, seed: int) -> None:
        self._files, self._length = files, length
        stop = np.cumsum(files.lengths)
        start = stop - files.lengths
        taken = np.minimum(files.lengths, length)
        usable = np.flatnonzero(_has_loss(files, start, start + taken))
        self._order = np.random.default_rng(seed).permutation(usable)
        # The number of each row's first sequence in that order. A row ends with the sequence that fills it.
        ends = np.cumsum(taken[self._order])
        firsts, filled = [0], 0
        while (last := int(np.searchsorted(ends, filled + length))) < len(ends):
            firsts.append(last + 1)
            filled = int(ends[last])
        # What is left at the end fills no row.
        self._firsts = np.array(firsts)

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens, loss_mask = np.zeros(self._length, np.int32), np.zeros(self._length, bool)
        at = 0
        for number in range(*self._firsts[index : index + 2]):
            sequence = self._files[int(self._order[number])]
            piece = slice(at, min(at + len(sequence.tokens), self._length))
            size = piece.stop - at
            tokens[piece], loss_mask[piece] = sequence.tokens[:size], sequence.loss_mask[:size]
            loss_mask[at] = False  # nothing predicts it: what stands before it is another text
            at = piece.stop
        return {"tokens": tokens, "loss_mask": loss_mask}

    def __repr__(self) -> str:
        return f"packed rows of {self._files.name}"


def _has_loss(files: TokenFiles, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Whether the loss counts anywhere in each piece, but for its position 0. Pieces in order, given by the tokens before them in all."""
    found, shard_start = [], 0
    for shard in files.shards():
        shard_stop = shard_start + shard.tokens.size
        here = slice(*np.searchsorted(start, (shard_start, shard_stop)))
        # One position before each piece's end is its last; a piece of one token has none beside position 0.
        first, last = start[here] + 1 - shard_start, stop[here] - 1 - shard_start
        bounds = np.stack([np.minimum(first, last), last], axis=1).ravel()
        has_loss = np.logical_or.reduceat(shard.loss_mask, bounds)[::2] | shard.loss_mask[last]
        found.append(has_loss & (first <= last))
        shard_start = shard_stop
    return np.concatenate(found)


def _fingerprint(files: TokenFiles, config: DataConfig) -> str:
    settings = dataclasses.asdict(config)
    del settings["num_epochs"]  # a longer run goes on from a shorter one
    digests = [shard.sha256 for shard in files.manifest.shards]
    return hashlib.sha256(json.dumps([settings, digests]).encode()).hexdigest()[:16]
