"""Attention of up to 64 rows over a long cache or over listed blocks of it: what `"triton"` means in two operations.

Serves `cached_attention` and `block_sparse_attention`, whose references are its specification.

Reads the slots below `length + T` (of listed blocks, in the window): `2 H` numbers each, for T rows times N / K query heads of a key/value
head. Up to 128 of these packed rows are one product, for which the memory's bandwidth is the limit. More of them (of a pass that checks
several sparse steps) are several programs a part, side by side in the grid, so that what one reads the next should find in the L2.

Writes `[B,T,N,H]`, and with P parts `B N T P H` float32 besides, which a second launch merges in a fixed order: results repeat bit for bit.
bfloat16, float16 and float32 (which multiplies exactly, outside the tensor cores); H from 16 to 256. Arrays sharded over a mesh are
gathered whole, for XLA knows nothing of a kernel's insides: `"reference"` is for those.

One launch whose last program merges was left aside: its counter must be zeroed before every launch, and that is a launch too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from specjax.kernels.triton_call import power_of_two, triton_call
from specjax.kernels.tuning import Tuning

MAX_ROWS = 64
MAX_PACKED_ROWS = 512
_WORD = 32  # bits of a mask's word
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# Two programs for each of an H200's 132 multiprocessors: while one waits for its first tile, the other reads.
_PROGRAMS = 264


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig(Tuning):
    """How the work is cut; `triton@PARTS:BLOCK_SLOTS:NUM_WARPS:NUM_STAGES:BLOCK_ROWS` in the name of an implementation.

    Attributes:
        parts: Programs that share the slots of one batch row and key/value head; a power of two.
        block_slots: Slots of a tile; a power of two.
        num_warps: Warps a program.
        num_stages: Tiles in flight.
        block_rows: Packed rows a program at most; a power of two.

    Raises:
        ValueError: A size that Triton cannot work with.
    """

    parts: int
    block_slots: int = 64
    num_warps: int = 4
    num_stages: int = 3
    block_rows: int = 128

    POWERS_OF_TWO: ClassVar[Mapping[str, tuple[int, int]]] = dict(
        parts=(1, 128), block_slots=(16, 256), num_warps=(1, 16), block_rows=(16, 256)
    )
    COUNTS: ClassVar[Mapping[str, tuple[int, int]]] = dict(num_stages=(1, 8))

    def rows_of_a_program(self, packed_rows: int) -> int:
        """Rows of a program's products, some of them padding: T N / K packed rows are there."""
        return max(16, min(self.block_rows, power_of_two(packed_rows)))

    def shared_bytes(self, *, packed_rows: int, head_dim: int, itemsize: int) -> int:
        """An upper bound of a program's shared memory: keys and values in flight, queries, and what threads exchange of scores and sums."""
        rows, columns = self.rows_of_a_program(packed_rows), power_of_two(head_dim)
        exchanged = rows * (columns + self.block_slots) * (itemsize + 4)
        return self.num_stages * self.block_slots * 2 * columns * itemsize + exchanged


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ListedBlocks:
    """The blocks that are read, and by whom; arguments of `block_sparse_attention`.

    Attributes:
        block_ids: `[B,K,C]` int32.
        num_blocks: `[B,K]` int32.
        row_mask: `[B,K,T,C]` bool or `None`.
        block_size: Slots a block; static.
    """

    block_ids: jax.Array
    num_blocks: jax.Array
    row_mask: jax.Array | None
    block_size: int = dataclasses.field(metadata={"static": True})


def serves(query_shape: tuple[int, ...], num_kv_heads: int) -> bool:
    """Whether a pass has so few rows that these kernels are meant for it; others (a prefill) are XLA's.

    Args:
        query_shape: `(B, T, N, H)`.
        num_kv_heads: K.
    """
    return query_shape[1] <= MAX_ROWS and query_shape[1] * query_shape[2] // num_kv_heads <= MAX_PACKED_ROWS


def why_not(query: jax.Array, keys: jax.Array, values: jax.Array) -> str | None:
    """What the kernels were not written for, as a sentence, or `None`.

    Args:
        query: `[B,T,N,H]`.
        keys: `[B,K,S,H]`.
        values: `[B,K,S,H]`.
    """
    if not (query.dtype == keys.dtype == values.dtype) or query.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        dtypes = f"{query.dtype}, {keys.dtype} and {values.dtype}"
        return f"implementation 'triton' needs query, keys and values of one dtype, of {names}; got {dtypes}"
    if not 16 <= query.shape[3] <= 256:
        return f"implementation 'triton' needs a head size H from 16 to 256, got {query.shape[3]}"
    return None


def default_tuning(*, packed_rows: int, num_heads: int, num_slots: int, head_dim: int, itemsize: int, is_listed: bool) -> TuningConfig:
    """Enough parts to keep an H200 busy, and no more than there are tiles.

    Args:
        packed_rows: T N / K.
        num_heads: B K.
        num_slots: Most slots that may be read: of the cache, of the listed blocks, or in the window.
        head_dim: H.
        itemsize: Bytes of a number of the cache.
        is_listed: Whether blocks are listed.
    """
    # Products of float32 are sums in registers: more rows or fewer warps than these spill.
    is_wide = itemsize > 2
    block_rows = 16 if is_wide else TuningConfig.block_rows
    block_slots = 64
    # Keys and values of two tiles, and the queries, fit a multiprocessor twice.
    while block_slots > 16 and block_slots * head_dim * itemsize > 16384:
        block_slots //= 2
    programs = num_heads * -(-packed_rows // block_rows)  # without parts
    wanted = max(1, min(_PROGRAMS // programs, -(-num_slots // block_slots), 128))
    return TuningConfig(
        parts=1 << (wanted.bit_length() - 1),  # the power of two at or below
        block_slots=block_slots,
        num_warps=8 if is_wide or packed_rows > 64 else 4,
        num_stages=5 if is_listed else 3,  # two tiles in flight: of an indirect load Triton halves the stages
        block_rows=block_rows,
    )


def few_row_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    step_mask: jax.Array | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    listed: ListedBlocks | None = None,
    tuning: TuningConfig | None = None,
) -> jax.Array:
    """What `cached_attention`, or with `listed` `block_sparse_attention`, computes; see there.

    Args:
        query: `[B,T,N,H]`, few rows in the sense of `serves`.
        keys: `[B,K,S,H]`.
        values: `[B,K,S,H]`.
        length: `[B]` int32.
        scale: Factor on the scores; static.
        step_mask: `[T,T]` bool or `None` for causal.
        window: Latest slots that a row attends to, or `None`; static.
        sinks: `[N]` or `None`.
        listed: The blocks that are read; `None` is all.
        tuning: How the work is cut; static. `None` takes `default_tuning`.

    Returns:
        `[B,T,N,H]` in the dtype of `query`.

    Raises:
        ValueError: What `why_not` says, more rows than `serves` allows, or no device or package to run it.
    """
    refused = why_not(query, keys, values)
    if refused is not None:
        raise ValueError(f"few_row_attention: {refused}")
    if not serves(query.shape, keys.shape[1]):
        raise ValueError(f"few_row_attention is for up to {MAX_ROWS} rows ({MAX_PACKED_ROWS} times N / K), got queries {query.shape}")
    batch_size, num_rows, num_query_heads, head_dim = query.shape
    num_kv_heads, capacity = keys.shape[1:3]
    group_size = num_query_heads // num_kv_heads
    packed_rows = num_rows * group_size
    width = 1 if listed is None else listed.block_ids.shape[2]
    if tuning is None:
        num_slots = capacity if listed is None else min(capacity, width * listed.block_size)
        num_slots = num_slots if window is None else min(num_slots, window + num_rows)
        tuning = default_tuning(
            packed_rows=packed_rows,
            num_heads=batch_size * num_kv_heads,
            num_slots=num_slots,
            head_dim=head_dim,
            itemsize=keys.dtype.itemsize,
            is_listed=listed is not None,
        )

    sizes: dict[str, Any] = dict(NUM_ROWS=num_rows, GROUP=group_size, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PARTS=tuning.parts)
    sizes |= dict(HAS_SINKS=sinks is not None, BLOCK_H=power_of_two(head_dim))
    constants: dict[str, Any] = dict(
        CAPACITY=capacity, SCALE=float(scale) * math.log2(math.e), WINDOW=window or 0, LISTED=listed is not None, WIDTH=width
    )
    block_rows = tuning.rows_of_a_program(packed_rows)
    constants |= dict(BLOCK_SIZE=1 if listed is None else listed.block_size, BLOCK_M=block_rows)
    constants |= dict(IS_CAUSAL=step_mask is None, MASK_WORDS=-(-num_rows // _WORD))
    constants |= dict(HAS_ROW_MASK=listed is not None and listed.row_mask is not None, BLOCK_S=tuning.block_slots)
    unread = length  # stands where the kernel reads nothing
    block_ids, num_blocks = (unread, unread) if listed is None else (listed.block_ids, listed.num_blocks)
    row_mask = unread if listed is None or listed.row_mask is None else listed.row_mask
    step_bits = unread if step_mask is None else _step_bits(step_mask)
    arrays = [query, keys, values, length, step_bits, block_ids, num_blocks, row_mask]
    arrays.append(unread if sinks is None else sinks)

    result = jax.ShapeDtypeStruct(query.shape, query.dtype)
    parts_shape = (batch_size, num_kv_heads, tuning.parts, packed_rows)
    parts = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*parts_shape, head_dim), parts_shape, parts_shape)]
    one = jax.ShapeDtypeStruct((1,), jnp.float32)
    attended = triton_call(
        "few_row_attention",
        "attend_part",
        *arrays,
        out_shapes=[result, one, one] if tuning.parts == 1 else parts,
        grid=(-(-packed_rows // block_rows), tuning.parts, batch_size * num_kv_heads),
        constants=sizes | constants,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        shared_bytes=tuning.shared_bytes(packed_rows=packed_rows, head_dim=head_dim, itemsize=keys.dtype.itemsize),
    )
    if tuning.parts == 1:
        return attended[0]
    grid = (packed_rows, batch_size * num_kv_heads)
    options: dict[str, Any] = dict(out_shapes=[result], grid=grid, constants=sizes | dict(BLOCK_P=tuning.parts), num_warps=4, num_stages=1)
    return triton_call("few_row_attention", "merge_parts", *attended, arrays[-1], **options)[0]


def _step_bits(step_mask: jax.Array) -> jax.Array:
    """`[T,W]` int32: bit u % 32 of word u // 32 of row t says whether new row t attends to new row u."""
    num_rows = step_mask.shape[0]
    words = jnp.pad(jnp.asarray(step_mask, jnp.uint32), ((0, 0), (0, -num_rows % _WORD))).reshape(num_rows, -1, _WORD)
    return lax.bitcast_convert_type((words << jnp.arange(_WORD, dtype=jnp.uint32)).sum(axis=2, dtype=jnp.uint32), jnp.int32)
