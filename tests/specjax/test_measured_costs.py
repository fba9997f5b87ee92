"""Costs of two levels that are measured: what is run for them, what they say, and acceptance made up at both levels, for timing."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from specjax import (
    GenerateConfig,
    Lossless,
    RejectionSampling,
    SparseAttention,
    SparsityConfig,
    SyntheticAcceptance,
    TypicalAcceptance,
    speculative_generate,
)
from specjax.two_level import measured_costs
from specjax.two_level.measured_costs import CostsUnknown, TwoLevelCosts, measure_costs
from specjax.two_level.two_level_cost import two_level_speedup
from tests.helpers import ReplayDrafter, random_prompts, recorded, tiny_target

SPARSE = SparsityConfig(attention=SparseAttention(block_size=4, keep=0.1, dense_below=8), lossless=Lossless(max_steps=2, adapt=False))
CONFIG = GenerateConfig(max_new_tokens=24, num_speculative_tokens=2, sparsity=SPARSE)
PROMPTS = random_prompts((20, 17))
RECORDED = recorded(np.zeros((2, 100)), [20, 17])


def test_costs_are_those_of_the_loops_and_settle_what_two_levels_decide(monkeypatch):
    target, params = tiny_target()
    ends, kept_up = {}, {}

    def times(loops, params, state, longest, repeats):
        for name, loop in loops.items():
            constants = jax.make_jaxpr(loop.__wrapped__)(params, state, np.int32(1)).consts
            # The rotary frequencies are the model's own in a call as well. All that a call passes is passed here.
            assert {constant.shape for constant in constants} <= {(target.config.head_dim // 2,)}
            end = loop(params, state, np.int32(1))
            ends[name], kept_up[name] = end.statistics, end.target_cache.summaries is not None
            assert end.target_cache.capacity == 256, "costs are those of the capacity that is asked for"
        return {"dense": 4.0, "sparse": 1.0, "cycle": 7.0}, ends["cycle"].levels

    monkeypatch.setattr(measured_costs, "_times", times)
    found = measure_costs(
        target, params, ReplayDrafter(), RECORDED, PROMPTS, config=dataclasses.replace(CONFIG, cache_capacity=256), num_steps=4
    )
    assert found == TwoLevelCosts(dense_ms=4.0, sparse_ms=1.0, check_ms=5.0, max_steps=2, draft_length=2)
    assert found.lossless() == Lossless(max_steps=2, step_cost=0.25, check_cost=1.25)
    # One loop makes a step of each row, the other a cycle of two and their check; only sparse ones read less.
    assert [int(ends[name].num_steps) for name in ("dense", "sparse", "cycle")] == [2, 2, 4]
    assert [int(ends[name].levels.dense_passes.sum()) for name in ("dense", "sparse", "cycle")] == [0, 0, 2]
    assert [int(ends[name].pass_counts.num_passes.sum()) for name in ("dense", "sparse", "cycle")] == [0, 2, 4]
    # Dense verification alone, which two levels are held against, has no summaries of blocks.
    assert kept_up == {"dense": False, "sparse": True, "cycle": True}
    config = dataclasses.replace(CONFIG, sparsity=dataclasses.replace(SPARSE, lossless=None))
    with pytest.raises(ValueError, match="needs config.sparsity.lossless"):
        measure_costs(target, params, ReplayDrafter(), RECORDED, PROMPTS, config=config)
    with pytest.raises(ValueError, match="check_ms must be a positive finite number, got -1.0"):
        dataclasses.replace(found, check_ms=-1.0)


def test_the_break_even_is_where_the_best_number_of_steps_begins_to_pay():
    costs = TwoLevelCosts(dense_ms=10.0, sparse_ms=5.0, check_ms=11.0, max_steps=8, draft_length=5)
    least = costs.break_even(tokens_per_step=3.0)
    assert least is not None
    assert costs.speedup(tokens_per_step=3.0, acceptance=least) == pytest.approx(1.0)
    assert costs.speedup(tokens_per_step=3.0, acceptance=0.99) > 1
    every = [two_level_speedup(num_steps=n, tokens_per_step=3.0, acceptance=0.95, step_cost=0.5, check_cost=1.1) for n in range(1, 9)]
    assert costs.speedup(tokens_per_step=3.0, acceptance=0.95) == max(every)
    assert f"more than {least:.3f}" in costs.describe(tokens_per_step=3.0)
    hopeless = dataclasses.replace(costs, sparse_ms=10.0)
    assert hopeless.break_even(tokens_per_step=3.0) is None
    assert hopeless.describe(tokens_per_step=3.0).endswith("two levels never pay")


def test_with_a_limit_of_tokens_a_cycle_has_the_steps_that_it_had(monkeypatch):
    target, params = tiny_target()
    sparsity = dataclasses.replace(SPARSE, lossless=Lossless(max_steps=8, max_tokens=7, adapt=False))
    verification = SyntheticAcceptance(rates=(1.0, 0.0), dense_rate=1.0)  # two tokens a step: three fit
    config = dataclasses.replace(CONFIG, sparsity=sparsity, verification=verification)
    monkeypatch.setattr(TwoLevelCosts, "of_times", lambda **given: given)  # such short times may be lost in noise
    given = measure_costs(target, params, ReplayDrafter(), RECORDED, PROMPTS, config=config, num_steps=4, repeats=1)
    assert given["cycle_steps"] == 3
    assert (given["lossless"].max_tokens, given["draft_length"]) == (7, 2)
    assert all(isinstance(given[name], float) for name in ("dense_ms", "sparse_ms", "cycle_ms"))


def test_costs_with_a_limit_of_tokens_are_those_of_the_steps_that_fit():
    costs = TwoLevelCosts(dense_ms=10.0, sparse_ms=1.0, check_ms=11.0, max_steps=8, max_tokens=24, draft_length=5)
    # Eighteen may wait before a step of up to six: seven steps of three tokens, or four of six.
    for tokens, most in ((3.0, 7), (6.0, 4), (1.0, 8)):
        every = [
            two_level_speedup(num_steps=n, tokens_per_step=tokens, acceptance=0.999, step_cost=0.1, check_cost=1.1) for n in range(1, 9)
        ]
        assert costs.speedup(tokens_per_step=tokens, acceptance=0.999) == max(every[:most])
    assert costs.lossless() == Lossless(max_steps=8, max_tokens=24, step_cost=0.1, check_cost=1.1)


@pytest.mark.full
def test_acceptance_is_made_up_at_both_levels_as_often_as_asked_for_and_is_marked():
    target, params = tiny_target()
    prompts = random_prompts((6,) * 16)
    drafter_params = recorded(np.zeros((16, 200)), [6] * 16)

    def run(rate):
        rule = SyntheticAcceptance(rates=(1.0, 0.0), dense_rate=rate)
        config = dataclasses.replace(CONFIG, max_new_tokens=96, verification=rule)
        return speculative_generate(target, params, ReplayDrafter(), drafter_params, prompts, config=config).statistics

    found = run(0.7)
    assert found.synthetic
    assert float(found.mean_acceptance_length) == pytest.approx(2.0, abs=0.05)  # limits cut some last steps short
    examined = int(found.levels.examined.sum())
    # Four standard errors of a coin.
    assert float(found.levels.dense_acceptance_rate) == pytest.approx(0.7, abs=4 * (0.21 / examined) ** 0.5)
    assert examined > 500


def test_only_a_synthetic_rule_with_a_rate_for_the_dense_level_may_stand_below_a_lossless_one():
    for rule in (SyntheticAcceptance(rates=(0.5, 0.5)), TypicalAcceptance()):
        with pytest.raises(ValueError, match="needs a lossless GenerateConfig.verification"):
            dataclasses.replace(CONFIG, verification=rule)
    for rule in (SyntheticAcceptance(rates=(0.5, 0.5), dense_rate=1.0), RejectionSampling()):
        assert dataclasses.replace(CONFIG, verification=rule).verification == rule
    with pytest.raises(ValueError, match="dense_rate must be None or a probability, got 1.5"):
        SyntheticAcceptance(rates=(0.5,), dense_rate=1.5)


def test_loops_that_need_more_slots_than_the_call_have_them_and_lost_times_are_an_error_of_their_own(monkeypatch):
    target, params = tiny_target()
    capacities = []

    def times(loops, params, state, longest, repeats):
        capacities.append(state.target_cache.capacity)
        return {"dense": 4.0, "sparse": 1.0, "cycle": 1.0}, loops["cycle"](params, state, np.int32(1)).statistics.levels

    monkeypatch.setattr(measured_costs, "_times", times)
    with pytest.raises(CostsUnknown, match="times are lost in noise: check_ms must be a positive finite number, got -1.0"):
        measure_costs(target, params, None, None, PROMPTS, config=dataclasses.replace(CONFIG, cache_capacity=32))
    # Up to 20 tokens, in 24 columns, and nine cycles of up to three; all of it rounded up.
    assert capacities == [64]


def test_loops_without_room_in_the_window_are_told_from_calls_that_are_wrong():
    target, params = tiny_target()
    sparsity = dataclasses.replace(SPARSE, lossless=Lossless(max_steps=1000))
    config = dataclasses.replace(CONFIG, sparsity=sparsity)
    with pytest.raises(CostsUnknown, match=r"have no room: row 0: a prompt of 20 tokens and up to 3003 new ones exceed the model's window"):
        measure_costs(target, params, None, None, PROMPTS, config=config)
    with pytest.raises(ValueError, match="prompt token ids must be") as wrong:
        measure_costs(target, params, None, None, [[10**6]], config=config)
    assert not isinstance(wrong.value, CostsUnknown)
