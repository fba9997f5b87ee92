"""The dense pass over what sparse passes took in."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.catch_up import catch_up
from tests.helpers import FLOAT32_TOLERANCE, tiny_target

CAPACITY, NUM_ROWS = 24, 6
# Tokens in the cache, of which so many are dense: all behind, none behind, at the end of the capacity, and at the very start.
LENGTH = np.array([14, 9, 24, 3])
DENSE_LENGTH = np.array([9, 9, 20, 0])


def test_catching_up_makes_the_cache_and_the_rows_those_of_a_dense_prefill() -> None:
    model, params = tiny_target()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, CAPACITY)), jnp.int32)
    empty = model.init_cache(batch_size=4, capacity=CAPACITY)
    clean = jax.jit(lambda: model.apply({"params": params}, tokens, empty, feature_layers=(1,)))()
    slots = jnp.arange(CAPACITY)[None, None, :, None]
    spoiled = (slots >= DENSE_LENGTH[:, None, None, None]) & (slots < LENGTH[:, None, None, None])

    def spoil(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(jnp.where(spoiled, x + 1, x) for x in arrays)

    cache = clean.cache.with_length(jnp.asarray(LENGTH))
    cache = dataclasses.replace(cache, keys=spoil(cache.keys), values=spoil(cache.values))

    @jax.jit
    def run(cache, dense_length):
        dense = catch_up(model, params, tokens, cache, dense_length, num_rows=NUM_ROWS, feature_layers=(1,))
        return dense, dense.at(dense.hidden, dense_length, 3), dense.at(dense.features, dense_length, 3)

    dense, hidden, features = run(cache, jnp.asarray(DENSE_LENGTH))
    np.testing.assert_array_equal(dense.cache.length, LENGTH)
    for row, (first, length) in enumerate(zip(DENSE_LENGTH, LENGTH, strict=True)):
        for got, expected in zip(dense.cache.keys + dense.cache.values, clean.cache.keys + clean.cache.values, strict=True):
            np.testing.assert_allclose(got[row, :, :length], expected[row, :, :length], rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)
        for got, expected in ((hidden, clean.hidden), (features, clean.features)):
            count = min(3, CAPACITY - first)
            np.testing.assert_allclose(got[row, :count], expected[row, first : first + count], rtol=1e-4, atol=FLOAT32_TOLERANCE)


def test_more_rows_than_the_cache_has_slots_are_refused() -> None:
    model, params = tiny_target()
    cache, zeros = model.init_cache(batch_size=1, capacity=4), jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match="catch_up needs 1 to 4 rows, as many as the cache has slots, got 5"):
        catch_up(model, params, jnp.zeros((1, 4), jnp.int32), cache, zeros, num_rows=5)
