"""The acceptance-cost model against the paper's figures, against brute force, and against itself."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.cost_model import (
    HeadCandidate,
    StepCosts,
    break_even_acceptance_ratio,
    conditional_acceptance,
    expect,
    expected_tokens,
    recommend,
    throughput_ratio,
)
from specjax.statistics import Statistics

# A handful of float64 operations on numbers of similar size.
ROUNDING = 1e-9
# The paper prints two digits, of measurements that are not the model's predictions.
PRINTED = 0.015

rates = st.floats(0.01, 1.0)
chains = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8).map(tuple)
times = st.floats(1.0, 1e5)
positive = st.floats(0.01, 10.0)

COSTS = StepCosts(plain_us=4300.0, drafter_us=130.0, verification_rows=(2, 6, 8), verification_us=(4290.0, 4300.0, 4340.0))


@st.composite
def cases(draw):
    rows = draw(st.lists(st.integers(2, 12), min_size=1, max_size=4, unique=True).map(sorted))
    costs = StepCosts(
        plain_us=draw(times),
        drafter_us=draw(times),
        verification_rows=(2, *[row for row in rows if row > 2]),
        verification_us=tuple(draw(times) for _ in range(1 + sum(row > 2 for row in rows))),
    )
    heads = draw(st.lists(st.tuples(times, chains), min_size=1, max_size=3))
    return costs, [HeadCandidate(name=str(n), head_us=us, conditional_acceptance=chain) for n, (us, chain) in enumerate(heads)]


@pytest.mark.parametrize(
    ("acceptance_ratio", "nu", "model", "reported"),
    [(1.00, 0.58, 1.092, 1.09), (0.99, 0.21, 1.176, 1.19), (0.98, 0.14, 1.184, 1.18)],
    ids=["trimmed to 64K", "rank D/8", "rank D/16"],
)
def test_the_papers_heads_of_llama_gain_what_it_reports(acceptance_ratio, nu, model, reported):
    ratio = throughput_ratio(acceptance_ratio=acceptance_ratio, kappa=0.25, nu=nu)
    assert ratio == pytest.approx(model, abs=5e-4)
    assert ratio == pytest.approx(reported, abs=PRINTED)


def test_the_papers_screened_head_gains_a_little_less_in_the_model_than_measured():
    assert throughput_ratio(acceptance_ratio=1.01, kappa=0.25, nu=0.46) == pytest.approx(1.132, abs=5e-4)  # reported: 1.16


@pytest.mark.parametrize(("nu", "expected"), [(0.21, 0.842), (0.46, 0.892), (0.58, 0.916)])
def test_the_papers_heads_break_even(nu, expected):
    assert break_even_acceptance_ratio(kappa=0.25, nu=nu) == pytest.approx(expected, abs=5e-4)


def test_kappa_of_the_papers_llama_is_that_of_a_whole_step():
    costs = StepCosts(plain_us=4400.0, drafter_us=120.0, verification_rows=(6,), verification_us=(4400.0,))
    assert costs.kappa(250.0, 5) == pytest.approx(5 * 0.25 / 5.0)


@given(kappa=positive, nu=positive, acceptance_ratio=positive, more=st.floats(1.01, 2.0))
def test_the_ratio_grows_with_acceptance_and_falls_with_the_heads_cost(kappa, nu, acceptance_ratio, more):
    base = throughput_ratio(acceptance_ratio=acceptance_ratio, kappa=kappa, nu=nu)
    assert throughput_ratio(acceptance_ratio=acceptance_ratio * more, kappa=kappa, nu=nu) > base
    assert throughput_ratio(acceptance_ratio=acceptance_ratio, kappa=kappa, nu=nu * more) < base


@given(kappa=positive, nu=positive, more=st.floats(1.1, 2.0))
def test_a_cheaper_head_is_worth_more_where_heads_weigh_more(kappa, nu, more):
    few, many = (throughput_ratio(acceptance_ratio=1.0, kappa=k, nu=nu) for k in (kappa, kappa * more))
    assert (many > few) == (nu < 1) or math.isclose(many, few, rel_tol=ROUNDING)


@given(kappa=positive, nu=positive)
def test_at_the_break_even_nothing_is_gained(kappa, nu):
    ratio = break_even_acceptance_ratio(kappa=kappa, nu=nu)
    assert throughput_ratio(acceptance_ratio=ratio, kappa=kappa, nu=nu) == pytest.approx(1.0, rel=ROUNDING)
    assert throughput_ratio(acceptance_ratio=1.0, kappa=kappa, nu=1.0) == pytest.approx(1.0, rel=ROUNDING)


@given(full_us=times, head_us=times, full=st.lists(rates, min_size=5, max_size=5), ours=st.lists(rates, min_size=5, max_size=5))
def test_the_papers_formula_is_the_ratio_of_the_two_heads_tokens_a_second(full_us, head_us, full, ours):
    heads = [
        HeadCandidate(name=name, head_us=us, conditional_acceptance=tuple(chain))
        for name, us, chain in (("full", full_us, full), ("ours", head_us, ours))
    ]
    for length in range(1, 6):
        with_full, with_ours = (expect(COSTS, head, length, batch_size=3) for head in heads)
        ratio = throughput_ratio(
            acceptance_ratio=with_ours.tokens_per_step / with_full.tokens_per_step,
            kappa=COSTS.kappa(full_us, length),
            nu=head_us / full_us,
        )
        assert with_ours.tokens_per_s / with_full.tokens_per_s == pytest.approx(ratio, rel=ROUNDING)


@given(chain=chains)
def test_expected_tokens_are_the_sum_over_what_may_happen(chain):
    for length in range(len(chain) + 1):
        # Exactly j accepted: the first j accepted, and the next one, if there is one, not.
        chances = [math.prod(chain[:j]) * (1 - chain[j] if j < length else 1) for j in range(length + 1)]
        assert sum(chances) == pytest.approx(1.0, rel=ROUNDING)
        assert expected_tokens(chain, length) == pytest.approx(sum((j + 1) * chance for j, chance in enumerate(chances)), rel=ROUNDING)


@given(rate=st.floats(0.0, 0.99), length=st.integers(0, 10))
def test_a_constant_rate_gives_the_geometric_sum(rate, length):
    expected = (1 - rate ** (length + 1)) / (1 - rate)
    assert expected_tokens([rate] * 10, length) == pytest.approx(expected, rel=1e-6)  # cancellation in the closed form


def test_conditional_rates_come_from_the_statistics_rates():
    statistics = Statistics.zeros(1, 3)
    counts = statistics.accepted_counts.at[0].set([40, 24, 12, 4])  # 80 steps
    statistics = dataclasses.replace(statistics, accepted_counts=counts)
    summary = statistics.summary()
    chain = conditional_acceptance(summary["acceptance_rate_per_position"])
    assert chain == pytest.approx((40 / 80, 16 / 40, 4 / 16), rel=1e-6)  # the rates are float32
    assert expected_tokens(chain, 3) == pytest.approx(summary["mean_acceptance_length"], rel=1e-6)
    assert conditional_acceptance([0.5, 0.0, 0.0]) == (0.5, 0.0, 0.0)


@settings(deadline=None)
@given(case=cases(), batch_size=st.integers(1, 64))
def test_the_first_choice_is_the_best_of_all_heads_and_lengths(case, batch_size):
    costs, heads = case
    points = dict(zip(costs.verification_rows, costs.verification_us, strict=True))

    def brute_force(head: HeadCandidate, length: int) -> float:
        rows = length + 1
        low = max(row for row in points if row <= rows)
        high = min(row for row in points if row >= rows)
        share = 0.0 if low == high else (rows - low) / (high - low)
        verification_us = (1 - share) * points[low] + share * points[high]
        tokens, chance = 1.0, 1.0
        for rate in head.conditional_acceptance[:length]:
            chance *= rate
            tokens += chance
        return batch_size * tokens / (verification_us + length * (costs.drafter_us + head.head_us)) * 1e6

    found = recommend(costs, heads, batch_size=batch_size)
    speeds = {
        (head.name, length): brute_force(head, length)
        for head in heads
        for length in range(1, min(len(head.conditional_acceptance), costs.longest_draft) + 1)
    }
    assert {(choice.name, choice.num_speculative_tokens) for choice in found} == set(speeds)
    assert found[0].tokens_per_s == pytest.approx(max(speeds.values()), rel=ROUNDING)
    for choice in found:
        assert choice.tokens_per_s == pytest.approx(speeds[choice.name, choice.num_speculative_tokens], rel=ROUNDING)
        assert choice.speed_up == pytest.approx(choice.tokens_per_s * costs.plain_us / (batch_size * 1e6), rel=ROUNDING)
    assert all(a.tokens_per_s >= b.tokens_per_s for a, b in itertools.pairwise(found))


def test_a_costlier_head_wants_a_shorter_draft_and_sure_acceptance_the_longest():
    chain = (0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
    lengths = [
        recommend(COSTS, [HeadCandidate(name="a", head_us=us, conditional_acceptance=chain)])[0].num_speculative_tokens
        for us in (10.0, 300.0, 1500.0, 6000.0)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]
    sure = HeadCandidate(name="sure", head_us=250.0, conditional_acceptance=(1.0,) * 7)
    assert recommend(COSTS, [sure])[0].num_speculative_tokens == 7


def test_a_draft_that_is_never_accepted_says_that_plain_decoding_is_faster():
    never = HeadCandidate(name="never", head_us=250.0, conditional_acceptance=(0.0, 0.0, 0.0))
    best = recommend(COSTS, [never])[0]
    assert (best.num_speculative_tokens, best.tokens_per_step) == (1, 1.0)
    assert best.speed_up < 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: throughput_ratio(acceptance_ratio=0.0, kappa=0.25, nu=0.5), "acceptance_ratio must be a positive finite number, got 0.0"),
        (lambda: break_even_acceptance_ratio(kappa=float("nan"), nu=0.5), "kappa must be a positive finite number, got nan"),
        (lambda: conditional_acceptance([0.5, 0.6]), "must not rise.*position 0 has 0.5, position 1 has 0.6"),
        (lambda: conditional_acceptance([]), "at least one, got \\[\\]"),
        (lambda: expected_tokens([0.5, 1.5], 1), "rates from 0 to 1.*1.5"),
        (lambda: expected_tokens([0.5], 2), "from 0 to 1, for which acceptance rates are known, got 2"),
        (lambda: HeadCandidate(name="a", head_us=-1.0, conditional_acceptance=(0.5,)), "head_us must be a positive finite number, got -1"),
        (lambda: dataclasses.replace(COSTS, verification_rows=(2, 2, 8)), "must ascend from at least 1, got \\(2, 2, 8\\)"),
        (lambda: dataclasses.replace(COSTS, verification_us=(1.0,)), "one verification_us for each"),
        (lambda: COSTS.without_heads_us(8), "measured for \\(2, 6, 8\\) rows, a draft of 8 tokens needs 9"),
        (lambda: expect(COSTS, HeadCandidate(name="a", head_us=1.0, conditional_acceptance=(0.5,)), 2), "from 1 to 1.*got 2"),
        (lambda: expect(COSTS, HeadCandidate(name="a", head_us=1.0, conditional_acceptance=(0.5,)), 1, batch_size=0), "at least 1, got 0"),
        (lambda: recommend(COSTS, []), "recommend needs heads"),
    ],
)
def test_what_cannot_be_is_refused_with_what_came(call, message):
    with pytest.raises(ValueError, match=message):
        call()
