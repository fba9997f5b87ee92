"""Agreement with dense passes along a text: exact where nothing is left out, and elsewhere what single passes say."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import SparseAttention, SparseFFN, SparsityConfig
from specjax.models.sparse_attention import prepare_cache
from specjax.sparsity.agreement import measure_agreement
from tests.helpers import FLOAT32_TOLERANCE, tiny_target

NUM_CONTEXT, NUM_ROWS = 40, 3
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 64))
ATTENTION = SparseAttention(block_size=8, keep=0.0, dense_below=16, head_blocks=1, tail_blocks=0)
SPARSE = SparsityConfig(attention=ATTENTION, ffn=SparseFFN(select="threshold", per="token", tau=0.1))


def measured(sparsity: SparsityConfig) -> Any:
    return measure_agreement(*tiny_target(), TOKENS, sparsity=sparsity, num_context=NUM_CONTEXT, num_rows=NUM_ROWS)


@pytest.mark.full
def test_agreement_is_that_of_passes_made_one_by_one() -> None:
    model, params = tiny_target()
    found = measured(SPARSE)
    assert found.num_tokens == 2 * 24

    @jax.jit
    def dense(tokens):
        output = model.apply({"params": params}, tokens, model.init_cache(batch_size=2, capacity=64))
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
    got, expected = np.concatenate(rows, axis=1), np.asarray(expected)[:, NUM_CONTEXT:]
    log_p, log_q = (np.asarray(jax.nn.log_softmax(x.astype(np.float64), axis=-1)) for x in (expected, got))
    assert found.num_equal == (got.argmax(-1) == expected.argmax(-1)).sum()
    assert 0 < found.num_equal < found.num_tokens
    np.testing.assert_allclose(found.mean_kl, (np.exp(log_p) * (log_p - log_q)).sum(-1).mean(), rtol=1e-4)
    summary = found.summary()
    assert summary["sparse_attention"]["keep_ratio"] < 0.8
    assert 0 < summary["sparse_ffn"]["keep_ratio"] < 1
    assert summary["step_work"]["total"]["flops"] < summary["step_work"]["total"]["dense_flops"]
    twice = found + found
    assert (twice.num_tokens, twice.mean_kl) == (2 * found.num_tokens, found.mean_kl)
    assert twice.summary()["sparse_ffn"]["keep_ratio"] == pytest.approx(summary["sparse_ffn"]["keep_ratio"], rel=1e-5)


def test_nothing_left_out_agrees_and_refreshes_bring_agreement_nearer() -> None:
    everything = measured(SparsityConfig(attention=dataclasses.replace(ATTENTION, dense_below=512)))
    assert everything.token_agreement == 1
    assert abs(everything.mean_kl) < FLOAT32_TOLERANCE
    every_step = measured(SparsityConfig(attention=ATTENTION, refresh_every=1))
    assert (every_step.token_agreement, every_step.mean_kl) == (1.0, 0.0)
    some, none = (measured(SparsityConfig(attention=ATTENTION, refresh_every=every)) for every in (2, 0))
    assert some.num_tokens == none.num_tokens
    assert some.mean_kl < none.mean_kl
    assert none.attention_reads.keep_ratio < some.attention_reads.keep_ratio < 1


def test_texts_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least num_context \+ 3 tokens, got shape \[2, 64\], num_context = 62 and num_rows = 3"):
        measure_agreement(*tiny_target(), TOKENS, sparsity=SPARSE, num_context=62, num_rows=3)
