"""Shapes of the operations that have kernels: those that tests, tuning and benchmarks share, and keys of the table of choices."""

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


Shape = AttentionShape | SelectionShape | LowRankShape | ExpertShape | ChoiceShape | LargestShape | GatheredShape


def bucket(shape: Shape) -> tuple[tuple[str, int | None], ...]:
    """The key of a shape in the table: every size rounded up to a power of two, so that a measurement stands for its neighbours."""
    sizes = dataclasses.asdict(shape)
    return tuple((name, None if size is None else 1 << (size - 1).bit_length()) for name, size in sorted(sizes.items()))


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
# Qwen3-30B-A3B, GPT-OSS-20B, and a mixture of OLMoE's kind.
_MIXTURES = (
    dict(choices=8, experts=128, hidden=2048, ffn=768),
    dict(choices=4, experts=32, hidden=2880, ffn=2880),
    dict(choices=8, experts=64, hidden=2048, ffn=1024),
)
EXPERT_SHAPES = tuple(ExpertShape(rows=rows, **mixture) for mixture in _MIXTURES for rows in (1, 6, 16, 64))
CHOICE_SHAPES = tuple(
    ChoiceShape(rows=rows, experts=experts, choices=choices) for experts, choices in ((128, 8), (32, 4)) for rows in (1, 6, 64)
)
# 25, 40 and 60 % of the channels of Llama-3.1-8B; 40 and 60 % of those of Qwen2.5-1.5B, of which 25 % round up to what 40 % do.
GATHERED_SHAPES = (
    *(GatheredShape(groups=1, rows=rows, hidden=4096, ffn=14336, kept=kept) for kept in (3584, 5736, 8608) for rows in (1, 6)),
    *(GatheredShape(groups=1, rows=rows, hidden=1536, ffn=8960, kept=kept) for kept in (3584, 5376) for rows in (1, 6)),
)
# Likewise; those of Qwen2.5-1.5B round up to the same sizes.
LARGEST_SHAPES = tuple(LargestShape(rows=1, size=14336, chosen=chosen) for chosen in (3584, 5736, 8608))
_TINY = dict(batch=2, kv_heads=2, group=2, head_dim=16)
# For a run that only shows that everything works.
TINY_SHAPES: tuple[Shape, ...] = (
    AttentionShape(rows=3, slots=64, **_TINY),
    AttentionShape(rows=3, slots=64, kept_slots=32, block_size=16, **_TINY),
    SelectionShape(blocks=8, chosen=4, **_TINY),
    LowRankShape(rows=3, hidden=16, rank=8, vocab=40),
    ExpertShape(rows=3, choices=2, experts=4, hidden=16, ffn=8),
    ChoiceShape(rows=3, experts=6, choices=2),
    GatheredShape(groups=1, rows=3, hidden=16, ffn=24, kept=8),
    LargestShape(rows=1, size=24, chosen=8),
)
SHAPES: tuple[Shape, ...] = (
    *ATTENTION_SHAPES,
    *SPARSE_ATTENTION_SHAPES,
    *SELECTION_SHAPES,
    *LOW_RANK_SHAPES,
    *EXPERT_SHAPES,
    *CHOICE_SHAPES,
    *GATHERED_SHAPES,
    *LARGEST_SHAPES,
)
