"""Quality of sparse verification on a tiny pair: that they run, and that their rows say what they must."""

from __future__ import annotations

import dataclasses

import pytest

from experiments import sparse_comparison, sparse_pair, sparse_quality
from experiments.decoding import Decoded
from experiments.experiment import ExperimentError, parse_config
from experiments.record import ROW_KEYS
from experiments.report import markdown
from experiments.sparse_comparison import NATS_PER_TOKEN, finished
from experiments.speeds import Timed, ratio, timed_prompts
from specjax import MoEConfig
from specjax.checkpoints.store import abstract_checkpoint, save_checkpoint
from tests.helpers import random_model

BLOCKS = ("block_size=8", "dense_below=16")
SMALL = (*BLOCKS, "prompts=2", "new_tokens=12", "num_speculative_tokens=2", "dtype=float32", "max_prompt_tokens=150")
QUALITY = "target drafter method setting reuse dataset prompts context metric score_dense score_sparse score_difference_interval "
QUALITY += "new_tokens finished_dense finished_sparse timed_tokens timed_seconds timed_mean_acceptance_length "
QUALITY += "token_agreement kl mean_acceptance_length_dense mean_acceptance_length_sparse keep_ratio flops_ratio bytes_ratio tokens_per_s "
QUALITY += "speedup_over_autoregressive"


def run_quality(target_path, task_data, *settings):
    small = [word for word in SMALL if word.split("=")[0] not in {setting.split("=")[0] for setting in settings}]
    words = (f"target={target_path}", f"data={task_data}", f"text={task_data / 'book.txt'}", *small, "resamples=100", *settings)
    return list(sparse_quality.run(parse_config(sparse_quality.Config, words)))


@pytest.mark.full
def test_quality_rows_hold_sparse_against_dense(target_path, task_data):
    settings = ("tasks=text", "attention=0", "reuse=tokens", "controls=window", "drafter=prompt_lookup")
    rows = run_quality(target_path, task_data, *settings)
    assert all(set(row) == {*QUALITY.split(), *ROW_KEYS} for row in rows)
    assert [(row["dataset"], row["metric"]) for row in rows] == [("text", NATS_PER_TOKEN)] * 3
    assert [f"{row['method']} {row['setting']}".strip() for row in rows] == ["dense", "attention 0", "window 0"]
    dense, sparse, window = rows
    assert (dense["keep_ratio"], dense["token_agreement"], dense["score_sparse"]) == (1.0, 1.0, dense["score_dense"])
    assert sparse["score_dense"] == pytest.approx(dense["score_dense"], abs=1e-4)
    assert sparse["mean_acceptance_length_dense"] == dense["mean_acceptance_length_sparse"]
    assert sparse["keep_ratio"] == window["keep_ratio"] < 0.5
    assert sparse["kl"] > 0
    assert sparse["bytes_ratio"] < 1
    assert sparse["flops_ratio"] < 1
    low, high = sparse["score_difference_interval"]
    assert low <= sparse["score_sparse"] - sparse["score_dense"] <= high
    result = {"experiment": "sparse_quality", "rows": rows, "device": {"count": 1, "kind": "cpu"}, "versions": {"jax": ""}}
    assert "| window 0 |" in markdown(result | {"git_sha": "", "command": ""}, "sparse_quality.json")
    assert set(sparse_quality.plots(rows)) - {"trade-off"} == {f"text-{NATS_PER_TOKEN}"}
    assert all(sparse_quality.show(row) for row in rows)


def test_channels_are_left_out_and_plain_decoding_needs_no_drafter(target_path, task_data, full_grid):
    settings = ("tasks=gsm8k", "attention=", "ffn=0.34", "prompts=3")
    dense, ffn = run_quality(target_path, task_data, *settings, "batch=2")  # the second batch is not full
    assert (dense["drafter"], dense["mean_acceptance_length_dense"]) == ("none", 1.0)
    assert ffn["keep_ratio"] == pytest.approx(16 / 24)  # a multiple of 8 channels
    assert ffn["kl"] > 0
    assert (ffn["prompts"], ffn["metric"], ffn["score_dense"]) == (3, "exact_match", 0.0)
    # Timed: the one full batch, behind its prompts' first tokens.
    assert dense["timed_tokens"] == ffn["timed_tokens"] == 2 * (12 - 1)
    assert (dense["speedup_over_autoregressive"], dense["finished_dense"]) == (1.0, ffn["finished_dense"])
    if not full_grid:
        return
    for others in (("batch=3",), ("batch=2", "longest=400")):  # one full batch; larger caches
        _, same = run_quality(target_path, task_data, *settings, *others)
        assert ffn["token_agreement"] == same["token_agreement"]
        assert ffn["kl"] == pytest.approx(same["kl"], rel=1e-4)


@pytest.fixture
def mixture_path(target_path, tmp_path):
    """A tiny mixture of experts with the target's tokenizer."""
    target = abstract_checkpoint(target_path)
    moe = MoEConfig(num_experts=6, num_experts_per_token=4, intermediate_size=8)
    config = dataclasses.replace(target.model.config, moe=moe)
    _, params = random_model(config)
    save_checkpoint(tmp_path / "mixture", config, params, {"source": "mixture", "quantisation": "none"}, target.tokenizer_path)
    return tmp_path / "mixture"


@pytest.mark.full
def test_a_mixture_loses_experts_channels_of_experts_and_context_at_once(mixture_path, task_data):
    settings = ("tasks=text", "attention=", "moe=1,3", "ffn=0.5", "hybrid=0+0.5+3", f"calibration_text={task_data / 'book.txt'}")
    dense, channels, mild, harsh, hybrid = run_quality(mixture_path, task_data, *settings, "drafter=prompt_lookup")
    assert [row["method"] for row in (dense, channels, mild, harsh, hybrid)] == ["dense", "ffn", "moe", "moe", "hybrid"]
    # Medians: the largest skip that is allowed falls on half of the tokens.
    assert 1 > mild["keep_ratio"] > 1 - 1 / 4
    assert mild["keep_ratio"] > harsh["keep_ratio"] > 1 / 4
    assert channels["keep_ratio"] == pytest.approx(0.5, abs=0.1)  # the threshold was found on the same text
    assert hybrid["keep_ratio"] < 0.8
    assert hybrid["flops_ratio"] < harsh["flops_ratio"] < mild["flops_ratio"] < 1
    assert all(row["kl"] > 0 for row in (channels, mild, harsh, hybrid))


def test_quality_refuses_what_it_cannot_compare(target_path, task_data):
    with pytest.raises(ExperimentError, match="needs target=PATH"):
        list(sparse_quality.run(sparse_quality.Config()))
    with pytest.raises(ExperimentError, match="'tiny' is a preset"):
        list(sparse_quality.run(sparse_quality.Config(target="tiny")))
    with pytest.raises(ExperimentError, match="no task 'other'"):
        run_quality(target_path, task_data, "tasks=other")
    with pytest.raises(ExperimentError, match="of 130 tokens and 500 that follow exceed the target's window of 512"):
        run_quality(target_path, task_data, "tasks=gsm8k", "new_tokens=500")


def test_a_speed_that_is_lost_in_the_prefills_noise_is_no_number():
    decoded = Decoded(tokens=[[1, 2, 3], [4]], seconds=3.0, statistics=None)
    assert Timed(decoded, 1.0).tokens_per_s == 1.0  # two tokens in two seconds: each prompt's first is the prefill's
    assert Timed(decoded, 3.5).tokens_per_s is None
    assert (ratio(2.0, 4.0), ratio(2.0, None), ratio(None, 2.0)) == (0.5, None, None)


@pytest.mark.full
def test_speed_and_work_do_not_change_with_the_rows_that_end(target_path, task_data, monkeypatch):
    answers, settings = [], ("tasks=gsm8k", "attention=0", "reuse=tokens", "controls=", "prompts=3", "batch=2", "timed_batches=1")
    scored = sparse_comparison.score
    monkeypatch.setattr(sparse_comparison, "score", lambda *given: answers.extend(given[1].tokens) or scored(*given))
    open_ended = run_quality(target_path, task_data, *settings)
    ends = {token for answer in answers for token in answer} - {answer[0] for answer in answers}
    monkeypatch.setattr(sparse_pair, "end_of_text", lambda target: tuple(ends))
    ended = run_quality(target_path, task_data, *settings)
    assert all(row["finished_sparse"] == 0 for row in open_ended)
    assert any(row["finished_sparse"] == 1 for row in ended)
    for before, row in zip(open_ended, ended, strict=True):
        assert before["timed_tokens"] == row["timed_tokens"] == 2 * (row["new_tokens"] - 1)
        assert row["tokens_per_s"] == pytest.approx(row["timed_tokens"] / row["timed_seconds"])
        assert (before["bytes_ratio"], before["flops_ratio"]) == (row["bytes_ratio"], row["flops_ratio"])


def test_full_batches_are_timed_where_there_are_any():
    prompts = [[number] for number in range(7)]
    assert timed_prompts(prompts, batch=2, batches=2) == prompts[:4]
    assert timed_prompts(prompts, batch=2, batches=9) == prompts[:6]
    assert timed_prompts(prompts, batch=9, batches=2) == prompts


def test_answers_that_the_limit_cut_off_are_not_finished():
    assert finished(Decoded(tokens=[[1, 2], [2, 1], [], [2]], seconds=1.0, statistics=None), ends=(2,)) == 0.5


def test_limits_are_one_for_all_tasks_or_one_for_each():
    words = ("target=none", "tasks=gsm8k,mbpp")
    for given in ("", "64", "64,32"):
        parse_config(sparse_quality.Config, (*words, f"new_tokens={given}"))
    with pytest.raises(ExperimentError, match="one for all or one for each of gsm8k, mbpp, got 1,2,3"):
        parse_config(sparse_quality.Config, (*words, "new_tokens=1,2,3"))
    with pytest.raises(ExperimentError, match="new_tokens must be positive, .*, got 0"):
        parse_config(sparse_quality.Config, (*words, "new_tokens=0"))
    with pytest.raises(ExperimentError, match="timed_batches must be at least 1, got 0"):
        parse_config(sparse_quality.Config, (*words, "timed_batches=0"))
