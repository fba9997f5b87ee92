"""Acceptance statistics under vLLM's names: counts in arrays, rates as properties.

Only what was delivered counts. A step that an EOS or a limit cuts short after e tokens, all of them accepted drafts, counts e drafted and e
accepted; the drafts behind the cut were examined but never delivered and count nowhere. With two-level verification the counts of drafts
are those of the first level: `levels` says how much of what it committed was kept.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.counts import added, one_row, ratio, total
from specjax.sparsity.attention_reads import AttentionReads
from specjax.sparsity.pass_counts import PassCounts, TargetPass
from specjax.two_level.level_counts import LevelCounts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts a row; add two with `+`, over rows with the properties, both in 64 bits on the host (see `specjax.counts`).

    What `vmap` or `scan` returned of several calls is counted as one with all of their rows.

    Attributes:
        accepted_counts: `[B,G+1]` int32: `[b, j]` is the number of steps in which row b accepted j draft tokens.
        drafted_counts: `[B,G+1]` int32: likewise for j drafted tokens.
        attention_reads: How much of the target's cache its passes read; `None` unless its attention was sparse.
        pass_counts: What its passes kept of the rest, and their number; `None` unless anything was sparse.
        levels: How two-level verification went; `None` without it. The two before it then count sparse passes only.
        synthetic: The acceptance was made up (`SyntheticAcceptance`): good for timing, never for text or accuracy. Static.
    """

    accepted_counts: jax.Array
    drafted_counts: jax.Array
    attention_reads: AttentionReads | None = None
    pass_counts: PassCounts | None = None
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
        pass_counts: PassCounts | None = None,
        levels: LevelCounts | None = None,
    ) -> Statistics:
        """No steps yet, for B rows and drafts of up to G tokens; the last three are the counts before the first sparse pass."""
        counts = jnp.zeros((batch_size, num_speculative_tokens + 1), jnp.int32)
        return cls(
            accepted_counts=counts,
            drafted_counts=counts,
            attention_reads=attention_reads,
            pass_counts=pass_counts,
            levels=levels,
            synthetic=synthetic,
        )

    def record(
        self,
        *,
        active: jax.Array,
        num_drafted: jax.Array,
        num_accepted: jax.Array,
        num_committed: jax.Array,
        target_pass: TargetPass | None = None,
    ) -> Statistics:
        """Counts one step.

        Args:
            active: `[B]` bool, rows that took part.
            num_drafted: `[B]` int32.
            num_accepted: `[B]` int32, before any cut.
            num_committed: `[B]` int32, tokens delivered after the cut.
            target_pass: What the target's pass kept, where that is counted.

        Returns:
            The new counts.
        """
        cut = num_committed <= num_accepted
        num_drafted = jnp.where(cut, num_committed, num_drafted)
        num_accepted = jnp.minimum(num_accepted, num_committed)
        slots = jnp.arange(self.accepted_counts.shape[-1])

        def one_hot(count: jax.Array) -> jax.Array:
            return ((count[:, None] == slots) & active[:, None]).astype(jnp.int32)

        reads, passes = self.attention_reads, self.pass_counts
        if target_pass is not None and reads is not None and target_pass.reads is not None:
            reads = reads + target_pass.reads.of_rows(active)
        if target_pass is not None and passes is not None:
            passes = passes.record(target_pass, active=active)
        return dataclasses.replace(
            self,
            attention_reads=reads,
            pass_counts=passes,
            accepted_counts=self.accepted_counts + one_hot(num_accepted),
            drafted_counts=self.drafted_counts + one_hot(num_drafted),
        )

    def __add__(self, other: Statistics) -> Statistics:
        """The sum over both runs' rows, which become one row each."""
        if self.draft_length != other.draft_length:
            raise ValueError(f"Statistics of different draft lengths do not add: {self.draft_length} and {other.draft_length}")

        for name, what in (("attention_reads", "attention"), ("pass_counts", "passes"), ("levels", "two-level verification")):
            if (getattr(self, name) is None) != (getattr(other, name) is None):
                raise ValueError(f"Statistics of sparse and of dense {what} do not add: only one of the two has {name}")

        def both(ours: Any, theirs: Any) -> Any:
            return None if ours is None else ours.total() + theirs.total()

        def over_rows(ours: jax.Array, theirs: jax.Array) -> Any:
            return added(*(one_row(counts, row_axes=counts.ndim - 1) for counts in (ours, theirs)))

        return Statistics(
            accepted_counts=over_rows(self.accepted_counts, other.accepted_counts),
            drafted_counts=over_rows(self.drafted_counts, other.drafted_counts),
            attention_reads=both(self.attention_reads, other.attention_reads),
            pass_counts=both(self.pass_counts, other.pass_counts),
            levels=both(self.levels, other.levels),
            synthetic=self.synthetic or other.synthetic,
        )

    @property
    def draft_length(self) -> int:
        """G."""
        return self.accepted_counts.shape[-1] - 1

    @property
    def steps_per_row(self) -> jax.Array:
        """`[B]` steps that each row took."""
        return self.accepted_counts.sum(axis=-1, dtype=jnp.int32)

    @property
    def num_steps(self) -> Any:
        """Steps, summed over rows (vLLM: `num_drafts`, which leaves out steps without a draft)."""
        return total(self.accepted_counts)

    @property
    def num_draft_tokens(self) -> Any:
        """Draft tokens, summed over rows and steps."""
        return _num_tokens(self.drafted_counts)

    @property
    def num_accepted_tokens(self) -> Any:
        """Accepted draft tokens, summed over rows and steps."""
        return _num_tokens(self.accepted_counts)

    @property
    def draft_acceptance_rate(self) -> Any:
        """accepted / drafted; 0 where nothing was drafted."""
        return ratio(self.num_accepted_tokens, self.num_draft_tokens, otherwise=0.0)

    @property
    def mean_acceptance_length(self) -> Any:
        """1 + accepted / steps: the recovered or bonus token is included."""
        return 1 + ratio(self.num_accepted_tokens, self.num_steps, otherwise=0.0)

    @property
    def acceptance_histogram(self) -> Any:
        """`[G+1]` steps in which exactly j draft tokens were accepted."""
        return total(self.accepted_counts, behind=1)

    @property
    def acceptance_rate_per_position(self) -> Any:
        """`[G]` share of all steps in which draft position j was accepted (unconditional: it falls with j)."""
        at_least = self.acceptance_histogram[::-1].cumsum()[::-1][1:]
        return ratio(at_least, self.num_steps, otherwise=0.0)

    def summary(self) -> dict:
        """Counts and rates as plain numbers, for printing and JSON."""
        sparse = {} if self.attention_reads is None else {"sparse_attention": self.attention_reads.summary()}
        if self.pass_counts is not None:
            sparse |= self.pass_counts.summary(self.attention_reads, num_tokens=self.draft_length + 1)
        if self.levels is not None:
            sparse["two_level"] = self.levels.summary()
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
        }


def _num_tokens(counts: jax.Array) -> Any:
    """Of counts of steps `[B,G+1]` by their tokens."""
    by_tokens = total(counts, behind=1)
    return (by_tokens * np.arange(by_tokens.shape[0])).sum()
