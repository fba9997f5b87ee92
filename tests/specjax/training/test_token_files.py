"""Token files: what is written is what is read, damage is named, and an interrupted run leaves nothing that looks whole."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specjax.training.token_counts import count_tokens, share_outside
from specjax.training.token_files import TokenFiles, TokenSequence, tokenizer_fingerprint
from specjax.training.token_manifest import MANIFEST, read_token_manifest
from specjax.training.token_writer import writing_token_files

V = 100


def sequence(tokens: list[int], loss_from: int = 1) -> TokenSequence:
    return TokenSequence(tokens=np.array(tokens), loss_mask=np.arange(len(tokens)) >= loss_from)


def random_sequences(number: int, *, seed: int = 0, longest: int = 9) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, number)
    return [TokenSequence(tokens=rng.integers(0, V, n), loss_mask=rng.random(n) < 0.5) for n in lengths]


def write(path: Path, sequences: list[TokenSequence], *, group: int = 4, **changes: Any) -> TokenFiles:
    settings = dict(vocab_size=V, tokenizer="abc", made={"kind": "text", "names": ["a"]}, max_shard_tokens=40) | changes
    with writing_token_files(path, **settings) as writer:
        for start in range(0, len(sequences), group):
            writer.extend(sequences[start : start + group], position=start + group, dropped={"empty": 1})
    return TokenFiles(path)


def assert_same(files: TokenFiles, sequences: list[TokenSequence]) -> None:
    assert len(files) == len(sequences)
    for index, expected in enumerate(sequences):
        np.testing.assert_array_equal(files[index].tokens, expected.tokens)
        np.testing.assert_array_equal(files[index].loss_mask, expected.loss_mask)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_what_is_written_is_read_in_order_and_memory_mapped(tmp_path: Path, vocab_size: int, dtype: Any) -> None:
    sequences = [*random_sequences(30), sequence([vocab_size - 1, 0])]
    files = write(tmp_path / "data", sequences, vocab_size=vocab_size)
    assert_same(files, sequences)
    files.verify()
    manifest = files.manifest
    assert manifest.made == {"kind": "text", "names": ["a"]}
    assert manifest.dropped == {"empty": 8}
    assert manifest.num_sequences == 31
    assert manifest.num_tokens == sum(len(one.tokens) for one in sequences) == files.lengths.sum()
    assert manifest.num_loss_tokens == sum(one.loss_mask.sum() for one in sequences)
    assert len(manifest.shards) > 3
    assert max(shard.num_tokens for shard in manifest.shards) <= 40
    tokens = np.load(tmp_path / "data" / "shard-00000.tokens.npy", mmap_mode="r")
    assert tokens.dtype == dtype
    with pytest.raises(IndexError, match="has sequences 0 to 30, not 31"):
        files[31]


def test_a_group_that_is_larger_than_a_shard_fills_several(tmp_path: Path) -> None:
    sequences = random_sequences(30)
    files = write(tmp_path / "data", sequences, group=30, max_shard_tokens=20)
    assert_same(files, sequences)
    assert max(shard.num_tokens for shard in files.manifest.shards) <= 20


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (sequence([]), r"ints of shape \[L\], L at least 1, got float64 \[0\]"),
        (sequence([V]), "token ids must be from 0 to 99, got ids from 100 to 100"),
        (sequence([-1, 3]), "token ids must be from 0 to 99, got ids from -1 to 3"),
        (TokenSequence(np.array([1, 2]), np.array([True])), r"mask of 2 tokens must be bool \[2\], got bool \[1\]"),
        (TokenSequence(np.array([1, 2]), np.array([0, 1])), r"mask of 2 tokens must be bool \[2\], got int64 \[2\]"),
        (sequence([1] * 41), "must fit into a shard of 40 tokens, got 41"),
    ],
)
def test_a_wrong_sequence_is_refused_and_nothing_is_left(tmp_path: Path, wrong: TokenSequence, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "data", [sequence([1, 2]), wrong])
    assert list(tmp_path.iterdir()) == []


def test_no_sequences_are_no_token_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no sequences to write"):
        write(tmp_path / "data", [])
    assert list(tmp_path.iterdir()) == []


def test_token_files_that_exist_are_replaced_only_when_asked(tmp_path: Path) -> None:
    write(tmp_path / "data", [sequence([1, 2])])
    with pytest.raises(FileExistsError, match="exists; pass --force"):
        write(tmp_path / "data", [sequence([3, 4])])
    assert_same(TokenFiles(tmp_path / "data"), [sequence([1, 2])])
    assert_same(write(tmp_path / "data", [sequence([3, 4])], force=True), [sequence([3, 4])])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(FileExistsError, match=f"holds no {MANIFEST}"):
        write(tmp_path / "other", [sequence([3, 4])], force=True)


def test_damaged_files_are_named_with_what_was_expected_and_found(tmp_path: Path) -> None:
    files = write(tmp_path / "data", [sequence([1, 2, 3, 4, 5])] * 30)
    tokens, offsets = (tmp_path / "data" / f"shard-00001.{part}.npy" for part in ("tokens", "offsets"))
    whole = {path: path.read_bytes() for path in (tokens, offsets)}

    tokens.write_bytes(whole[tokens][:-2])
    with pytest.raises(ValueError, match=rf"shard-00001.tokens.npy should have {len(whole[tokens])} bytes, got {len(whole[tokens]) - 2}"):
        TokenFiles(tmp_path / "data")
    tokens.unlink()
    with pytest.raises(ValueError, match=r"shard-00001.tokens.npy is missing"):
        TokenFiles(tmp_path / "data")

    flipped = bytearray(whole[tokens])
    flipped[-2] ^= 1
    tokens.write_bytes(flipped)
    with pytest.raises(ValueError, match=r"shard-00001.tokens.npy is damaged: its SHA-256 should be .*, got "):
        TokenFiles(tmp_path / "data").verify()
    flipped[-1] = 255
    tokens.write_bytes(flipped)
    files = TokenFiles(tmp_path / "data")
    with pytest.raises(ValueError, match=r"shard-00001.tokens.npy should hold ids below 100, got 65"):
        [files[index] for index in range(30)]
    with pytest.raises(ValueError, match="ids should be below 100, got 65"):
        count_tokens(files, V)
    tokens.write_bytes(b"x" * len(whole[tokens]))
    with pytest.raises(ValueError, match=r"shard-00001.tokens.npy is damaged: it should hold uint16"):
        [TokenFiles(tmp_path / "data")[index] for index in range(30)]
    tokens.write_bytes(whole[tokens])

    offsets.write_bytes(whole[offsets][:-8] + bytes(8))
    with pytest.raises(ValueError, match=r"shard-00001.offsets.npy should rise from 0 to \d+, got 0 to 0"):
        TokenFiles(tmp_path / "data")
    offsets.write_bytes(whole[offsets])
    TokenFiles(tmp_path / "data").verify()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(format_version=2), "has format version 2, this version of specjax reads 1"),
        (dict(format_version=None), "has format version None"),
        (dict(num_tokens=5), "is damaged: it should add up to .*'num_tokens': 2"),
        (dict(shards=[{}]), "is damaged: .*missing"),
        (dict(shards=...), "is damaged: 'shards'"),
        (dict(extra=1), "is damaged: .*extra"),
        (dict(vocab_size="big"), "is damaged: vocab_size = 'big'"),
        (dict(made=[]), r"is damaged: .*made = \[\]"),
    ],
)
def test_a_damaged_manifest_is_said(tmp_path: Path, changes: dict, message: str) -> None:
    write(tmp_path / "data", [sequence([1, 2])])
    file = tmp_path / "data" / MANIFEST
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    with pytest.raises(ValueError, match=message):
        read_token_manifest(tmp_path / "data")


def test_what_holds_no_token_files_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"holds no token files: there is no {MANIFEST}"):
        TokenFiles(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        TokenFiles(tmp_path)


SAMPLED = dict(vocab_size=V, tokenizer="abc", made={"kind": "sampled"}, max_shard_tokens=40, resume=True)


class Stop(Exception):
    """What interrupts a run in these tests."""


def sample(path: Path, sequences: list[TokenSequence], *, stop_at: int | None = None, **changes: Any) -> int:
    """A run in groups of four that goes on from what it finds; where it began."""
    with writing_token_files(path, **SAMPLED | changes) as writer:
        began = writer.position
        assert [one.tokens.tolist() for one in writer.written()] == [one.tokens.tolist() for one in sequences[:began]]
        assert writer.num_sequences == began
        for start in range(began, len(sequences), 4):
            if start == stop_at:
                raise Stop
            writer.extend(sequences[start : start + 4], position=start + 4, dropped={"empty": 1})
    return began


def interrupt(path: Path, sequences: list[TokenSequence], *, stop_at: int = 20, **changes: Any) -> None:
    with pytest.raises(Stop):
        sample(path, sequences, stop_at=stop_at, **changes)


def test_an_interrupted_run_is_not_a_dataset_and_is_gone_on_with(tmp_path: Path) -> None:
    sequences = random_sequences(32)
    interrupt(tmp_path / "data", sequences)
    assert not (tmp_path / "data").exists()
    assert sample(tmp_path / "data", sequences) == 20
    files = TokenFiles(tmp_path / "data")
    assert_same(files, sequences)
    assert files.manifest.dropped == {"empty": 8}
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_a_killed_run_goes_on_from_its_last_whole_shard(tmp_path: Path) -> None:
    sequences = random_sequences(32)
    code = """
        import os, signal, sys
        from tests.specjax.training.test_token_files import SAMPLED, random_sequences, writing_token_files
        with writing_token_files(sys.argv[1], **SAMPLED) as writer:
            sequences = random_sequences(32)
            for start in range(0, 20, 4):
                writer.extend(sequences[start : start + 4], position=start + 4, dropped={"empty": 1})
            os.kill(os.getpid(), signal.SIGKILL)
    """
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "data")], cwd=root, check=False)
    assert done.returncode == -9
    with pytest.raises(ValueError, match="holds no token files"):
        TokenFiles(tmp_path / "data")
    # A shard that was written, but not yet noted.
    (tmp_path / ".data.incomplete" / "shard-00077.tokens.npy").touch()
    assert 0 < sample(tmp_path / "data", sequences) < 20
    assert_same(TokenFiles(tmp_path / "data"), sequences)
    assert not (tmp_path / "data" / "shard-00077.tokens.npy").exists()


def test_an_unfinished_run_with_other_settings_is_kept_unless_forced(tmp_path: Path) -> None:
    sequences = random_sequences(32)
    interrupt(tmp_path / "data", sequences, made={"kind": "sampled", "seed": 1})
    with pytest.raises(ValueError, match="is of an unfinished run with seed 1, not None: go on with that, or pass --force"):
        sample(tmp_path / "data", sequences)
    assert sample(tmp_path / "data", sequences, force=True) == 0
    assert_same(TokenFiles(tmp_path / "data"), sequences)


def test_a_damaged_unfinished_run_is_said(tmp_path: Path) -> None:
    sequences = random_sequences(32)
    interrupt(tmp_path / "data", sequences)
    shard = tmp_path / ".data.incomplete" / "shard-00000.tokens.npy"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"shard-00000.tokens.npy of an unfinished run should have \d+ bytes, got \d+: remove"):
        sample(tmp_path / "data", sequences)


def test_a_run_that_cannot_be_gone_on_with_does_not_look_like_one_that_can(tmp_path: Path) -> None:
    with writing_token_files(tmp_path / "data", **SAMPLED | {"resume": False}) as writer:
        writer.extend(random_sequences(4))
        writer.save()
        names = {entry.name for entry in (tmp_path / ".data.incomplete").iterdir()}
        assert names == {"shard-00000.tokens.npy", "shard-00000.loss_mask.npy", "shard-00000.offsets.npy"}
    assert_same(TokenFiles(tmp_path / "data"), random_sequences(4))


def test_a_run_that_made_nothing_leaves_nothing(tmp_path: Path) -> None:
    interrupt(tmp_path / "data", random_sequences(4), stop_at=0)
    assert list(tmp_path.iterdir()) == []


def test_tokens_are_counted_where_the_loss_counts(tmp_path: Path) -> None:
    sequences = random_sequences(50)
    files = write(tmp_path / "data", sequences)
    counts = count_tokens(files, V + 3)
    expected = np.zeros(V + 3, int)
    for one in sequences:
        for token, has_loss in zip(one.tokens, one.loss_mask, strict=True):
            expected[token] += has_loss
    np.testing.assert_array_equal(counts, expected)
    with pytest.raises(ValueError, match="vocab_size must be at least that of .*, 100, got 99"):
        count_tokens(files, V - 1)


def test_the_share_outside_a_draft_vocabulary() -> None:
    counts = np.array([5, 0, 3, 2])
    assert share_outside(counts, [0, 2, 2]) == 0.2
    assert share_outside(counts, [0, 1, 2, 3]) == 0
    assert share_outside(counts, []) == 1
    with pytest.raises(ValueError, match="draft token ids must be ints from 0 to 3, got int64 from 0 to 4"):
        share_outside(counts, [0, 4])
    with pytest.raises(ValueError, match="counts of at least one token"):
        share_outside(np.zeros(4), [0])


def test_the_fingerprint_of_a_tokenizer_changes_with_its_ids() -> None:
    one, same, other = ({"a": 0, "b": 1}, {"b": 1, "a": 0}, {"a": 1, "b": 0})
    prints = [tokenizer_fingerprint(SimpleNamespace(get_vocab=lambda ids=ids: ids)) for ids in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]


def test_several_folders_are_read_as_one(tmp_path: Path) -> None:
    first, second = random_sequences(9), random_sequences(7, seed=1)
    write(tmp_path / "a", first), write(tmp_path / "b", second)
    both = TokenFiles(tmp_path / "a", tmp_path / "b")
    both.verify()
    assert_same(both, [*first, *second])
    assert both.manifest.made == {"kind": "mixed", "parts": [{"kind": "text", "names": ["a"]}] * 2}
    assert both.manifest.num_tokens == sum(len(one.tokens) for one in [*first, *second]) == int(both.lengths.sum())
    assert [shard.tokens.size for shard in both.shards()] == [shard.num_tokens for shard in both.manifest.shards]


def test_folders_of_different_tokenizers_are_not_one(tmp_path: Path) -> None:
    write(tmp_path / "a", random_sequences(3)), write(tmp_path / "b", random_sequences(3), tokenizer="xyz")
    with pytest.raises(ValueError, match="b was made with another tokenizer than .*a: expected abc, got xyz"):
        TokenFiles(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match="token files are in folders, none is named"):
        TokenFiles()
