"""Sparse networks and experts in whole generations: all kept is dense decoding, what counts is measured, padding counts for nothing."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from specjax import GenerateConfig, MoEConfig, Reuse, SparseAttention, SparseFFN, SparseMoE, SparsityConfig, generate, speculative_generate
from specjax.sparsity.work import pass_work
from tests.helpers import ReplayDrafter, greedy_text, random_model, random_prompts, recorded, tiny_config

NUM_TOKENS, NUM_DRAFTS = 12, 3
PROMPTS = random_prompts((5, 17, 30))
EXPERTS = MoEConfig(num_experts=6, num_experts_per_token=3, intermediate_size=16, dense_layers=(1,))
ALL_BLOCKS = SparseAttention(block_size=8, keep=0.0, dense_below=512)
FEW_BLOCKS = SparseAttention(block_size=8, keep=0.0, dense_below=8, head_blocks=1, tail_blocks=0)
ALL_CHANNELS = SparseFFN(select="threshold", per="token", tau=0.0)
MODELS = {"dense": {}, "experts": dict(moe=EXPERTS)}


@functools.cache
def model(name: str) -> Any:
    return random_model(tiny_config(**MODELS[name]), seed=1)


def run(name: str, sparsity: SparsityConfig, *, num_drafts: int = NUM_DRAFTS, drafter: bool = True, **recording: Any) -> Any:
    target, params = model(name)
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=num_drafts, prefill_chunk_size=32, sparsity=sparsity)
    if not drafter:
        return generate(target, params, PROMPTS, config=config)
    text = greedy_text(PROMPTS, NUM_TOKENS, model=model(name))
    answers = recorded(text, [len(prompt) for prompt in PROMPTS], **recording)
    return speculative_generate(target, params, ReplayDrafter(random_flips=not recording), answers, PROMPTS, config=config)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        pytest.param("dense", dict(ffn=dataclasses.replace(ALL_CHANNELS, per="rows")), marks=pytest.mark.full),
        pytest.param("experts", dict(moe=SparseMoE(max_skipped=0)), marks=pytest.mark.full),
        pytest.param("experts", dict(moe=SparseMoE(max_skipped=2, beta=(0.0, 0.0))), marks=pytest.mark.full),
        pytest.param("experts", dict(moe=SparseMoE(expert_budget=6)), marks=pytest.mark.full),
        pytest.param("experts", dict(ffn=ALL_CHANNELS), marks=pytest.mark.full),
        (
            "experts",
            dict(attention=ALL_BLOCKS, ffn=ALL_CHANNELS, moe=SparseMoE(max_skipped=1, beta=((0.0,), (0.0,))), reuse=Reuse(anchors=(0,))),
        ),
    ],
)
def test_greedy_text_with_everything_kept_is_that_of_dense_decoding(name: str, parts: dict) -> None:
    output = run(name, SparsityConfig(**parts))
    np.testing.assert_array_equal(output.tokens, greedy_text(PROMPTS, NUM_TOKENS, model=model(name)))
    summary = output.statistics.summary()
    for kept in (summary.get(key) for key in ("sparse_attention", "sparse_ffn", "sparse_moe")):
        assert kept is None or kept["keep_ratio"] == pytest.approx(1, rel=1e-6)
    total = summary["step_work"]["total"]
    if "moe" not in parts or name == "dense":
        assert total["flops"] == pytest.approx(total["dense_flops"], rel=1e-6)


@pytest.mark.full
def test_what_is_kept_is_measured_and_becomes_operations_and_bytes() -> None:
    keep = 24 / 48
    sparsity = SparsityConfig(attention=FEW_BLOCKS, ffn=SparseFFN(keep=keep))
    output = run("dense", sparsity)
    statistics = output.statistics
    summary = statistics.summary()
    assert summary["sparse_ffn"]["keep_ratio_per_layer"] == [keep, keep]
    assert summary["sparse_ffn"]["read_ratio"] == keep
    counts = statistics.pass_counts
    assert counts.num_passes.sum() == statistics.num_steps
    np.testing.assert_allclose(counts.passes.sum(), statistics.accepted_counts.sum(1).max(), rtol=1e-6)  # the longest row took part in all
    num_rows = float(counts.num_passes.sum()) / float(counts.passes.sum())
    context = float(counts.context.sum()) / float(counts.num_passes.sum())
    sizes = dict(batch_size=num_rows, num_tokens=NUM_DRAFTS + 1, context=context, weight_bytes=4, cache_bytes=4)
    dense = pass_work(model("dense")[0].config, **sizes)
    step = summary["step_work"]
    assert step["total"]["dense_flops"] == pytest.approx(dense.total.flops, rel=1e-6)
    assert step["feed_forward"]["flops"] == pytest.approx((1 + 2 * keep) / 3 * dense.feed_forward.flops, rel=1e-6)
    assert step["feed_forward"]["bytes"] == pytest.approx((1 + 2 * keep) / 3 * dense.feed_forward.moved_bytes, rel=1e-6)
    assert step["attention"]["flops"] < 0.9 * step["attention"]["dense_flops"]
    assert step["lm_head"]["flops"] == step["lm_head"]["dense_flops"]
    assert set(step) == {"attention_projections", "attention", "feed_forward", "lm_head", "total"}
    both = (statistics + statistics).summary()
    assert both["step_work"]["total"]["flops"] == pytest.approx(step["total"]["flops"], rel=1e-5)
    assert both["sparse_ffn"] == summary["sparse_ffn"]
    with pytest.raises(ValueError, match="only one of the two has pass_counts"):
        statistics + dataclasses.replace(statistics, pass_counts=None)


def test_experts_that_are_skipped_are_counted() -> None:
    output = run("experts", SparsityConfig(moe=SparseMoE(max_skipped=1, beta=((1.0, 0.0), (0.0, 0.0)))), drafter=False)
    summary = output.statistics.summary()
    moe = summary["sparse_moe"]
    assert moe["experts_per_token_per_layer"] == [2.0, None]  # every share is below 1, so one of three is always skipped
    assert moe["keep_ratio"] == pytest.approx(2 / 3, rel=1e-6)
    assert 2.0 <= moe["distinct_experts_per_pass"] <= moe["dense_distinct_experts_per_pass"] <= 6.0
    assert "sparse_ffn" not in summary
    experts = summary["step_work"]["experts"]
    assert experts["flops"] == pytest.approx(experts["dense_flops"] * 2 / 3, rel=1e-6)
    # Read are the experts that the rows took, of those that they would have taken without skipping.
    shares = moe["distinct_experts_per_pass"] / moe["dense_distinct_experts_per_pass"]
    assert experts["bytes"] == pytest.approx(experts["dense_bytes"] * shares, rel=1e-5)


@pytest.mark.full
def test_channels_of_experts_are_counted_too() -> None:
    tau = SparseFFN(select="threshold", per="token", tau=0.2)
    summary = run("experts", SparsityConfig(ffn=tau, moe=SparseMoE(max_skipped=1, beta=(1.0,))), drafter=False).statistics.summary()
    kept = summary["sparse_ffn"]["keep_ratio"]
    assert all(0 < layer < 1 for layer in summary["sparse_ffn"]["keep_ratio_per_layer"])
    experts = summary["step_work"]["experts"]
    assert experts["flops"] == pytest.approx(experts["dense_flops"] * 2 / 3 * (1 + 2 * kept) / 3, rel=1e-5)
    assert experts["bytes"] > experts["dense_bytes"] * 2 / 3 * (1 + 2 * kept) / 3  # each token's channels are its own
    # Without skipping the experts are those of dense passes, as many as the rows took and not as many as an even choice would.
    alone = run("experts", SparsityConfig(ffn=tau), drafter=False).statistics
    assert "sparse_moe" not in alone.summary()
    np.testing.assert_array_equal(alone.pass_counts.distinct_experts, alone.pass_counts.dense_distinct_experts)
    assert 3 <= float(alone.pass_counts.distinct_experts[:, 0].sum() / alone.pass_counts.passes.sum()) <= 6


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        pytest.param("dense", dict(ffn=SparseFFN(keep=8 / 48, implementation="masked")), marks=pytest.mark.full),
        pytest.param("experts", dict(moe=SparseMoE(expert_budget=3)), marks=pytest.mark.full),
        ("dense", dict(attention=dataclasses.replace(FEW_BLOCKS, dense_below=24, rows="mean"))),
        pytest.param("dense", dict(attention=dataclasses.replace(FEW_BLOCKS, dense_below=24, rows="union")), marks=pytest.mark.full),
        pytest.param("dense", dict(attention=dataclasses.replace(FEW_BLOCKS, dense_below=24, rows="each")), marks=pytest.mark.full),
        pytest.param("dense", dict(ffn=SparseFFN(keep=8 / 48, score="mean", per="batch")), marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_padding_behind_short_drafts_changes_nothing(name: str, parts: dict) -> None:
    """Drafts of one token in passes over four rows are drafts of one token in passes over two."""
    sparsity = SparsityConfig(**parts)
    padded, tight = (run(name, sparsity, num_drafts=number, max_drafted=1) for number in (3, 1))
    np.testing.assert_array_equal(padded.tokens, tight.tokens)
    assert padded.statistics.num_steps == tight.statistics.num_steps
    assert (padded.tokens != greedy_text(PROMPTS, NUM_TOKENS, model=model(name))).any(), "nothing was left out that matters"
    ours, theirs = (x.statistics.summary() for x in (padded, tight))
    for part, key in {"sparse_attention": "keep_ratio", "sparse_ffn": "keep_ratio", "sparse_moe": "experts_per_token"}.items():
        assert part not in ours or ours[part][key] == pytest.approx(theirs[part][key], rel=1e-6)


def test_settings_that_do_not_fit_are_refused_before_compiling() -> None:
    for parts, message in (
        (dict(moe=SparseMoE()), "SparseMoE needs a model with experts"),
        (dict(ffn=SparseFFN(select="threshold")), "needs tau, a number or a tuple of 2, one a layer, got None"),
        (dict(ffn=SparseFFN(select="threshold", tau=(0.1,))), r"needs tau, a number or a tuple of 2, one a layer, got \(0.1,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            run("dense", SparsityConfig(**parts), drafter=False)
    for skipped, message in ((3, "max_skipped must be below the 3 experts that a token takes, got 3"), (1, "needs beta, 1 thresholds")):
        with pytest.raises(ValueError, match=message):
            run("experts", SparsityConfig(moe=SparseMoE(max_skipped=skipped)), drafter=False)
