"""Configurations of drafters as JSON: a draft head comes back as the kind that it is, and what is not known is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.kinds import build_model, config_from_dict, config_to_dict, kind_of
from specjax.checkpoints.store import load_checkpoint, save_checkpoint
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads import FullHead, LowRankHead, ScreenedHead, TrimmedHead
from tests.helpers import tiny_config

HEADS = {
    "full": FullHead(bias=True),
    "shared": FullHead(shared=True),
    "low_rank": LowRankHead(rank=4),
    "trimmed": TrimmedHead(num_tokens=20),
    "screened": ScreenedHead(rank=4, num_candidates=8),
}


def drafter(head: Any) -> Eagle3Config:
    return Eagle3Config(decoder=tiny_config(num_layers=1), target_hidden_size=32, head=head, feature_layers=(0, 2))


@pytest.mark.parametrize("name", HEADS)
def test_a_saved_drafter_comes_back_with_its_head(tmp_path: Path, name: str) -> None:
    config = drafter(HEADS[name])
    values = json.loads(json.dumps(config_to_dict(config)))
    assert values["head"]["kind"] == ("full" if name == "shared" else name)
    assert config_from_dict(values, kind_of(config)) == config
    params = build_model(config, jnp.float32).init_params(jax.random.key(0))
    save_checkpoint(tmp_path / "saved", config, params)
    checkpoint = load_checkpoint(tmp_path / "saved")
    assert checkpoint.model.config == config
    jax.tree.map(np.testing.assert_array_equal, checkpoint.params, params)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (dict(kind="tree", rank=4), "knows draft heads of kind full, low_rank, trimmed, screened, not 'tree': upgrade specjax"),
        (dict(kind=["full"]), "does not fit this version of specjax"),
        (dict(rank=4), r"its draft head is \{'rank': 4\}"),
        ("full", "its draft head is 'full'"),
        (dict(kind="low_rank", rank=4, alpha=1), "does not fit this version of specjax: .*'alpha'"),
        (dict(kind="low_rank"), "does not fit this version of specjax: .*'rank'"),
        (dict(kind="low_rank", rank=33), "LowRankHead.rank must be at most hidden_size = 32, got 33"),
    ],
)
def test_a_head_that_is_not_known_is_refused_by_name(head: Any, message: str) -> None:
    values = config_to_dict(drafter(FullHead())) | {"head": head}
    with pytest.raises(ValueError, match=message):
        config_from_dict(values, "eagle3")


def test_a_head_of_no_kind_that_is_saved_is_refused() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OwnHead(FullHead):
        pass

    with pytest.raises(ValueError, match="must be one of FullHead, LowRankHead, TrimmedHead, ScreenedHead, got OwnHead"):
        config_to_dict(drafter(OwnHead()))


def test_a_drafter_of_an_earlier_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    config = drafter(FullHead())
    save_checkpoint(tmp_path / "saved", config, build_model(config, jnp.float32).init_params(jax.random.key(0)))
    manifest = tmp_path / "saved" / "specjax.json"
    values = json.loads(manifest.read_text())
    assert values["format_version"] == 3
    # As that version wrote it.
    old = {name: value for name, value in values["config"].items() if name != "head"}
    old |= dict(draft_vocab_size=64, lm_head_rank=None, own_head=True)
    manifest.write_text(json.dumps(values | {"format_version": 2, "config": old}))
    with pytest.raises(ValueError, match=r"has checkpoint format 2, .*: convert the published drafter again, specjax convert"):
        load_checkpoint(tmp_path / "saved")
