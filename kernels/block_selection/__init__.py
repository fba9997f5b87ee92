"""Which blocks of a key/value cache one query attends to: scores from mean keys, and the best of them. arXiv:2512.21911."""

from __future__ import annotations

import functools

import jax

from specjax.kernels.block_selection.reference import block_selection_reference, top_blocks
from specjax.kernels.block_selection.triton_launch import block_selection_triton, why_not
from specjax.kernels.measured import dispatch
from specjax.kernels.shapes import SelectionShape

__all__ = ["block_selection", "top_blocks"]

IMPLEMENTATIONS = ("auto", "reference", "triton")
GROUPS = ("mean", "max")


def block_selection(
    query: jax.Array,
    means: jax.Array,
    first_tail: jax.Array,
    num_there: jax.Array,
    num_kept: jax.Array,
    *,
    head_blocks: int,
    max_chosen: int,
    group: str = "mean",
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Chooses `num_kept` blocks for each batch row and key/value head: those always kept, and the best-scored of the others.

    A block's score is `q · m` for its mean key m, of the query heads of a key/value head the mean or the greatest, as in `block_scores`.
    Blocks that score alike are chosen from the first on, and those whose score is NaN before all others.

    Args:
        query: `[B,N,H]`, one query a row, after the rotary embedding.
        means: `[B,K,NB,H]`, mean keys of the blocks; of those always kept, and of those beyond `num_there`, any.
        first_tail: `[B]` int32, this block and those after it are always kept.
        num_there: `[B]` int32, blocks that exist, up to NB.
        num_kept: `[B]` int32: at least the blocks always kept, at most `num_there` and `max_chosen`.
        head_blocks: The first blocks are always kept, this many; static.
        max_chosen: C; static.
        group: `"mean"` or `"max"`.
        implementation: `"auto"`, `"reference"` or `"triton"`, which scores and chooses in one launch.

    Returns:
        `[B,K,C]` int32, ascending, zeros after the first `num_kept`, and `[B,K]` int32, how many count.

    Raises:
        ValueError: Shapes that disagree, an unknown `group` or implementation, or one that cannot run here.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"block_selection: implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    if group not in GROUPS:
        raise ValueError(f"block_selection: group must be one of {GROUPS}, got {group!r}")
    if query.ndim != 3 or means.ndim != 4:
        raise ValueError(f"block_selection: expected query [B,N,H] and means [B,K,NB,H], got {query.shape} and {means.shape}")
    if query.shape[0] != means.shape[0] or query.shape[2] != means.shape[3] or query.shape[1] % means.shape[1]:
        raise ValueError(f"block_selection: query {query.shape} does not fit means {means.shape}: B and H must agree and K divide N")
    if not 1 <= max_chosen <= means.shape[2]:
        raise ValueError(f"block_selection: max_chosen must be from 1 to the {means.shape[2]} blocks, got {max_chosen}")
    batch, kv_heads, blocks, head_dim = means.shape
    sizes = dict(batch=batch, kv_heads=kv_heads, group=query.shape[1] // kv_heads, head_dim=head_dim, blocks=blocks, chosen=max_chosen)
    options = dict(head_blocks=head_blocks, max_chosen=max_chosen, group=group)
    reference, triton = (functools.partial(choose, **options) for choose in (block_selection_reference, block_selection_triton))
    arrays = query, means, first_tail, num_there, num_kept
    if implementation == "auto" and why_not(query, means) is not None:
        return reference(*arrays)
    return dispatch(implementation, SelectionShape(**sizes), means.dtype, triton=triton, reference=reference, arrays=arrays)
