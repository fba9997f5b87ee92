"""The drafters that come with the package: small enough to come along, with a record, and they fit the models that they are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specjax.checkpoints.convert import convert
from specjax.checkpoints.formats.drafters import open_drafter
from specjax.checkpoints.pretrained_drafters import pretrained_drafters
from specjax.checkpoints.source import check_source
from specjax.drafting.heads import LowRankHead

MIB = 1 << 20


@pytest.mark.parametrize("name", sorted(pretrained_drafters()))
def test_a_drafter_is_whole_and_small_and_says_how_it_was_trained(name: str) -> None:
    folder = pretrained_drafters()[name]
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert max(sizes) <= 16 * MIB
    assert sum(sizes) <= 32 * MIB
    source = open_drafter(folder)
    assert source is not None
    check_source(source)
    training = json.loads((folder / "training.json").read_text())
    # On prompts that it was not trained on, and not the training's own expectation.
    assert training["evaluation"]["synthetic"] is False
    assert training["evaluation"]["mean_acceptance_length"] > 2
    assert training["data"]["num_loss_tokens"] > 1e6
    assert (folder / "README.md").is_file()


def test_smollm2_has_one() -> None:
    source = open_drafter(pretrained_drafters()["smollm2_135m_instruct_eagle3"])
    assert source is not None
    assert isinstance(source.config.head, LowRankHead)
    assert source.config.decoder.vocab_size == 49152


def test_another_name_is_refused_as_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no_such_drafter"):
        convert("no_such_drafter", tmp_path / "out")
