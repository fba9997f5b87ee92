"""Shapes of the operations that have kernels: what the table of choices is keyed by, and what a call of each moves."""

from __future__ import annotations

import dataclasses
from typing import ClassVar


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """`expert_products`.

    Attributes:
        rows: M.
        choices: C.
        experts: E.
        hidden: D.
        ffn: F.
    """

    rows: int
    choices: int
    experts: int
    hidden: int
    ffn: int
    op: ClassVar[str] = "expert_products"

    @classmethod
    def of(cls, experts: tuple[int, ...], gate_up: tuple[int, ...]) -> ExpertShape:
        """From the shapes of the arrays, `[M,C]` and `[E,D,2,F]`."""
        return cls(rows=experts[0], choices=experts[1], experts=gate_up[0], hidden=gate_up[1], ffn=gate_up[3])

    def moved_bytes(self, itemsize: int) -> int:
        """Bytes that must pass through memory: the experts that rows use between them if each chooses evenly and apart, and the rows."""
        distinct = self.experts * (1 - (1 - self.choices / self.experts) ** self.rows)
        return round(itemsize * self.hidden * (3 * self.ffn * distinct + 2 * self.rows))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestShape:
    """`largest`.

    Attributes:
        rows: Rows of numbers.
        size: V.
        chosen: k.
        dtype: Of the numbers, whatever a model's is.
    """

    rows: int
    size: int
    chosen: int
    op: ClassVar[str] = "largest"
    dtype: ClassVar[str] = "float32"

    def moved_bytes(self, itemsize: int) -> int:
        """Bytes that must pass through memory: the numbers, which are float32, and the columns."""
        del itemsize
        return 4 * self.rows * (self.size + self.chosen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredShape:
    """`gathered_ffn`.

    Attributes:
        groups: G.
        rows: T, tokens a group.
        hidden: D, and O.
        ffn: F.
        kept: k, channels a group.
    """

    groups: int
    rows: int
    hidden: int
    ffn: int
    kept: int
    op: ClassVar[str] = "gathered_ffn"

    def moved_bytes(self, itemsize: int) -> int:
        """Bytes that must pass through memory: the chosen rows of both matrices, of each group's, the tokens and the results."""
        return itemsize * self.groups * self.hidden * 2 * (self.kept + self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceShape:
    """`expert_choice`.

    Attributes:
        rows: M.
        experts: E.
        choices: C.
        dtype: Of the scores, whatever a model's is.
    """

    rows: int
    experts: int
    choices: int
    op: ClassVar[str] = "expert_choice"
    dtype: ClassVar[str] = "float32"

    def moved_bytes(self, itemsize: int) -> int:
        """Bytes that must pass through memory: the scores, which are float32, and the choices with their weights."""
        del itemsize
        return 4 * self.rows * (self.experts + 2 * self.choices)


Shape = (
    AttentionShape | SelectionShape | LowRankShape | LinearShape | RotaryShape | ExpertShape | ChoiceShape | LargestShape | GatheredShape
)
# Of each operation.
SHAPE_TYPES: dict[str, type[Shape]] = {
    "cached_attention": AttentionShape,
    "block_sparse_attention": AttentionShape,
    "block_selection": SelectionShape,
    "low_rank_argmax": LowRankShape,
    "few_row_linear": LinearShape,
    "rope_and_write": RotaryShape,
    "expert_products": ExpertShape,
    "expert_choice": ChoiceShape,
    "gathered_ffn": GatheredShape,
    "largest": LargestShape,
}
