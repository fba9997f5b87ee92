"""The calibration, end to end on tiny targets: what it finds can be read back, and fits the target."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import calibrate
from experiments.experiment import ExperimentError, parse_config
from experiments.models import load_model
from experiments.presets import PRESETS
from experiments.record import check_row, write_json
from experiments.report import markdown
from experiments.texts import running_texts
from specjax import MoEConfig, SparsityConfig
from specjax.training.token_files import TokenFiles
from tests.helpers import tiny_config
from tests.token_data import write_token_files

SMALL = (
    "num_texts=2",
    "context=60",
    "measured=6",
    "num_speculative_tokens=2",
    "block_size=4",
    "dense_below=32",
    "dtype=float32",
)
EXPERTS = MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=16)
COMMON = {"context", "implementation", "kind", "model", "synthetic", "texts", "weights"}


def rows_of(*words: str) -> list[dict]:
    config = parse_config(calibrate.Config, [*words, *SMALL])
    rows = [check_row(row) for row in calibrate.run(config)]
    assert all(row.keys() >= COMMON and isinstance(calibrate.show(row), str) for row in rows)
    return rows


def test_a_calibration_is_read_back_as_a_setting_that_fits_the_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, full_grid: bool
) -> None:
    model = tiny_config(num_layers=3, moe=EXPERTS) if full_grid else tiny_config(num_layers=2)
    channels = "0.5" if full_grid else ""
    monkeypatch.setitem(PRESETS, "tiny_target", lambda: model)
    rows = rows_of("target=tiny_target", "keeps=0.1", f"ffn_keeps={channels}", "skips=1,2", "theta=0.9")
    selection, thresholds, *settings = rows
    assert selection["anchors"][0] == 0
    assert np.shape(selection["layer_similarity"]) == (model.num_layers, model.num_layers)
    assert len(selection["row_overlap_per_layer"]) == model.num_layers
    assert len(selection["row_overlap_per_distance"]) == 2
    if full_grid:
        assert np.shape(thresholds["beta"]) == (3, 1)
        assert all(0.5 <= kept <= 0.55 for kept in thresholds["tau_keeps"]["0.5"])  # a bin holds a share of the channels
    else:
        assert (thresholds["beta"], thresholds["tau"]) == (None, {})
    names = [row["setting"] for row in settings]
    assert names == [
        "attention 0.1",
        *["attention 0.1, anchors"] * (len(selection["anchors"]) < model.num_layers),
        *["channels 0.5, by threshold", "skip up to 1", "together 0.1, 0.5, 1"] * full_grid,
    ]
    for row in settings:
        assert 0 <= row["token_agreement"] <= 1
        assert row["measured_tokens"] == 2 * 6
        assert row["flops_ratio"] <= 1 + 1e-6
        assert row["bytes_ratio"] <= 1 + 1e-6
        SparsityConfig.from_json(row["sparsity"]).check(model)
        with pytest.raises(ValueError, match="this calibration is of 'tiny_target': expected num_layers"):
            SparsityConfig.from_json(row["sparsity"]).check(tiny_config(num_layers=7, moe=model.moe))
    path = tmp_path / "calibrate.json"
    result: dict[str, Any] = {"experiment": "calibrate", "question": "?", "command": "run", "git_sha": "0" * 40, "config": {}, "rows": rows}
    result |= {"device": {"kind": "cpu", "count": 1}, "versions": {"jax": "0"}}
    write_json(path, result)
    chosen = SparsityConfig.from_calibration(path, agreement=0.0)
    cheapest = min(settings, key=lambda row: (row["bytes_ratio"], row["flops_ratio"], -row["token_agreement"]))
    assert chosen == SparsityConfig.from_json(cheapest["sparsity"])
    assert markdown(json.loads(path.read_text()), path.name).count("\n| ") == len(settings) + 1
    assert set(calibrate.plots(rows)) == {"", "overlap"}
    if importlib.util.find_spec("matplotlib"):  # the extra `plots`
        from matplotlib.figure import Figure

        for draw in calibrate.plots(rows).values():
            axes = Figure().subplots()
            draw(axes)
            assert axes.get_xlabel()


@pytest.mark.full
def test_a_checkpoint_is_calibrated_on_text(target_path: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text\n" for number in range(40)), encoding="utf-8")
    rows = rows_of(f"target={target_path}", f"data={text}", "keeps=", "ffn_keeps=0.4,0.8")
    assert [row["setting"] for row in rows[1:]] == [
        "channels 0.8, by threshold",
        "channels 0.8, shared by rows",
        "channels 0.4, by threshold",
        "channels 0.4, shared by rows",
    ]
    shared = {row["setting"]: row["channel_keep_ratio"] for row in rows[1:] if "shared" in row["setting"]}
    assert shared["channels 0.4, shared by rows"] == pytest.approx(16 / 24)  # rounded up to a multiple of 8


def test_texts_are_pieces_of_what_is_given(target_path: Path, tmp_path: Path) -> None:
    target = load_model(str(target_path), dtype="float32")
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 30, encoding="utf-8")
    tokens = running_texts((str(text),), target, number=2, length=100, seed=0)
    assert target.checkpoint is not None
    assert target.checkpoint.tokenizer().decode(tokens[0]) == ("abcdefgh" * 13)[:100]
    folder = write_token_files(tmp_path / "tokens", target_path)
    both = running_texts((str(text), str(folder)), target, number=2, length=10, seed=0)
    first = TokenFiles(folder)[0].tokens
    np.testing.assert_array_equal(both[1][: len(first)], first[:10])
    drawn = running_texts((), target, number=3, length=5, seed=1)
    assert drawn.shape == (3, 5)
    assert drawn.max() < 259
    for paths, length, message in (
        ((str(text),), 200, "text.txt holds too little text for 2 pieces of 200 tokens"),
        ((str(tmp_path / "nowhere"),), 5, "there is no text file or folder of token files"),
        ((str(tmp_path),), 5, "is neither a text file .* nor a folder of token files"),
        ((str(folder),), 10_000_000, "tokens holds too few tokens for 2 pieces of 10000000"),
    ):
        with pytest.raises(ExperimentError, match=message):
            running_texts(paths, target, number=2, length=length, seed=0)
    with pytest.raises(ExperimentError, match="at least one piece of text is needed, got 0"):
        running_texts((), target, number=0, length=5, seed=0)
    with pytest.raises(ExperimentError, match="the preset 'tiny' has no tokenizer"):
        running_texts((str(text),), load_model("tiny", dtype="float32"), number=1, length=5, seed=0)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ExperimentError, match=r"context \+ measured \+ 1 = 5007 tokens exceed the target's window of 4096"):
        list(calibrate.run(parse_config(calibrate.Config, ["target=tiny", "context=5000", "measured=6", "dtype=float32"])))
