"""New rows on their way from the projection to attention: norm, rotary embedding, and the writing of keys and values into the cache."""

from __future__ import annotations

from typing import Any

import jax

from specjax.kernels.measured import check_implementation, dispatch
from specjax.kernels.rope_and_write.cache_write import write_layer, write_slots
from specjax.kernels.rope_and_write.heads import Heads, apply_rotary
from specjax.kernels.rope_and_write.reference import rope_and_write_reference
from specjax.kernels.rope_and_write.triton_launch import MAX_ROWS, rope_and_write_triton, why_not
from specjax.kernels.shapes import RotaryShape

__all__ = ["Heads", "apply_rotary", "rope_and_write", "write_layer", "write_slots"]

IMPLEMENTATIONS = ("auto", "reference", "triton")


def rope_and_write(
    heads: Heads, keys: jax.Array, values: jax.Array, start: jax.Array, *, implementation: str = "auto"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `heads.rotated()` gives: the queries, and its keys and values written as `write_layer` does, in place inside a jitted loop.

    Args:
        heads: Of T new rows each of B sequences.
        keys: `[B,K,S,H]`.
        values: `[B,K,S,H]`.
        start: `[B]` int32, the slot of each sequence's first new row.
        implementation: `"auto"`, `"reference"` or `"triton"`, one launch for up to 64 rows B T: more are the reference's.

    Returns:
        Query `[B,T,N,H]`, and the updated keys and values.

    Raises:
        ValueError: Shapes that disagree, more new rows than slots, an unknown implementation, or one that cannot run here.
    """
    check_implementation("rope_and_write", implementation, IMPLEMENTATIONS)
    batch, num_rows, num_kv_heads, both, head_dim = heads.qkv.shape
    cached = batch, num_kv_heads, keys.shape[2], head_dim
    if keys.shape != cached or values.shape != cached:
        raise ValueError(f"rope_and_write: qkv [B,T,K,N/K+2,H] = {heads.qkv.shape} does not fit caches {keys.shape} and {values.shape}")
    if num_rows > keys.shape[2]:
        raise ValueError(f"rope_and_write: {num_rows} new rows do not fit a cache of {keys.shape[2]} slots")
    arrays = heads, keys, values, start
    if not 0 < batch * num_rows <= MAX_ROWS or (implementation == "auto" and why_not(heads, keys, values) is not None):
        return rope_and_write_reference(*arrays)
    shape = RotaryShape(rows=batch * num_rows, kv_heads=num_kv_heads, group=both - 2, head_dim=head_dim)
    functions: dict[str, Any] = dict(triton=rope_and_write_triton, reference=rope_and_write_reference)
    return dispatch(implementation, shape, keys.dtype, **functions, arrays=arrays)
