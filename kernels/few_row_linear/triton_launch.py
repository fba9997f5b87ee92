"""A product with few rows in one launch: the weight passes by once, and norm, bias, gate and residual are done on the way.

Reads `D N` weights (`D 2 N` where gated) and aims at the memory's bandwidth; x is read by every program, from the cache. bfloat16 and
float32 (which multiplies exactly, outside the tensor cores); one row as it is, or up to 64 rows, padded to 16, 32 or 64. With P parts of
the inner sum `P M N` float32 are written besides, which XLA adds up in a fixed order together with what follows: results repeat bit for
bit. Arrays sharded over a mesh are gathered whole, as of every kernel: `"reference"` is for those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.kernels.few_row_linear.normed import Normed
from specjax.kernels.triton_call import added, power_of_two, triton_call
from specjax.kernels.tuning import Tuning

MAX_ROWS = 64
_DTYPES = (jnp.bfloat16, jnp.float32)
# Multiples of it are known to the compiler, which then loads 16 bytes at a time.
_UNIT = 16
_WARP = 32  # threads
_MULTIPROCESSORS = 132  # of an H200


@dataclasses.dataclass(frozen=True)
class LinearTuning(Tuning):
    """How the work is cut; `triton@BLOCK_D:BLOCK_N:NUM_WARPS:NUM_STAGES:PARTS:TENSOR_CORES` in the name of an implementation.

    Attributes:
        block_d: Rows of a tile of the weight.
        block_n: Columns of a tile, of either half where gated.
        num_warps: Warps a program.
        num_stages: Tiles in flight, and the one that is being multiplied.
        parts: Programs that share the inner sum of a strip.
        tensor_cores: 1, or 0 for a single row, which ordinary arithmetic multiplies as fast as memory delivers the weight.
    """

    block_d: int
    block_n: int
    num_warps: int
    num_stages: int
    parts: int
    tensor_cores: int

    POWERS_OF_TWO: ClassVar[Mapping[str, tuple[int, int]]] = dict(block_d=(16, 1024), block_n=(16, 256), num_warps=(1, 16), parts=(1, 16))
    COUNTS: ClassVar[Mapping[str, tuple[int, int]]] = dict(num_stages=(1, 8), tensor_cores=(0, 1))

    def shared_bytes(self, *, num_rows: int, itemsize: int, gated: bool) -> int:
        """An upper bound of a program's shared memory: tiles in flight, and the sums that its threads exchange."""
        width = self.block_n * (2 if gated else 1)
        tile = self.block_d * (width + self.padded(num_rows) + 1) * itemsize  # one for the norm's scale
        return self.num_stages * tile + 4 * width * max(self.padded(num_rows), self.num_warps)

    def padded(self, num_rows: int) -> int:
        """Rows that are multiplied: tensor cores take no fewer than 16."""
        return max(16, power_of_two(num_rows)) if self.tensor_cores else 1


def default_tuning(*, num_rows: int, inner: int, num_columns: int, itemsize: int, gated: bool) -> LinearTuning:
    """About four tiles of 8 KB in flight a program, and two programs for each of an H200's multiprocessors where the columns suffice.

    Where they do not, and one row needs no tensor cores, tiles are twice as deep: x then comes by asynchronous copies, as the weight does.

    Args:
        num_rows: M.
        inner: D.
        num_columns: N.
        itemsize: Bytes of a weight.
        gated: Whether a program reads two strips.
    """
    block_n = 64 if num_columns >= 64 * 2 * _MULTIPROCESSORS else 32
    block_d = 8192 // (block_n * itemsize * (2 if gated else 1))
    if num_rows == 1 and not gated and num_columns < 64 * _MULTIPROCESSORS and inner % (2 * block_d) == 0:  # a ragged tile costs more
        block_d *= 2
    return LinearTuning(block_d=block_d, block_n=block_n, num_warps=4, num_stages=5, parts=1, tensor_cores=int(num_rows > 1))


def why_not(x: Normed | jax.Array, weight: jax.Array) -> str | None:
    """What the kernel was not written for, as a sentence, or `None`."""
    num_rows = x.shape[0]
    if num_rows > MAX_ROWS:
        return f"implementation 'triton' is for up to {MAX_ROWS} rows, got {num_rows}"
    if x.dtype != weight.dtype or x.dtype not in _DTYPES:
        return f"implementation 'triton' needs rows and weight both of bfloat16 or of float32, got {x.dtype} and {weight.dtype}"
    return None


def few_row_linear_triton(
    x: Normed | jax.Array, weight: jax.Array, bias, residual, *, gated: bool, tuning: LinearTuning | None = None
) -> jax.Array:
    """See `specjax.kernels.few_row_linear.few_row_linear`.

    Args:
        x: `[M,D]`.
        weight: `[D,N]`, `[D,2,N]` where gated.
        bias: The weight's shape without D, or `None`.
        residual: `[M,N]` or `None`.
        gated: Static.
        tuning: How the work is cut; `None` takes `default_tuning`.

    Raises:
        ValueError: What `why_not` says, or no device or package to run it.
    """
    refused = why_not(x, weight)
    if refused is not None:
        raise ValueError(f"few_row_linear: {refused}")
    (num_rows, inner), width = x.shape, weight.shape[-1]
    if tuning is None:
        tuning = default_tuning(num_rows=num_rows, inner=inner, num_columns=width, itemsize=weight.dtype.itemsize, gated=gated)
    if num_rows > 1 and not tuning.tensor_cores:
        raise ValueError(f"few_row_linear: a tuning without tensor cores is for one row, got {num_rows} rows")
    rows = x.x if isinstance(x, Normed) else x
    inner_unit, column_unit = (_UNIT if size % _UNIT == 0 else 1 for size in (inner, width))
    normed, parts = isinstance(x, Normed), tuning.parts
    sums = (parts, num_rows, 2, width) if gated else (parts, num_rows, width)
    of_parts = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (sums, (parts, num_rows))]
    out, squares = triton_call(
        "few_row_linear",
        "multiply_strip",
        rows,
        weight,
        x.scale if isinstance(x, Normed) else rows,  # what is not read may be any array
        rows if bias is None else bias,
        rows if residual is None else residual,
        num_rows - 1,
        inner // inner_unit,
        width // column_unit,
        out_shapes=[jax.ShapeDtypeStruct((num_rows, width), x.dtype), jax.ShapeDtypeStruct((1,), jnp.float32)] if parts == 1 else of_parts,
        grid=(-(-width // tuning.block_n), parts),
        constants=dict(
            EPSILON=float(x.epsilon) if isinstance(x, Normed) else 0.0,
            NORMED=normed,
            GATED=gated,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            PARTS=parts,
            INNER_UNIT=inner_unit,
            COLUMN_UNIT=column_unit,
            RAGGED=bool(inner % tuning.block_d or width % tuning.block_n),
            TENSOR_CORES=bool(tuning.tensor_cores),
            READ_AHEAD=tuning.block_d * weight.dtype.itemsize < 4 * _WARP * tuning.num_warps,
            STAGES=tuning.num_stages,
            BLOCK_M=tuning.padded(num_rows),
            BLOCK_D=tuning.block_d,
            BLOCK_N=tuning.block_n,
        ),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        shared_bytes=tuning.shared_bytes(num_rows=num_rows, itemsize=weight.dtype.itemsize, gated=gated),
    )
    if parts == 1:
        return out
    factor = None
    if isinstance(x, Normed):
        factor = jax.lax.rsqrt(added(squares) / inner + x.epsilon)
    return _finished(added(out), factor, bias, residual, gated=gated).astype(x.dtype)


def _finished(sums: jax.Array, factor: jax.Array | None, bias, residual, *, gated: bool) -> jax.Array:
    """What a program does behind its loop where it has all of the sum, in float32."""
    if factor is not None:
        sums = sums * factor.reshape(-1, *[1] * (sums.ndim - 1))
    if bias is not None:
        sums = sums + bias.astype(jnp.float32)
    if gated:
        sums = jax.nn.silu(sums[:, 0]) * sums[:, 1]
    return sums if residual is None else sums + residual.astype(jnp.float32)
