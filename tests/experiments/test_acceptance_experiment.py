"""The acceptance experiment, end to end on a tiny pair."""

from __future__ import annotations

import numpy as np
import pytest

from experiments import acceptance
from experiments.experiment import ExperimentError, parse_config
from experiments.models import load_drafter, load_model
from experiments.prompts import load_prompts
from specjax import DraftModel, Kernels, MedusaDrafter
from specjax.checkpoints.store import read_model
from tests.checkpoints import published_drafters
from tests.drafters import write_drafter
from tests.tiny_checkpoint import write_checkpoint

SMALL = ("prompts_per_set=3", "batch=2", "new_tokens=16", "num_speculative_tokens=2", "dtype=float32")


def rows_of(target_path, data_dir, *settings, sets="first"):
    words = (f"target={target_path}", f"data_dir={data_dir}", f"sets={sets}", *SMALL, *settings)
    return list(acceptance.run(parse_config(acceptance.Config, words)))


def test_float32_greedy_rows_report_equality_and_consistent_counts(target_path, drafter_path, data_dir):
    rows = rows_of(target_path, data_dir, f"drafter={drafter_path}", sets="first,second")
    assert [row["dataset"] for row in rows] == ["first", "second", "mean"]
    for row in rows:
        assert row["greedy_equal_to_plain"] == row["greedy_equal_to_padded_plain"] == 1.0
        assert row["divergence_max_logit_gap"] is None
        assert (row["weights"], row["synthetic"]) == ("real, float32", False)
        assert row["reference_acceptance_rate"] is None
    for row in rows[:2]:
        assert row["mean_acceptance_length"] == pytest.approx(1 + row["num_accepted_tokens"] / row["steps"])
        assert row["acceptance_rate"] == pytest.approx(row["num_accepted_tokens"] / row["num_draft_tokens"])
        assert row["tokens"] <= 3 * 16
        assert len(row["acceptance_rate_per_position"]) == 2


def test_the_target_as_its_own_drafter_has_everything_accepted(target_path, data_dir):
    row = rows_of(target_path, data_dir, f"drafter={target_path}", "ignore_eos=true")[0]
    assert row["acceptance_rate"] == 1.0
    assert row["tokens"] == 3 * 16
    # 16 tokens: one from the prefill, five steps of three.
    assert row["tokens_per_target_step_counting_prefill"] == pytest.approx(16 / 6)


@pytest.mark.full
def test_a_drafter_on_the_targets_features_is_named_and_gives_the_same_text(target_path, data_dir, tmp_path):
    drafter = write_drafter(tmp_path / "tiny-eagle3", target_path, "eagle3")
    row = rows_of(target_path, data_dir, f"drafter={drafter}")[0]
    assert (row["drafter"], row["drafter_weights"]) == ("tiny-eagle3", "real, float32")
    assert row["greedy_equal_to_plain"] == row["greedy_equal_to_padded_plain"] == 1.0
    assert row["num_draft_tokens"] > 0


def test_published_heads_are_converted_for_the_target_and_kept(target_path, tmp_path):
    # Heads without LM heads of their own: only the target says how many tokens there are.
    width = read_model(target_path).config.hidden_size
    tensors = {f"{head}.0.linear.weight": np.full((width, width), 0.1, np.float32) for head in range(2)}
    raw = dict(medusa_num_heads=2, medusa_num_layers=1, version="2")
    folder = published_drafters.write_drafter(tmp_path / "heads", raw, tensors, file="medusa_lm_head.safetensors")
    options = dict(dtype="float32", cache_dir=str(tmp_path / "cache"))
    target = load_model(str(target_path), **options)
    for _ in range(2):
        loaded = load_drafter(str(folder), target, **options, implementation="reference")
    assert isinstance(loaded.drafter, MedusaDrafter)
    assert loaded.drafter.model.kernels == Kernels.of("reference")
    assert loaded.params["target_head"] is target.params["lm_head"]
    assert len(list((tmp_path / "cache" / "converted").iterdir())) == 1


def test_drafters_that_cannot_draft_for_a_target_are_refused(target_path, drafter_path, tmp_path):
    target, preset = load_model(str(target_path), dtype="float32"), load_model("tiny", dtype="float32")
    assert load_drafter("prompt_lookup", preset, dtype="float32").weights is None
    assert isinstance(load_drafter("tiny", target, dtype="float32").drafter, DraftModel)
    with pytest.raises(ExperimentError, match="needs the checkpoint of its target, 'tiny' is a preset"):
        load_drafter(str(drafter_path), preset, dtype="float32")
    other = write_checkpoint(tmp_path / "other", special_tokens=("<a>", "<u>"))
    with pytest.raises(ValueError, match="must have the target's tokenizer"):
        load_drafter(str(other), target, dtype="float32")


def test_synthetic_acceptance_is_marked_and_compares_no_text(target_path, data_dir):
    row = rows_of(target_path, data_dir, "synthetic_acceptance_length=2.0")[0]
    assert row["synthetic"] is True
    assert row["greedy_equal_to_plain"] is None
    assert "text" not in row


@pytest.mark.slow
def test_sampled_runs_compare_no_text(target_path, data_dir):
    row = rows_of(target_path, data_dir, "temperature=1.0")[0]
    assert row["greedy_equal_to_plain"] is None
    assert row["temperature"] == 1.0


def test_a_known_pair_and_setting_is_held_against_the_reference():
    row = {"target": "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M", "drafter": "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M", "dataset": "gsm8k"}
    row |= {"synthetic": False, "acceptance_rate": 0.79}
    found = acceptance.reference(row, acceptance.Config())
    assert found["reference_acceptance_rate"] == 0.78
    assert found["acceptance_rate_minus_reference"] == pytest.approx(0.01)
    assert acceptance.reference(row, acceptance.Config(num_speculative_tokens=3))["reference_acceptance_rate"] is None


def test_prompts_are_spread_over_the_set(data_dir):
    assert [prompt.split()[1] for prompt in load_prompts(data_dir, "first", 2)] == ["0", "2"]
    assert len(load_prompts(data_dir, "first", None)) == 5
    with pytest.raises(ValueError, match="no prompt set third"):
        load_prompts(data_dir, "third")


@pytest.mark.parametrize("setting", ["target", "data_dir"])
def test_missing_paths_are_named(setting):
    other = {"target": "data_dir", "data_dir": "target"}[setting]
    with pytest.raises(ValueError, match=f"{setting}=PATH"):
        list(acceptance.run(parse_config(acceptance.Config, [f"{other}=somewhere"])))
