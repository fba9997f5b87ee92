"""Experts left out: against loops in NumPy, exact where nothing is left out, and really not read."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Kernels, ModelConfig, MoEConfig
from specjax.models.moe import MixtureOfExperts
from specjax.sparsity.sparse_mlp import SparseMLP
from specjax.sparsity.sparse_moe import SparseMoE, choose_experts, expert_work, skip_ratios
from tests.helpers import FLOAT32_TOLERANCE, random_model, tiny_config

WIDTH, EXPERTS, TAKEN = 32, 8, 4
MOE = MoEConfig(num_experts=EXPERTS, num_experts_per_token=TAKEN, intermediate_size=16)
PLAIN = MoEConfig(num_experts=EXPERTS, num_experts_per_token=TAKEN, intermediate_size=16, normalise=False)
FAMILIES = pytest.mark.parametrize("moe", [MOE, PLAIN], ids=["normalised", "shares"])
ONE_FAMILY = pytest.mark.parametrize("moe", [MOE, pytest.param(PLAIN, marks=pytest.mark.full)], ids=["normalised", "shares"])


def mixture(moe: MoEConfig = MOE, **changes: Any) -> tuple[ModelConfig, dict[str, jax.Array]]:
    config = tiny_config(num_layers=1, moe=moe, **changes)
    return config, random_model(config)[1]["layer_0"]["mlp"]


def inputs(batch_size: int = 2, num_tokens: int = 5) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (batch_size, num_tokens, WIDTH))


def run(
    config: ModelConfig, mlp: dict, sparse: SparseMLP | None, *, x: jax.Array | None = None, implementation: str = "reference"
) -> tuple[np.ndarray, Any]:
    out, work = compiled(config, implementation, mlp, inputs() if x is None else x, sparse)
    return np.asarray(out), work


@functools.partial(jax.jit, static_argnums=(0, 1))
def compiled(config: ModelConfig, implementation: str, mlp: dict, x: jax.Array, sparse: SparseMLP | None) -> Any:
    return MixtureOfExperts(config, jnp.float32, Kernels(experts=implementation)).apply({"params": mlp}, x, sparse)


compiled_choice = jax.jit(choose_experts, static_argnums=(1, 2))


def random_probs(shape: tuple[int, ...] = (2, 5), seed: int = 0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(*shape, EXPERTS)) * 1.5
    return (np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)).astype(np.float32)


def numpy_choice(
    probs: np.ndarray, moe: MoEConfig, sparse: SparseMoE, beta: np.ndarray | None = None, counted: np.ndarray | None = None
) -> list[dict[int, float]]:
    """For each token its experts and their weights, decided one at a time."""
    batch, tokens, num_experts = probs.shape
    counted = np.ones((batch, tokens), bool) if counted is None else counted
    choices = []
    for row in range(batch):
        rows = [row] if sparse.per == "rows" else list(range(batch))
        mass = [sum(probs[b, t, e] for b in rows for t in range(tokens) if counted[b, t]) for e in range(num_experts)]
        budget = num_experts if sparse.expert_budget is None else sparse.expert_budget
        allowed = sorted(range(num_experts), key=lambda e: -mass[e])[:budget]
        for token in range(tokens):
            prob = probs[row, token].astype(np.float64)
            own = np.sort(prob)[::-1][: moe.num_experts_per_token].sum()
            best = sorted(allowed, key=lambda e: -prob[e])[: sparse.experts_per_token or moe.num_experts_per_token]
            keep = list(best)
            for i in range(sparse.max_skipped, 0, -1):
                lightest = [prob[e] for e in best[-i:]]
                value = lightest[0] / prob[best[0]] if sparse.ratio == "pair" else sum(lightest) / sum(prob[e] for e in best)
                if value < beta[i - 1]:
                    keep = best[:-i]
                    break
            left = sum(prob[e] for e in keep)
            target = 1.0 if moe.normalise else own
            renormalises = {"family": moe.normalise, "renormalise": True, "original": False}[sparse.survivors]
            scale = target / left if renormalises else target / own
            choices.append({e: prob[e] * scale for e in keep})
    return choices


def assert_same_choice(probs: np.ndarray, moe: MoEConfig, sparse: SparseMoE, beta: Any = None, counted: Any = None) -> list[dict]:
    expected = numpy_choice(probs, moe, sparse, beta, counted)
    given = dict(beta=None if beta is None else jnp.asarray(beta), counted=None if counted is None else jnp.asarray(counted))
    found = compiled_choice(jnp.asarray(probs), moe, sparse, **given)
    for want, experts, weights in zip(expected, np.asarray(found.experts), np.asarray(found.weights), strict=True):
        got = {int(e): float(w) for e, w in zip(experts, weights, strict=True) if e < EXPERTS}
        assert got.keys() == want.keys()
        np.testing.assert_allclose([got[e] for e in want], list(want.values()), rtol=FLOAT32_TOLERANCE)
        assert (weights[experts == EXPERTS] == 0).all()
    work = expert_work(found, EXPERTS, (probs.shape[0], probs.shape[1]), given["counted"])
    assert int(work.distinct_experts) == len(set().union(*expected))
    own = np.argsort(-probs.reshape(-1, EXPERTS), axis=-1, kind="stable")[:, : moe.num_experts_per_token]
    assert int(work.dense_distinct_experts) == len(np.unique(own))
    counted = np.ones(probs.shape[:2], bool) if counted is None else counted
    numbers = np.array([len(choice) for choice in expected]).reshape(probs.shape[:2])
    np.testing.assert_allclose(work.experts_per_token, (numbers * counted).sum(axis=1) / counted.sum(axis=1), rtol=FLOAT32_TOLERANCE)
    return expected


@FAMILIES
@pytest.mark.parametrize("survivors", ["family", "renormalise", "original"])
@pytest.mark.parametrize("ratio", ["share", "pair"])
def test_light_experts_are_skipped_as_the_thresholds_say(ratio: str, survivors: str, moe: MoEConfig) -> None:
    probs = random_probs()
    sparse = SparseMoE(max_skipped=3, ratio=ratio, survivors=survivors)
    ratios = skip_ratios(jax.lax.top_k(jnp.asarray(probs), TAKEN)[0], 3, ratio=ratio)
    # Midway between two tokens' ratios: no decision hangs on the last bit.
    ordered = np.sort(np.asarray(ratios).reshape(-1, 3), axis=0)
    choices = assert_same_choice(probs, moe, sparse, ordered[3:5].mean(axis=0))
    assert len({len(choice) for choice in choices}) > 1


def test_the_ratios_are_shares_of_the_tokens_own_experts() -> None:
    weights = jnp.array([[0.4, 0.3, 0.2, 0.1]])
    np.testing.assert_allclose(skip_ratios(weights, 3)[0], [0.1, 0.3, 0.6], rtol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(skip_ratios(weights, 3, ratio="pair")[0], [0.25, 0.5, 0.75], rtol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(skip_ratios(weights / 2, 2), skip_ratios(weights, 2), rtol=FLOAT32_TOLERANCE)


@ONE_FAMILY
@pytest.mark.parametrize("per", ["rows", "batch"])
def test_the_budget_goes_to_the_experts_of_the_largest_summed_weight(per: str, moe: MoEConfig) -> None:
    counted = np.array([[True, True, False, True, True], [True, False, False, False, False]])
    choices = assert_same_choice(random_probs(), moe, SparseMoE(expert_budget=5, per=per), counted=counted)
    assert len(set().union(*choices[:5])) <= 5
    everything = SparseMoE(expert_budget=5, per=per, max_skipped=2, experts_per_token=3, survivors="original")
    assert_same_choice(random_probs(), moe, everything, np.array([0.2, 0.4]))


@FAMILIES
def test_fewer_experts_a_token_are_its_best_ones_weighted_as_the_family_does(moe: MoEConfig) -> None:
    probs = random_probs()
    for number in (1, 3):
        choices = assert_same_choice(probs, moe, SparseMoE(experts_per_token=number))
        totals = np.array([sum(choice.values()) for choice in choices])
        best = -np.sort(-probs, axis=-1)[..., :number].sum(axis=-1).reshape(-1)
        np.testing.assert_allclose(totals, 1.0 if moe.normalise else best, rtol=FLOAT32_TOLERANCE)


@ONE_FAMILY
@pytest.mark.parametrize("exact", [SparseMoE(), SparseMoE(experts_per_token=TAKEN), SparseMoE(expert_budget=EXPERTS)])
def test_an_exact_setting_is_the_dense_program(exact: SparseMoE, moe: MoEConfig) -> None:
    config, mlp = mixture(moe)

    def text(sparse: SparseMLP | None) -> str:
        layer = MixtureOfExperts(config, jnp.float32)
        return jax.jit(lambda mlp, x: layer.apply({"params": mlp}, x, sparse)[0]).lower(mlp, inputs()).as_text()

    assert exact.exact(moe)
    assert text(SparseMLP(moe=exact)) == text(None)


@ONE_FAMILY
@pytest.mark.parametrize("implementation", ["grouped", "dense"])
def test_thresholds_that_skip_nothing_are_the_dense_mixture(implementation: str, moe: MoEConfig) -> None:
    config, mlp = mixture(moe)
    dense, nothing = run(config, mlp, None, implementation=implementation)
    assert nothing is None
    out, work = run(config, mlp, SparseMLP(moe=SparseMoE(max_skipped=3), beta=jnp.zeros(3)), implementation=implementation)
    np.testing.assert_allclose(out, dense, atol=FLOAT32_TOLERANCE)  # another program: products may be fused with other sums
    assert np.asarray(work.experts_per_token).tolist() == [TAKEN, TAKEN]


def test_thresholds_that_always_skip_are_fewer_experts_a_token() -> None:
    config, mlp = mixture(mlp_bias=True)
    always = SparseMLP(moe=SparseMoE(max_skipped=2), beta=jnp.full(3, jnp.inf))
    fewer, work = run(config, mlp, SparseMLP(moe=SparseMoE(experts_per_token=TAKEN - 2)))
    for implementation in ("reference", "grouped", "dense"):
        out, skipped = run(config, mlp, always, implementation=implementation)
        np.testing.assert_allclose(out, fewer, atol=FLOAT32_TOLERANCE)
        assert int(skipped.distinct_experts) == int(work.distinct_experts)
    assert np.abs(fewer - run(config, mlp, None)[0]).max() > 100 * FLOAT32_TOLERANCE


@pytest.mark.parametrize("implementation", ["grouped", pytest.param("dense", marks=pytest.mark.full)])
def test_an_expert_outside_the_budget_is_not_looked_at(implementation: str) -> None:
    config, mlp = mixture()
    sparse = SparseMLP(moe=SparseMoE(expert_budget=4, per="batch"))
    out, work = run(config, mlp, sparse, implementation=implementation)
    assert int(work.distinct_experts) == 4
    scores = np.exp(np.asarray(inputs()) @ np.asarray(mlp["router"]))
    used = set().union(*numpy_choice(scores / scores.sum(axis=-1, keepdims=True), MOE, sparse.moe))
    poison = np.array([1.0 if expert in used else np.inf for expert in range(EXPERTS)], np.float32)[:, None, None]
    poisoned = mlp | {"expert_down": mlp["expert_down"] * poison} if implementation == "grouped" else mlp
    poisoned |= {"expert_gate_up": mlp["expert_gate_up"] * poison[..., None]}
    np.testing.assert_array_equal(run(config, poisoned, sparse, implementation=implementation)[0], out)


def test_a_row_that_is_not_a_number_chooses_for_itself() -> None:
    config, mlp = mixture()
    x = inputs()
    for per in ("rows", "batch"):
        sparse = SparseMLP(moe=SparseMoE(expert_budget=4, per=per))
        out = run(config, mlp, sparse, x=x.at[1].set(jnp.nan))[0]
        assert np.isfinite(out[0]).all()
        assert np.isnan(out[1]).all()
    np.testing.assert_array_equal(out[0], run(config, mlp, SparseMLP(moe=SparseMoE(expert_budget=4)), x=x)[0][0])


def test_only_a_budget_sees_later_rows() -> None:
    assert SparseMoE(expert_budget=7).sees_later_rows
    assert SparseMoE(expert_budget=EXPERTS).sees_later_rows  # that these are all, only the model knows
    assert not SparseMoE(max_skipped=3, experts_per_token=4).sees_later_rows
    probs = random_probs((1, 5))
    other = np.concatenate([probs[:, :4], probs[:, 4:, ::-1]], axis=1)

    def first_rows(probs: np.ndarray, sparse: SparseMoE) -> list[dict]:
        return numpy_choice(probs, MOE, sparse, np.array([0.2, 0.3, 0.4]))[:4]

    assert first_rows(probs, SparseMoE(max_skipped=3)) == first_rows(other, SparseMoE(max_skipped=3))
    assert first_rows(probs, SparseMoE(expert_budget=4)) != first_rows(other, SparseMoE(expert_budget=4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(max_skipped=4), "max_skipped must be below the 4 experts that a token takes, got 4"),
        (dict(max_skipped=2, experts_per_token=2), "max_skipped must be below the 2 experts that a token takes, got 2"),
        (dict(experts_per_token=5), "experts_per_token must be at most the model's num_experts_per_token = 4, got 5"),
        (dict(expert_budget=3), "expert_budget must be from 4, which one token takes, to num_experts = 8, got 3"),
        (dict(expert_budget=9), "expert_budget must be from 4, .* got 9"),
        (dict(max_skipped=1), "needs beta, 1 thresholds or a tuple of 2 times as many, one a layer, got None"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseMoE(**settings).check(tiny_config(moe=MOE))


def test_thresholds_of_another_number_and_models_without_experts_are_refused() -> None:
    sparse = SparseMoE(max_skipped=2)
    for beta in ((), (0.1,), ((0.1, 0.1),) * 3, ((0.1,),) * 2):
        with pytest.raises(ValueError, match="needs beta, 2 thresholds or a tuple of 2 times as many, one a layer, got"):
            SparseMoE(max_skipped=2, beta=beta).check(tiny_config(moe=MOE))
    SparseMoE(max_skipped=2, beta=((0.1, 0.2, 0.3),) * 2).check(tiny_config(moe=MOE))
    SparseMoE(max_skipped=2, beta=(0.1, 0.2)).check(tiny_config(moe=MOE))
    wrong: list[Any] = [(0.1, -1.0), (0.1, float("inf")), 0.1, ((0.1,), (0.1, 0.2)), [0.1]]
    for beta in wrong:
        with pytest.raises(ValueError, match="SparseMoE.beta must be None, a tuple of finite numbers of at least 0"):
            SparseMoE(max_skipped=1, beta=beta)
    with pytest.raises(ValueError, match="needs a model with experts"):
        SparseMoE().check(tiny_config())
    with pytest.raises(ValueError, match=r"needs beta, as many thresholds a layer; got \[1\]"):
        choose_experts(jnp.asarray(random_probs()), MOE, sparse, beta=jnp.zeros(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(max_skipped=-1), "SparseMoE.max_skipped must be an int of at least 0, got -1"),
        (dict(max_skipped=1.5), "SparseMoE.max_skipped must be an int of at least 0, got 1.5"),
        (dict(expert_budget=0), "SparseMoE.expert_budget must be None or a positive int, got 0"),
        (dict(experts_per_token=0), "SparseMoE.experts_per_token must be None or a positive int, got 0"),
        (dict(per="token"), r"SparseMoE.per must be one of .*, got 'token'"),
        (dict(ratio="sum"), r"SparseMoE.ratio must be one of .*, got 'sum'"),
        (dict(survivors="none"), r"SparseMoE.survivors must be one of .*, got 'none'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseMoE(**settings)
