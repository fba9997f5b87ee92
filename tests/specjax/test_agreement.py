"""Agreement with dense passes along texts: exact where nothing is left out, elsewhere what single passes and decoding itself say."""

from __future__ import annotations

import dataclasses
from functools import reduce
from operator import add
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import GenerateConfig, SparseAttention, SparseFFN, SparsityConfig, generate
from specjax.models.sparse_attention import prepare_cache
from specjax.sparsity import agreement
from specjax.sparsity.agreement import Agreement, measure_agreement
from tests.helpers import numpy_log_softmax, tiny_target

NUM_CONTEXT, NUM_ROWS = 40, 3
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 65))
# Of both texts the tokens that steps predict.
NEXT = TOKENS[:, NUM_CONTEXT + 1 :]
ATTENTION = SparseAttention(block_size=8, keep=0.0, dense_below=16, head_blocks=1, tail_blocks=0)
SPARSE = SparsityConfig(attention=ATTENTION, ffn=SparseFFN(select="threshold", per="token", tau=0.1))
# float32 means of log-probabilities of order 1 to 10, a few dozen of them.
TOLERANCE = 1e-4


def measured(sparsity: SparsityConfig, tokens: Any = TOKENS, num_context: Any = NUM_CONTEXT, **options: Any) -> Agreement:
    return measure_agreement(*tiny_target(), tokens, sparsity=sparsity, num_context=num_context, **{"num_rows": NUM_ROWS, **options})


def mean_nll(log_probs: np.ndarray, following: np.ndarray) -> float:
    return -np.take_along_axis(log_probs, following[..., None], axis=-1).mean()


@pytest.mark.full
def test_a_context_may_be_in_a_cache_already() -> None:
    model, params = tiny_target()
    cache = model.apply({"params": params}, jnp.asarray(TOKENS, jnp.int32), model.init_cache(batch_size=2, capacity=72)).cache
    for sparsity in (SPARSE, SparsityConfig(ffn=SPARSE.ffn)):
        found, expected = measured(sparsity, cache=cache).summary(), measured(sparsity).summary()
        assert found["token_agreement"] == expected["token_agreement"]
        assert found["mean_kl"] == pytest.approx(expected["mean_kl"], rel=TOLERANCE)
    with pytest.raises(ValueError, match="needs a cache of 68 slots for these texts, got 64"):
        measured(SPARSE, cache=model.init_cache(batch_size=2, capacity=64))


@pytest.mark.full
def test_agreement_is_that_of_passes_made_one_by_one() -> None:
    model, params = tiny_target()
    found = measured(SPARSE)
    assert found.num_tokens == NEXT.size == 2 * 24

    @jax.jit
    def dense(tokens):
        output = model.apply({"params": params}, tokens, model.init_cache(batch_size=2, capacity=72))
        return output.cache, model.apply({"params": params}, output.hidden, method="logits")

    @jax.jit
    def step(tokens, cache):
        output = model.apply({"params": params}, tokens, cache, sparsity=SPARSE)
        return output.cache, model.apply({"params": params}, output.hidden, method="logits")

    tokens = jnp.asarray(TOKENS, jnp.int32)
    cache, expected = dense(tokens)
    cache = prepare_cache(cache.with_length(jnp.full((2,), NUM_CONTEXT)), SPARSE, model.config)
    rows = []
    for start in range(NUM_CONTEXT, 64, NUM_ROWS):
        cache, logits = step(tokens[:, start : start + NUM_ROWS], cache)
        rows.append(logits)
    got, expected = np.concatenate(rows, axis=1), np.asarray(expected)[:, NUM_CONTEXT:-1]
    log_p, log_q = numpy_log_softmax(expected), numpy_log_softmax(got)
    assert found.num_equal == (got.argmax(-1) == expected.argmax(-1)).sum()
    assert 0 < found.num_equal < found.num_tokens
    np.testing.assert_allclose(found.mean_kl, (np.exp(log_p) * (log_p - log_q)).sum(-1).mean(), rtol=TOLERANCE)
    np.testing.assert_allclose([found.dense_nll, found.sparse_nll], [mean_nll(log_p, NEXT), mean_nll(log_q, NEXT)], rtol=TOLERANCE)
    summary = found.summary()
    assert summary["sparse_attention"]["keep_ratio"] < 0.8
    assert 0 < summary["sparse_ffn"]["keep_ratio"] < 1
    assert summary["step_work"]["total"]["flops"] < summary["step_work"]["total"]["dense_flops"]
    twice = found + found
    assert (twice.num_tokens, twice.mean_kl) == (2 * found.num_tokens, found.mean_kl)
    assert twice.summary()["sparse_ffn"]["keep_ratio"] == pytest.approx(summary["sparse_ffn"]["keep_ratio"], rel=1e-5)
    with pytest.raises(ValueError, match="of 3 and of 4 rows do not add"):
        found + dataclasses.replace(found, num_rows=4)


def test_texts_of_any_lengths_run_one_program_and_add_up_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, contexts = (65, 50, 44, 12), (40, 47, 42, 1)  # of the last three the last step is short
    texts = np.random.default_rng(1).integers(0, 64, (4, 65))
    compare = jax.jit(chex.assert_max_traces(agreement._compare.__wrapped__, n=2), static_argnums=(0, 1, 2))
    monkeypatch.setattr(agreement, "_compare", compare)
    nothing = np.full((1, 65), 7)  # of one token behind its context nothing is predicted, and nothing counts
    together = measured(SPARSE, np.concatenate([texts, nothing]), [*contexts, 20], lengths=[*lengths, 21])
    alone = []
    for text, context, length in zip(texts, contexts, lengths, strict=True):
        padded = np.where(np.arange(65) < length, text, 7)  # what stands behind a text is not read
        alone.append(measured(SPARSE, padded[None], context, lengths=[length]))
    assert [one.num_tokens for one in alone] == [24, 2, 1, 10]
    added, whole = reduce(add, alone), together
    assert (added.num_tokens, added.num_equal) == (whole.num_tokens, whole.num_equal)
    for name in ("mean_kl", "dense_nll", "sparse_nll"):
        np.testing.assert_allclose(getattr(added, name), getattr(whole, name), rtol=TOLERANCE)
    chex.assert_trees_all_close(added.attention_reads, whole.attention_reads, rtol=TOLERANCE)
    assert whole.pass_counts.num_passes == added.pass_counts.num_passes == 8 + 1 + 1 + 4
    np.testing.assert_allclose(added.pass_counts.channels_read, whole.pass_counts.channels_read, rtol=TOLERANCE)


def test_along_its_own_text_the_sparse_target_says_what_it_said_when_decoding() -> None:
    model, params = tiny_target()
    config = GenerateConfig(max_new_tokens=16, sparsity=SPARSE, return_log_probs=True)
    prompt = TOKENS[0, :60].tolist()
    output = generate(model, params, [prompt], config=config)
    found = measured(SPARSE, [[*prompt, *output.tokens[0].tolist()]], 60, num_rows=1)
    assert found.num_tokens == 15  # the first token comes out of the prefill
    np.testing.assert_allclose(found.sparse_nll, -output.log_probs[0, 1:].mean(), rtol=TOLERANCE)
    assert found.token_agreement < 1
    reads, counts = output.statistics.attention_reads, output.statistics.pass_counts
    np.testing.assert_allclose(found.attention_reads.keep_ratio, reads.keep_ratio, rtol=TOLERANCE)
    np.testing.assert_allclose(found.pass_counts.channels_read, counts.total().channels_read, rtol=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize(("num_context", "num_rows"), [(40, 3), (1, 4)])
def test_with_everything_kept_both_are_the_dense_target(num_context: int, num_rows: int) -> None:
    model, params = tiny_target()
    everything = SparsityConfig(attention=dataclasses.replace(ATTENTION, dense_below=512))
    found = measured(everything, num_context=num_context, num_rows=num_rows)
    output = model.apply({"params": params}, jnp.asarray(TOKENS), model.init_cache(batch_size=2, capacity=72))
    log_probs = numpy_log_softmax(np.asarray(model.apply({"params": params}, output.hidden, method="logits")))
    expected = mean_nll(log_probs[:, num_context:-1], TOKENS[:, num_context + 1 :])
    assert found.num_tokens == found.num_equal == 2 * (64 - num_context)
    np.testing.assert_allclose([found.dense_nll, found.sparse_nll], expected, rtol=TOLERANCE)
    np.testing.assert_allclose(found.mean_kl, 0, atol=TOLERANCE)


def test_nothing_left_out_agrees_and_refreshes_bring_agreement_nearer() -> None:
    dense = measured(SparsityConfig())
    every_step = measured(SparsityConfig(attention=ATTENTION, refresh_every=1))
    for found in (dense, every_step):
        assert (found.token_agreement, found.mean_kl, found.sparse_nll) == (1.0, 0.0, found.dense_nll)
    assert dense.summary().keys() == {"num_tokens", "token_agreement", "mean_kl", "dense_nll", "sparse_nll"}
    some, none = (measured(SparsityConfig(attention=ATTENTION, refresh_every=every)) for every in (3, 0))
    assert some.num_tokens == none.num_tokens
    assert 0 < some.mean_kl < none.mean_kl
    np.testing.assert_allclose([some.dense_nll, every_step.dense_nll], none.dense_nll, rtol=TOLERANCE)
    # Of eight steps two refresh, and read 9 rows' blocks; the last two are sparse.
    assert none.attention_reads.keep_ratio < some.attention_reads.keep_ratio < every_step.attention_reads.keep_ratio == 1
    assert (some.attention_reads.num_passes == 16).all()


def test_texts_with_nothing_to_predict_are_refused() -> None:
    with pytest.raises(ValueError, match=r"within their 65 columns, got num_context = \[64, 64\] and lengths = \[65, 65\]"):
        measured(SPARSE, num_context=64)
    with pytest.raises(ValueError, match=r"at least 1 token, .* got num_context = \[0, 3\]"):
        measured(SPARSE, num_context=[0, 3])
    with pytest.raises(ValueError, match=r"lengths = \[65, 66\]"):
        measured(SPARSE, lengths=[65, 66])
    with pytest.raises(ValueError, match=r"needs texts \[B,N\] and num_rows >= 1, got shape \[65\] and num_rows = 3"):
        measured(SPARSE, TOKENS[0])
