"""Scores of blocks against loops over their keys."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.block_scores import block_scores
from specjax.models.block_summaries import summarise

BLOCK, NUM_BLOCKS, HEAD_DIM = 4, 5, 8
# Sums of 8 float32 products of order 1, in another order.
TOLERANCE = 1e-5


def arrays(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Queries of 6 heads `[2,3,6,H]`, and keys of 2 key/value heads."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, 3, 6, HEAD_DIM)).astype(np.float32), rng.normal(size=(2, 2, NUM_BLOCKS * BLOCK, HEAD_DIM)).astype(np.float32)


@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize("kind", ["mean", "bounds"])
def test_scores_equal_a_loop_over_keys_and_query_heads(kind: str, group: str) -> None:
    query, keys = arrays()
    got = block_scores(jnp.asarray(query), summarise(jnp.asarray(keys), kind, BLOCK), group=group)
    assert got.shape == (2, 2, 3, NUM_BLOCKS)
    for b, kv_head, row, block in np.ndindex(*got.shape):
        inside = keys[b, kv_head, block * BLOCK : (block + 1) * BLOCK]
        of_heads = []
        for q in query[b, row, kv_head * 3 : kv_head * 3 + 3]:
            if kind == "mean":
                of_heads.append(np.mean([q @ k for k in inside]))
            else:
                of_heads.append(sum(max(q[h] * inside[:, h].min(), q[h] * inside[:, h].max()) for h in range(HEAD_DIM)))
        expected = np.mean(of_heads) if group == "mean" else max(of_heads)
        np.testing.assert_allclose(got[b, kv_head, row, block], expected, atol=TOLERANCE)


def test_bounds_are_never_below_the_largest_product_in_the_block() -> None:
    for seed in range(20):
        query, keys = arrays(seed)
        bound = block_scores(jnp.asarray(query[:, :, ::3]), summarise(jnp.asarray(keys), "bounds", BLOCK), group="max")
        products = np.einsum("brkh,bksh->bkrs", query[:, :, ::3], keys).reshape(2, 2, 3, NUM_BLOCKS, BLOCK)
        assert (np.asarray(bound) >= products.max(axis=-1) - TOLERANCE).all()


def test_bad_arguments_are_refused_with_what_came() -> None:
    query, means = jnp.zeros((1, 1, 4, 8)), jnp.zeros((1, 2, 3, 8))
    with pytest.raises(ValueError, match="group must be one of .* got 'sum'"):
        block_scores(query, (means,), group="sum")
    with pytest.raises(ValueError, match="implementation must be one of .* got 'fast'"):
        block_scores(query, (means,), implementation="fast")
    with pytest.raises(ValueError, match="one or two summaries"):
        block_scores(query, ())
    with pytest.raises(ValueError, match="does not fit summaries"):
        block_scores(query[..., :4], (means,))
