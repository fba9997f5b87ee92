"""Attention block by block against the reference, and what it leaves unread."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.cached_attention import blocked, cached_attention
from specjax.kernels.cached_attention.reference import cached_attention_reference

NUM_ROWS, HEAD_DIM = 72, 16
SCALE = HEAD_DIM**-0.5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK_SLOTS", 64)


def arrays(*, capacity: int, dtype: Any = jnp.float32, batch_size: int = 3) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(capacity)
    query = rng.normal(size=(batch_size, NUM_ROWS, 4, HEAD_DIM))
    keys, values = rng.normal(size=(2, batch_size, 2, capacity, HEAD_DIM))
    return jnp.asarray(query, dtype), jnp.asarray(keys, dtype), jnp.asarray(values, dtype)


def both(query: jax.Array, keys: jax.Array, values: jax.Array, length: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    options = dict(step_mask=None, window=None, sinks=None, scale=SCALE) | options
    length = jnp.asarray(length, jnp.int32)
    found = (
        jax.jit(lambda *args, f=f: f(*args, **options))(query, keys, values, length)
        for f in (blocked.blocked_attention, cached_attention_reference)
    )
    got, expected = (np.asarray(x, np.float32) for x in found)
    return got, expected


@pytest.mark.parametrize("capacity", [128, 200, 321])
@pytest.mark.parametrize("length", [[0, 0, 0], [1, 40, 56], [55, 0, 17]])
def test_blocks_give_what_the_whole_gives(capacity: int, length: list[int]) -> None:
    got, expected = both(*arrays(capacity=capacity), length)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("window", [1, 30, 64, 100])
def test_with_a_window_and_sinks_and_a_mask_among_the_new_rows(window: int) -> None:
    mask = np.tril(np.random.default_rng(0).random((NUM_ROWS, NUM_ROWS)) < 0.5) | np.eye(NUM_ROWS, dtype=bool)
    sinks = jnp.asarray([0.5, -1.0, 3.0, 0.0])
    for options in (dict(window=window), dict(window=window, sinks=sinks), dict(step_mask=jnp.asarray(mask), sinks=sinks)):
        got, expected = both(*arrays(capacity=321), [0, 200, 130], **options)
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_bfloat16_differs_by_its_rounding_alone() -> None:
    got, expected = both(*arrays(capacity=256, dtype=jnp.bfloat16), [100, 0, 180])
    np.testing.assert_allclose(got, expected, atol=2e-2)


def test_blocks_beyond_the_length_and_before_the_window_are_not_read() -> None:
    query, keys, values = arrays(capacity=512)
    length = [64, 70, 100]  # the last row stands in slot 171: blocks from 192 on are nobody's
    marked = values.at[:, :, 192:].set(jnp.nan)  # a weight of zero times NaN would show
    got, _ = both(query, keys, marked, length)
    assert np.isfinite(got).all()
    got, _ = both(query, keys, values.at[:, :, :256].set(jnp.nan), [300, 310, 330], window=20)
    assert np.isfinite(got).all()
    got, expected = both(query, keys.at[:, :, 180:].set(jnp.nan), values, length)  # of a block that is read, but not these slots
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_its_derivative_is_the_references_in_both_modes() -> None:
    query, keys, values = arrays(capacity=200, batch_size=2)
    length, sinks = jnp.asarray([5, 100], jnp.int32), jnp.asarray([0.5, -1.0, 3.0, 0.0])
    mask = jnp.asarray(np.tril(np.ones((NUM_ROWS, NUM_ROWS), bool)))

    def loss(attention: Any) -> Any:
        options = dict(step_mask=mask, window=70, scale=SCALE)
        return lambda q, k, v, length, s: (attention(q, k, v, length, sinks=s, **options) ** 2).sum()  # the length is traced, as in a pass

    ours, theirs = (loss(attention) for attention in (cached_attention, cached_attention_reference))
    got, expected = (jax.jit(jax.grad(f, argnums=(0, 1, 2, 4)))(query, keys, values, length, sinks) for f in (ours, theirs))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    tangents = (jnp.ones_like(query), jnp.ones_like(keys))
    got, expected = (jax.jvp(lambda q, k, f=f: f(q, k, values, length, sinks), (query, keys), tangents)[1] for f in (ours, theirs))
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_it_runs_where_each_device_has_a_part_of_the_batch() -> None:
    query, keys, values = arrays(capacity=200, batch_size=2)
    length = jnp.asarray([5, 100], jnp.int32)
    parts = jax.sharding.PartitionSpec("batch")
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("batch",))
    options = dict(step_mask=None, window=None, sinks=None, scale=SCALE)
    attend = jax.shard_map(lambda *arrays: blocked.blocked_attention(*arrays, **options), mesh=mesh, in_specs=(parts,) * 4, out_specs=parts)
    expected = cached_attention_reference(query, keys, values, length, **options)
    np.testing.assert_allclose(jax.jit(attend)(query, keys, values, length), expected, atol=1e-5)


def test_no_array_has_the_size_of_all_scores_or_of_their_mask() -> None:
    query, keys, values = arrays(capacity=640, batch_size=2)
    length = jnp.asarray([5, 100], jnp.int32)
    options = dict(step_mask=None, window=30, sinks=None, scale=SCALE)
    text = jax.jit(lambda *arrays: blocked.blocked_attention(*arrays, **options)).lower(query, keys, values, length).as_text()
    assert f"{NUM_ROWS}x64x" in text
    assert f"{NUM_ROWS}x640x" not in text


def test_prefills_over_a_long_cache_take_it_and_texts_as_long_as_the_cache_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr("specjax.kernels.cached_attention.blocked_attention", lambda *args, **options: taken.append(args) or args[0])
    query, keys, values = arrays(capacity=256)
    length = jnp.zeros((3,), jnp.int32)
    cached_attention(query, keys, values, length, scale=SCALE)
    assert len(taken) == 1
    cached_attention(query[:, :64], keys, values, length, scale=SCALE)  # few rows
    cached_attention(query, keys[:, :, :100], values[:, :, :100], length, scale=SCALE)  # a short cache
    whole = jnp.zeros((3, 256, 4, HEAD_DIM))
    cached_attention(whole, keys, values, length, scale=SCALE)
    assert len(taken) == 1
