"""The shapes that tests, tuning and benchmarks share: those of published models at their batch sizes and contexts."""

from __future__ import annotations

from typing import Any

from specjax.kernels.shapes import (
    AttentionShape,
    ChoiceShape,
    ExpertShape,
    GatheredShape,
    LargestShape,
    LinearShape,
    LowRankShape,
    RotaryShape,
    SelectionShape,
    Shape,
)

_LLAMA_8B = dict(kv_heads=8, group=4, head_dim=128)
_QWEN_1_5B = dict(kv_heads=2, group=6, head_dim=128)
_OLMOE = dict(kv_heads=16, group=1, head_dim=128)
# Verification is G + 1 rows, drafting and plain decoding are one.
ATTENTION_SHAPES = (
    *(AttentionShape(batch=1, rows=rows, slots=slots, **_LLAMA_8B) for slots in (4096, 16384, 32768, 65536, 131072) for rows in (1, 6)),
    *(AttentionShape(batch=batch, rows=rows, slots=32768, **_LLAMA_8B) for batch in (4, 8) for rows in (1, 6)),
    *(AttentionShape(batch=64, rows=rows, slots=2048, **_LLAMA_8B) for rows in (1, 6)),
    AttentionShape(batch=2, rows=6, slots=131072, **_LLAMA_8B),
    *(AttentionShape(batch=1, rows=16, slots=slots, **_LLAMA_8B) for slots in (16384, 131072)),
    *(AttentionShape(batch=1, rows=rows, slots=131072, **_LLAMA_8B) for rows in (25, 49)),  # checks of four and of eight steps
    *(AttentionShape(batch=8, rows=rows, slots=32768, **_LLAMA_8B) for rows in (25, 49)),
    AttentionShape(batch=1, rows=6, slots=16384, **_QWEN_1_5B),
    AttentionShape(batch=1, rows=6, slots=4096, **_OLMOE),
)
SPARSE_ATTENTION_SHAPES = (
    *(AttentionShape(batch=1, rows=6, slots=slots, kept_slots=slots // 8, **_LLAMA_8B) for slots in (16384, 65536, 131072)),
    AttentionShape(batch=1, rows=1, slots=16384, kept_slots=4096, **_LLAMA_8B),
    AttentionShape(batch=1, rows=6, slots=16384, kept_slots=16384, **_LLAMA_8B),
    *(AttentionShape(batch=8, rows=rows, slots=32768, kept_slots=4096, **_LLAMA_8B) for rows in (1, 6)),
    *(AttentionShape(batch=1, rows=rows, slots=131072, kept_slots=8192, **_LLAMA_8B) for rows in (1, 6)),
)
SELECTION_SHAPES = (
    *(SelectionShape(batch=1, blocks=blocks, chosen=blocks // 8, **_LLAMA_8B) for blocks in (256, 1024, 2048)),
    SelectionShape(batch=1, blocks=2048, chosen=128, **_LLAMA_8B),
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
# Likewise; those of Qwen2.5-1.5B round up to the same sizes. And what is left of a vocabulary where a batch's candidates are chosen.
LARGEST_SHAPES = (
    *(LargestShape(rows=1, size=14336, chosen=chosen) for chosen in (3584, 5736, 8608)),
    *(LargestShape(rows=64, size=size, chosen=2048) for size in (8192, 16384)),
)
_TINY = dict(batch=2, kv_heads=2, group=2, head_dim=16)
# For a run that only shows that everything works.
TINY_SHAPES: tuple[Shape, ...] = (
    AttentionShape(rows=3, slots=64, **_TINY),
    AttentionShape(rows=3, slots=64, kept_slots=32, block_size=16, **_TINY),
    SelectionShape(blocks=8, chosen=4, **_TINY),
    LowRankShape(rows=3, hidden=16, rank=8, vocab=40),
    LinearShape(rows=3, inner=32, columns=48, gated=True, normed=True),
    RotaryShape(rows=3, kv_heads=2, group=2, head_dim=16),
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
    *LINEAR_SHAPES,
    *ROTARY_SHAPES,
    *EXPERT_SHAPES,
    *CHOICE_SHAPES,
    *GATHERED_SHAPES,
    *LARGEST_SHAPES,
)
