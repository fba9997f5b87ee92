"""Attention over listed blocks: with all of them it is dense attention, with some it is NumPy's over their slots."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.block_sparse_attention import block_sparse_attention as eager_block_sparse_attention
from specjax.kernels.cached_attention import cached_attention as eager_cached_attention

HEAD_DIM, BLOCK = 8, 8
SCALE = HEAD_DIM**-0.5
# Sums of at most 64 float32 terms of order 1, in NumPy's order.
TOLERANCE = 1e-5
# Where the two compute over arrays of other widths: the same terms and exact zeros, added in another order. bfloat16 rounds the output.
TOLERANCES = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}

block_sparse_attention = jax.jit(eager_block_sparse_attention, static_argnames=("block_size", "scale", "implementation"))
cached_attention = jax.jit(eager_cached_attention, static_argnames=("scale", "window", "implementation"))


def arrays(batch_size: int, num_rows: int, capacity: int, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    """4 query heads on 2 key/value heads."""
    rng = np.random.default_rng(batch_size * 100 + num_rows)
    keys, values = rng.normal(size=(2, batch_size, 2, capacity, HEAD_DIM))
    query = rng.normal(size=(batch_size, num_rows, 4, HEAD_DIM))
    return jnp.asarray(query, dtype), jnp.asarray(keys, dtype), jnp.asarray(values, dtype)


def listed(batch_size: int, *blocks: int) -> jax.Array:
    """The same list for each row and head, `[B,2,C]`."""
    return jnp.broadcast_to(jnp.asarray(blocks, jnp.int32), (batch_size, 2, len(blocks)))


def counts(batch_size: int, count: Any) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(count, jnp.int32), (batch_size, 2))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_all_blocks_listed_in_order_is_dense_attention_bit_for_bit_at_every_length(num_drafts: int, batch_size: int) -> None:
    capacity = 5 * BLOCK
    query, keys, values = arrays(batch_size, num_drafts + 1, capacity)
    everything = listed(batch_size, *range(5)), counts(batch_size, 5)
    for length in range(1, 3 * BLOCK + 2):
        lengths = jnp.maximum(length - jnp.arange(batch_size), 0)
        expected = cached_attention(query, keys, values, lengths, scale=SCALE)
        got = block_sparse_attention(query, keys, values, lengths, *everything, block_size=BLOCK, scale=SCALE)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_blocks_listed_up_to_the_last_row_are_dense_attention_and_what_is_not_counted_is_not_read(dtype: Any) -> None:
    query, keys, values = arrays(3, 4, 8 * BLOCK, dtype)
    lengths = jnp.array([5, 12, 17])  # the draft of the second row crosses into a new block
    there = -(-(lengths + 4) // BLOCK)
    ids = listed(3, 0, 1, 2, 0)  # then padding, as a selection pads
    num_blocks = jnp.broadcast_to(there[:, None], (3, 2))
    expected = cached_attention(query, keys, values, lengths, scale=SCALE)
    got = block_sparse_attention(query, keys, values, lengths, ids, num_blocks, block_size=BLOCK, scale=SCALE)
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), atol=TOLERANCES[dtype])


def test_a_partial_last_block_of_negative_logits_takes_no_weight_from_slots_that_are_empty() -> None:
    ones = jnp.ones((1, 1, 4, HEAD_DIM))
    keys = jnp.zeros((1, 2, 128, HEAD_DIM)).at[:, :, :66].set(-9.0)  # an empty slot's logit, 0, would outweigh all of these
    values = jnp.zeros((1, 2, 128, HEAD_DIM)).at[:, :, :66].set(1.0)
    got = block_sparse_attention(ones, keys, values, jnp.array([65]), listed(1, 0, 1), counts(1, 2), block_size=64, scale=SCALE)
    np.testing.assert_allclose(got, 1.0, atol=TOLERANCE)


# Rows 1 and 2 of the tree are siblings under row 0.
TREE = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)


@pytest.mark.parametrize("step_mask", [None, TREE], ids=["causal", "tree"])
@pytest.mark.parametrize("with_row_mask", [False, True])
def test_some_blocks_are_numpy_attention_over_their_slots(step_mask: Any, with_row_mask: bool) -> None:
    query, keys, values = arrays(2, 3, 6 * BLOCK)
    lengths = np.array([30, 39])  # the draft of the second row crosses into block 5
    ids = np.array([[[3, 0, 5, 4], [1, 3, 4, 0]], [[5, 4, 1, 0], [0, 5, 4, 2]]], np.int32)  # any order; each row's own blocks among them
    num_blocks = np.array([[2, 3], [3, 3]], np.int32)
    row_mask = np.ones((2, 2, 3, 4), bool)
    if with_row_mask:
        row_mask[0, 0, 1, 1] = row_mask[0, 1, 2, 0] = row_mask[1, 0, :, 2] = False
    ids[0, 0, :2] = 3, 4
    poisoned = keys.at[0, :, 33:].set(jnp.nan).at[1, :, 42:].set(jnp.inf)
    got = block_sparse_attention(
        query, poisoned, values, lengths, ids, num_blocks, block_size=BLOCK, scale=SCALE, step_mask=step_mask, row_mask=row_mask
    )
    mask = np.tril(np.ones((3, 3), bool)) if step_mask is None else step_mask
    for b, t, head in np.ndindex(2, 3, 4):
        kv_head, length = head // 2, lengths[b]
        counted = [ids[b, kv_head, i] for i in range(num_blocks[b, kv_head]) if row_mask[b, kv_head, t, i]]
        slots = [s for j in counted for s in range(j * BLOCK, (j + 1) * BLOCK)]
        slots = [s for s in slots if s < length or (s < length + 3 and mask[t, s - length])]
        scores = np.asarray(keys)[b, kv_head, slots] @ np.asarray(query)[b, t, head] * SCALE
        weights = np.exp(scores - scores.max())
        expected = weights @ np.asarray(values)[b, kv_head, slots] / weights.sum()
        np.testing.assert_allclose(got[b, t, head], expected, atol=TOLERANCE)


def test_bad_arguments_are_refused_with_what_came() -> None:
    query, keys, values = arrays(1, 2, 2 * BLOCK)
    good = (query, keys, values, jnp.array([3]), listed(1, 0, 1), counts(1, 2))
    with pytest.raises(ValueError, match="16 slots are not whole blocks of block_size = 5"):
        eager_block_sparse_attention(*good, block_size=5, scale=1.0)
    with pytest.raises(ValueError, match="implementation must be one of .* got 'fast'"):
        eager_block_sparse_attention(*good, block_size=8, scale=1.0, implementation="fast")
    with pytest.raises(ValueError, match=r"expected block_ids \[B,K,C\] and num_blocks \[B,K\] .* got \(1, 2, 2\) and \(1,\)"):
        eager_block_sparse_attention(*good[:5], jnp.array([2]), block_size=8, scale=1.0)
    with pytest.raises(ValueError, match=r"row_mask must be \[B,K,T,C\] .* got \(1, 2, 2\)"):
        eager_block_sparse_attention(*good, block_size=8, scale=1.0, row_mask=jnp.ones((1, 2, 2), bool))
    with pytest.raises(ValueError, match="block_sparse_attention: .*K must divide N"):
        eager_block_sparse_attention(query[:, :, :3], *good[1:], block_size=8, scale=1.0)
