"""Settings found from samples: histograms against sorted arrays, sampled texts against a pass of our own, anchors against loops."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import MoEConfig, SparsityConfig
from specjax.sparsity.calibration import MLPSamples, choose_anchors, jaccard, sample_mlp, selection_masks
from specjax.sparsity.histogram import NUM_BINS, RELATIVE_WIDTH, histogram, quantile, share_at_least
from specjax.sparsity.sparse_ffn import SparseFFN
from specjax.sparsity.sparse_moe import SparseMoE
from tests.helpers import random_model, tiny_config

MOE = MoEConfig(num_experts=4, num_experts_per_token=3, intermediate_size=16, dense_layers=(1,))
BATCHES = [(jnp.arange(24, dtype=jnp.int32).reshape(3, 8) * 7 % 64, None), (jnp.arange(24, dtype=jnp.int32).reshape(3, 8) * 5 % 64, None)]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.6, 0.95, 1.0])
def test_a_quantile_is_the_sorted_arrays_to_a_bins_width(share: float) -> None:
    values = np.random.default_rng(0).lognormal(sigma=3.0, size=2000).astype(np.float32)
    counts = np.asarray(histogram(jnp.asarray(values.reshape(20, 100))))
    exact = np.sort(values)[min(int(share * 2000), 1999)]
    found = quantile(counts, share)
    assert exact * (1 - RELATIVE_WIDTH) <= found <= exact
    assert (values < found).mean() <= share
    assert share_at_least(counts, found) == (values >= found).mean()


def test_a_histogram_counts_what_counts_and_streams_add_up() -> None:
    values = jnp.array([[0.0, 1.0, 3e38], [1e-38, 0.02, jnp.inf]])
    counted = jnp.array([[True], [False]])
    whole, part = histogram(values), histogram(values, counted)
    assert part.sum() == 3
    assert part[0] == 1  # zero has a bin of its own
    np.testing.assert_array_equal(whole, part + histogram(values, ~counted))
    with pytest.raises(ValueError, match="holds no values"):
        quantile(np.zeros((2, NUM_BINS), np.int64), 0.5)
    with pytest.raises(ValueError, match="share must be from 0 to 1, got 1.5"):
        quantile(np.asarray(whole), 1.5)


def test_the_thresholds_keep_the_share_of_channels_that_was_asked_for() -> None:
    config = tiny_config()
    model, params = random_model(config)
    samples = sample_mlp(model, params, BATCHES)
    assert samples.gates.sum(axis=1).tolist() == [48 * 48] * 2  # 48 tokens, 48 channels

    @functools.partial(jax.jit, static_argnums=1)
    def computed(tokens: jax.Array, tau: float) -> jax.Array:
        sparsity = SparsityConfig(ffn=SparseFFN(select="threshold", per="token", tau=(tau, 0.0)))
        cache = model.init_cache(batch_size=3, capacity=8)
        return model.apply({"params": params}, tokens, cache, sparsity=sparsity).mlp_work[0].channels

    for keep in (1.0, 0.7, 0.4, 0.05):
        tau = samples.tau(keep)
        kept = np.mean([computed(tokens, float(tau[0])) for tokens, _ in BATCHES])
        assert keep <= kept <= keep + 0.02  # a bin holds 1.6 % of the scale, about as much of the channels
        np.testing.assert_allclose(samples.kept(tau)[0], kept, atol=1e-6)


def test_samples_of_experts_are_those_of_the_experts_that_were_chosen() -> None:
    config = tiny_config(moe=MOE, mlp_bias=True)
    model, params = random_model(config)
    tokens = BATCHES[0][0]
    counted = jnp.arange(8) < jnp.array([8, 3, 1])[:, None]
    samples = sample_mlp(model, params, [(tokens, counted)])
    mlp = params["layer_0"]["mlp"]

    @jax.jit
    def what_experts_read() -> Any:
        cache = model.init_cache(batch_size=3, capacity=8)
        norms = dict(mutable=["intermediates"], capture_intermediates=lambda module, _: module.name == "mlp_norm")
        return model.apply({"params": params}, tokens, cache, **norms)[1]

    captured = what_experts_read()
    x = np.asarray(captured["intermediates"]["layer_0"]["mlp_norm"]["deferred"][0].value)[np.asarray(counted)]
    probs = np.exp(x @ np.asarray(mlp["router"]))
    probs /= probs.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-probs, axis=-1)[:, :3]
    gates = np.einsum("md,edf->mef", x, np.asarray(mlp["expert_gate_up"])[:, :, 0]) + np.asarray(mlp["expert_gate_up_bias"])[:, 0]
    gates = np.take_along_axis(gates, chosen[..., None], axis=1)
    sizes = np.sort(np.abs(gates / (1 + np.exp(-gates))).ravel())
    assert samples.gates[0].sum() == sizes.size == 12 * 3 * 16
    assert samples.gates[1].sum() == 12 * 48  # the dense layer
    for keep in (0.8, 0.3):
        exact = sizes[int((1 - keep) * sizes.size)]
        np.testing.assert_allclose(samples.tau(keep)[0], exact, rtol=RELATIVE_WIDTH)
    weights = -np.sort(-probs, axis=-1)[:, :3]
    shares = np.cumsum(weights[:, ::-1], axis=-1)[:, :2] / weights.sum(axis=-1, keepdims=True)
    beta = samples.beta()
    assert beta.shape == (2, 2)
    np.testing.assert_allclose(beta[0], np.sort(shares, axis=0)[6], rtol=RELATIVE_WIDTH)  # of 12 the upper median
    assert beta[1].tolist() == [0.0, 0.0]


def test_median_thresholds_skip_half_of_what_they_may() -> None:
    config = tiny_config(
        num_layers=1, num_heads=1, num_kv_heads=1, moe=MoEConfig(num_experts=8, num_experts_per_token=4, intermediate_size=8)
    )
    model, params = random_model(config)
    samples = sample_mlp(model, params, BATCHES)

    @jax.jit
    def experts_per_token(tokens: jax.Array) -> jax.Array:
        sparsity = SparsityConfig(moe=SparseMoE(max_skipped=1, beta=tuple(map(tuple, samples.beta().tolist()))))
        cache = model.init_cache(batch_size=3, capacity=8)
        return model.apply({"params": params}, tokens, cache, sparsity=sparsity).mlp_work[0].experts_per_token

    # On the texts of the calibration themselves; 0.1 are the tokens of a bin, of 48.
    assert abs(np.mean([experts_per_token(tokens) for tokens, _ in BATCHES]) - 3.5) < 0.1
    pairs = sample_mlp(model, params, BATCHES, ratio="pair")
    assert pairs.ratios.shape == samples.ratios.shape == (1, 3, NUM_BINS)
    assert (pairs.beta() > samples.beta()).any()
    with pytest.raises(ValueError, match="'share' and 'pair' do not add"):
        samples + pairs


def test_what_cannot_be_sampled_is_refused() -> None:
    config = tiny_config(num_layers=1)
    model, params = random_model(config)
    with pytest.raises(ValueError, match="there is no batch"):
        sample_mlp(model, params, [])
    with pytest.raises(ValueError, match="ratio must be one of"):
        sample_mlp(model, params, BATCHES, ratio="sum")
    samples = MLPSamples(gates=np.ones((1, NUM_BINS), np.int64), ratios=None, ratio="share")
    with pytest.raises(ValueError, match="no thresholds of experts"):
        samples.beta()
    with pytest.raises(ValueError, match="keep must be above 0 and at most 1, got 0"):
        samples.tau(0)


def test_jaccard_similarity_is_that_of_sets() -> None:
    rng = np.random.default_rng(0)
    selections = rng.uniform(size=(4, 3, 2, 9)) < 0.4
    selections[:2, 0, 0] = False  # two empty sets
    expected = np.zeros((4, 4))
    for i in range(4):
        for j in range(4):
            for sample in np.ndindex(3, 2):
                a, b = set(np.flatnonzero(selections[i][sample])), set(np.flatnonzero(selections[j][sample]))
                expected[i, j] += (len(a & b) / len(a | b) if a | b else 1.0) / 6
    np.testing.assert_allclose(jaccard(selections), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="no selections to compare"):
        jaccard(np.zeros((4, 0, 9), bool))


def test_masks_are_the_ids_that_count() -> None:
    masks = selection_masks(np.array([[[3, 0, 1]], [[2, 2, 2]]]), np.array([[2], [0]]), 4)
    assert masks.tolist() == [[[True, False, False, True]], [[False] * 4]]


def test_anchors_open_where_a_layer_is_unlike_the_last_one() -> None:
    similarity = np.array(
        [
            [1.0, 0.5, 0.9, 0.9, 0.1],
            [0.5, 1.0, 0.8, 0.4, 0.1],
            [0.9, 0.8, 1.0, 0.9, 0.9],
            [0.9, 0.4, 0.9, 1.0, 0.7],
            [0.1, 0.1, 0.9, 0.7, 1.0],
        ]
    )
    assert choose_anchors(similarity, 0.6) == (0, 1, 3)  # 2 is like 1, 3 is unlike 1, 4 is like 3
    assert choose_anchors(similarity, 0.0) == (0,)
    assert choose_anchors(similarity, 1.0) == (0, 1, 2, 3, 4)
    for theta in (0.3, 0.75, 0.95):
        anchors = choose_anchors(similarity, theta)
        for layer in range(5):
            last = max(anchor for anchor in anchors if anchor <= layer)
            assert layer in anchors or similarity[layer, last] >= theta
            before = [anchor for anchor in anchors if anchor < layer]
            assert layer not in anchors or not before or similarity[layer, before[-1]] < theta
    with pytest.raises(ValueError, match="theta must be from 0 to 1, got 1.5"):
        choose_anchors(similarity, 1.5)
    with pytest.raises(ValueError, match=r"similarity must be \[L,L\], got \[2, 5\]"):
        choose_anchors(similarity[:2], 0.5)
