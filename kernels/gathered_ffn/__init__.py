"""The up and down projections of a few channels of a gated feed-forward network, by their numbers. arXiv:2512.21911."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from specjax.kernels.gated_unit import GatedUnit
from specjax.kernels.gathered_ffn.reference import gathered_ffn_reference
from specjax.kernels.gathered_ffn.triton_launch import gathered_ffn_triton, serves
from specjax.kernels.measured import check_implementation, dispatch
from specjax.kernels.shapes import GatheredShape

IMPLEMENTATIONS = ("auto", "reference", "triton")


def gathered_ffn(
    x: jax.Array,
    activated: jax.Array,
    channels: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    unit: GatedUnit,
    up_bias: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """`y[g,t] = sum over the channels c of g of unit.combine(activated[g,t,c], x[g,t] . up[c] + up_bias[c]) * down[c]`.

    Args:
        x: `[G,T,D]`, the tokens of each group.
        activated: `[G,T,F]`, their activated gates, of all channels.
        channels: `[G,k]` int32, the channels that a group's tokens share, each from 0 to F - 1 and once.
        up: `[F,D]`, a row a channel.
        down: `[F,O]`, likewise.
        unit: The inner activation.
        up_bias: `[F]` or `None`.
        implementation: `"reference"` copies the chosen rows together; `"triton"` reads them where they lie, for up to 64 tokens a group
            (more are the reference's). `"auto"` takes what was measured to be the fastest: see `specjax.kernels.measured`.

    Returns:
        `[G,T,O]` in the dtype of `x`.

    Raises:
        ValueError: Shapes that disagree, an unknown implementation, or one that cannot run here.
    """
    check_implementation("gathered_ffn", implementation, IMPLEMENTATIONS)
    fits = x.ndim == activated.ndim == 3 and channels.ndim == 2 and x.shape[:2] == activated.shape[:2] and len(x) == len(channels)
    if not fits or up.shape != (activated.shape[2], x.shape[2]) or len(down) != len(up):
        raise ValueError(
            "gathered_ffn: expected x [G,T,D], activated [G,T,F], channels [G,k], up [F,D], down [F,O], "
            f"got {x.shape}, {activated.shape}, {channels.shape}, {up.shape}, {down.shape}"
        )

    def positional(projections: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda *arrays: projections(*arrays[:5], unit=unit, up_bias=arrays[5])

    arrays: tuple[Any, ...] = (x, activated, channels, up, down, up_bias)
    reference, triton = positional(gathered_ffn_reference), positional(gathered_ffn_triton)
    if not serves(x.shape):
        return reference(*arrays)
    sizes = dict(groups=x.shape[0], rows=x.shape[1], hidden=x.shape[2], ffn=up.shape[0], kept=channels.shape[1])
    return dispatch(implementation, GatheredShape(**sizes), up.dtype, triton=triton, reference=reference, arrays=arrays)
