"""Draft heads made from a finished LM head, without training: the best low-rank factors, the rows of frequent tokens.

The factors are a truncated singular value decomposition of `(W - 1 m^T) C^{1/2}`: m, the mean row of W, adds the same number to all of a
position's scores, which softmax does not see; C = E[h h^T] counts each direction of the hidden states by how far they go in it. SlimSpec,
arXiv:2605.10453, trains its factors from scratch; these are a warm start, and what screens candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import require_size
from specjax.drafting.heads.draft_head import TOKEN_IDS, DraftHead, check_token_ids
from specjax.drafting.heads.low_rank import LowRankHead
from specjax.drafting.heads.screened import ScreenedHead
from specjax.drafting.heads.trimmed import TrimmedHead

# Rows of W that are held in float32 at once.
_ROWS_AT_ONCE = 16384
# A direction in which the hidden states that were seen do not go counts as if they went this share of the average in it (in squares):
# others may, and the factors have to be finite.
_LEAST_VARIANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class FittedHead:
    """A head and its arrays.

    Attributes:
        head: For `DraftModel(model, head=...)` or a drafter's configuration.
        params: Its arrays, on the default device, matrices in the dtype of the head that they were made from.
    """

    head: DraftHead
    params: dict[str, jax.Array]


def low_rank_from(lm_head: Any, rank: int, covariance: Any = None) -> FittedHead:
    """A low-rank head whose scores are as close as those of any of that rank, up to a number that all scores of a position share.

    Of all factors, `down [R,D]` and `up [V,R]` minimise `E |(W - 1 m^T - up down) h|^2`, where h has the covariance given, or the same
    variance in every direction. The products are taken in float32 on W's device, the decomposition of a `[D,D]` matrix in float64 on the
    host; rows of `down` have length 1.

    Example:
        >>> fitted = low_rank_from(params["lm_head"], rank=512)
        >>> drafter, drafter_params = DraftModel(model, head=fitted.head), params | {"draft_head": fitted.params}

    Args:
        lm_head: W, `[V,D]`.
        rank: R, at most D; with D the distributions are those of W.
        covariance: `[D,D]`, the mean of `h h^T` over hidden states as W reads them, after the final norm; not centred.

    Raises:
        ValueError: No such matrix, values that are not finite, a rank that does not fit, or a covariance that is none.
    """
    width = _matrix_width(lm_head)
    head = LowRankHead(rank=rank)
    head.check_sizes(hidden_size=width, vocab_size=lm_head.shape[0])
    mean, gram = _mean_and_gram(lm_head)
    if covariance is None:
        root = inverse_root = np.eye(width)
    else:
        root, inverse_root = _roots(covariance, width)
    _, vectors = np.linalg.eigh(root @ gram @ root)
    best = vectors[:, ::-1][:, :rank]
    down = best.T @ inverse_root
    lengths = np.linalg.norm(down, axis=1)
    projection = jnp.asarray(root @ best * lengths, jnp.float32)
    up = [_projected(rows, jnp.asarray(mean, jnp.float32), projection).astype(rows.dtype) for rows in _chunks(lm_head)]
    return FittedHead(head, {"down": jnp.asarray(down / lengths[:, None], up[0].dtype), "up": jnp.concatenate(up)})


def screened_from(lm_head: Any, rank: int, num_candidates: int, covariance: Any = None, *, shared: bool = False) -> FittedHead:
    """A head whose screening factors are those of `low_rank_from`, and whose candidates are scored by W itself.

    Args:
        lm_head: W, `[V,D]`.
        rank: R of the screening factors, at most D.
        num_candidates: k, at most V.
        covariance: As in `low_rank_from`.
        shared: W lies elsewhere, and is not among the arrays.

    Raises:
        ValueError: As in `low_rank_from`, or more candidates than tokens.
    """
    width = _matrix_width(lm_head)
    head = ScreenedHead(rank=rank, num_candidates=num_candidates, shared=shared)
    head.check_sizes(hidden_size=width, vocab_size=lm_head.shape[0])
    params = low_rank_from(lm_head, rank, covariance).params
    return FittedHead(head, params if shared else params | {"lm_head": jnp.asarray(lm_head)})


def trimmed_from(lm_head: Any, token_ids: Sequence[int] | np.ndarray) -> FittedHead:
    """A head of some of W's rows.

    Example:
        >>> fitted = trimmed_from(params["lm_head"], frequent_tokens(counts, 32768, always=tokenizer.all_special_ids))

    Args:
        lm_head: W, `[V,D]`.
        token_ids: `[Vd]`, which rows, in this order.

    Raises:
        ValueError: No such matrix, no tokens, or tokens that are no different ones of the vocabulary.
    """
    _matrix_width(lm_head)
    ids = check_token_ids("token_ids", token_ids, vocab_size=lm_head.shape[0])
    head = TrimmedHead(num_tokens=len(ids))
    return FittedHead(head, {"lm_head": jnp.take(jnp.asarray(lm_head), ids, axis=0), TOKEN_IDS: jnp.asarray(ids)})


def frequent_tokens(counts: Any, num_tokens: int, always: Sequence[int] = ()) -> np.ndarray:
    """The most frequent tokens; of equally frequent ones those with the smaller ids.

    Args:
        counts: `[V]`, how often each token occurs.
        num_tokens: Vd, how many to take.
        always: Tokens to take however rare they are, such as those that end a text.

    Returns:
        `[Vd]` int32 ids in ascending order.

    Raises:
        ValueError: Counts that are negative or not finite, more tokens than there are, or more of them in `always` than are to be taken.
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or counts.dtype.kind not in "iuf" or not (np.isfinite(counts) & (counts >= 0)).all():
        raise ValueError(f"counts must be numbers of at least 0, one a token, got {counts.dtype} of shape {list(counts.shape)}")
    require_size("num_tokens", num_tokens, len(counts), "the length of counts")
    kept = check_token_ids("always", np.asarray(always, np.int32) if len(always) == 0 else always, vocab_size=len(counts))
    if len(kept) > num_tokens:
        raise ValueError(f"num_tokens must leave room for the {len(kept)} tokens of always, got {num_tokens}")
    # The first key to sort by stands last.
    order = np.lexsort((np.arange(len(counts)), -counts.astype(np.float64), ~np.isin(np.arange(len(counts)), kept)))
    return np.sort(order[:num_tokens]).astype(np.int32)


def _matrix_width(lm_head: Any) -> int:
    shape, dtype = getattr(lm_head, "shape", None), getattr(lm_head, "dtype", None)
    if shape is None or dtype is None or len(shape) != 2 or 0 in shape or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"lm_head must be a matrix [V,D] of floating-point numbers, got {dtype} of shape {shape}")
    return shape[1]


def _chunks(lm_head: Any) -> Iterator[jax.Array]:
    for start in range(0, lm_head.shape[0], _ROWS_AT_ONCE):
        yield jnp.asarray(lm_head[start : start + _ROWS_AT_ONCE])


def _mean_and_gram(lm_head: Any) -> tuple[np.ndarray, np.ndarray]:
    """The mean row of W and, of what is left without it, `W^T W`; float64 sums of chunks that are summed in float32."""
    total = sum(np.asarray(rows.astype(jnp.float32).sum(axis=0), np.float64) for rows in _chunks(lm_head))
    mean = np.asarray(total) / lm_head.shape[0]
    gram = np.asarray(sum(np.asarray(_gram(rows, jnp.asarray(mean, jnp.float32)), np.float64) for rows in _chunks(lm_head)))
    if not np.isfinite(gram).all():
        raise ValueError("lm_head must hold finite numbers, got NaN or infinity")
    return mean, gram


@jax.jit
def _gram(rows: jax.Array, mean: jax.Array) -> jax.Array:
    centred = rows.astype(jnp.float32) - mean
    return jnp.matmul(centred.T, centred, precision=jax.lax.Precision.HIGHEST)


@jax.jit
def _projected(rows: jax.Array, mean: jax.Array, projection: jax.Array) -> jax.Array:
    return jnp.matmul(rows.astype(jnp.float32) - mean, projection, precision=jax.lax.Precision.HIGHEST)


def _roots(covariance: Any, width: int) -> tuple[np.ndarray, np.ndarray]:
    """`C^{1/2}` and `C^{-1/2}`, of the covariance divided by its average variance."""
    matrix = np.asarray(covariance, np.float64)
    if matrix.shape != (width, width):
        raise ValueError(f"covariance should have shape [{width}, {width}], that of the hidden states, got {list(matrix.shape)}")
    variance = np.trace(matrix) / width
    # Tolerances of 1e-4 of the average variance: a covariance may have been summed in float32.
    if not np.isfinite(matrix).all() or variance <= 0 or np.abs(matrix - matrix.T).max() > 1e-4 * variance:
        raise ValueError("covariance must be the mean of h h^T: finite, symmetric and not zero")
    values, vectors = np.linalg.eigh((matrix + matrix.T) / (2 * variance))
    if values[0] < -1e-4:
        raise ValueError(f"covariance must be the mean of h h^T, which has no negative eigenvalues; the least is {values[0] * variance:g}")
    roots = np.sqrt(np.maximum(values, _LEAST_VARIANCE))
    return vectors * roots @ vectors.T, vectors / roots @ vectors.T
