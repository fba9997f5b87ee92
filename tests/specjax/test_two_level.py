"""Two-level verification, greedy: the text is dense decoding's, token for token, whatever sparse passes leave out and wherever rows end."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    DraftModel,
    FinishReason,
    GenerateConfig,
    GenerateOutput,
    Lossless,
    MoEConfig,
    PromptLookup,
    Reuse,
    SamplingParams,
    SparseAttention,
    SparseFFN,
    SparseMoE,
    SparsityConfig,
    TypicalAcceptance,
    generate,
    speculative_generate,
    stream_generate,
)
from tests.drafters import eagle3, fresh_state, hydra, medusa
from tests.helpers import (
    FLOAT32_TOLERANCE,
    NUM_TOKENS,
    ReplayDrafter,
    greedy_text,
    random_model,
    random_prompts,
    recorded,
    tiny_config,
    tiny_draft_model,
    tiny_target,
)
from tests.specjax.test_cache_and_rollback import assert_cache_is_fresh

FULL = pytest.mark.full
PROMPTS = random_prompts((50, 41, 33))
LENGTHS = [len(prompt) for prompt in PROMPTS]

# Of 40 to 70 tokens: one or two blocks; or seven tenths, with which dense passes accept half of the tokens and more.
HARSH = dict(block_size=4, keep=0.0, dense_below=0, head_blocks=0, tail_blocks=0)
MILD = dict(block_size=4, keep=0.7, dense_below=0, score="bounds", rows="each")
FIXED, ADAPTING = Lossless(max_steps=3, adapt=False), Lossless(max_steps=3, step_cost=0.3)
FEW = Lossless(max_steps=6, max_tokens=7, adapt=False)


def sparse(lossless: Lossless | None, **changes: Any) -> SparsityConfig:
    others = {name: changes.pop(name) for name in ("reuse", "ffn") if name in changes}
    return SparsityConfig(attention=SparseAttention(**changes), lossless=lossless, **others)


def drafters(name: str, batch_size: int = 3) -> tuple[Any, Any]:
    target, params = tiny_target()
    draft_model, draft_params = tiny_draft_model()
    return {
        "none": lambda: (None, None),
        "prompt lookup": lambda: (PromptLookup(), None),
        "replay": lambda: (ReplayDrafter(random_flips=True), recorded(greedy_text(PROMPTS)[:batch_size], LENGTHS[:batch_size])),
        "draft model": lambda: (DraftModel(draft_model), draft_params),
        "the target itself": lambda: (DraftModel(target), params),
        "EAGLE-3": lambda: eagle3(target, params),
        "Medusa": lambda: medusa(target, params),
        "Hydra": lambda: hydra(target, params),
    }[name]()


def run(
    sparsity: SparsityConfig, drafter_name: str, num_drafts: int, prompts: Any = PROMPTS, *, target_params: Any = None, **arguments: Any
) -> GenerateOutput:
    target, params = tiny_target()
    options = {name: arguments.pop(name) for name in ("return_log_probs", "cache_capacity") if name in arguments}
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=num_drafts, sparsity=sparsity, **options)
    params = params if target_params is None else target_params
    return speculative_generate(target, params, *drafters(drafter_name, len(prompts)), prompts, config=config, **arguments)


SETTINGS = [
    dict(HARSH),
    dict(MILD),
    dict(HARSH, score="window", tail_blocks=1),
    dict(HARSH, score="random", keep=0.5),
    dict(HARSH, rows="union", keep=0.5),
    dict(HARSH, rows="mean", keep=0.3, head_blocks=1),
    dict(HARSH, keep=0.5, budget="layer"),
    dict(HARSH, dense_below=60),  # crossed on the way
    dict(HARSH, keep=0.5, reuse=Reuse(anchors=(0,))),
    dict(MILD, ffn=SparseFFN(keep=0.5)),
]
DRAFTERS = ("none", "prompt lookup", "replay", "draft model", "EAGLE-3")
# Every other pair, as on a chessboard: each drafter meets half the settings, each setting half the drafters.
GRID = [
    (name, settings)
    for (row, name), (column, settings) in itertools.product(enumerate(DRAFTERS), enumerate(SETTINGS))
    if (row + column) % 2 == 0
]


@pytest.mark.parametrize(
    ("drafter_name", "num_drafts", "settings", "lossless", "batch_size"),
    [
        ("none", 1, SETTINGS[0], FIXED, 1),
        pytest.param("replay", 3, SETTINGS[1], FEW, 3, marks=FULL),
        *(
            pytest.param(name, 1 + index % 4, settings, (FIXED, ADAPTING)[index % 2], 1 if index % 3 == 0 else 3, marks=FULL)
            for index, (name, settings) in enumerate(GRID)
        ),
    ],
)
def test_greedy_text_is_that_of_dense_decoding(
    drafter_name: str, num_drafts: int, settings: dict, lossless: Lossless, batch_size: int
) -> None:
    prompts = PROMPTS[:batch_size]
    output = run(sparse(lossless, **settings), drafter_name, num_drafts, prompts)
    np.testing.assert_array_equal(output.tokens, greedy_text(PROMPTS)[:batch_size])
    assert output.lengths.tolist() == [NUM_TOKENS] * batch_size
    levels = output.statistics.levels
    assert levels is not None
    assert levels.provisional.sum() > 0
    assert levels.examined.sum() > levels.accepted.sum(), "sparse passes of these settings are wrong now and then"
    # Every pass and every dense step delivers at least a token, and a pass one token more than it accepts, unless the row ends.
    more = np.asarray(output.lengths - 1 - levels.accepted)
    if not lossless.adapt:
        assert ((more == levels.dense_passes) | (more == levels.dense_passes - 1)).all()
    assert (levels.accepted <= levels.examined).all()
    assert (levels.examined <= levels.provisional).all()
    assert (levels.sparse_steps <= lossless.max_steps * levels.dense_passes).all()


@FULL
@pytest.mark.parametrize("drafter_name", ["none", "replay"])
def test_greedy_text_is_that_of_dense_decoding_with_few_experts_and_no_sparse_attention(drafter_name: str) -> None:
    moe = MoEConfig(num_experts=6, num_experts_per_token=3, intermediate_size=24)
    target, params = model = random_model(tiny_config(moe=moe), seed=5)
    text = greedy_text(PROMPTS, model=model)
    sparsity = SparsityConfig(moe=SparseMoE(experts_per_token=2), lossless=ADAPTING)
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=3, sparsity=sparsity)
    drafter = (None, None) if drafter_name == "none" else (ReplayDrafter(random_flips=True), recorded(text, LENGTHS))
    output = speculative_generate(target, params, *drafter, PROMPTS, config=config)
    np.testing.assert_array_equal(output.tokens, text)
    assert output.statistics.levels.examined.sum() > output.statistics.levels.accepted.sum() > 0


def test_an_eos_or_a_limit_anywhere_among_provisional_tokens_ends_a_row_where_dense_text_does() -> None:
    text, sparsity = greedy_text(PROMPTS), sparse(FIXED, **MILD)
    assert 0.3 < run(sparsity, "replay", 4).statistics.levels.dense_acceptance_rate < 0.9
    cases = [([int(text[0, position])], [NUM_TOKENS] * 3) for position in range(9)]
    cases += [([], [limit, NUM_TOKENS, 2 * limit]) for limit in range(10)]
    cases += [([int(text[1, 7]), int(text[2, 4])], [9, 8, 3])]
    for eos, limits in cases:
        output = run(sparsity, "replay", 4, eos_token_ids=eos, max_new_tokens=limits)
        for row, limit in enumerate(limits):
            positions = np.flatnonzero(np.isin(text[row, :limit], eos))
            length = positions[0] + 1 if positions.size else limit
            assert output.lengths[row] == length
            assert output.finish_reason[row] == (FinishReason.EOS if positions.size else FinishReason.LENGTH)
            np.testing.assert_array_equal(output.tokens[row], [*text[row, :length], *[0] * (NUM_TOKENS - length)])


@pytest.mark.parametrize(
    ("settings", "drafter_name"),
    [
        (MILD, "the target itself"),
        pytest.param(MILD | dict(keep=1.0), "the target itself", marks=FULL),
        pytest.param(MILD, "draft model", marks=FULL),
        pytest.param(HARSH, "draft model", marks=FULL),
    ],
)
@pytest.mark.full
def test_afterwards_the_caches_are_those_of_a_dense_prefill_and_a_draft_models_too(settings: dict, drafter_name: str) -> None:
    output = run(sparse(FIXED, **settings), drafter_name, 2)
    after, (drafter, drafter_params) = output.continuation, drafters(drafter_name)
    assert_cache_is_fresh(after.target_cache, after.context, *tiny_target(), missing=1)
    assert_cache_is_fresh(after.drafter_state, after.context, drafter.model, drafter_params, missing=2)
    np.testing.assert_array_equal(output.tokens, greedy_text(PROMPTS))
    if drafter_name == "the target itself":
        # A draft accepted whole leaves a gap in the draft model's cache, behind which a dense pass adds a token.
        assert output.statistics.acceptance_histogram[2] > 0
        assert output.statistics.levels.dense_acceptance_rate > 0.5
    if settings.get("keep") == 1:
        assert output.statistics.levels.dense_acceptance_rate == 1.0


@pytest.mark.parametrize("drafter_name", ["EAGLE-3", pytest.param("Medusa", marks=FULL), pytest.param("Hydra", marks=FULL)])
@pytest.mark.full
def test_afterwards_a_drafter_on_features_knows_those_of_dense_passes(drafter_name: str) -> None:
    drafter, params = drafters(drafter_name)
    output = run(sparse(FIXED, **MILD), drafter_name, 3)
    np.testing.assert_array_equal(output.tokens, greedy_text(PROMPTS))
    texts = [[*prompt, *row.tolist()] for prompt, row in zip(PROMPTS, greedy_text(PROMPTS), strict=True)]
    ours, fresh = output.continuation.drafter_state, fresh_state(*tiny_target(), drafter, params, texts)
    np.testing.assert_allclose(ours.hidden, fresh.hidden, atol=20 * FLOAT32_TOLERANCE)
    if drafter_name == "EAGLE-3":
        for got, expected in zip(ours.cache.keys + ours.cache.values, fresh.cache.keys + fresh.cache.values, strict=True):
            for row, text in enumerate(texts):
                np.testing.assert_allclose(got[row, :, : len(text) - 1], expected[row, :, : len(text) - 1], atol=10 * FLOAT32_TOLERANCE)
        np.testing.assert_allclose(ours.next_state, fresh.next_state, atol=20 * FLOAT32_TOLERANCE)


@pytest.mark.full
def test_a_stream_delivers_settled_tokens_only_and_a_call_may_be_continued(full_grid: bool) -> None:
    target, params = tiny_target()
    # Steps so dear that the first few rejections end them for a while: both kinds of cycles are there.
    text, sparsity = greedy_text(PROMPTS), sparse(dataclasses.replace(ADAPTING, step_cost=0.8), **HARSH)
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=2, sparsity=sparsity, return_log_probs=True)
    dense = generate(target, params, PROMPTS, config=GenerateConfig(max_new_tokens=NUM_TOKENS, return_log_probs=True))
    streamed: list[list[int]] = [[] for _ in PROMPTS]
    for update in stream_generate(target, params, PromptLookup(), None, PROMPTS, config=config, max_new_tokens=[9, 24, 5]):
        for row, tokens in enumerate(update.new_tokens):
            streamed[row].extend(tokens)
            assert streamed[row] == text[row, : len(streamed[row])].tolist()
    output = update.output
    assert output is not None
    assert output.statistics.levels.dense_passes.sum() > 0
    assert output.statistics.levels.dense_steps.sum() > 0
    assert [len(row) for row in streamed] == [9, 24, 5]
    for row, length in enumerate([9, 24, 5]):
        np.testing.assert_allclose(output.log_probs[row, :length], dense.log_probs[row, :length], atol=10 * FLOAT32_TOLERANCE)
        assert (output.log_probs[row, length:] == 0).all()
    if not full_grid:
        return
    second = speculative_generate(
        target, params, PromptLookup(), None, [[]] * 3, config=config, max_new_tokens=[15, 0, 19], continue_from=output.continuation
    )
    for row, (before, length) in enumerate([(9, 15), (24, 0), (5, 19)]):
        np.testing.assert_array_equal(second.tokens[row, :length], text[row, before:])


def test_invalid_logits_end_a_row_where_they_end_it_densely() -> None:
    target, params = tiny_target()
    token = int(greedy_text(PROMPTS)[1, 5])
    broken = params | {"embedding": params["embedding"].at[token].set(jnp.nan)}
    prompts = [[x for x in prompt if x != token] for prompt in PROMPTS]
    expected = generate(target, broken, prompts, config=GenerateConfig(max_new_tokens=NUM_TOKENS))
    assert FinishReason.NONFINITE_LOGITS in expected.finish_reason
    output = run(sparse(FIXED, **MILD), "replay", 4, prompts, target_params=broken)
    np.testing.assert_array_equal(output.tokens, expected.tokens)
    np.testing.assert_array_equal(output.finish_reason, expected.finish_reason)


def test_a_cache_without_room_for_all_provisional_tokens_is_refused(full_grid: bool) -> None:
    # 50 prompt tokens, 24 new ones, 3 steps of 1 + 1 tokens, and the pending one: 81 slots, in whole blocks.
    prompts = PROMPTS[:1]
    with pytest.raises(ValueError, match="cache_capacity = 80 slots are too few: this call needs 81"):
        run(sparse(FIXED, **MILD), "prompt lookup", 1, prompts, cache_capacity=80)
    if not full_grid:
        return
    output = run(sparse(FIXED, **MILD), "prompt lookup", 1, prompts, cache_capacity=81)
    assert output.continuation.target_cache.capacity == 84
    np.testing.assert_array_equal(output.tokens, greedy_text(PROMPTS)[:1])


def test_no_more_tokens_wait_than_may_and_steps_are_taken_while_they_fit(full_grid: bool) -> None:
    drafts = 3
    few = run(sparse(FEW, **MILD), "the target itself", drafts, PROMPTS[:1])
    np.testing.assert_array_equal(few.tokens, greedy_text(PROMPTS)[:1])
    config = GenerateConfig(max_new_tokens=8, num_speculative_tokens=drafts, sparsity=sparse(FEW, **MILD))
    assert config.max_unsettled(drafts) == 7
    passes, waiting, steps = (float(getattr(few.statistics.levels, name).sum()) for name in ("dense_passes", "provisional", "sparse_steps"))
    # Behind a step of four tokens, as most are, no other one has room for sure; behind one of three it has.
    assert passes <= steps < 2 * passes
    assert waiting <= 7 * passes
    if full_grid:
        all_six = run(sparse(dataclasses.replace(FEW, max_tokens=None), **MILD), "the target itself", drafts, PROMPTS[:1])
        assert all_six.statistics.levels.dense_passes.sum() < passes
    with pytest.raises(ValueError, match="Lossless.max_tokens = 7 has no room for a step of 7 draft tokens: at least 8"):
        run(sparse(FEW, **MILD), "prompt lookup", 7, PROMPTS[:1])


@FULL
def test_where_sparse_steps_cannot_pay_every_step_is_dense() -> None:
    output = run(sparse(Lossless(max_steps=3, step_cost=1.5), **MILD), "prompt lookup", 2)
    np.testing.assert_array_equal(output.tokens, greedy_text(PROMPTS))
    levels, steps = output.statistics.levels, output.statistics.steps_per_row
    assert levels.dense_steps.tolist() == steps.tolist()
    assert levels.sparse_steps.sum() == levels.dense_passes.sum() == 0
    summary = output.statistics.summary()["two_level"]
    assert summary["break_even_dense_acceptance"] is None
    assert summary["dense_steps"] == int(steps.sum())


@FULL
@pytest.mark.full
def test_where_hardly_anything_is_accepted_dense_steps_take_over_and_sparse_ones_are_tried_again() -> None:
    prompts = [[token % 64 for token in range(row, row + 40)] for row in range(3)]
    target, params = tiny_target()
    config = GenerateConfig(max_new_tokens=192, num_speculative_tokens=1, sparsity=sparse(ADAPTING, **HARSH))
    output = speculative_generate(target, params, PromptLookup(), None, prompts, config=config)
    levels = output.statistics.levels
    num_cycles, num_dense = int(levels.dense_passes.max()), int(levels.dense_steps.max())
    assert num_cycles < num_dense, "with a few in a hundred tokens accepted most steps are dense"
    # The first cycles find out; the evidence fades within some fifty steps, and more cycles follow.
    assert num_cycles > 6
    dense = generate(target, params, prompts, config=GenerateConfig(max_new_tokens=192))
    np.testing.assert_array_equal(output.tokens, dense.tokens)


def test_what_would_not_be_lossless_is_refused_by_name() -> None:
    later = sparse(FIXED, rows="mean")
    GenerateConfig(max_new_tokens=1, sparsity=later)
    with pytest.raises(ValueError, match=r"lossless with do_sample=True needs a selection that does not see later draft rows.*rows='mean'"):
        GenerateConfig(max_new_tokens=1, do_sample=True, sparsity=later)
    with pytest.raises(ValueError, match=r"lossless needs a lossless GenerateConfig.verification, got TypicalAcceptance"):
        GenerateConfig(max_new_tokens=1, sparsity=sparse(FIXED), verification=TypicalAcceptance())
    with pytest.raises(ValueError, match=r"SparsityConfig.lossless needs something sparse to check, got Lossless"):
        SparsityConfig(lossless=FIXED)
    with pytest.raises(ValueError, match="SparsityConfig.lossless must be None or a Lossless, got True"):
        SparsityConfig(attention=SparseAttention(), lossless=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lossless refreshes at each of its checks: refresh_every must be 0 with it, got 4"):
        SparsityConfig(attention=SparseAttention(), lossless=FIXED, refresh_every=4)
    with pytest.raises(ValueError, match=r"Lossless.adapt needs a measured step_cost where attention is dense, got Lossless\(max_steps=8"):
        SparsityConfig(ffn=SparseFFN(keep=0.5), lossless=Lossless())
    for field, value, message in (
        ("max_steps", 0, "Lossless.max_steps must be a positive int, got 0"),
        ("max_steps", True, "Lossless.max_steps must be a positive int, got True"),
        ("max_tokens", 0, "Lossless.max_tokens must be None or a positive int, got 0"),
        ("max_tokens", 2.0, "Lossless.max_tokens must be None or a positive int, got 2.0"),
        ("adapt", 1, "Lossless.adapt must be a bool, got 1"),
        ("step_cost", 0.0, "Lossless.step_cost must be None or a positive number, got 0.0"),
        ("step_cost", float("nan"), "Lossless.step_cost must be None or a positive number, got nan"),
        ("check_cost", None, "Lossless.check_cost must be a positive number, got None"),
    ):
        with pytest.raises(ValueError, match=message):
            Lossless(**{field: value})


@FULL
@pytest.mark.parametrize("drafter_name", ["none", "draft model"])
@pytest.mark.full
def test_sampling_at_temperature_zero_is_greedy(drafter_name: str) -> None:
    target, params = tiny_target()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=2, do_sample=True, sparsity=sparse(FIXED, **MILD))
    arguments = dict(config=config, sampling=SamplingParams(0.0), rng=jax.random.key(0))
    output = speculative_generate(target, params, *drafters(drafter_name), PROMPTS, **arguments)
    np.testing.assert_array_equal(output.tokens, greedy_text(PROMPTS))


@FULL
@pytest.mark.full
def test_64_bit_mode_changes_no_token() -> None:
    with jax.enable_x64(True):
        output = run(sparse(ADAPTING, **HARSH), "prompt lookup", 2)
        np.testing.assert_array_equal(output.tokens, greedy_text(PROMPTS))


@FULL
@pytest.mark.full
def test_a_traced_continuation_ends_the_rows_without_room_for_provisional_tokens_and_goes_on_with_the_others() -> None:
    # Contexts of 25 and 28 tokens: continuing takes 24 + 23 and 27 + 23 slots, with one step of 4 + 1 tokens.
    target, params = tiny_target()
    config = GenerateConfig(
        max_new_tokens=16, num_speculative_tokens=4, sparsity=sparse(Lossless(max_steps=1, adapt=False), **HARSH), cache_capacity=48
    )
    prompts = random_prompts((9, 12))
    first = speculative_generate(target, params, PromptLookup(), None, prompts, config=GenerateConfig(max_new_tokens=16)).continuation
    context = dataclasses.replace(first.context, tokens=first.context.tokens[:, :48])
    keys, values = (tuple(x[:, :, :48] for x in arrays) for arrays in (first.target_cache.keys, first.target_cache.values))
    first = dataclasses.replace(first, context=context, target_cache=dataclasses.replace(first.target_cache, keys=keys, values=values))
    empty, lengths = jnp.zeros((2, 1), jnp.int32), jnp.zeros((2,), jnp.int32)

    @jax.jit
    def go_on(continuation: Any) -> GenerateOutput:
        arguments = dict(config=config, prompt_lengths=lengths, continue_from=continuation)
        return speculative_generate(target, params, PromptLookup(), None, empty, **arguments)

    second = go_on(first)
    assert second.finish_reason.tolist() == [FinishReason.LENGTH, FinishReason.NO_CAPACITY]
    assert second.lengths.tolist() == [16, 0]
    np.testing.assert_array_equal(second.tokens[0], greedy_text(prompts, 32)[0, 16:])


@FULL
def test_counts_of_two_runs_add_up() -> None:
    first, second = (run(sparse(FIXED, **MILD), "prompt lookup", 2, max_new_tokens=limit).statistics for limit in (9, 24))
    both = first + second
    assert both.levels.accepted.tolist() == [int(first.levels.accepted.sum() + second.levels.accepted.sum())]
    assert both.summary()["two_level"]["provisional"] == sum(x.summary()["two_level"]["provisional"] for x in (first, second))
