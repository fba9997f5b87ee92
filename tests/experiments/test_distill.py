"""The distillation experiment on a tiny target, and what a trimmed vocabulary misses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments import distill
from experiments.experiment import ExperimentError, parse_config
from experiments.record import check_row
from specjax.training.token_files import TokenFiles, TokenSequence
from specjax.training.token_writer import writing_token_files
from tests.tiny_checkpoint import write_checkpoint


def test_a_row_counts_what_was_written(tmp_path: Path) -> None:
    # One in five tokens ends a turn.
    template = "{% for m in messages %}<u>{{ m['content'] }}<e>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    target = write_checkpoint(tmp_path / "target", template=template, eos_token_ids=tuple(range(0, 250, 5)))
    words = (f"target={target}", f"out={tmp_path / 'data'}", "num_tokens=60", "batch_size=4", "max_user_tokens=12")
    words += ("max_answer_tokens=8", "vocabularies=64,100000", "dtype=float32", "user_top_p=1")
    (row,) = distill.run(parse_config(distill.Config, words))
    check_row(row)
    assert row["tokens"] == TokenFiles(tmp_path / "data").manifest.num_tokens >= 60
    assert 0 < row["share_outside"]["64"] <= 1
    assert row["share_outside"]["100000"] is None
    assert "outside a vocabulary of 64 tokens" in distill.show(row)


def test_the_share_outside_is_that_of_text_that_was_not_counted(tmp_path: Path) -> None:
    # Nine sequences of tokens 1 and 2, and one of 1, 1, 3, 4: with two tokens half of it can be drafted, with three a quarter cannot.
    rows = [[1, 1, 2, 2]] * 8 + [[1, 1, 3, 3]] + [[1, 1, 3, 4]]
    with writing_token_files(tmp_path / "data", vocab_size=8, tokenizer="x", made={"kind": "text"}) as writer:
        writer.extend([TokenSequence(tokens=np.array(row), loss_mask=np.ones(4, bool)) for row in rows], position=10)
    assert distill.shares_outside(TokenFiles(tmp_path / "data"), 8, (2, 3, 8)) == {"2": 0.5, "3": 0.25, "8": None}


def test_missing_settings_are_named(target_path: Path) -> None:
    with pytest.raises(ExperimentError, match="distill needs target=PATH and out=FOLDER"):
        list(distill.run(distill.Config(target=str(target_path))))
    with pytest.raises(ExperimentError, match="top_p must be in"):
        list(distill.run(distill.Config(target=str(target_path), out="nowhere", user_top_p=2.0)))
