"""Verification rules: chi-square tests of what they emit, on chains whose exact law is known, and shown able to fail."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    BlockVerification,
    DraftModel,
    GenerateConfig,
    RejectionSampling,
    SamplingParams,
    SyntheticAcceptance,
    TypicalAcceptance,
    speculative_generate,
)
from specjax.sampling import sample_from_probs, split_row_keys
from specjax.state import Draft, Verification
from specjax.verification.rejection_sampling import residual_weights
from specjax.verification.verify import verify
from tests.helpers import (
    MIN_P_VALUE,
    FixedDrafter,
    ReplayDrafter,
    chi_square_p_value,
    numpy_filtered_probs,
    numpy_forward,
    random_model,
    random_prompts,
    recorded,
    tiny_config,
    tiny_target,
)

NUM_ROWS = 1 << 16
VOCAB_SIZE = 16
DRAFT_LENGTH = 2
LOSSLESS_RULES = [RejectionSampling(), BlockVerification()]


def markov_chain(seed: int, *, num_tokens: int = VOCAB_SIZE, spread: float = 1.5, **sampling: Any) -> np.ndarray:
    """Next-token distributions `[previous token, token]` over the first `num_tokens` tokens, filtered as asked."""
    table = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    logits = np.random.default_rng(seed).normal(0, spread, (VOCAB_SIZE, num_tokens))
    for previous in range(VOCAB_SIZE):
        table[previous, :num_tokens] = numpy_filtered_probs(logits[previous], **sampling)
    return table


def joint_law(chain: np.ndarray) -> np.ndarray:
    """The exact law `[V,V,V]` of the first three tokens after token 0."""
    return np.einsum("a,ab,bc->abc", chain[0], chain, chain)


@functools.partial(jax.jit, static_argnames=("rule", "point_mass"))
def run_rule(
    rule: Any, target: jax.Array, drawn_from: jax.Array, recorded_as: jax.Array, num_drafted: jax.Array, *, point_mass: bool
) -> tuple[jax.Array, Verification]:
    """Drafts two tokens a row along the chain, verifies, and completes to three tokens from the target: `[B,3]` and the verification."""
    keys = split_row_keys(jax.random.split(jax.random.key(0), NUM_ROWS), 6)
    previous = jnp.zeros((NUM_ROWS,), jnp.int32)
    drafted, probs, target_probs = [], [], [target[previous]]
    for position in range(DRAFT_LENGTH):
        probs.append(recorded_as[previous])
        if point_mass:
            previous = jnp.argmax(drawn_from[previous], axis=-1).astype(jnp.int32)
        else:
            previous = sample_from_probs(keys[position], drawn_from[previous])
        drafted.append(previous)
        target_probs.append(target[previous])
    draft = Draft(tokens=jnp.stack(drafted, 1), num_drafted=num_drafted, probs=None if point_mass else jnp.stack(probs, 1))
    verification = rule(draft, jnp.stack(target_probs, 1), keys[2])
    tokens = [verification.tokens[:, 0]]
    for position in range(1, DRAFT_LENGTH + 1):
        fresh = sample_from_probs(keys[2 + position], target[tokens[-1]])
        tokens.append(jnp.where(position <= verification.num_accepted, verification.tokens[:, position], fresh))
    return jnp.stack(tokens, 1), verification


def p_value(
    rule: Any, target: np.ndarray, drawn_from: np.ndarray, *, recorded_as: np.ndarray | None = None, point_mass: bool = False
) -> float:
    """p-value of the first three emitted tokens of rows whose drafts have 0, 1 or 2 tokens."""
    num_drafted = jnp.asarray(np.random.default_rng(7).choice(3, NUM_ROWS, p=[0.1, 0.2, 0.7]), jnp.int32)
    recorded_as = drawn_from if recorded_as is None else recorded_as
    tokens, verification = run_rule(rule, target, drawn_from, recorded_as, num_drafted, point_mass=point_mass)
    assert (np.asarray(verification.num_accepted) <= np.asarray(num_drafted)).all()
    counts = np.zeros((VOCAB_SIZE,) * 3)
    np.add.at(counts, tuple(np.asarray(tokens).T), 1)
    return chi_square_p_value(counts, joint_law(target))


SETTINGS = {
    "four tokens": dict(num_tokens=4),
    "sixteen tokens": dict(),
    "top-k and top-p": dict(temperature=0.8, top_k=3, top_p=0.9),
    "cold and narrow": dict(temperature=0.1, top_p=0.5, spread=0.2),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("point_mass", [False, True], ids=["sampled drafts", "point masses"])
@pytest.mark.parametrize("rule", LOSSLESS_RULES, ids=lambda rule: type(rule).__name__)
def test_emitted_tokens_follow_the_targets_distribution(rule: Any, point_mass: bool, setting: str) -> None:
    target, draft = markov_chain(1, **SETTINGS[setting]), markov_chain(2, **SETTINGS[setting])
    assert p_value(rule, target, draft, point_mass=point_mass) > MIN_P_VALUE


@pytest.mark.parametrize("rule", LOSSLESS_RULES, ids=lambda rule: type(rule).__name__)
def test_the_chi_square_test_detects_a_raw_draft_distribution_recorded_for_filtered_drafts(rule: Any) -> None:
    sampling = dict(temperature=0.8, top_k=3, top_p=0.9)
    target, drawn_from, raw = markov_chain(1, **sampling), markov_chain(2, **sampling), markov_chain(2)
    assert p_value(rule, target, drawn_from, recorded_as=raw) < MIN_P_VALUE


@pytest.mark.parametrize("rule", LOSSLESS_RULES, ids=lambda rule: type(rule).__name__)
def test_the_chi_square_test_detects_greedy_drafts_recorded_as_sampled_ones(rule: Any) -> None:
    target, draft = markov_chain(1, num_tokens=4), markov_chain(2, num_tokens=4)
    greedy = np.eye(VOCAB_SIZE)[draft.argmax(axis=1)]
    assert p_value(rule, target, greedy, recorded_as=draft) < MIN_P_VALUE
    assert p_value(rule, target, greedy, recorded_as=greedy) > MIN_P_VALUE


def test_the_chi_square_test_detects_the_lossy_rule() -> None:
    target, draft = markov_chain(1, num_tokens=4), markov_chain(2, num_tokens=4)
    assert p_value(TypicalAcceptance(), target, draft) < MIN_P_VALUE


def acceptance(rule: Any, target: np.ndarray, draft: np.ndarray, *, point_mass: bool = False) -> np.ndarray:
    full = jnp.full((NUM_ROWS,), DRAFT_LENGTH, jnp.int32)
    return np.asarray(run_rule(rule, target, draft, draft, full, point_mass=point_mass)[1].num_accepted)


def test_measured_acceptance_is_the_overlap_of_the_two_distributions() -> None:
    target, draft = markov_chain(1), markov_chain(2)
    num_accepted = acceptance(RejectionSampling(), target, draft)
    first = np.minimum(target[0], draft[0])
    second = (first * np.minimum(target, draft).sum(axis=1)).sum()
    # Four standard errors of a share of 65536 rows.
    assert (num_accepted >= 1).mean() == pytest.approx(first.sum(), abs=4 * 0.5 / 256)
    assert (num_accepted == 2).mean() == pytest.approx(second, abs=4 * 0.5 / 256)
    assert first.sum() < 0.9, "equality of two samples, or accepting everything, must not pass"


def test_a_point_mass_is_accepted_with_its_target_probability() -> None:
    target, draft = markov_chain(1), markov_chain(2)
    num_accepted = acceptance(RejectionSampling(), target, draft, point_mass=True)
    first = draft[0].argmax()
    assert (num_accepted >= 1).mean() == pytest.approx(target[0, first], abs=4 * 0.5 / 256)


@pytest.mark.parametrize("seed", [1, 3, 5])
def test_block_verification_accepts_at_least_as_much_as_token_wise_rejection(seed: int) -> None:
    target, draft = markov_chain(seed), markov_chain(seed + 1)
    block, token_wise = acceptance(BlockVerification(), target, draft), acceptance(RejectionSampling(), target, draft)
    # By enumeration: both tokens are accepted with probability E[w_2] by the block, E[min(1, p_1/q_1) min(1, p_2/q_2)] token by token.
    w_1 = np.minimum(1, target[0] / draft[0])
    ratio = target / draft
    w_2 = np.minimum(1, w_1[:, None] * ratio)
    draft_law = draft[0][:, None] * draft
    gain = (draft_law * (w_2 - w_1[:, None] * np.minimum(1, ratio))).sum()
    assert gain > 0.005
    assert (block == 2).mean() - (token_wise == 2).mean() == pytest.approx(gain, abs=4 * 0.7 / 256)
    assert block.mean() > token_wise.mean()


def test_block_verification_gains_nothing_on_point_masses() -> None:
    target, draft = markov_chain(1), markov_chain(2)
    block = acceptance(BlockVerification(), target, draft, point_mass=True)
    token_wise = acceptance(RejectionSampling(), target, draft, point_mass=True)
    assert block.mean() == pytest.approx(token_wise.mean(), abs=4 * 0.9 / 256)


@pytest.mark.parametrize("rule", LOSSLESS_RULES, ids=lambda rule: type(rule).__name__)
def test_a_draft_model_equal_to_the_target_is_always_accepted(rule: Any) -> None:
    target = markov_chain(1, top_k=5)
    num_accepted = acceptance(rule, target, target)
    assert (num_accepted == DRAFT_LENGTH).all()
    # Rounding apart: at most one row in 2^23 draws a uniform number that close to 1.
    above, below = np.float32(target) * np.float32(1 + 2**-23), np.float32(target) * np.float32(1 - 2**-23)
    for almost in (above, below):
        assert (acceptance(rule, target, almost) == DRAFT_LENGTH).mean() > 0.999
        assert p_value(rule, target, almost) > MIN_P_VALUE


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    probs = jnp.array([[[0.25, 0.75, 0.0]] * 2])
    draft = Draft(tokens=jnp.array([[0]]), num_drafted=jnp.array([1]), probs=probs[:, :1])
    weights = residual_weights(draft, probs, jnp.array([0]), jnp.ones((1,)))
    np.testing.assert_array_equal(weights, probs[:, 0])
    point = Draft(tokens=jnp.array([[1]]), num_drafted=jnp.array([1]), probs=None)
    np.testing.assert_array_equal(residual_weights(point, probs, jnp.array([0]), jnp.ones((1,))), [[0.25, 0, 0]])


@pytest.mark.parametrize("rule", [*LOSSLESS_RULES, TypicalAcceptance()], ids=lambda rule: type(rule).__name__)
def test_a_token_that_the_target_never_emits_is_never_accepted(rule: Any) -> None:
    target = markov_chain(1, top_k=2)
    draft = np.where(target > 0, 0, 1.0)
    draft /= draft.sum(axis=1, keepdims=True)
    tokens, verification = run_rule(rule, target, draft, draft, jnp.full((NUM_ROWS,), 2, jnp.int32), point_mass=False)
    assert (np.asarray(verification.num_accepted) == 0).all()
    assert (target[0][np.asarray(tokens)[:, 0]] > 0).all()


def test_typical_acceptance_follows_its_formula() -> None:
    rng = np.random.default_rng(0)
    num_rows, draft_length = 500, 4
    probs = rng.dirichlet(np.full(8, 0.4), (num_rows, draft_length + 1)).astype(np.float32)
    draft_tokens = rng.integers(0, 8, (num_rows, draft_length))
    num_drafted = rng.integers(0, draft_length + 1, num_rows)
    rule = TypicalAcceptance(posterior_threshold=0.2, posterior_alpha=0.5)
    draft = Draft(tokens=jnp.asarray(draft_tokens, jnp.int32), num_drafted=jnp.asarray(num_drafted, jnp.int32), probs=None)
    got = jax.jit(rule.__call__)(draft, jnp.asarray(probs), jax.random.split(jax.random.key(0), num_rows))
    expected = []
    for row in range(num_rows):
        accepted = 0
        while accepted < num_drafted[row]:
            p = probs[row, accepted].astype(np.float64)
            entropy = -sum(x * np.log(x) for x in p if x > 0)
            if p[draft_tokens[row, accepted]] <= min(0.2, 0.5 * np.exp(-entropy)):
                break
            accepted += 1
        expected.append(accepted)
    assert got.num_accepted.tolist() == expected
    assert set(expected) == set(range(draft_length + 1))
    assert not rule.lossless
    for row, accepted in enumerate(expected):
        assert got.tokens[row, :accepted].tolist() == draft_tokens[row, :accepted].tolist()


def test_after_typical_acceptance_the_next_token_follows_the_target() -> None:
    target = markov_chain(1, num_tokens=4)
    nothing = jnp.zeros((NUM_ROWS,), jnp.int32)
    tokens, _ = run_rule(TypicalAcceptance(), target, target, target, nothing, point_mass=False)
    assert chi_square_p_value(np.bincount(np.asarray(tokens)[:, 0], minlength=VOCAB_SIZE), target[0]) > MIN_P_VALUE


@pytest.mark.parametrize("mean_acceptance_length", [1.0, 1.7, 2.5, 4.9, 5.0])
def test_synthetic_acceptance_reaches_the_mean_length_asked_for(mean_acceptance_length: float) -> None:
    rule = SyntheticAcceptance.from_mean_acceptance_length(mean_acceptance_length, 4)
    draft = Draft(tokens=jnp.zeros((20_000, 4), jnp.int32), num_drafted=jnp.full((20_000,), 4, jnp.int32), probs=None)
    verification = rule(draft, jnp.ones((20_000, 5, 2)), jax.random.split(jax.random.key(0), 20_000))
    # Four standard errors; a length has a standard deviation of at most 2.
    assert 1 + verification.num_accepted.mean() == pytest.approx(mean_acceptance_length, abs=4 * 2 / 20_000**0.5)


def test_a_synthetic_run_is_marked_and_reaches_its_length_end_to_end() -> None:
    target, params = tiny_target()
    prompts = random_prompts((6,) * 32)
    drafter_params = recorded(np.zeros((32, 400)), [6] * 32)
    rule = SyntheticAcceptance.from_mean_acceptance_length(2.5, 4)
    config = GenerateConfig(max_new_tokens=192, num_speculative_tokens=4, verification=rule)
    output = speculative_generate(target, params, ReplayDrafter(), drafter_params, prompts, config=config)
    assert output.statistics.synthetic
    assert output.statistics.summary()["synthetic"]
    # About 2400 steps, a standard deviation of 1.5.
    assert float(output.statistics.mean_acceptance_length) == pytest.approx(2.5, abs=4 * 1.5 / 2400**0.5)
    lossless = dataclasses.replace(output.statistics, synthetic=False)
    assert (lossless + output.statistics).synthetic, "a sum that contains synthetic counts is synthetic"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TypicalAcceptance(posterior_threshold=0.0), r"posterior_threshold must be in \(0, 1\], got 0.0"),
        (lambda: TypicalAcceptance(posterior_alpha=1.5), r"posterior_alpha must be in \(0, 1\], got 1.5"),
        (lambda: TypicalAcceptance(posterior_alpha=float("nan")), r"posterior_alpha must be in \(0, 1\], got nan"),
        (lambda: SyntheticAcceptance(rates=()), "non-empty tuple of probabilities"),
        (lambda: SyntheticAcceptance(rates=(0.5, 1.5)), "tuple of probabilities, got"),
        (lambda: SyntheticAcceptance.from_mean_acceptance_length(0.9, 4), r"must be in \[1, 5\] for 4 draft tokens, got 0.9"),
        (lambda: SyntheticAcceptance.from_mean_acceptance_length(5.1, 4), r"must be in \[1, 5\] for 4 draft tokens, got 5.1"),
    ],
)
def test_impossible_settings_of_a_rule_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_synthetic_rates_for_another_draft_length_are_refused() -> None:
    target, params = tiny_target()
    config = GenerateConfig(max_new_tokens=4, num_speculative_tokens=4, verification=SyntheticAcceptance(rates=(0.5,)))
    with pytest.raises(ValueError, match="1 rates for drafts of 4 tokens"):
        speculative_generate(target, params, ReplayDrafter(), recorded(np.zeros((1, 8)), [2]), [[1, 2]], config=config)


def test_rows_of_a_batch_with_their_own_temperatures_are_each_verified_at_theirs() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 1, 4), jnp.float32)
    num_rows = 30_000
    temperature = jnp.tile(jnp.array([0.0, 0.7, 1.0]), num_rows // 3)
    draft = Draft(tokens=jnp.ones((num_rows, 1), jnp.int32), num_drafted=jnp.ones((num_rows,), jnp.int32), probs=None)
    checked = jax.jit(verify, static_argnames=("rule", "do_sample"))(
        rule=RejectionSampling(),
        draft=draft,
        target_logits=jnp.broadcast_to(logits, (num_rows, 2, 4)),
        sampling=SamplingParams(temperature).broadcast(num_rows),
        row_keys=jax.random.split(jax.random.key(3), num_rows),
        do_sample=True,
    )
    first = np.asarray(checked.verification.tokens)[:, 0]
    for group, value in enumerate([0.0, 0.7, 1.0]):
        expected = numpy_filtered_probs(np.asarray(logits, np.float64), value)
        counts = np.bincount(first[group::3], minlength=4)
        if value == 0:
            assert counts.tolist() == (expected * num_rows / 3).tolist()
        else:
            assert chi_square_p_value(counts, expected) > MIN_P_VALUE


# End to end: the joint law of four emitted tokens of a five-token model.

SMALL_VOCAB = 5
NUM_EMITTED = 4
ROWS_PER_SETTING = 4096
ROW_SETTINGS = [(1.0, 0, 1.0), (0.8, 3, 0.9)]
PROMPT = [3, 1, 4, 1]


def small_model(seed: int) -> tuple[Any, Any]:
    sizes = dict(vocab_size=SMALL_VOCAB, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)
    model, params = random_model(tiny_config(**sizes), seed=seed)
    return model, params | {"lm_head": params["lm_head"] * 0.5}


@functools.cache
def exact_laws() -> list[np.ndarray]:
    model, params = small_model(0)
    laws = [np.ones((SMALL_VOCAB,) * NUM_EMITTED) for _ in ROW_SETTINGS]
    for length in range(NUM_EMITTED):
        for prefix in itertools.product(range(SMALL_VOCAB), repeat=length):
            logits = numpy_forward(model.config, params, [*PROMPT, *prefix])[-1]
            for law, setting in zip(laws, ROW_SETTINGS, strict=True):
                probs = numpy_filtered_probs(logits, *setting)
                law[prefix] *= probs.reshape(-1, *[1] * (NUM_EMITTED - length - 1))
    return laws


@pytest.mark.parametrize("drafter_name", ["a sampled draft model", "a point mass"])
@pytest.mark.parametrize("rule", LOSSLESS_RULES, ids=lambda rule: type(rule).__name__)
def test_generated_text_follows_the_exact_law_of_the_target(rule: Any, drafter_name: str) -> None:
    target, params = small_model(0)
    draft_model, draft_params = small_model(1)
    drafter = DraftModel(draft_model) if drafter_name == "a sampled draft model" else FixedDrafter()
    drafter_params = draft_params if drafter_name == "a sampled draft model" else {"tokens": jnp.array([1, 2])}
    temperature, top_k, top_p = (np.repeat(np.asarray(column), ROWS_PER_SETTING) for column in zip(*ROW_SETTINGS, strict=True))
    output = speculative_generate(
        target,
        params,
        drafter,
        drafter_params,
        np.tile(np.int32(PROMPT), (2 * ROWS_PER_SETTING, 1)),
        config=GenerateConfig(max_new_tokens=NUM_EMITTED, num_speculative_tokens=2, do_sample=True, verification=rule),
        sampling=SamplingParams(temperature, top_k, top_p),
        rng=jax.random.key(11),
    )
    assert 0.05 < output.statistics.draft_acceptance_rate < 0.95
    tokens = np.asarray(output.tokens).reshape(2, ROWS_PER_SETTING, NUM_EMITTED)
    for group, law in enumerate(exact_laws()):
        counts = np.zeros(law.shape)
        np.add.at(counts, tuple(tokens[group].T), 1)
        assert chi_square_p_value(counts, law) > MIN_P_VALUE
        assert chi_square_p_value(counts, exact_laws()[1 - group]) < MIN_P_VALUE, "the other rows' law must not fit"
