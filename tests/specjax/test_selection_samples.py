"""Sampled choices of blocks: those of single passes, and overlaps counted by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import SparseAttention, SparsityConfig
from specjax.models.sparse_attention import prepare_cache
from specjax.sparsity.selection_samples import SelectionSamples, sample_selections
from tests.helpers import tiny_target

NUM_CONTEXT, NUM_ROWS = 60, 3
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 84))
ATTENTION = SparseAttention(block_size=4, keep=0.0, dense_below=28, head_blocks=1, tail_blocks=1)


def test_samples_are_what_the_rows_of_a_pass_choose_and_the_first_of_them_chooses_alone() -> None:
    model, params = tiny_target()
    samples = sample_selections(model, params, TOKENS, attention=ATTENTION, num_context=NUM_CONTEXT, num_rows=NUM_ROWS, num_samples=4)
    assert samples.layers == (0, 1)
    assert samples.chosen.shape == (2, 4 * 2 * 2, NUM_ROWS, 21)
    # Seven blocks of a budget of 28 tokens, of which three (or four, where rows stand in two) are always kept.
    assert set(samples.chosen.sum(-1).ravel().tolist()) <= {3, 4}
    assert not samples.chosen[..., 0].any()
    assert not samples.chosen[:, :4, :, 14:].any()  # the first step stands behind 15 full blocks, of which one is the tail
    sparsity = SparsityConfig(attention=dataclasses.replace(ATTENTION, rows="first"))
    tokens = jnp.asarray(TOKENS, jnp.int32)

    @jax.jit
    def first_layer():
        cache = model.apply({"params": params}, tokens, model.init_cache(batch_size=2, capacity=84)).cache
        cache = prepare_cache(cache.with_length(jnp.full((2,), NUM_CONTEXT)), sparsity, model.config)
        options = dict(mutable=["intermediates"], capture_intermediates=lambda module, _: module.name == "attention")
        rows = tokens[:, NUM_CONTEXT : NUM_CONTEXT + NUM_ROWS]
        captured = model.apply({"params": params}, rows, cache, sparsity=sparsity, **options)[1]["intermediates"]
        return captured["layer_0"]["attention"]["__call__"][0][1].selection

    selection = first_layer()
    for row in range(2):
        for head in range(2):
            ids = selection.block_ids[row, head, : selection.num_blocks[row, head]].tolist()
            assert np.flatnonzero(samples.chosen[0, row * 2 + head, 0]).tolist() == [block for block in ids if 1 <= block < 14]


def test_overlaps_are_counted_by_hand() -> None:
    chosen = np.zeros((2, 2, 3, 5), bool)
    chosen[0, 0, 0, [1, 2]] = chosen[0, 0, 1, [1, 2]] = chosen[0, 0, 2, [2, 3]] = True
    chosen[0, 1, 0, [1, 4]] = chosen[0, 1, 1, [2, 3]] = chosen[0, 1, 2, [1, 4]] = True
    chosen[1] = chosen[0]
    chosen[1, 1, 0] = chosen[0, 0, 0]
    samples = SelectionSamples(chosen=chosen, layers=(0, 1))
    np.testing.assert_allclose(samples.row_overlap()[0], [0.5, 0.75])
    np.testing.assert_allclose(samples.layer_similarity(), [[1, (1 + 1 / 3) / 2], [(1 + 1 / 3) / 2, 1]])
    assert (samples + samples).chosen.shape == (2, 4, 3, 5)


def test_contexts_without_a_choice_are_refused() -> None:
    def sample(num_context: int = NUM_CONTEXT, num_rows: int = NUM_ROWS, **changes: object) -> SelectionSamples:
        attention = dataclasses.replace(ATTENTION, **changes)
        return sample_selections(*tiny_target(), TOKENS, attention=attention, num_context=num_context, num_rows=num_rows)

    with pytest.raises(ValueError, match="a context of 16 tokens leaves no query a choice: of its 5 blocks of 4 tokens 5 are kept, 4"):
        sample(16)
    with pytest.raises(ValueError, match="leaves no query a choice: of its 16 blocks of 4 tokens 4 are kept, 4 of them always"):
        sample(dense_below=16)
    with pytest.raises(ValueError, match="SparseAttention.score = 'window' chooses the same blocks for every query"):
        sample(score="window")
    with pytest.raises(ValueError, match="needs steps of at least 2 rows .* got num_rows = 1"):
        sample(num_rows=1)
