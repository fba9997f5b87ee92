"""The README's tables come from the recorded JSON, and from nothing else."""

from __future__ import annotations

import json

import pytest

from experiments import report
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


def test_an_interrupted_run_is_called_one(tmp_path):
    (tmp_path / "quickstart.json").write_text(json.dumps(RESULT | {"interrupted": True}))
    assert "The run was interrupted: these are the rows that it finished." in report.rewritten(README, tmp_path)


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
    first = report.figure(path).read_bytes()
    assert b"<svg" in first
    assert report.figure(path).read_bytes() == first
