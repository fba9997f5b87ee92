"""How relevant each block of a key/value cache is to a query, from a summary of its keys: mean key, or bounds of the keys."""

from __future__ import annotations

import jax

from specjax.kernels.block_scores.reference import block_scores_reference

IMPLEMENTATIONS = ("auto", "reference")
GROUPS = ("mean", "max")


def block_scores(query: jax.Array, summaries: tuple[jax.Array, ...], *, group: str = "mean", implementation: str = "auto") -> jax.Array:
    """Scores blocks for the query heads of each key/value head.

    One summary is the mean key m of each block: `score = q · m`, the mean of q · k over the block's keys (arXiv:2512.21911). Two are the
    least and greatest key components a and b: `score = sum_h max(q_h a_h, q_h b_h)`, which no q · k in the block exceeds (Quest,
    arXiv:2406.10774). Both without the scale of attention, which changes no order.

    Args:
        query: `[B,R,N,H]`, R queries a row, after the rotary embedding.
        summaries: `(means,)` or `(least, greatest)`, each `[B,K,NB,H]` for NB blocks.
        group: What becomes of the scores of one key/value head's query heads: `"mean"` or `"max"`.
        implementation: `"auto"` or `"reference"`.

    Returns:
        `[B,K,R,NB]` float32.

    Raises:
        ValueError: Shapes that disagree, or an unknown `group` or implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"block_scores: implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    if group not in GROUPS:
        raise ValueError(f"block_scores: group must be one of {GROUPS}, got {group!r}")
    shapes = [summary.shape for summary in summaries]
    if len(shapes) not in (1, 2) or any(shape != shapes[0] or len(shape) != 4 for shape in shapes) or query.ndim != 4:
        raise ValueError(f"block_scores: expected query [B,R,N,H] and one or two summaries [B,K,NB,H], got {query.shape} and {shapes}")
    if query.shape[0] != shapes[0][0] or query.shape[3] != shapes[0][3] or query.shape[2] % shapes[0][1]:
        raise ValueError(f"block_scores: query {query.shape} does not fit summaries {shapes[0]}: B and H must agree and K must divide N")
    return block_scores_reference(query, summaries, group=group)
