"""Attention over the cache against jax.nn.dot_product_attention and NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.cached_attention import cached_attention as eager_cached_attention
from specjax.kernels.cached_attention.reference import visible_slots

# float32: sums of H = 16 and S = 40 terms of order 1 in another order. bfloat16: 8 bits of mantissa, sums in float32.
TOLERANCES = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}
LENGTHS = np.array([0, 1, 17, 35], np.int32)
CAPACITY = 40
HEAD_DIM = 16
SCALE = HEAD_DIM**-0.5

cached_attention = jax.jit(eager_cached_attention, static_argnames=("scale", "window", "implementation"))
dot_product_attention = jax.jit(jax.nn.dot_product_attention, static_argnames=("scale", "implementation"))


def arrays(*, num_rows: int, num_heads: int, num_kv_heads: int, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(num_rows * 100 + num_heads)
    query = rng.normal(size=(4, num_rows, num_heads, HEAD_DIM))
    keys, values = rng.normal(size=(2, 4, num_kv_heads, CAPACITY, HEAD_DIM))
    return jnp.asarray(query, dtype), jnp.asarray(keys, dtype), jnp.asarray(values, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_cached_attention_equals_dot_product_attention(num_rows: int, num_heads: int, num_kv_heads: int, dtype: Any) -> None:
    query, keys, values = arrays(num_rows=num_rows, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype)
    mask = np.arange(CAPACITY) <= (LENGTHS[:, None] + np.arange(num_rows))[..., None]
    with jax.default_matmul_precision("highest"):  # a GPU would round float32 to TF32
        expected = dot_product_attention(
            query, keys.swapaxes(1, 2), values.swapaxes(1, 2), mask=jnp.asarray(mask)[:, None], scale=SCALE, implementation="xla"
        )
    got = cached_attention(query, keys, values, jnp.asarray(LENGTHS), scale=SCALE)
    assert got.dtype == dtype
    assert got.shape == query.shape
    np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), atol=TOLERANCES[dtype])


def numpy_attention(query: jax.Array, keys: jax.Array, values: jax.Array, seen: np.ndarray) -> np.ndarray:
    """One query `[H]` over the slots `seen` of one head's `[S,H]`."""
    scores = np.asarray(keys)[seen] @ np.asarray(query) * SCALE
    weights = np.exp(scores - scores.max())
    return weights @ np.asarray(values)[seen] / weights.sum()


# Rows 1 and 2 of the tree are siblings under row 0; row 3 is a child of row 2.
TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)


@pytest.mark.parametrize("step_mask", [None, TREE], ids=["causal", "tree"])
def test_cached_attention_equals_numpy_row_by_row(step_mask: np.ndarray | None) -> None:
    query, keys, values = arrays(num_rows=4, num_heads=4, num_kv_heads=2)
    got = cached_attention(query, keys, values, jnp.asarray(LENGTHS), scale=SCALE, step_mask=step_mask)
    mask = np.tril(np.ones((4, 4), bool)) if step_mask is None else step_mask
    for batch_row, length in enumerate(LENGTHS):
        for row in range(4):
            seen = np.array([*range(length), *(length + np.flatnonzero(mask[row]))])
            for head in range(4):
                expected = numpy_attention(query[batch_row, row, head], keys[batch_row, head // 2], values[batch_row, head // 2], seen)
                np.testing.assert_allclose(got[batch_row, row, head], expected, atol=TOLERANCES[jnp.float32])


def test_a_causal_step_mask_equals_none() -> None:
    query, keys, values = arrays(num_rows=4, num_heads=4, num_kv_heads=2)
    causal = jnp.tril(jnp.ones((4, 4), bool))
    given = cached_attention(query, keys, values, jnp.asarray(LENGTHS), scale=SCALE, step_mask=causal)
    np.testing.assert_array_equal(given, cached_attention(query, keys, values, jnp.asarray(LENGTHS), scale=SCALE))
    np.testing.assert_array_equal(
        visible_slots(jnp.asarray(LENGTHS), 4, CAPACITY, causal), visible_slots(jnp.asarray(LENGTHS), 4, CAPACITY, None)
    )


def test_nothing_beyond_the_length_is_attended_even_if_its_key_is_nan() -> None:
    query, keys, values = arrays(num_rows=2, num_heads=4, num_kv_heads=2)
    beyond = np.arange(CAPACITY) >= LENGTHS[:, None] + 2
    dirty_keys = jnp.where(beyond[:, None, :, None], jnp.nan, keys)
    dirty_values = jnp.where(beyond[:, None, :, None], 1e30, values)
    got = cached_attention(query, dirty_keys, dirty_values, jnp.asarray(LENGTHS), scale=SCALE)
    np.testing.assert_array_equal(got, cached_attention(query, keys, values, jnp.asarray(LENGTHS), scale=SCALE))


def test_large_scores_do_not_overflow() -> None:
    query, keys, values = arrays(num_rows=2, num_heads=4, num_kv_heads=2)
    assert jnp.isfinite(cached_attention(query * 1e4, keys * 1e4, values, jnp.asarray(LENGTHS), scale=SCALE)).all()


def test_shapes_that_disagree_are_refused_by_name() -> None:
    query, keys, values = arrays(num_rows=2, num_heads=4, num_kv_heads=2)
    length = jnp.asarray(LENGTHS)
    with pytest.raises(ValueError, match=r"expected query \[B,T,N,H\]"):
        cached_attention(query[0], keys, values, length, scale=SCALE)
    with pytest.raises(ValueError, match=r"expected query \[B,T,N,H\]"):
        cached_attention(query, keys, values[:, :, 1:], length, scale=SCALE)
    with pytest.raises(ValueError, match="B and H must agree and K must divide N"):
        cached_attention(query[:, :, :3], keys, values, length, scale=SCALE)
    with pytest.raises(ValueError, match="B and H must agree and K must divide N"):
        cached_attention(query[:2], keys, values, length, scale=SCALE)


def test_an_unknown_implementation_is_refused() -> None:
    query, keys, values = arrays(num_rows=2, num_heads=4, num_kv_heads=2)
    with pytest.raises(ValueError, match="implementation must be one of .*got 'cuda'"):
        cached_attention(query, keys, values, jnp.asarray(LENGTHS), scale=SCALE, implementation="cuda")


@pytest.mark.parametrize("step_mask", [None, TREE], ids=["causal", "tree"])
@pytest.mark.parametrize("window", [1, 3, 20, 100])
def test_a_window_hides_what_lies_further_back(window: int, step_mask: np.ndarray | None) -> None:
    query, keys, values = arrays(num_rows=4, num_heads=4, num_kv_heads=2)
    mask = None if step_mask is None else jnp.asarray(step_mask)
    got = cached_attention(query, keys, values, jnp.asarray(LENGTHS), scale=SCALE, step_mask=mask, window=window)
    for row, length in enumerate(LENGTHS):
        for t in range(4):
            among_new = np.arange(4) <= t if step_mask is None else step_mask[t]
            seen = [s for s in range(length + 4) if s > length + t - window and (s < length or among_new[s - length])]
            for head in range(4):
                expected = numpy_attention(query[row, t, head], keys[row, head // 2], values[row, head // 2], np.array(seen))
                np.testing.assert_allclose(got[row, t, head], expected, atol=1e-5)
    # What lies outside every row's window may be anything.
    hidden = np.arange(CAPACITY) < np.maximum(LENGTHS - window + 1, 0)[:, None]
    assert window >= 36 or hidden.any()
    spoilt = jnp.where(hidden[:, None, :, None], jnp.nan, keys)
    np.testing.assert_array_equal(cached_attention(query, spoilt, values, LENGTHS, scale=SCALE, step_mask=mask, window=window), got)


def test_a_sink_takes_its_share_of_the_softmax_and_has_no_value() -> None:
    query, keys, values = arrays(num_rows=2, num_heads=4, num_kv_heads=2)
    sinks = jnp.array([0.5, -3.0, 40.0, 2.0])
    got = cached_attention(query, keys, values, jnp.asarray(LENGTHS), scale=SCALE, sinks=sinks)
    for row, length in enumerate(LENGTHS):
        for t in range(2):
            for head in range(4):
                scores = np.asarray(keys[row, head // 2, : length + t + 1] @ query[row, t, head], np.float64) * SCALE
                weights = np.exp(scores - 40) / (np.exp(scores - 40).sum() + np.exp(float(sinks[head]) - 40))
                expected = weights @ np.asarray(values[row, head // 2, : length + t + 1])
                np.testing.assert_allclose(got[row, t, head], expected, atol=1e-5)
    without = cached_attention(query, keys, values, jnp.asarray(LENGTHS), scale=SCALE)
    low = cached_attention(query, keys, values, jnp.asarray(LENGTHS), scale=SCALE, sinks=jnp.full((4,), -1e9))
    np.testing.assert_allclose(low, without, atol=1e-6)


def test_a_window_and_sinks_that_do_not_fit_are_refused() -> None:
    query, keys, values = arrays(num_rows=1, num_heads=4, num_kv_heads=2)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        cached_attention(query, keys, values, jnp.asarray(LENGTHS), scale=SCALE, window=0)
    with pytest.raises(ValueError, match=r"a score for each of the 4 heads, got shape \(2,\)"):
        cached_attention(query, keys, values, jnp.asarray(LENGTHS), scale=SCALE, sinks=jnp.zeros((2,)))
