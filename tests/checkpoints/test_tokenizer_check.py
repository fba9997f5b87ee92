"""Tokenizers that differ are noticed before a drafter wastes its drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from specjax.checkpoints.store import Checkpoint
from specjax.checkpoints.tokenizer_check import check_same_tokenizer, tokenizer_difference
from tests.checkpoints.sources import VOCAB_SIZE, write_tokenizer
from tests.helpers import tiny_target


def checkpoint(folder: Path, name: str, **options: str | bool) -> Checkpoint:
    path = folder / name
    path.mkdir()
    write_tokenizer(path, **options)
    return Checkpoint(model=tiny_target()[0], params={}, metadata={"source": name}, tokenizer_path=path)


def test_equal_tokenizers_have_no_difference(tmp_path: Path) -> None:
    target, draft = checkpoint(tmp_path, "target"), checkpoint(tmp_path, "draft")
    assert tokenizer_difference(target.tokenizer(), draft.tokenizer()) == ""
    check_same_tokenizer(target, draft)


def test_another_vocabulary_is_named_with_what_was_expected(tmp_path: Path) -> None:
    target, draft = checkpoint(tmp_path, "target"), checkpoint(tmp_path, "draft", extra_token="<call>")
    with pytest.raises(
        ValueError, match=rf"expected that of target, got that of draft: 2 tokens differ: '<call>' has id None and {VOCAB_SIZE - 1}"
    ):
        check_same_tokenizer(target, draft)
    with pytest.warns(UserWarning, match="2 tokens differ"):
        check_same_tokenizer(target, draft, allow_different=True)


def test_other_merges_and_other_special_ids_are_noticed(tmp_path: Path) -> None:
    target, draft = checkpoint(tmp_path, "target"), checkpoint(tmp_path, "draft", with_merges=False)
    assert "vocabularies are equal, but" in tokenizer_difference(target.tokenizer(), draft.tokenizer())
    other = AutoTokenizer.from_pretrained(target.tokenizer_path, eos_token="<|start|>")
    assert tokenizer_difference(target.tokenizer(), other) == f"eos_token_id is {VOCAB_SIZE - 2} and {VOCAB_SIZE - 3}"


def test_a_checkpoint_without_tokenizer_cannot_be_compared(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, "target")
    bare = Checkpoint(model=target.model, params={}, metadata={"source": "bare"}, tokenizer_path=None)
    with pytest.raises(ValueError, match="bare has no tokenizer to compare"):
        check_same_tokenizer(target, bare)
    with pytest.raises(ValueError, match="made from bare holds no tokenizer"):
        bare.tokenizer()
