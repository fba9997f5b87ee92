"""Channels left out of a feed-forward network: against loops in NumPy, exact where all are kept, less to read where rows share a choice."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Kernels, ModelConfig, MoEConfig, SparsityConfig
from specjax.models.feed_forward import FeedForward
from specjax.models.moe import MixtureOfExperts
from specjax.models.projections import split_gate_up
from specjax.sparsity.sparse_ffn import SparseFFN
from specjax.sparsity.sparse_mlp import SparseMLP
from tests.helpers import FLOAT32_TOLERANCE, random_model, tiny_config

WIDTH, FFN = 32, 48
TOKENS = SparseFFN(select="threshold", per="token")
BIASED = dict(mlp_bias=True, activation="clamped_swiglu", swiglu_limit=1.0)


def network(seed: int = 0, **changes: Any) -> tuple[ModelConfig, dict[str, jax.Array]]:
    config = tiny_config(num_layers=1, **changes)
    return config, random_model(config, seed=seed)[1]["layer_0"]["mlp"]


def inputs(batch_size: int = 2, num_tokens: int = 3, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (batch_size, num_tokens, WIDTH))


def run(config: ModelConfig, mlp: dict, x: jax.Array, sparse: SparseMLP | None = None) -> tuple[np.ndarray, Any]:
    out, work = compiled(config, mlp, x, sparse)
    return np.asarray(out), work


@functools.partial(jax.jit, static_argnums=0)
def compiled(config: ModelConfig, mlp: dict, x: jax.Array, sparse: SparseMLP | None) -> Any:
    return FeedForward(config, jnp.float32).apply({"params": mlp}, x, sparse)


def halves(config: ModelConfig, mlp: dict, x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """The activated gate and the inner activation, in float64."""
    gate, up = np.moveaxis(np.einsum("...d,dcf->...cf", np.asarray(x, np.float64), np.asarray(mlp["gate_up"], np.float64)), -2, 0)
    if config.mlp_bias:
        gate, up = gate + np.asarray(mlp["gate_up_bias"])[0], up + np.asarray(mlp["gate_up_bias"])[1]
    if config.activation == "silu":
        return gate / (1 + np.exp(-gate)), gate / (1 + np.exp(-gate)) * up
    gate, up = np.minimum(gate, config.swiglu_limit), np.clip(up, -config.swiglu_limit, config.swiglu_limit)
    activated = gate / (1 + np.exp(-config.swiglu_alpha * gate))
    return activated, activated * (up + 1)


def finish(mlp: dict, inner: np.ndarray, kept: np.ndarray) -> np.ndarray:
    return np.where(kept, inner, 0) @ np.asarray(mlp["down"], np.float64) + np.asarray(mlp.get("down_bias", 0.0))


def numpy_kept(activated: np.ndarray, sparse: SparseFFN, counted: np.ndarray) -> np.ndarray:
    """Channels of the largest scores, group by group and channel by channel."""
    sizes, kept = np.abs(activated), np.zeros(activated.shape, bool)
    batch, tokens, channels = activated.shape
    places = [(b, t) for b in range(batch) for t in range(tokens)]
    groups = {"token": [[place] for place in places], "rows": [[p for p in places if p[0] == b] for b in range(batch)], "batch": [places]}
    for group in groups[sparse.per]:
        voters = group if sparse.per == "token" else [p for p in group if counted[p] and (sparse.score != "first" or p[1] == 0)]
        scores = [(np.mean if sparse.score == "mean" else np.max)([sizes[p][c] for p in voters]) for c in range(channels)]
        best = np.argsort(-np.array(scores), kind="stable")[: sparse.num_channels(channels)]
        for place in group:
            kept[place][best] = True
    return kept


@pytest.mark.parametrize("changes", [{}, BIASED], ids=["silu", "biased clamped"])
def test_channels_below_the_threshold_take_no_part(changes: dict) -> None:
    config, mlp = network(**changes)
    x, tau = inputs(), 0.2
    activated, inner = halves(config, mlp, x)
    kept = np.abs(activated) >= tau
    assert 0.2 < kept.mean() < 0.8
    out, work = run(config, mlp, x, SparseMLP(ffn=TOKENS, tau=jnp.float32(tau)))
    np.testing.assert_allclose(out, finish(mlp, inner, kept), atol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(work.channels, kept.mean(axis=(1, 2)), atol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(work.channels_read, kept.any(axis=1).mean(axis=1), atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("per", ["token", "rows", "batch"])
def test_a_threshold_of_zero_is_the_dense_network(per: str) -> None:
    config, mlp = network()
    dense, nothing = run(config, mlp, inputs())
    out, work = run(config, mlp, inputs(), SparseMLP(ffn=SparseFFN(select="threshold", per=per), tau=jnp.float32(0)))
    np.testing.assert_allclose(out, dense, atol=FLOAT32_TOLERANCE)  # another program: products may be fused with other sums
    assert nothing is None
    assert np.asarray(work.channels_read).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("implementation", ["masked", "gathered"])
@pytest.mark.parametrize(
    ("per", "score"),
    [
        ("token", "max"),
        ("rows", "mean"),
        ("batch", "first"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("token", "mean"), ("token", "first"), ("rows", "max"), ("rows", "first"), ("batch", "max"), ("batch", "mean"))
        ),
    ],
)
def test_the_channels_of_the_largest_scores_are_kept(per: str, score: str, implementation: str) -> None:
    config, mlp = network(**BIASED)
    x, counted = inputs(), np.array([[True, True, False], [True, True, True]])
    sparse = SparseFFN(keep=0.25, per=per, score=score, implementation=implementation)
    activated, inner = halves(config, mlp, x)
    kept = numpy_kept(activated, sparse, counted)
    for params in (mlp, split_gate_up({"layer_0": {"mlp": mlp}})["layer_0"]["mlp"]):
        out, work = run(config, params, x, SparseMLP(ffn=sparse, counted=jnp.asarray(counted)))
        np.testing.assert_allclose(out, finish(mlp, inner, kept), atol=FLOAT32_TOLERANCE)
        np.testing.assert_allclose(work.channels, [16 / 48] * 2, atol=FLOAT32_TOLERANCE)  # 12 channels, rounded up to 16
        union = (kept & counted[..., None]).any(axis=1).mean(axis=1)
        np.testing.assert_allclose(work.channels_read, union, atol=FLOAT32_TOLERANCE)


def test_a_gathered_network_of_one_row_equals_the_masked_one_in_both_layouts() -> None:
    config, mlp = network()
    x = inputs(batch_size=1, num_tokens=5)
    out = {}
    for implementation in ("masked", "gathered"):
        for name, params in (("together", mlp), ("split", split_gate_up({"layer_0": {"mlp": mlp}})["layer_0"]["mlp"])):
            out[implementation, name] = run(config, params, x, SparseMLP(ffn=SparseFFN(keep=0.5, implementation=implementation)))[0]
    for found in out.values():
        np.testing.assert_allclose(found, out["masked", "together"], atol=FLOAT32_TOLERANCE)
    assert np.abs(out["masked", "together"] - run(config, mlp, x)[0]).max() > 100 * FLOAT32_TOLERANCE


def test_gathering_brings_fewer_weights_to_the_products_and_copies_none() -> None:
    config = tiny_config(num_layers=1, hidden_size=256, intermediate_size=1024)
    x = jax.ShapeDtypeStruct((1, 5, 256), jnp.float32)
    together = {"gate_up": jax.ShapeDtypeStruct((256, 2, 1024), jnp.float32), "down": jax.ShapeDtypeStruct((1024, 256), jnp.float32)}
    split = jax.eval_shape(lambda mlp: split_gate_up({"layer_0": {"mlp": mlp}})["layer_0"]["mlp"], together)
    size, eighth = 1024 * 256, 128 * 256

    def weights_and_operations(mlp: dict, sparse: SparseFFN | None) -> tuple[int, float]:
        lowered = jax.jit(lambda p, x: FeedForward(config, jnp.float32).apply({"params": p}, x, SparseMLP(ffn=sparse))[0]).lower(mlp, x)
        shapes = re.findall(r"dot_general.*tensor<([\dx]+)xf32>\) ->", lowered.as_text())
        compiled = lowered.compile()
        # Gathers read the arrays as they lie: (XLA's count of bytes takes a gather to read all that it might.)
        assert not re.findall(r"= f32\[(?:1024,256|256,1024)\]\S* (?:copy|transpose)\(", compiled.as_text())
        cost: Any = compiled.cost_analysis()
        return sum(math.prod(map(int, shape.split("x"))) for shape in shapes), cost["flops"]

    dense, sparse = weights_and_operations(together, None), weights_and_operations(split, SparseFFN(keep=1 / 8))
    assert dense[0] == 3 * size
    assert sparse[0] == size + 2 * eighth
    assert weights_and_operations(together, SparseFFN(keep=1 / 8))[0] == 2 * size + eighth  # gate and up are one product
    # 10/24 of the products, and the choice.
    assert 10 / 24 * dense[1] < sparse[1] < 0.6 * dense[1]


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_rows_share_no_choice_with_other_rows_of_the_batch(keep: float) -> None:
    config, mlp = network()
    x = inputs()
    other = x.at[1].set(jnp.nan)
    sparse = SparseMLP(ffn=SparseFFN(keep=keep, implementation="gathered" if keep < 1 else "auto"))
    np.testing.assert_array_equal(run(config, mlp, other, sparse)[0][0], run(config, mlp, x, sparse)[0][0])
    everyone = SparseMLP(ffn=SparseFFN(keep=0.5, per="batch"))
    assert np.isfinite(run(config, mlp, other, everyone)[0][0]).all()
    assert np.isnan(run(config, mlp, other, everyone)[0][1]).all()


@pytest.mark.parametrize("score", ["max", "first"])
def test_what_sees_later_rows_says_so(score: str) -> None:
    config, mlp = network()
    x, sparse = inputs(batch_size=1), SparseFFN(keep=0.25, score=score)
    later = x.at[0, 2].multiply(3.0)
    before, after = (run(config, mlp, tokens, SparseMLP(ffn=sparse))[0][0, :2] for tokens in (x, later))
    assert sparse.sees_later_rows == bool((before != after).any())


def test_an_exact_setting_is_the_dense_program_and_a_layers_threshold_is_its_own() -> None:
    config = tiny_config()
    model, params = random_model(config)
    tokens = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)

    @functools.partial(jax.jit, static_argnums=1)
    def hidden(params: dict, ffn: SparseFFN | None) -> Any:
        cache = model.init_cache(batch_size=2, capacity=16)
        output = model.apply({"params": params}, tokens, cache, sparsity=SparsityConfig(ffn=ffn))
        return output.hidden, output.mlp_work

    assert hidden.lower(params, SparseFFN(keep=1.0)).as_text() == hidden.lower(params, None).as_text()
    out, work = hidden(params, dataclasses.replace(TOKENS, tau=(0.0, 0.3)))
    assert float(work[0].channels.mean()) == 1.0
    assert 0.0 < float(work[1].channels.mean()) < 0.9
    assert np.isfinite(out).all()
    assert jax.eval_shape(lambda: hidden(params, None))[1] == (None, None)


def test_split_params_are_the_same_network() -> None:
    config = tiny_config(num_layers=2, moe=MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=16, dense_layers=(1,)))
    _, params = random_model(config)
    split = split_gate_up(params)
    assert set(split["layer_1"]["mlp"]) == {"gate", "up", "down"}
    assert split["layer_0"] is params["layer_0"]
    found = [run(config, weights["layer_1"]["mlp"], inputs())[0] for weights in (params, split)]
    np.testing.assert_allclose(found[1], found[0], atol=FLOAT32_TOLERANCE)


def test_channels_of_experts_are_left_out_below_the_threshold(full_grid: bool) -> None:
    config, mlp = network(moe=MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=16))

    @functools.partial(jax.jit, static_argnums=1)
    def run_mixture(sparse: SparseMLP | None, implementation: str = "reference") -> Any:
        return MixtureOfExperts(config, jnp.float32, Kernels(experts=implementation)).apply({"params": mlp}, inputs(), sparse)

    def mixture(*arguments: Any) -> jax.Array:
        return run_mixture(*arguments)[0]

    def above(tau: float) -> SparseMLP:
        return SparseMLP(ffn=TOKENS, tau=jnp.float32(tau))

    dense, some, none = mixture(None), mixture(above(0.2)), mixture(above(1e9))
    np.testing.assert_allclose(mixture(above(0.0)), dense, atol=FLOAT32_TOLERANCE)
    for implementation in ("grouped", "dense") if full_grid else ("grouped",):
        np.testing.assert_allclose(mixture(above(0.2), implementation), some, atol=FLOAT32_TOLERANCE)
    assert (none == 0).all()
    expected, kept = np.zeros(some.shape), np.zeros(some.shape[:2])
    for place in np.ndindex(some.shape[:2]):
        x = np.asarray(inputs())[place]
        probs = np.exp(x @ np.asarray(mlp["router"]))
        best = np.argsort(-probs)[:2]
        for expert in best:
            gate, up = np.einsum("d,dcf->cf", x, np.asarray(mlp["expert_gate_up"][expert]))
            activated = gate / (1 + np.exp(-gate))
            inner = np.where(np.abs(activated) >= 0.2, activated * up, 0)
            kept[place] += (np.abs(activated) >= 0.2).mean() / 2
            expected[place] += probs[expert] / probs[best].sum() * (inner @ np.asarray(mlp["expert_down"][expert]))
    np.testing.assert_allclose(some, expected, atol=FLOAT32_TOLERANCE)
    for implementation in ("grouped", "dense"):
        work = run_mixture(above(0.2), implementation)[1]
        np.testing.assert_allclose(work.channels, kept.mean(axis=1), atol=FLOAT32_TOLERANCE)
        assert work.experts_per_token.tolist() == [2.0, 2.0]
    assert run_mixture(None)[1] is None


def test_a_threshold_of_another_value_runs_the_same_program() -> None:
    config, mlp = network()
    traces = []

    @jax.jit
    def traced(sparse: SparseMLP) -> jax.Array:
        traces.append(sparse)
        return FeedForward(config, jnp.float32).apply({"params": mlp}, inputs(), sparse)[0]

    outputs = [traced(SparseMLP(ffn=TOKENS, tau=jnp.float32(tau))) for tau in (0.0, 0.1, 0.3)]
    assert len(traces) == 1
    assert (outputs[0] != outputs[2]).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(keep=0.0), "SparseFFN.keep must be above 0 and at most 1, got 0.0"),
        (dict(keep=1.5), "SparseFFN.keep must be above 0 and at most 1, got 1.5"),
        (dict(keep="0.4"), "SparseFFN.keep must be above 0 and at most 1, got '0.4'"),
        (dict(keep=True), "SparseFFN.keep must be above 0 and at most 1, got True"),
        (dict(select="magic"), r"SparseFFN.select must be one of .*, got 'magic'"),
        (dict(per="layer"), r"SparseFFN.per must be one of .*, got 'layer'"),
        (dict(score="sum"), r"SparseFFN.score must be one of .*, got 'sum'"),
        (dict(select="threshold", implementation="gathered"), "needs a fixed number of channels"),
        (dict(select="threshold", tau=(0.1, -0.1)), r"SparseFFN.tau must be None, a finite number of at least 0, .* got \(0.1, -0.1\)"),
        (dict(select="threshold", tau=float("nan")), "SparseFFN.tau must be None, a finite number .* got nan"),
        (dict(tau=0.1), "SparseFFN.tau is read with select 'threshold' only, got select='top_k' and tau=0.1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseFFN(**settings)


def test_what_does_not_fit_the_model_is_refused() -> None:
    with_experts = tiny_config(moe=MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=16))
    with pytest.raises(ValueError, match=r"needs tau, a number or a tuple of 2, one a layer, got \(0.1, 0.1, 0.1\)"):
        dataclasses.replace(TOKENS, tau=(0.1, 0.1, 0.1)).check(tiny_config())
    with pytest.raises(ValueError, match="needs tau, a number or a tuple of 2, one a layer, got None"):
        TOKENS.check(tiny_config())
    with pytest.raises(ValueError, match="channels are left out by a threshold for each token.*layers with experts: .0, 1"):
        SparseFFN().check(with_experts)


@pytest.mark.parametrize(("keep", "size", "number"), [(0.4, 14336, 5736), (0.56, 100, 56), (0.25, 48, 16), (1.0, 50, 50), (0.99, 50, 50)])
def test_the_number_of_channels_is_rounded_up(keep: float, size: int, number: int) -> None:
    assert SparseFFN(keep=keep).num_channels(size) == number
