"""Sparse attention in whole generations: everything kept is dense decoding, and what is left out is what was asked for."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    GenerateConfig,
    KVCache,
    PromptLookup,
    Reuse,
    SparseAttention,
    SparsityConfig,
    Transformer,
    generate,
    speculative_generate,
)
from specjax.generate import _generate, prepare_call
from specjax.kernels.rope_and_write import write_slots
from specjax.models.block_summaries import BlockSummaries
from specjax.models.sparse_attention import dense_reads, prepare_cache
from tests.helpers import (
    FLOAT32_TOLERANCE,
    NUM_TOKENS,
    ReplayDrafter,
    greedy_text,
    random_model,
    random_prompts,
    recorded,
    tiny_config,
    tiny_target,
)

BLOCK, CAPACITY = 8, 96
FULL = pytest.mark.full


def sparse(reuse: Reuse | None = None, **changes: Any) -> SparsityConfig:
    """Blocks of 8; everything is kept of contexts up to 64 tokens."""
    attention = SparseAttention(**(dict(block_size=BLOCK, keep=0.0, dense_below=64, head_blocks=1, tail_blocks=1) | changes))
    return SparsityConfig(attention=attention, reuse=Reuse() if reuse is None else reuse)


def little(reuse: Reuse | None = None, **changes: Any) -> SparsityConfig:
    """Blocks of 8, of which five or six are kept of longer contexts."""
    return sparse(reuse, **(dict(dense_below=40) | changes))


@functools.partial(jax.jit, static_argnums=(0, 4))
def one_pass(model: Transformer, params: Any, tokens: jax.Array, cache: KVCache, sparsity: SparsityConfig | None) -> Any:
    """A pass as decoding makes it."""
    if sparsity is not None:
        cache = prepare_cache(cache, sparsity, model.config)
    return model.apply({"params": params}, tokens, cache, sparsity=sparsity)


@functools.cache
def filled_cache() -> KVCache:
    """48 to 80 tokens a row; behind them stand keys and values of other tokens."""
    model, params = tiny_target()
    tokens = np.random.default_rng(0).integers(0, 64, (3, CAPACITY))
    cache = one_pass(model, params, tokens, model.init_cache(batch_size=3, capacity=CAPACITY), None).cache
    return cache.with_length(jnp.array([48, 71, 80]))


def tokens_of(num_rows: int, batch_size: int = 3) -> np.ndarray:
    return np.random.default_rng(num_rows).integers(0, 64, (batch_size, num_rows)).astype(np.int32)


@pytest.mark.parametrize(
    ("num_drafts", "batch_size"), [(3, 3), *(pytest.param(*sizes, marks=FULL) for sizes in ((1, 1), (3, 1), (7, 1), (1, 3), (7, 3)))]
)
def test_a_pass_that_keeps_everything_is_the_dense_pass_at_every_length(num_drafts: int, batch_size: int) -> None:
    model, params = tiny_target()
    tokens, cache = tokens_of(num_drafts + 1, batch_size), filled_cache()
    cache = jax.tree.map(lambda x: x[:batch_size], cache)
    for length in range(1, 3 * BLOCK + 2) if num_drafts == 3 else (1, 7, 8, 17, 25, 56):
        there = cache.with_length(jnp.maximum(length - np.arange(batch_size), 0))
        got = one_pass(model, params, tokens, there, sparse())
        expected = one_pass(model, params, tokens, there, None)
        assert got.reads.blocks_read.tolist() == got.reads.blocks_there.tolist()
        # Of the cache's 12 blocks at most 9 are gathered: the same sums over fewer zeros, in another order.
        np.testing.assert_allclose(got.hidden, expected.hidden, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [
        dict(rows="each", score="bounds"),
        pytest.param(dict(rows="union"), marks=FULL),
        pytest.param(dict(rows="mean", score="oracle"), marks=FULL),
        pytest.param(dict(budget="layer"), marks=FULL),
    ],
)
def test_a_pass_that_keeps_everything_is_dense_whoever_chooses(changes: dict) -> None:
    model, params = tiny_target()
    cache = filled_cache().with_length(jnp.array([20, 44, 55]))
    got = one_pass(model, params, tokens_of(4), cache, sparse(**changes))
    expected = one_pass(model, params, tokens_of(4), cache, None)
    np.testing.assert_allclose(got.hidden, expected.hidden, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)


@FULL
def test_a_bfloat16_pass_that_keeps_everything_is_the_dense_pass() -> None:
    model, params = random_model(tiny_config(), seed=1, dtype=jnp.bfloat16)
    tokens = np.random.default_rng(0).integers(0, 64, (3, CAPACITY))
    cache = one_pass(model, params, tokens, model.init_cache(batch_size=3, capacity=CAPACITY), None).cache
    cache = cache.with_length(jnp.array([20, 44, 55]))
    got, expected = (one_pass(model, params, tokens_of(4), cache, x).hidden.astype(jnp.float32) for x in (sparse(), None))
    # 8 bits of mantissa, rounded anew in each of two layers; outputs are of order 1.
    np.testing.assert_allclose(got, expected, atol=0.1)
    assert one_pass(model, params, tokens_of(4), cache, sparse()).cache.summaries.layers[0][0].dtype == jnp.bfloat16


@pytest.mark.parametrize("score", ["mean", pytest.param("bounds", marks=FULL)])
@pytest.mark.parametrize("value", [np.nan, 1e30])
def test_a_sparse_pass_never_sees_what_stands_behind_the_committed_tokens(score: str, value: float) -> None:
    model, params = tiny_target()
    cache = filled_cache()
    behind = (np.arange(CAPACITY) >= np.asarray(cache.length)[:, None])[:, None, :, None]
    poisoned = dataclasses.replace(cache, keys=tuple(jnp.where(behind, value, keys) for keys in cache.keys))
    expected = one_pass(model, params, tokens_of(4), cache, little(score=score))
    assert expected.reads.keep_ratio < 0.8
    got = one_pass(model, params, tokens_of(4), poisoned, little(score=score))
    np.testing.assert_array_equal(got.hidden, expected.hidden)


def test_a_later_row_sees_the_block_that_an_earlier_one_began_and_not_the_other_way_round() -> None:
    model, params = tiny_target()
    cache = filled_cache().with_length(jnp.array([62, 63, 61]))  # a block ends at 64
    tokens = tokens_of(6)
    hidden = one_pass(model, params, tokens, cache, little()).hidden
    for changed in range(6):
        other = tokens.copy()
        other[:, changed] = (other[:, changed] + 1) % 64
        differs = (one_pass(model, params, other, cache, little()).hidden != hidden).any(axis=-1)
        # The pending token chooses for all rows. No row depends on one behind it.
        assert not differs[:, :changed].any()
        assert differs[:, changed:].all()


def test_only_anchors_score_and_the_others_read_what_they_chose() -> None:
    model, params = tiny_target()
    cache, tokens = filled_cache(), tokens_of(4)
    anchored = one_pass(model, params, tokens, cache, little(Reuse(anchors=(0,))))
    alone = one_pass(model, params, tokens, cache, little())
    assert [len(kept) for kept in anchored.cache.summaries.layers] == [1, 0]
    assert (anchored.reads.blocks_scored > 0).all(axis=0).tolist() == [True, False]
    assert anchored.reads.blocks_read.tolist() == alone.reads.blocks_read.tolist()
    np.testing.assert_array_equal(anchored.cache.keys[1], alone.cache.keys[1])  # the first layer chose as before
    assert (anchored.hidden != alone.hidden).any()  # the second read what the first had chosen
    short = cache.with_length(jnp.array([5, 31, 36]))  # read whole
    expected = one_pass(model, params, tokens, short, None)
    everything = one_pass(model, params, tokens, short, little(Reuse(anchors=(0,))))
    np.testing.assert_allclose(everything.hidden, expected.hidden, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)


def test_layers_with_a_window_stay_dense() -> None:
    _, params = tiny_target()
    model = Transformer(tiny_config(layer_windows=(16, None)), dtype=jnp.float32, param_dtype=jnp.float32)
    cache = filled_cache()
    got = one_pass(model, params, tokens_of(4), cache, little())
    dense = one_pass(model, params, tokens_of(4), cache, None)
    assert got.reads.keep_ratio_per_layer[0] == 1
    # Behind 48, 71 and 80 tokens 4 rows see from 33, 56 and 65 on, in blocks 4 to 6, 7 to 9 and 8 to 10.
    assert got.reads.blocks_there.tolist() == [[3.0, 7.0], [3.0, 10.0], [3.0, 11.0]]
    assert got.reads.blocks_read[:, 0].tolist() == [3.0, 3.0, 3.0]
    attention = little().attention
    assert dense_reads(cache, attention, 4, model.config).blocks_read.tolist() == got.reads.blocks_there.tolist()
    assert got.reads.keep_ratio_per_layer[1] < 0.8
    assert [len(kept) for kept in got.cache.summaries.layers] == [0, 1]
    np.testing.assert_array_equal(got.cache.keys[1], dense.cache.keys[1])
    assert (got.hidden != dense.hidden).any()


@pytest.mark.parametrize("kind", ["mean", "bounds"])
def test_after_any_writes_and_rollbacks_the_summaries_of_full_blocks_are_those_of_their_keys(kind: str) -> None:
    rng = np.random.default_rng(0)
    keys = jnp.asarray(rng.normal(size=(2, 2, 48, 4)), jnp.float32)
    cache = KVCache(keys=(keys,), values=(keys,), length=jnp.zeros((2,), jnp.int32))
    cache = dataclasses.replace(cache, summaries=BlockSummaries.of(cache.keys, kind=kind, block_size=BLOCK, layers=(0,)))

    @jax.jit
    def write(cache: KVCache, new: jax.Array) -> KVCache:
        keys = write_slots(cache.keys[0], new, cache.length)
        assert cache.summaries is not None
        kept = cache.summaries.written(0, keys, cache.length, new.shape[2])
        return dataclasses.replace(cache, keys=(keys,), summaries=dataclasses.replace(cache.summaries, layers=(kept,)))

    for _ in range(16):
        # 11 rows cross up to two ends of a block; some are taken back.
        cache = write(cache, jnp.asarray(rng.normal(size=(2, 2, 11, 4)), jnp.float32))
        cache = cache.with_length(jnp.minimum(cache.length + rng.integers(0, 6, 2), 48 - 11))
        fresh = BlockSummaries.of(cache.keys, kind=kind, block_size=BLOCK, layers=(0,))
        for row, length in enumerate(cache.length.tolist()):
            for got, expected in zip(cache.summaries.layers[0], fresh.layers[0], strict=True):
                full = length // BLOCK
                # Means may be summed in another order.
                np.testing.assert_allclose(got[row, :, :full], expected[row, :, :full], rtol=1e-6, atol=1e-6)
    assert (cache.length > 3 * BLOCK).all()


def run(sparsity: SparsityConfig, drafter: Any = None, prompts: Any = None, num_drafts: int = 3, **arguments: Any) -> Any:
    target, params = tiny_target()
    prompts = random_prompts() if prompts is None else prompts
    config = GenerateConfig(
        max_new_tokens=NUM_TOKENS, num_speculative_tokens=num_drafts, cache_capacity=CAPACITY, prefill_chunk_size=16, sparsity=sparsity
    )
    drafter_params = None
    if isinstance(drafter, ReplayDrafter):
        drafter_params = recorded(greedy_text(prompts), [len(prompt) for prompt in prompts])
    return speculative_generate(target, params, drafter, drafter_params, prompts, config=config, **arguments)


def test_greedy_text_with_everything_kept_is_that_of_dense_decoding_and_the_summaries_survive_rejections() -> None:
    prompts = random_prompts()  # at most 33 + 24 + 4 tokens: within what is read whole
    output = run(sparse(), ReplayDrafter(random_flips=True))
    np.testing.assert_array_equal(output.tokens, greedy_text(prompts))
    assert (output.statistics.acceptance_histogram > 0).all()
    reads = output.statistics.attention_reads
    assert reads.keep_ratio == 1
    assert reads.num_passes.sum() == output.statistics.num_steps
    cache = output.continuation.target_cache
    fresh = BlockSummaries.of(cache.keys, kind="mean", block_size=BLOCK, layers=(0, 1))
    for layer in range(2):
        for row, length in enumerate(cache.length.tolist()):
            got, expected = (summaries.layers[layer][0][row, :, : length // BLOCK] for summaries in (cache.summaries, fresh))
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)  # summed in another order


def test_the_measured_keep_ratio_is_the_budget_that_was_asked_for() -> None:
    prompts = random_prompts((60, 50))
    output = run(little(), None, prompts)
    settings = little().attention
    assert settings is not None
    read = there = 0
    for prompt in prompts:
        for total in range(len(prompt) + 1, len(prompt) + NUM_TOKENS):  # context and pending token, one pass each
            always = 2 + -(-total // BLOCK) - (total - 1) // BLOCK
            read += max(settings.budget_blocks(total), always)
            there += -(-total // BLOCK)
    reads = output.statistics.attention_reads
    assert float(reads.keep_ratio) == pytest.approx(read / there, rel=1e-6)
    assert reads.keep_ratio_per_layer.tolist() == pytest.approx([read / there] * 2, rel=1e-6)
    block_bytes = 2 * BLOCK * 2 * 8 * 4  # keys and values, slots, heads, their size, float32
    num_passes = int(reads.num_passes.sum())
    assert num_passes == 2 * (NUM_TOKENS - 1)
    assert float(reads.dense_kv_bytes_per_pass) == pytest.approx(2 * there * block_bytes / num_passes, rel=1e-6)
    full = sum((len(prompt) + i) // BLOCK for prompt in prompts for i in range(NUM_TOKENS - 1))  # blocks whose mean keys were read
    assert float(reads.kv_bytes_per_pass) == pytest.approx(2 * (read + full / (2 * BLOCK)) * block_bytes / num_passes, rel=1e-6)
    assert output.statistics.summary()["sparse_attention"]["keep_ratio"] == pytest.approx(read / there, rel=1e-6)
    total = output.statistics + output.statistics
    assert total.attention_reads.keep_ratio == reads.keep_ratio
    with pytest.raises(ValueError, match="Statistics of sparse and of dense attention do not add"):
        total + dataclasses.replace(output.statistics, attention_reads=None)


@pytest.mark.full
def test_a_dense_call_goes_on_sparsely_and_a_sparse_one_densely() -> None:
    prompts, text = random_prompts(), greedy_text(random_prompts())
    target, params = tiny_target()
    nothing: list[list[int]] = [[] for _ in prompts]
    # 75 slots: not whole blocks, so that the cache must grow.
    first = generate(target, params, prompts, config=GenerateConfig(max_new_tokens=NUM_TOKENS, cache_capacity=75), max_new_tokens=8)
    assert first.continuation.target_cache.summaries is None
    second = run(sparse(), None, nothing, max_new_tokens=8, continue_from=first.continuation)
    assert second.continuation.target_cache.capacity % BLOCK == 0
    third = run(SparsityConfig(), None, nothing, max_new_tokens=8, continue_from=second.continuation)
    assert third.continuation.target_cache.summaries is None
    np.testing.assert_array_equal(np.concatenate([x.tokens[:, :8] for x in (first, second, third)], axis=1), text)


@FULL
@pytest.mark.parametrize("changes", [dict(), dict(score="bounds", rows="each")])
def test_sparse_calls_that_go_on_from_one_another_equal_one_long_call(changes: dict) -> None:
    prompts = random_prompts((60, 50))
    nothing: list[list[int]] = [[] for _ in prompts]
    long = run(little(**changes), None, prompts)
    first = run(little(**changes), None, prompts, max_new_tokens=8)
    second = run(little(**changes), None, nothing, max_new_tokens=16, continue_from=first.continuation)
    # The pending token goes through the prefill of the second call, which is dense: 8 tokens in, no sparse pass saw it.
    np.testing.assert_array_equal(first.tokens[:, :8], long.tokens[:, :8])
    assert second.lengths.tolist() == [16, 16]
    assert second.statistics.attention_reads.keep_ratio < 0.8


def lowered(config: GenerateConfig, batch_size: int = 2) -> Any:
    model, _ = tiny_target()
    params = jax.eval_shape(model.init_params, jax.random.key(0))
    request, static = prepare_call(model, PromptLookup(), None, [[1] * 40] * batch_size, config=config)
    return _generate.lower(model, PromptLookup(), static, params, None, request, None)


def test_without_sparsity_the_program_is_the_dense_one() -> None:
    config = GenerateConfig(max_new_tokens=32, num_speculative_tokens=3, cache_capacity=104)
    text = lowered(config).as_text()
    assert text == lowered(dataclasses.replace(config, sparsity=SparsityConfig())).as_text()
    assert "x13x" not in text, "the dense program knows of the 13 blocks"
    assert "x13x" in lowered(dataclasses.replace(config, sparsity=little())).as_text()


def test_settings_that_do_not_fit_the_target_are_refused_before_compiling() -> None:
    with pytest.raises(ValueError, match=r"must begin with the first sparse layer, 0, got \(1,\)"):
        run(little(Reuse(anchors=(1,))))
    model, params = tiny_target()
    with pytest.raises(ValueError, match="sparse attention needs a cache of whole blocks of 8, got 20 slots"):
        model.apply({"params": params}, tokens_of(2), model.init_cache(batch_size=3, capacity=20), sparsity=little(score="window"))
    with pytest.raises(ValueError, match=r"the cache has no 'mean' summaries of blocks of 8 for layers \(0, 1\)"):
        model.apply({"params": params}, tokens_of(2), model.init_cache(batch_size=3, capacity=24), sparsity=little())
