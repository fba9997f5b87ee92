"""How two-level verification went: what sparse steps committed, and how much of it dense passes kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.counts import added, one_row, ratio, total
from specjax.two_level.two_level_cost import break_even_dense_acceptance, two_level_speedup


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LevelCounts:
    """Counts a row; add two with `+`.

    Attributes:
        sparse_steps: `[B]` int32.
        dense_passes: `[B]` int32, passes that checked sparse steps.
        dense_steps: `[B]` int32, steps verified densely at once, where two levels would have been slower.
        provisional: `[B]` int32, tokens that sparse steps committed.
        accepted: `[B]` int32, those that dense passes kept.
        examined: `[B]` int32, those up to the first that a dense pass rejected; what stands behind it is dropped unseen.
        step_costs: `[B]` float32, the time of a sparse step over that of a dense one, summed over dense passes.
        check_cost: The time of a dense pass over that of a dense step. Static.
    """

    sparse_steps: jax.Array
    dense_passes: jax.Array
    dense_steps: jax.Array
    provisional: jax.Array
    accepted: jax.Array
    examined: jax.Array
    step_costs: jax.Array
    check_cost: float = dataclasses.field(metadata={"static": True}, default=1.0)

    @classmethod
    def zeros(cls, batch_size: int, *, check_cost: float = 1.0) -> LevelCounts:
        """Nothing yet."""
        none = jnp.zeros((batch_size,), jnp.int32)
        return cls(none, none, none, none, none, none, jnp.zeros((batch_size,), jnp.float32), check_cost=check_cost)

    def total(self) -> LevelCounts:
        """The sum over rows, as one row."""
        return one_row(self, row_axes=self.sparse_steps.ndim)

    def __add__(self, other: LevelCounts) -> LevelCounts:
        """Row by row."""
        if self.check_cost != other.check_cost:
            raise ValueError(f"LevelCounts of different settings do not add: check_cost {self.check_cost} and {other.check_cost}")
        return added(self, other)

    @property
    def dense_acceptance_rate(self) -> Any:
        """accepted / examined: the chance of a token to be kept if all before it were; 1 where none was examined."""
        return ratio(total(self.accepted), total(self.examined), otherwise=1.0)

    @property
    def steps_per_dense_pass(self) -> Any:
        """Sparse steps before each dense pass, the mean over rows and cycles."""
        return ratio(total(self.sparse_steps), total(self.dense_passes), otherwise=0.0)

    @property
    def step_cost(self) -> Any:
        """The mean of what was taken for the time of a sparse step over that of a dense one."""
        return ratio(total(self.step_costs), total(self.dense_passes), otherwise=0.0)

    def summary(self) -> dict:
        """Plain numbers, for printing and JSON; the rate and the modelled ones are `None` where no dense pass checked anything."""
        names = ("sparse_steps", "dense_passes", "dense_steps", "provisional", "accepted")
        counts = {name: int(total(getattr(self, name))) for name in names}
        costs = dict(step_cost=float(self.step_cost), check_cost=self.check_cost)
        rate, break_even, speedup = None, None, None
        if counts["provisional"] > 0:
            rate = float(self.dense_acceptance_rate)
            tokens = counts["provisional"] / counts["sparse_steps"]
            sizes = dict(num_steps=float(self.steps_per_dense_pass), tokens_per_step=tokens, **costs)
            break_even = break_even_dense_acceptance(**sizes)
            speedup = two_level_speedup(acceptance=rate, **sizes)
        return {
            **counts,
            "dense_acceptance_rate": rate,
            "break_even_dense_acceptance": break_even,
            "modelled_speedup": speedup,
            "step_cost": costs["step_cost"] if counts["dense_passes"] else None,
        }
