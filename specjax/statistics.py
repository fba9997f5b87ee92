"""Acceptance statistics under vLLM's names: counts in arrays, rates as properties.

Only what was delivered counts. A step that an EOS or a limit cuts short after e tokens, all of them accepted drafts, counts e drafted and e
accepted; the drafts behind the cut were examined but never delivered and count nowhere. With two-level verification the counts of drafts
are those of the first level: `levels` says how much of what it committed was kept.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.attention_reads import AttentionReads
from specjax.level_counts import LevelCounts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts a row; add two with `+`, over rows with the properties.

    Attributes:
        accepted_counts: `[B,G+1]` int32: `[b, j]` is the number of steps in which row b accepted j draft tokens.
        drafted_counts: `[B,G+1]` int32: likewise for j drafted tokens.
        attention_reads: How much of the target's cache its passes read; `None` unless its attention was sparse. Dense
            checks are not counted.
        levels: How two-level verification went; `None` without it.
        synthetic: The acceptance was made up (`SyntheticAcceptance`): good for timing, never for text or accuracy. Static.
    """

    accepted_counts: jax.Array
    drafted_counts: jax.Array
    attention_reads: AttentionReads | None = None
    levels: LevelCounts | None = None
    synthetic: bool = dataclasses.field(metadata={"static": True}, default=False)

    @classmethod
    def zeros(
        cls,
        batch_size: int,
        num_speculative_tokens: int,
        *,
        synthetic: bool = False,
        attention_reads: AttentionReads | None = None,
        levels: LevelCounts | None = None,
    ) -> Statistics:
        """No steps yet, for B rows and drafts of up to G tokens; `attention_reads` and `levels` are the counts before the first."""
        counts = jnp.zeros((batch_size, num_speculative_tokens + 1), jnp.int32)
        return cls(accepted_counts=counts, drafted_counts=counts, attention_reads=attention_reads, levels=levels, synthetic=synthetic)

    def record(
        self,
        *,
        active: jax.Array,
        num_drafted: jax.Array,
        num_accepted: jax.Array,
        num_committed: jax.Array,
        reads: AttentionReads | None = None,
    ) -> Statistics:
        """Counts one step.

        Args:
            active: `[B]` bool, rows that took part.
            num_drafted: `[B]` int32.
            num_accepted: `[B]` int32, before any cut.
            num_committed: `[B]` int32, tokens delivered after the cut.
            reads: What the pass read, where that is counted.

        Returns:
            The new counts.
        """
        cut = num_committed <= num_accepted
        num_drafted = jnp.where(cut, num_committed, num_drafted)
        num_accepted = jnp.minimum(num_accepted, num_committed)
        slots = jnp.arange(self.accepted_counts.shape[1])

        def one_hot(count: jax.Array) -> jax.Array:
            return ((count[:, None] == slots) & active[:, None]).astype(jnp.int32)

        counted = self.attention_reads
        return dataclasses.replace(
            self,
            attention_reads=counted if counted is None or reads is None else counted + reads.of_rows(active),
            accepted_counts=self.accepted_counts + one_hot(num_accepted),
            drafted_counts=self.drafted_counts + one_hot(num_drafted),
        )

    def __add__(self, other: Statistics) -> Statistics:
        """The sum over both runs' rows, which become one row each."""
        if self.accepted_counts.shape[1] != other.accepted_counts.shape[1]:
            raise ValueError(
                "Statistics of different draft lengths do not add: "
                f"{self.accepted_counts.shape[1] - 1} and {other.accepted_counts.shape[1] - 1}"
            )

        reads = [x.attention_reads for x in (self, other) if x.attention_reads is not None]
        if len(reads) == 1:
            raise ValueError("Statistics of sparse and of dense attention do not add: only one of the two counts what attention read")

        levels = [x.levels.total() for x in (self, other) if x.levels is not None]

        def total(ours: jax.Array, theirs: jax.Array) -> jax.Array:
            return (ours.sum(0) + theirs.sum(0))[None]

        return Statistics(
            accepted_counts=total(self.accepted_counts, other.accepted_counts),
            drafted_counts=total(self.drafted_counts, other.drafted_counts),
            attention_reads=reads[0].total() + reads[1].total() if reads else None,
            levels=None if not levels else levels[0] if len(levels) == 1 else levels[0] + levels[1],
            synthetic=self.synthetic or other.synthetic,
        )

    @property
    def draft_length(self) -> int:
        """G."""
        return self.accepted_counts.shape[1] - 1

    @property
    def steps_per_row(self) -> jax.Array:
        """`[B]` steps that each row took."""
        return self.accepted_counts.sum(axis=1)

    @property
    def num_steps(self) -> jax.Array:
        """Steps, summed over rows (vLLM: `num_drafts`, which leaves out steps without a draft)."""
        return self.accepted_counts.sum()

    @property
    def num_draft_tokens(self) -> jax.Array:
        """Draft tokens, summed over rows and steps."""
        return (self.drafted_counts * jnp.arange(self.drafted_counts.shape[1])).sum()

    @property
    def num_accepted_tokens(self) -> jax.Array:
        """Accepted draft tokens, summed over rows and steps."""
        return (self.accepted_counts * jnp.arange(self.accepted_counts.shape[1])).sum()

    @property
    def draft_acceptance_rate(self) -> jax.Array:
        """accepted / drafted; 0 where nothing was drafted."""
        return self.num_accepted_tokens / jnp.maximum(self.num_draft_tokens, 1)

    @property
    def mean_acceptance_length(self) -> jax.Array:
        """1 + accepted / steps: the recovered or bonus token is included."""
        return 1 + self.num_accepted_tokens / jnp.maximum(self.num_steps, 1)

    @property
    def acceptance_histogram(self) -> jax.Array:
        """`[G+1]` steps in which exactly j draft tokens were accepted."""
        return self.accepted_counts.sum(0)

    @property
    def acceptance_rate_per_position(self) -> jax.Array:
        """`[G]` share of all steps in which draft position j was accepted (unconditional: it falls with j)."""
        at_least = jnp.cumsum(self.acceptance_histogram[::-1])[::-1][1:]
        return at_least / jnp.maximum(self.num_steps, 1)

    def summary(self) -> dict:
        """Counts and rates as plain numbers, for printing and JSON."""
        sparse = {} if self.attention_reads is None else {"sparse_attention": self.attention_reads.summary()}
        return {
            "steps": int(self.num_steps),
            "num_draft_tokens": int(self.num_draft_tokens),
            "num_accepted_tokens": int(self.num_accepted_tokens),
            "draft_acceptance_rate": float(self.draft_acceptance_rate),
            "mean_acceptance_length": float(self.mean_acceptance_length),
            "acceptance_histogram": [int(x) for x in self.acceptance_histogram],
            "acceptance_rate_per_position": [float(x) for x in self.acceptance_rate_per_position],
            "synthetic": self.synthetic,
            **sparse,
            **({} if self.levels is None else {"two_level": self.levels.summary()}),
        }
