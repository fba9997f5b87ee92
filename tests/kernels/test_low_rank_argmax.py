"""The arg-max of a low-rank head: the reference against the head itself, and the Triton kernels, interpreted, against the reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafting.heads import LowRankHead
from specjax.drafting.heads.low_rank import low_rank_logits
from specjax.kernels.low_rank_argmax import low_rank_argmax
from tests.kernels.interpreted_triton import interpreted, launches, needs_triton
from tests.kernels.low_rank_bounds import check_best

# Sums of R = 96 terms of order 1 in another order.
TOLERANCE = 1e-5
FULL = pytest.mark.full


def case(*, rows: int, rank: int, vocab: int, hidden: int = 24, dtype: Any = jnp.float32, integers: bool = False) -> tuple[jax.Array, ...]:
    """With `integers`, sums are exact in any order, and many scores are equal."""
    rng = np.random.default_rng(rows + rank + vocab)
    draw = (lambda *size: rng.integers(-1, 2, size)) if integers else (lambda *size: rng.normal(size=size))
    return tuple(jnp.asarray(draw(*size), dtype) for size in ((rows, hidden), (rank, hidden), (vocab, rank)))


def test_the_reference_is_the_arg_max_of_the_heads_scores() -> None:
    hidden, down, up = case(rows=5, rank=7, vocab=50)
    tokens, scores = low_rank_argmax(hidden, down, up)
    logits = LowRankHead(rank=7).scores({"down": down, "up": up}, hidden).logits
    np.testing.assert_array_equal(tokens, jnp.argmax(logits, axis=-1))
    np.testing.assert_array_equal(scores, logits.max(axis=-1))


@pytest.mark.parametrize("rows", [1, 8])
def test_the_inner_product_is_rounded_before_the_outer_one_reads_it(rows: int) -> None:
    hidden, down, up = case(rows=rows, rank=64, vocab=3000, hidden=256, dtype=jnp.bfloat16)
    check_best((hidden, down, up), jax.jit(low_rank_argmax)(hidden, down, up))
    # Said in the program, for a cast alone is left out where the product widens it again, as XLA does for one row on a GPU.
    program = jax.jit(low_rank_argmax).lower(hidden, down, up).as_text()
    head = jax.jit(lambda *arrays: low_rank_logits(dict(down=arrays[1], up=arrays[2]), arrays[0])).lower(hidden, down, up).as_text()
    assert "reduce_precision" in program
    assert "reduce_precision" in head
    # What would come out then is seen to be wrong.
    scores = np.asarray(hidden, np.float64) @ np.asarray(down, np.float64).T @ np.asarray(up, np.float64).T
    with pytest.raises(AssertionError, match="are not from"):
        check_best((hidden, down, up), (scores.argmax(axis=1), scores.max(axis=1)))
    best = np.asarray(low_rank_argmax(hidden, down, up)[1])
    with pytest.raises(AssertionError, match="score at most"):
        check_best((hidden, down, up), (scores.argmin(axis=1), best))


@needs_triton
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "rank", "vocab"),
    [(1, 16, 128), (5, 96, 300), pytest.param(64, 32, 257, marks=FULL), pytest.param(17, 100, 1000, marks=FULL)],
)
def test_the_kernels_find_what_the_reference_finds(rows: int, rank: int, vocab: int, dtype: Any) -> None:
    for integers in (False, True):
        arrays = case(rows=rows, rank=rank, vocab=vocab, dtype=dtype, integers=integers)
        with interpreted():
            tokens, scores = low_rank_argmax(*arrays, implementation="triton")
            assert launches == ["best_of_part", "best_of_parts"]
        expected_tokens, expected_scores = low_rank_argmax(*arrays, implementation="reference")
        np.testing.assert_array_equal(tokens, expected_tokens)
        np.testing.assert_allclose(scores, expected_scores, rtol=TOLERANCE)


@needs_triton
def test_of_equal_scores_the_lower_token_wins_within_a_part_and_across_parts() -> None:
    hidden, down = jnp.ones((2, 16)), jnp.eye(16)
    up = jnp.zeros((400, 16)).at[jnp.asarray([130, 131, 300])].set(1.0)
    with interpreted():
        tokens, _ = low_rank_argmax(hidden, down, up, implementation="triton")
        zeros, _ = low_rank_argmax(hidden, down, jnp.zeros((400, 16)).at[0, 0].set(-0.0), implementation="triton")
        negative, _ = low_rank_argmax(hidden, down, jnp.full((400, 16), -1.0), implementation="triton")
    np.testing.assert_array_equal(tokens, [130, 130])
    np.testing.assert_array_equal(zeros, [0, 0])
    np.testing.assert_array_equal(negative, [0, 0])


@needs_triton
@pytest.mark.parametrize("value", [jnp.nan, -jnp.nan, jnp.inf, -jnp.inf])
def test_nan_and_infinity_come_out_as_from_arg_max(value: float) -> None:
    hidden, down, up = case(rows=3, rank=16, vocab=300, integers=True)
    up = up.at[jnp.asarray([140, 290]), 0].set(value)  # a NaN where the row's inner product is zero
    with interpreted():
        tokens, scores = low_rank_argmax(hidden, down, up, implementation="triton")
    expected_tokens, expected_scores = low_rank_argmax(hidden, down, up, implementation="reference")
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_array_equal(scores, expected_scores)


@needs_triton
def test_the_kernels_leave_more_rows_to_the_reference_and_refuse_other_dtypes() -> None:
    hidden, down, up = case(rows=65, rank=16, vocab=10)
    with interpreted():
        low_rank_argmax(hidden, down, up, implementation="triton")
        assert launches == []
    with interpreted(), pytest.raises(ValueError, match="throughout, got float32, bfloat16"):
        low_rank_argmax(hidden[:1], down, up.astype(jnp.bfloat16), implementation="triton")


def test_wrong_shapes_are_refused() -> None:
    hidden, down, up = case(rows=2, rank=16, vocab=10)
    with pytest.raises(ValueError, match=r"expected hidden \[M,D\], down \[R,D\], up \[V,R\]"):
        low_rank_argmax(hidden, up, down)
    with pytest.raises(ValueError, match="implementation must be one of"):
        low_rank_argmax(hidden, down, up, implementation="fused")
