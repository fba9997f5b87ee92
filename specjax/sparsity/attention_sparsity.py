"""Settings of sparse attention: which blocks of the cache a verification reads, and which layers share a choice. arXiv:2512.21911.

Our `keep` is the paper's rho, `dense_below` its L0, `block_size` its B.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from specjax.checks import is_int, require, require_seed

SCORES = ("mean", "bounds", "window", "random", "oracle")
GROUPS = ("mean", "max")
ROWS = ("first", "each", "mean", "union")
BUDGETS = ("head", "layer")
# `keep` counts in these parts: shares of token counts are then exact in int32, up to contexts of 2^31 tokens.
_PARTS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseAttention:
    """Verification attends to a part of the context: blocks of the key/value cache, chosen for each layer and key/value head. Lossy.

    Of L tokens (the context and the rows of the pass) `budget_tokens(L) = floor((L - dense_below) * keep + dense_below)` are kept where
    L > dense_below, all otherwise. In blocks that is `ceil(budget_tokens / block_size)`, and it counts the blocks that are always kept: the
    first `head_blocks`, the last `tail_blocks` full ones, the one being filled, and those that rows of the pass stand in. Where these alone
    are more, they are what is kept.

    Attributes:
        block_size: Tokens a block.
        keep: Share of the tokens beyond `dense_below` that is kept, from 0 to 1; rounded to ten-thousandths.
        dense_below: Contexts of up to this many tokens are read whole.
        head_blocks: Blocks at the start that are always kept (attention sinks).
        tail_blocks: Full blocks at the end that are always kept, apart from the one being filled.
        score: How the other blocks compete. `"mean"`: query · mean key of the block. `"bounds"`: the largest query · key that the least and
            the greatest key components allow (Quest, arXiv:2406.10774). `"window"`: the latest win (StreamingLLM, arXiv:2309.17453).
            `"random"`: by lot. `"oracle"`: the exact attention mass; reads every key, for tests and comparisons.
        group: What the query heads of one key/value head make of their scores: `"mean"` or `"max"`.
        rows: Whose query scores. `"first"`: the pending token's, for all rows. `"mean"`: the mean query of all rows. `"each"`: every row
            reads what it chose itself. `"union"`: every row reads what any of them chose.
        budget: Who shares it. `"head"`: each key/value head keeps as many blocks as every other. `"layer"`: of all blocks of all heads of a
            layer those with the largest scores, as many as all heads' budgets together; what is always kept is so in each head.
        head_limit: With `budget="layer"` the most that one head keeps, over its even share. Lists of blocks are that much wider, and an
            implementation that gathers what they name moves as much more.
        seed: For `"random"`.

    Raises:
        ValueError: A size that is not an int or too small, `keep` outside [0, 1], a `head_limit` below 1, or a choice that does not exist.
    """

    block_size: int = 64
    keep: float = 0.2
    dense_below: int = 2048
    head_blocks: int = 1
    tail_blocks: int = 2
    score: str = "mean"
    group: str = "mean"
    rows: str = "first"
    budget: str = "head"
    head_limit: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, smallest in (("block_size", 1), ("dense_below", 0), ("head_blocks", 0), ("tail_blocks", 0)):
            value = getattr(self, name)
            require(is_int(value, smallest), f"SparseAttention.{name} must be an int of at least {smallest}, got {value!r}")
        require_seed("SparseAttention.seed", self.seed)
        is_number = isinstance(self.keep, int | float) and not isinstance(self.keep, bool)
        require(is_number and 0 <= self.keep <= 1, f"SparseAttention.keep must be from 0 to 1, got {self.keep!r}")
        limit = self.head_limit
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        require(is_number and 1 <= limit < math.inf, f"SparseAttention.head_limit must be a finite number of at least 1, got {limit!r}")
        for name, choices in (("score", SCORES), ("group", GROUPS), ("rows", ROWS), ("budget", BUDGETS)):
            value = getattr(self, name)
            require(value in choices, f"SparseAttention.{name} must be one of {choices}, got {value!r}")

    @property
    def scores_queries(self) -> bool:
        """Whether queries decide which blocks are read."""
        return self.score in ("mean", "bounds", "oracle")

    @property
    def summary(self) -> str | None:
        """Which block summaries the score reads: `"mean"`, `"bounds"`, or `None`."""
        return self.score if self.score in ("mean", "bounds") else None

    @property
    def sees_later_rows(self) -> bool:
        """Whether what a row reads depends on draft rows behind it: then its distribution is not one that a lossless check may rely on."""
        return self.scores_queries and self.rows in ("mean", "union")

    def budget_tokens(self, length: Any) -> Any:
        """Tokens kept of `length`; an int for an int, an int32 array for an array."""
        beyond = (length > self.dense_below) * (length - self.dense_below)
        parts = round(self.keep * _PARTS)
        # beyond * parts might exceed int32.
        return length - beyond + (beyond // _PARTS) * parts + (beyond % _PARTS) * parts // _PARTS

    def budget_blocks(self, length: Any) -> Any:
        """Blocks that hold `budget_tokens(length)`, rounded up."""
        return -(-self.budget_tokens(length) // self.block_size)

    def max_forced(self, num_rows: int) -> int:
        """Most blocks that a pass over `num_rows` rows always keeps."""
        # T rows stand in at most ceil((T - 1) / block) + 1 blocks; the one being filled is the first of them.
        return self.head_blocks + self.tail_blocks + -(-(num_rows - 1) // self.block_size) + 1

    def max_kept(self, *, capacity: int, num_rows: int) -> int:
        """Most blocks that a query keeps in a cache of `capacity` slots, those always kept included; of heads that share, their mean."""
        return min(capacity // self.block_size, max(self.max_forced(num_rows), self.budget_blocks(capacity)))

    def max_chosen(self, *, capacity: int, num_rows: int) -> int:
        """Most blocks that one head's query chooses: the width of its list."""
        kept = self.max_kept(capacity=capacity, num_rows=num_rows)
        return kept if self.budget == "head" else min(capacity // self.block_size, math.ceil(kept * self.head_limit))

    def max_read(self, *, capacity: int, num_rows: int) -> int:
        """Most blocks that a key/value head reads in a pass over `num_rows` rows: static, the width of the gather."""
        chosen = self.max_chosen(capacity=capacity, num_rows=num_rows)
        if self.rows in ("first", "mean") or not self.scores_queries:
            return chosen
        # All rows share the blocks always kept; where there is anything to choose these are at least head + tail + 1.
        shared = self.head_blocks + self.tail_blocks + 1
        return min(capacity // self.block_size, max(self.max_forced(num_rows), num_rows * chosen - (num_rows - 1) * shared))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reuse:
    """Which layers share what was chosen (retrieval reuse).

    Attributes:
        anchors: Layers that choose; every other sparse layer reads what the nearest anchor before it chose, the same key/value head's.
            `None`: every layer chooses.

    Raises:
        ValueError: Not an increasing tuple of ints of at least 0.
    """

    anchors: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        anchors = self.anchors
        fits = anchors is None or (isinstance(anchors, tuple) and len(anchors) > 0 and all(is_int(layer, 0) for layer in anchors))
        increasing = fits and (anchors is None or list(anchors) == sorted(set(anchors)))
        require(increasing, f"Reuse.anchors must be None or an increasing tuple of layers, got {anchors!r}")

    def anchor(self, layer: int) -> int:
        """The layer whose choice `layer` reads: itself, or the nearest anchor before it."""
        return layer if self.anchors is None else max(anchor for anchor in self.anchors if anchor <= layer)
