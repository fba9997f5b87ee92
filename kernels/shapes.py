"""Shapes of the operations that have kernels: those that tests, tuning and benchmarks share, and keys of the table of choices."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """`cached_attention`, or with `kept_slots` `block_sparse_attention`.

    Attributes:
        batch: B.
        rows: T.
        kv_heads: K.
        group: Query heads of a key/value head, N / K.
        head_dim: H.
        slots: S.
        kept_slots: Most slots of the listed blocks; `None` reads the whole cache.
        block_size: Slots a listed block.
    """

    batch: int
    rows: int
    kv_heads: int
    group: int
    head_dim: int
    slots: int
    kept_slots: int | None = None
    block_size: int = 64

    @classmethod
    def of(cls, query: tuple[int, ...], keys: tuple[int, ...], *, kept_slots: int | None = None, block_size: int = 64) -> AttentionShape:
        """From the shapes of the arrays, `[B,T,N,H]` and `[B,K,S,H]`."""
        batch, rows, heads, head_dim = query
        sizes = dict(batch=batch, rows=rows, kv_heads=keys[1], group=heads // keys[1], head_dim=head_dim, slots=keys[2])
        return cls(**sizes, kept_slots=kept_slots, block_size=block_size)

    @property
    def op(self) -> str:
        """The operation's name."""
        return "cached_attention" if self.kept_slots is None else "block_sparse_attention"

    def moved_bytes(self, itemsize: int) -> int:
        """Bytes that must pass through memory: keys and values that are read, queries and results."""
        read = self.slots if self.kept_slots is None else self.kept_slots
        return itemsize * self.batch * self.kv_heads * self.head_dim * 2 * (read + self.rows * self.group)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionShape:
    """`block_selection`.

    Attributes:
        batch: B.
        kv_heads: K.
        group: N / K.
        head_dim: H.
        blocks: NB.
        chosen: C, most blocks that are chosen.
    """

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    blocks: int
    chosen: int
    op: ClassVar[str] = "block_selection"

    def moved_bytes(self, itemsize: int) -> int:
        """Bytes that must pass through memory: the summaries, the queries and the list."""
        summaries = itemsize * self.head_dim * (self.blocks + self.group)
        return self.batch * self.kv_heads * (summaries + 4 * self.chosen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankShape:
    """`low_rank_argmax`.

    Attributes:
        rows: M.
        hidden: D.
        rank: R.
        vocab: V.
    """

    rows: int
    hidden: int
    rank: int
    vocab: int
    op: ClassVar[str] = "low_rank_argmax"

    def moved_bytes(self, itemsize: int) -> int:
        """Bytes that must pass through memory: both factors and the rows."""
        return itemsize * (self.rank * (self.hidden + self.vocab) + self.rows * self.hidden)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearShape:
    """`few_row_linear`.

    Attributes:
        rows: M.
        inner: D.
        columns: N, of each half where gated.
        gated: Two halves are multiplied, and one comes out.
        normed: The rows are normed on the way.
    """

    rows: int
    inner: int
    columns: int
    gated: bool = False
    normed: bool = False
    op: ClassVar[str] = "few_row_linear"

    def moved_bytes(self, itemsize: int) -> int:
        """Bytes that must pass through memory: the weight, rows and results."""
        width = self.columns * (2 if self.gated else 1)
        return itemsize * (self.inner * width + self.rows * (self.inner + self.columns))

    @property
    def bucket(self) -> tuple[tuple[str, int], ...]:
        """See `bucket`; with half steps between the powers of two."""
        sizes = dict(rows=_rows_class(self.rows), inner=_half_step(self.inner), columns=_half_step(self.columns))
        return tuple(sorted((sizes | dict(gated=int(self.gated), normed=int(self.normed))).items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryShape:
    """`rope_and_write`.

    Attributes:
        rows: B T.
        kv_heads: K.
        group: N / K.
        head_dim: H.
    """

    rows: int
    kv_heads: int
    group: int
    head_dim: int
    op: ClassVar[str] = "rope_and_write"

    def moved_bytes(self, itemsize: int) -> int:
        """Bytes that must pass through memory: queries, keys and values, read and written, and the angles."""
        return self.rows * self.head_dim * (2 * itemsize * self.kv_heads * (self.group + 2) + 4)

    @property
    def bucket(self) -> tuple[tuple[str, int], ...]:
        """See `bucket`: any number of heads costs about the same."""
        return ("head_dim", 1 << (self.head_dim - 1).bit_length()), ("rows", _rows_class(self.rows))


Shape = AttentionShape | SelectionShape | LowRankShape | LinearShape | RotaryShape


def bucket(shape: Shape) -> tuple[tuple[str, int | None], ...]:
    """The key of a shape in the table: every size rounded up to a power of two, so that a measurement stands for its neighbours."""
    if isinstance(shape, LinearShape | RotaryShape):
        return shape.bucket
    sizes = dataclasses.asdict(shape)
    return tuple((name, None if size is None else 1 << (size - 1).bit_length()) for name, size in sorted(sizes.items()))


def _rows_class(rows: int) -> int:
    """One row apart, since XLA has other ways for it; 2 to 8, 9 to 16, and what is padded further."""
    return next((most for most in (1, 8, 16) if rows <= most), 64)


def _half_step(size: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16 ... that is no smaller."""
    above = 1 << (size - 1).bit_length()
    return above * 3 // 4 if above >= 4 and size <= above * 3 // 4 else above


_LLAMA_8B = dict(kv_heads=8, group=4, head_dim=128)
_QWEN_1_5B = dict(kv_heads=2, group=6, head_dim=128)
_OLMOE = dict(kv_heads=16, group=1, head_dim=128)
# Verification is G + 1 rows, drafting and plain decoding are one.
ATTENTION_SHAPES = (
    *(AttentionShape(batch=1, rows=rows, slots=slots, **_LLAMA_8B) for slots in (4096, 16384, 65536, 131072) for rows in (1, 6)),
    *(AttentionShape(batch=8, rows=rows, slots=32768, **_LLAMA_8B) for rows in (1, 6)),
    *(AttentionShape(batch=64, rows=rows, slots=2048, **_LLAMA_8B) for rows in (1, 6)),
    AttentionShape(batch=1, rows=16, slots=16384, **_LLAMA_8B),
    AttentionShape(batch=1, rows=6, slots=16384, **_QWEN_1_5B),
    AttentionShape(batch=1, rows=6, slots=4096, **_OLMOE),
)
SPARSE_ATTENTION_SHAPES = (
    *(AttentionShape(batch=1, rows=6, slots=slots, kept_slots=slots // 8, **_LLAMA_8B) for slots in (16384, 65536, 131072)),
    AttentionShape(batch=1, rows=1, slots=16384, kept_slots=4096, **_LLAMA_8B),
    AttentionShape(batch=1, rows=6, slots=16384, kept_slots=16384, **_LLAMA_8B),
    AttentionShape(batch=8, rows=6, slots=32768, kept_slots=4096, **_LLAMA_8B),
)
SELECTION_SHAPES = (
    *(SelectionShape(batch=1, blocks=blocks, chosen=blocks // 8, **_LLAMA_8B) for blocks in (256, 1024, 2048)),
    SelectionShape(batch=8, blocks=512, chosen=64, **_LLAMA_8B),
)
LOW_RANK_SHAPES = (
    *(LowRankShape(rows=rows, hidden=4096, rank=512, vocab=128256) for rows in (1, 8, 64)),
    *(LowRankShape(rows=rows, hidden=2048, rank=256, vocab=151936) for rows in (1, 64)),
)


def _decoder_layer(*, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int | None) -> tuple[dict[str, Any], ...]:
    """The products of a layer, all but their rows: queries, keys and values; output; gate and up; down."""
    attention = dict(inner=hidden, columns=(heads + 2 * kv_heads) * head_dim, normed=True), dict(inner=heads * head_dim, columns=hidden)
    if ffn is None:
        return attention
    return *attention, dict(inner=hidden, columns=ffn, normed=True, gated=True), dict(inner=ffn, columns=hidden)


_LLAMA_8B_LAYER = _decoder_layer(hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336)
_PRODUCTS: tuple[dict[str, Any], ...] = (
    *_LLAMA_8B_LAYER,
    dict(inner=12288, columns=4096),  # fc of an EAGLE-3 drafter of that model
    dict(inner=8192, columns=6144),  # and its first queries, keys and values, normed in two halves before
    *_decoder_layer(hidden=1536, heads=12, kv_heads=2, head_dim=128, ffn=8960),  # Qwen2.5-1.5B
    *_decoder_layer(hidden=896, heads=14, kv_heads=2, head_dim=64, ffn=4864),  # Qwen2.5-0.5B
    *_decoder_layer(hidden=2048, heads=32, kv_heads=4, head_dim=128, ffn=None),  # Qwen3-30B-A3B
)
LINEAR_SHAPES: tuple[LinearShape, ...] = tuple(LinearShape(rows=rows, **sizes) for rows in (1, 6, 16, 64) for sizes in _PRODUCTS)
_QWEN_0_5B = dict(kv_heads=2, group=7, head_dim=64)
ROTARY_SHAPES = tuple(RotaryShape(rows=rows, **sizes) for rows in (1, 6, 16, 64) for sizes in (_LLAMA_8B, _QWEN_0_5B))
_TINY = dict(batch=2, kv_heads=2, group=2, head_dim=16)
# For a run that only shows that everything works.
TINY_SHAPES: tuple[Shape, ...] = (
    AttentionShape(rows=3, slots=64, **_TINY),
    AttentionShape(rows=3, slots=64, kept_slots=32, block_size=16, **_TINY),
    SelectionShape(blocks=8, chosen=4, **_TINY),
    LowRankShape(rows=3, hidden=16, rank=8, vocab=40),
    LinearShape(rows=3, inner=32, columns=48, gated=True, normed=True),
    RotaryShape(rows=3, kv_heads=2, group=2, head_dim=16),
)
SHAPES: tuple[Shape, ...] = (
    *ATTENTION_SHAPES,
    *SPARSE_ATTENTION_SHAPES,
    *SELECTION_SHAPES,
    *LOW_RANK_SHAPES,
    *LINEAR_SHAPES,
    *ROTARY_SHAPES,
)
