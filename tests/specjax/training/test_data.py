"""Batches from token files: every row as it should be, in an order that a seed gives and a state restores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.training.data import DataConfig, TokenBatch, TokenBatches
from specjax.training.token_files import TokenFiles
from tests.specjax.training.test_token_files import TokenSequence, random_sequences, write

T = 6


@pytest.fixture
def sequences() -> list[TokenSequence]:
    """37 of up to 15 tokens, each of which can be told by its first token."""
    found = random_sequences(37, longest=15)
    return [TokenSequence(np.concatenate([[index], one.tokens]), np.append(True, one.loss_mask)) for index, one in enumerate(found)]


@pytest.fixture
def files(tmp_path: Path, sequences: list[TokenSequence]) -> TokenFiles:
    return write(tmp_path / "data", sequences)


def config(**changes: Any) -> DataConfig:
    return DataConfig(**dict(batch_size=4, sequence_length=T, seed=3) | changes)


def expected_rows(sequences: list[TokenSequence], *, split: bool) -> list[tuple[list[int], list[bool]]]:
    """Token by token."""
    rows = []
    for one in sequences:
        for begin in range(0, len(one.tokens) if split else 1, T):
            tokens, mask = [], []
            for position in range(T):
                there = begin + position < len(one.tokens)
                tokens.append(int(one.tokens[begin + position]) if there else 0)
                mask.append(bool(there and position > 0 and one.loss_mask[begin + position]))
            if any(mask):
                rows.append((tokens, mask))
    return rows


def rows_of(batches: list[TokenBatch]) -> list[tuple[list[int], list[bool]]]:
    return [(t.tolist(), m.tolist()) for batch in batches for t, m in zip(batch.tokens, batch.loss_mask, strict=True)]


def take(batches: TokenBatches, number: int) -> list[TokenBatch]:
    return [next(batches) for _ in range(number)]


def assert_equal(left: list[TokenBatch], right: list[TokenBatch]) -> None:
    assert rows_of(left) == rows_of(right)


@pytest.mark.parametrize("split", [False, True])
def test_rows_are_cut_or_split_padded_and_masked(files: TokenFiles, sequences: list[TokenSequence], split: bool) -> None:
    batches = TokenBatches(files, config(batch_size=1, shuffle=False, num_epochs=1, long_sequences="split" if split else "cut"))
    found = list(batches)
    assert found[0].tokens.shape == found[0].loss_mask.shape == (1, T)
    assert (found[0].tokens.dtype, found[0].loss_mask.dtype) == (np.int32, bool)
    expected = expected_rows(sequences, split=split)
    assert rows_of(found) == expected
    assert batches.num_rows == batches.num_batches == len(expected)
    # Some rows have no token whose prediction counts; they are not among these.
    assert len(expected) < sum(-(-len(one.tokens) // T) if split else 1 for one in sequences)


def test_every_epoch_has_every_row_once_in_another_order(files: TokenFiles, sequences: list[TokenSequence]) -> None:
    expected = expected_rows(sequences, split=False)
    rows = rows_of(list(TokenBatches(files, config(batch_size=1, num_epochs=3))))
    epochs = [rows[start : start + len(expected)] for start in range(0, len(rows), len(expected))]
    assert len(epochs) == 3
    assert all(sorted(epoch) == sorted(expected) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != expected
    assert epochs[0] == rows_of(take(TokenBatches(files, config(batch_size=1)), len(expected)))
    assert epochs[0] != rows_of(take(TokenBatches(files, config(batch_size=1, seed=4)), len(expected)))


def test_a_batch_may_hold_rows_of_two_epochs_and_only_the_last_incomplete_one_is_dropped(files: TokenFiles) -> None:
    batches = TokenBatches(files, config(num_epochs=3))
    single = rows_of(list(TokenBatches(files, config(batch_size=1, num_epochs=3))))
    assert batches.num_rows % 4
    assert (3 * batches.num_rows) % 4
    rows = rows_of(list(batches))
    whole = 3 * batches.num_rows // 4
    assert batches.num_batches == whole
    assert rows == single[: 4 * whole]


@pytest.mark.parametrize("at", [0, 1, 5, 9, 23])
def test_a_restored_state_gives_the_same_batches(files: TokenFiles, at: int) -> None:
    straight = TokenBatches(files, config())
    take(straight, at)
    state = json.dumps(straight.get_state())
    rest = take(straight, 12)  # across the end of an epoch
    again = TokenBatches(TokenFiles(*files.paths), config())
    again.set_state(json.loads(state))
    assert_equal(take(again, 12), rest)
    straight.set_state(json.loads(state))
    assert_equal(take(straight, 12), rest)


def test_a_state_of_other_data_is_refused(files: TokenFiles, sequences: list[TokenSequence], tmp_path: Path) -> None:
    state = TokenBatches(files, config()).get_state()
    other = write(tmp_path / "other", sequences[::-1])
    for batches in (TokenBatches(other, config()), TokenBatches(files, config(seed=4)), TokenBatches(files, config(batch_size=2))):
        with pytest.raises(ValueError, match="this state is of other token files or another DataConfig: expected fingerprint .*, got"):
            batches.set_state(state)
    TokenBatches(files, config(num_epochs=7)).set_state(state)


def test_hosts_share_the_batches_of_one_host(files: TokenFiles) -> None:
    together = take(TokenBatches(files, config()), 20)
    for num_hosts in (2, 4):
        hosts = [take(TokenBatches(files, config(), host=host, num_hosts=num_hosts), 20) for host in range(num_hosts)]
        for number, batch in enumerate(together):
            shared = [batches[number] for batches in hosts]
            assert shared[0].tokens.shape == (4 // num_hosts, T)
            assert sorted(rows_of(shared)) == sorted(rows_of([batch]))
    with pytest.raises(ValueError, match="a batch of 4 rows must be shared evenly by hosts 0 to 2, host is 0"):
        TokenBatches(files, config(), num_hosts=3)
    with pytest.raises(ValueError, match="hosts 0 to 1, host is 2"):
        TokenBatches(files, config(), host=2, num_hosts=2)


def test_every_host_has_as_many_batches_where_the_last_one_is_incomplete(tmp_path: Path) -> None:
    some = write(tmp_path / "some", [TokenSequence(np.arange(3), np.ones(3, bool)) for _ in range(9)])
    hosts = [TokenBatches(some, config(batch_size=2, num_epochs=1), host=host, num_hosts=2) for host in range(2)]
    assert [one.num_batches for one in hosts] == [4, 4]
    assert [len(list(one)) for one in hosts] == [4, 4]


def test_a_dataset_smaller_than_a_batch_is_refused(files: TokenFiles) -> None:
    rows = TokenBatches(files, config(batch_size=1)).num_rows
    assert TokenBatches(files, config(batch_size=rows)).num_rows == rows
    with pytest.raises(ValueError, match=f"has {rows} rows of up to 6 tokens in which the loss counts somewhere, fewer than a batch of"):
        TokenBatches(files, config(batch_size=rows + 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(batch_size=0), "DataConfig.batch_size must be an int of at least 1, got 0"),
        (dict(sequence_length=1), "DataConfig.sequence_length must be an int of at least 2, got 1"),
        (dict(seed=-1), "DataConfig.seed must be an int of at least 0, got -1"),
        (dict(seed=1 << 32), "DataConfig.seed must be below 2^32"),
        (dict(num_epochs=0), "DataConfig.num_epochs must be an int of at least 1, got 0"),
        (dict(batch_size=True), "DataConfig.batch_size must be an int of at least 1, got True"),
        (dict(long_sequences="pack"), r"DataConfig.long_sequences must be one of \('cut', 'split'\), got 'pack'"),
    ],
)
def test_a_config_checks_itself(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("^", r"\^")):
        config(**changes)


def test_packed_rows_hold_whole_sequences_and_every_usable_one_but_the_last(files: TokenFiles, sequences: list[TokenSequence]) -> None:
    length = 20
    batches = TokenBatches(files, config(packed=True, sequence_length=length, batch_size=2, num_epochs=1))
    usable = {int(one.tokens[0]): one for one in sequences if one.loss_mask[1:length].any()}
    found = []
    for tokens, mask in rows_of(take(batches, batches.num_batches or 0)):
        at = 0
        while at < length:
            one = usable[tokens[at]]
            size = min(len(one.tokens), length - at)
            assert tokens[at : at + size] == one.tokens[:size].tolist()
            # Nothing predicts a text's first token, whatever the mask says of it.
            assert mask[at : at + size] == [False, *one.loss_mask[1:size].tolist()]
            found.append(tokens[at])
            at += size
    assert len(found) == len(set(found))
    # One odd row at most for want of a batch, and what fills no row.
    left = sum(len(one.tokens) for index, one in usable.items() if index not in found)
    assert left < 3 * length


def test_packed_rows_are_the_same_in_every_run_and_others_with_another_seed(files: TokenFiles) -> None:
    first, second, other = (TokenBatches(files, config(packed=True, sequence_length=20, batch_size=2, seed=seed)) for seed in (3, 3, 4))
    taken = take(first, 5)
    assert_equal(taken, take(second, 5))
    assert rows_of(taken) != rows_of(take(other, 5))


def test_packed_rows_are_not_split() -> None:
    with pytest.raises(ValueError, match="packed rows cut what is too long: DataConfig.long_sequences must be \"cut\", got 'split'"):
        config(packed=True, long_sequences="split")
