"""The README's tables come from the recorded JSON, and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from experiments import report, sparse_quality, train_drafter
from experiments.experiment import ExperimentError
from experiments.run import RESULTS

RESULT = {
    "experiment": "quickstart",
    "question": "Faster?",
    "command": "python -m experiments.run quickstart",
    "git_sha": "0123456789abcdef",
    "versions": {"jax": "1.2.3"},
    "device": {"kind": "abacus", "count": 1},
    "rows": [
        {
            "prompt": None,
            "tokens_per_s": 1234.5,
            "tokens_per_s_autoregressive": 61.72,
            "speedup": 20.0,
            "identical": True,
            "weights": "random",
        }
    ],
}
README = "before\n<!-- results:quickstart -->\nstale\n<!-- /results:quickstart -->\nafter\n"


def test_the_readme_agrees_with_the_recorded_results():
    text = report.README.read_text(encoding="utf-8")
    assert report.rewritten(text, RESULTS) == text, "run python -m experiments.report"


def test_a_table_is_made_between_its_markers_with_its_source(tmp_path):
    (tmp_path / "quickstart.json").write_text(json.dumps(RESULT))
    text = report.rewritten(README, tmp_path)
    assert text.startswith("before\n<!-- results:quickstart -->\n| answer |")
    assert "| all |  | 1234 | 61.7 | 20.00 × | yes |" in text
    assert "results/quickstart.json): abacus, JAX 1.2.3, weights random, commit 01234567; `python -m experiments.run quickstart`." in text
    assert text.endswith("<!-- /results:quickstart -->\nafter\n")
    assert report.rewritten(text, tmp_path) == text


def test_a_long_table_is_folded_and_a_short_one_is_not(tmp_path):
    def text(num_rows):
        (tmp_path / "quickstart.json").write_text(json.dumps(RESULT | {"rows": num_rows * RESULT["rows"]}))
        return report.rewritten(README, tmp_path)

    shown = len(RESULT["rows"])
    assert "<details>" not in text(12 // shown)
    longer = text(12 // shown + 1)
    assert f"<details>\n<summary>Table of {shown * (12 // shown + 1)} rows</summary>\n\n| answer |" in longer
    assert longer.index("| all |") < longer.index("</details>") < longer.index("From [")


def test_an_interrupted_run_is_called_one(tmp_path):
    (tmp_path / "quickstart.json").write_text(json.dumps(RESULT | {"interrupted": True}))
    assert "The run was interrupted: these are the rows that it finished." in report.rewritten(README, tmp_path)


def test_rows_that_were_appended_name_their_own_run(tmp_path):
    later = {
        "first_row": 1,
        "command": "python later",
        "git_sha": "fedcba9876",
        "versions": {"jax": "1.2.4"},
        "device": {"kind": "slide rule", "count": 2},
    }
    (tmp_path / "quickstart.json").write_text(json.dumps(RESULT | {"rows": 2 * RESULT["rows"], "appended": [later]}))
    text = report.rewritten(README, tmp_path)
    assert (
        "`python -m experiments.run quickstart`. Rows 2 and on: 2 × slide rule, JAX 1.2.4, weights random, commit fedcba98; `python later`."
        in text
    )


def test_the_run_that_was_interrupted_is_called_so(tmp_path):
    run = {"git_sha": "fedcba9876", "versions": {"jax": "1.2.4"}, "device": {"kind": "slide rule", "count": 1}}
    first, second = run | {"first_row": 1, "command": "python b"}, run | {"first_row": 2, "command": "python c"}
    sentence = "The run was interrupted: these are the rows that it finished."
    for part, whole, behind in (({}, True, "python c"), ({"earlier_interrupted": True}, False, "python b")):
        result = RESULT | {"rows": 3 * RESULT["rows"], "appended": [first, second | part], "interrupted": whole}
        (tmp_path / "quickstart.json").write_text(json.dumps(result))
        text = report.rewritten(README, tmp_path)
        assert f"`{behind}`. {sentence}" in text
        assert text.count(sentence) == 1


def test_appended_rows_are_counted_as_the_table_shows_them_and_name_their_own_weights(tmp_path, monkeypatch):
    speeds = (111.0, 222.0, 333.0, 444.0)
    rows = [RESULT["rows"][0] | {"tokens_per_s": speed, "weights": "old" if speed < 300 else "new"} for speed in speeds]
    run = {"git_sha": "fedcba9876", "versions": {"jax": "1.2.4"}, "device": {"kind": "slide rule", "count": 1}}
    later = run | {"first_row": 2, "command": "python later"}
    (tmp_path / "quickstart.json").write_text(json.dumps(RESULT | {"rows": rows, "appended": [later]}))
    module = report._module("quickstart")
    monkeypatch.setattr(module, "table_rows", lambda rows: [row for row in rows if row["tokens_per_s"] != 222.0], raising=False)
    text = report.rewritten(README, tmp_path)
    assert "weights old, commit" in text
    assert "Rows 2 and on: slide rule, JAX 1.2.4, weights new, commit fedcba98; `python later`." in text


def test_a_table_of_some_rows_says_of_how_many(tmp_path, monkeypatch):
    rows = [RESULT["rows"][0] | {"tokens_per_s": speed} for speed in (111.0, 222.0, 333.0)]
    (tmp_path / "quickstart.json").write_text(json.dumps(RESULT | {"rows": rows}))
    module = report._module("quickstart")
    monkeypatch.setattr(module, "table_rows", lambda rows: [row for row in rows if row["tokens_per_s"] != 222.0], raising=False)
    text = report.rewritten(README, tmp_path)
    assert "results/quickstart.json) (here 2 of its 3 rows): abacus" in text
    assert [speed for speed in (111, 222, 333) if f"| {speed} |" in text] == [111, 333]


def test_missing_results_and_unpaired_markers_are_errors(tmp_path):
    with pytest.raises(ExperimentError, match=r"quickstart\.json does not exist"):
        report.rewritten(README, tmp_path)
    with pytest.raises(ExperimentError, match="without its other half"):
        report.rewritten("<!-- results:quickstart -->\n", tmp_path)


def test_a_figure_is_the_same_file_every_time(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"mode": "decode", "batch": 1, "context": 64, "rows": 1, "ms_per_step": 2.0, "ms_per_step_min": 1.0, "ms_per_step_max": 3.0}
    path = tmp_path / "decode_latency.json"
    path.write_text(json.dumps(RESULT | {"experiment": "decode_latency", "rows": [row | {"floor_ms": 0.5}]}))
    (drawn,) = report.figures(path)
    assert drawn.name == "decode_latency.svg"
    first = drawn.read_bytes()
    assert b"<svg" in first
    report.figures(path)
    assert drawn.read_bytes() == first
    path.write_text(json.dumps(RESULT))
    assert report.figures(path) == []


def quality_row(method: str, setting: str, agreement: float, speed: float | None) -> dict:
    row = {"target": "t", "method": method, "setting": setting, "reuse": "", "dataset": "meetings", "metric": "rouge", "prompts": 2}
    row |= {
        "context": 99.0,
        "score_dense": 0.5,
        "score_sparse": 0.4,
        "score_difference_interval": [-0.2, 0.0],
        "kl": 0.1,
        "weights": "real",
    }
    row |= {"mean_acceptance_length_sparse": 2.0, "finished_sparse": 0.75, "keep_ratio": 0.5, "bytes_ratio": 0.5, "flops_ratio": 0.5}
    return row | {"token_agreement": agreement, "tokens_per_s": speed, "timed_seconds": 1.0, "speedup_over_autoregressive": None}


def test_an_optional_result_is_shown_with_its_figures_once_it_is_there(tmp_path):
    text = "a\n<!-- optional:sparse_quality -->\nstale\n<!-- /optional:sparse_quality -->\nb\n"
    empty = text.replace("stale\n", "")
    assert report.rewritten(text, tmp_path) == empty
    rows = [quality_row("dense", "", 1.0, 50.0), quality_row("attention", "0.5", 0.9, 60.0), quality_row("attention", "0.1", 0.8, 75.0)]
    rows += [quality_row("window", "0.1", 0.7, None)]
    path = tmp_path / "sparse_quality.json"
    path.write_text(json.dumps(RESULT | {"experiment": "sparse_quality", "rows": rows}))
    shown = report.rewritten(empty, tmp_path)
    assert "| attention 0.1 |" in shown
    assert "![Faster? (trade-off)](experiments/results/sparse_quality-trade-off.svg)" in shown
    assert "![Faster? (meetings-rouge)](experiments/results/sparse_quality-meetings-rouge.svg)" in shown
    assert report.rewritten(shown, tmp_path) == shown
    path.unlink()
    assert report.rewritten(shown, tmp_path) == empty
    assert "trade-off" not in sparse_quality.plots(rows[::3])


def test_the_trade_off_is_speed_against_agreement(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [quality_row("dense", "", 1.0, 50.0), quality_row("attention", "0.5", 0.9, 60.0), quality_row("attention", "0.1", 0.8, 75.0)]
    path = tmp_path / "sparse_quality.json"
    path.write_text(json.dumps(RESULT | {"experiment": "sparse_quality", "rows": rows}))
    assert [drawn.name for drawn in report.figures(path)] == ["sparse_quality-trade-off.svg", "sparse_quality-meetings-rouge.svg"]
    assert lines_of(sparse_quality.plots(rows)["trade-off"])["attention, meetings"] == [1.5, 1.2]


def test_rows_of_batches_that_emptied_while_they_were_timed_show_no_speed(tmp_path):
    rows = [quality_row("dense", "", 1.0, 50.0), quality_row("attention", "0.5", 0.9, 60.0)]
    earlier = [{key: value for key, value in row.items() if key not in ("timed_seconds", "finished_sparse")} for row in rows]
    assert {"finished", "bytes", "operations", "tokens/s", "over plain"} == set(sparse_quality.columns(rows[1])) - set(
        sparse_quality.columns(earlier[1])
    )
    assert set(sparse_quality.plots(earlier)) == {"meetings-rouge"}
    assert set(sparse_quality.plots([*earlier, *rows])) == {"meetings-rouge", "trade-off"}


def trained_row(variant: str, length: float, **changes: object) -> dict:
    row = {"variant": variant, "head": "low_rank", "rank": 8, "rows": 100, "hidden_size": 64, "init": "weighted_svd", "loss": "forward_kl"}
    return row | {"dataset": "mean", "train_tokens": 1e6, "mean_acceptance_length": length, "weights": "random"} | changes


def lines_of(figure: Callable[[Any], None]) -> dict[str, list[float]]:
    """By label, the heights of what is drawn."""
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    figure(axes)
    return {str(line.get_label()): list(line.get_ydata()) for line in axes.get_lines()}


def test_a_training_has_a_figure_for_each_property_in_which_alone_its_drafters_differ(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        row
        for tokens, gain in ((1e6, 0.0), (2e6, 0.5))
        for row in (
            trained_row("low_rank_8", 2.0 + gain, train_tokens=tokens),
            trained_row("low_rank_8", 9.0, train_tokens=tokens, dataset="first"),
            trained_row("low_rank_4", 2.25 + gain, train_tokens=tokens, rank=16),
            trained_row("full", 2.5 + gain, train_tokens=tokens, head="full", rank=None),
            trained_row("low_rank_8-random", 1.5 + gain, train_tokens=tokens, init="random"),
            trained_row("low_rank_4-lk_alpha", 2.75 + gain, train_tokens=tokens, rank=16, loss="lk_alpha"),
            trained_row("trimmed_50", 2.125 + gain, train_tokens=tokens, head="trimmed", rank=None, rows=50),
        )
    ]
    found = {suffix: lines_of(draw) for suffix, draw in train_drafter.plots(rows).items()}
    assert found == {
        "": {
            "low-rank head, D/8": [2.0, 2.5],
            "low-rank head, D/4": [2.25, 2.75],
            "full head": [2.5, 3.0],
            "low-rank head, D/8; start: random": [1.5, 2.0],
            "low-rank head, D/4; loss: acceptance (LK)": [2.75, 3.25],
            "head of 50 tokens": [2.125, 2.625],
        },
        "rank": {"low-rank head": [2.5, 2.75], "full head": [3.0, 3.0]},
        "init": {"the target's head, where its hidden states go": [2.0, 2.5], "random": [1.5, 2.0]},
        "loss": {"KL divergence": [2.25, 2.75], "acceptance (LK)": [2.75, 3.25]},
    }
    path = tmp_path / "heads.json"
    path.write_text(json.dumps(RESULT | {"experiment": "train_drafter", "rows": rows}))
    drawn = report.figures(path)
    assert [one.name for one in drawn] == ["heads.svg", "heads-rank.svg", "heads-init.svg", "heads-loss.svg"]
    assert b"D/8" in drawn[1].read_bytes()
    assert [*train_drafter.plots(rows[:2])] == [""]
