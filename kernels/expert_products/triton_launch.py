"""A mixture of experts for few rows in two launches: gate and up with the activation between, then down with the routing weights.

A program takes some columns of one expert's matrix, for all rows that chose the expert: its weights are read once, however many did, and
those of an expert that nobody chose are not read. Programs find their rows themselves, from the list of choices, so nothing sorts or counts
before them: there is one for every pair of a row and a choice, and those whose pair is not the first of its expert end at once. What the
pairs come to, `[M,C,O]` float32, XLA adds up in their order: results repeat bit for bit.

Aims at the memory's bandwidth: the bytes of the chosen experts. bfloat16, float16 and float32; up to 64 rows and 1024 pairs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.kernels.gated_unit import GatedUnit
from specjax.kernels.triton_call import added, power_of_two, triton_call
from specjax.kernels.tuning import Tuning

MAX_ROWS = 64
MAX_PAIRS = 1024
_PAIRS_AT_ONCE = 64  # that a program looks through
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertTuning(Tuning):
    """How the work is cut; `triton@CHANNELS:OUTPUTS:DEPTH:NUM_WARPS:NUM_STAGES` in the name of an implementation.

    Attributes:
        channels: Of gate and of up that a program of the first launch computes.
        outputs: That one of the second computes.
        depth: Terms of their sums in a tile.
        num_warps: Warps a program.
        num_stages: Tiles in flight, and one more.

    Raises:
        ValueError: A size that Triton cannot work with.
    """

    channels: int
    outputs: int
    depth: int
    num_warps: int = 4
    num_stages: int = 4

    POWERS_OF_TWO: ClassVar[Mapping[str, tuple[int, int]]] = dict(channels=(16, 256), outputs=(16, 256), depth=(16, 256), num_warps=(1, 16))
    COUNTS: ClassVar[Mapping[str, tuple[int, int]]] = dict(num_stages=(1, 8))

    def shared_bytes(self, *, num_rows: int, itemsize: int) -> int:
        """An upper bound of a program's shared memory, in either launch: tiles in flight, and what its threads exchange."""
        width, rows = max(2 * self.channels, self.outputs), padded(num_rows)
        return self.num_stages * self.depth * (width + rows) * itemsize + 4 * rows * (width + _PAIRS_AT_ONCE)


def padded(num_rows: int) -> int:
    """Rows that are multiplied: tensor cores take no fewer than 16."""
    return max(16, power_of_two(num_rows))


def default_tuning(*, num_rows: int, itemsize: int) -> ExpertTuning:
    """64 bytes of a weight's row at least, and enough programs for an H200's 132 multiprocessors with the few experts of one token.

    Args:
        num_rows: M.
        itemsize: Bytes of a weight.
    """
    depth = 128 if num_rows <= 16 else 64  # beside more rows fewer weights fit a multiprocessor's shared memory
    return ExpertTuning(channels=32, outputs=64, depth=depth * 2 // itemsize)


def serves(shape: tuple[int, ...]) -> bool:
    """Whether these kernels are meant for choices `[M,C]` of such a shape."""
    return shape[0] <= MAX_ROWS and math.prod(shape) <= MAX_PAIRS


def expert_products_triton(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    gate_up_bias: jax.Array | None,
    down_bias: jax.Array | None,
    may_skip: bool,
    tuning: ExpertTuning | None = None,
) -> jax.Array:
    """See `specjax.kernels.expert_products.expert_products`.

    Raises:
        ValueError: More rows or pairs, an activation or dtypes that the kernels were not written for, or no device or package to run them.
    """
    if not (serves(experts.shape) and isinstance(activation, GatedUnit)):
        raise ValueError(
            f"expert_products: implementation 'triton' is for up to {MAX_ROWS} rows and {MAX_PAIRS} pairs, and a GatedUnit between them, "
            "which one that leaves channels out by a threshold is not; "
            f"got {experts.shape[0]} rows, {experts.size} pairs and a {type(activation).__name__}"
        )
    if {array.dtype for array in (x, gate_up, down)} - {jnp.dtype(dtype) for dtype in _DTYPES}:
        raise ValueError(
            f"expert_products: implementation 'triton' needs 16- or 32-bit floats, got {x.dtype}, {gate_up.dtype}, {down.dtype}"
        )
    (num_rows, num_choices), (num_experts, width, _, ffn), outputs = experts.shape, gate_up.shape, down.shape[2]
    if tuning is None:
        tuning = default_tuning(num_rows=num_rows, itemsize=gate_up.dtype.itemsize)
    num_pairs = experts.size
    sizes: dict[str, Any] = dict(NUM_PAIRS=num_pairs, NUM_CHOICES=num_choices, NUM_EXPERTS=num_experts, FFN=ffn, BLOCK_D=tuning.depth)
    # No more rows than that choose one expert, if none chooses it twice: each expert's weights are then read by one block.
    sizes |= dict(BLOCK_M=padded(num_rows), BLOCK_P=power_of_two(num_pairs))
    options: dict[str, Any] = dict(num_warps=tuning.num_warps, num_stages=tuning.num_stages)
    options["shared_bytes"] = tuning.shared_bytes(num_rows=num_rows, itemsize=max(x.dtype.itemsize, gate_up.dtype.itemsize))
    unread = weights.astype(jnp.float32)  # stands where a kernel reads nothing, too
    clamp = dict(IS_CLAMPED=activation.limit is not None, LIMIT=float(activation.limit or 0), ALPHA=float(activation.alpha))
    (inner,) = triton_call(
        "expert_products",
        "gate_and_up",
        x,
        experts,
        gate_up,
        unread if gate_up_bias is None else gate_up_bias,
        out_shapes=[jax.ShapeDtypeStruct((num_rows, num_choices, ffn), x.dtype)],
        grid=(-(-ffn // tuning.channels), num_pairs),
        constants=sizes | clamp | dict(WIDTH=width, HAS_BIAS=gate_up_bias is not None, BLOCK_N=tuning.channels),
        **options,
    )
    (parts,) = triton_call(
        "expert_products",
        "weighted_down",
        inner,
        experts,
        unread,
        down,
        unread if down_bias is None else down_bias,
        out_shapes=[jax.ShapeDtypeStruct((num_rows, num_choices, outputs), jnp.float32)],
        grid=(-(-outputs // tuning.outputs), num_pairs),
        constants=sizes | dict(WIDTH=outputs, HAS_BIAS=down_bias is not None, BLOCK_N=tuning.outputs),
        **options,
    )
    if may_skip:
        parts = jnp.where((experts == num_experts)[:, :, None], 0.0, parts)
    return added(parts, axis=1).astype(x.dtype)
