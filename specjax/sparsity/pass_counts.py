"""What the sparse passes of decoding kept and what that comes to: operations and bytes a step by component, sparse beside dense.

Measured are the shares of channels and the experts, and, by `AttentionReads`, the keys; `specjax.sparsity.work` makes operations and
bytes of their means. Of experts those count as read that the rows of a pass took, all of their channels, and beside them those that the
model itself would have taken for the same rows.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.counts import added, one_row, total
from specjax.sparsity.attention_reads import AttentionReads
from specjax.sparsity.sparse_ffn import FeedForwardWork
from specjax.sparsity.sparse_moe import ExpertWork
from specjax.sparsity.work import Kept, PassWork, Work, expected_distinct_experts, pass_work

if TYPE_CHECKING:
    from specjax.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetPass:
    """One pass of the target, to be counted.

    Attributes:
        reads: What attention read; `None` where all of it is dense.
        mlp_work: What it kept of the rest, a layer; `None` for a layer of which it kept all.
        context: `[B]` int32, tokens that stood before it.
        num_tokens: T, rows.
    """

    reads: AttentionReads | None
    mlp_work: tuple[FeedForwardWork | ExpertWork | None, ...]
    context: jax.Array
    num_tokens: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PassCounts:
    """Sums over a row's passes; two of the same target add up with `+`. L are the model's layers, or 0 of what is measured in none.

    Attributes:
        num_passes: `[B]` int32, passes that the row took part in.
        passes: `[B]` float32, the row's part of them: each pass is shared evenly by the rows that took part.
        tokens: `[B]` float32, rows of those passes, T each.
        context: `[B]` float32, tokens that stood before them.
        channels_computed: `[B,L]` float32, share of the channels that a token computes.
        channels_read: `[B,L]` float32, share that any token of the row computes.
        experts_per_token: `[B,L]` float32.
        distinct_experts: `[B,L]` float32, the row's part of those that passes read.
        sparse_passes: `[B]` float32, the row's part of the passes whose experts were measured: all but refreshes.
        dense_distinct_experts: `[B,L]` float32, likewise of those that dense passes over the rows of these would have read.
        model: The target's shape. Static.
        measured: For each layer what of it was measured: some of `"channels"`, `"experts"` (how many a token took) and
            `"distinct"` (how many a pass read). Static.
        weight_bytes: A weight's. Static.
        cache_bytes: A key's or value's number. Static.
    """

    num_passes: jax.Array
    passes: jax.Array
    tokens: jax.Array
    context: jax.Array
    channels_computed: jax.Array
    channels_read: jax.Array
    experts_per_token: jax.Array
    distinct_experts: jax.Array
    sparse_passes: jax.Array
    dense_distinct_experts: jax.Array
    model: ModelConfig = dataclasses.field(metadata={"static": True})
    measured: tuple[tuple[str, ...], ...] = dataclasses.field(metadata={"static": True})
    weight_bytes: int = dataclasses.field(metadata={"static": True})
    cache_bytes: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def zeros(
        cls, batch_size: int, *, model: ModelConfig, measured: tuple[tuple[str, ...], ...], weight_bytes: int, cache_bytes: int
    ) -> PassCounts:
        """No pass yet."""
        row = jnp.zeros((batch_size,), jnp.float32)
        channels, experts, distinct = (
            jnp.zeros((batch_size, len(measured) if any(kind in layer for layer in measured) else 0), jnp.float32)
            for kind in ("channels", "experts", "distinct")
        )
        return cls(
            num_passes=row.astype(jnp.int32),
            passes=row,
            tokens=row,
            context=row,
            channels_computed=channels,
            channels_read=channels,
            experts_per_token=experts,
            distinct_experts=distinct,
            sparse_passes=row,
            dense_distinct_experts=distinct,
            model=model,
            measured=measured,
            weight_bytes=weight_bytes,
            cache_bytes=cache_bytes,
        )

    def record(self, target_pass: TargetPass, *, active: jax.Array) -> PassCounts:
        """Counts one pass.

        Args:
            target_pass: The pass.
            active: `[B]` bool, rows that took part.
        """
        work, num_tokens = target_pass.mlp_work, target_pass.num_tokens
        part = active / jnp.maximum(active.sum(), 1)

        def stack(kind: str, name: str, whole: jax.Array) -> jax.Array:
            if not self._layers(kind):
                return jnp.zeros((active.shape[0], 0), jnp.float32)
            layers = [getattr(x, name, None) if kind in self.measured[i] else None for i, x in enumerate(work)]
            return jnp.stack([jnp.broadcast_to(whole if x is None else x, active.shape) for x in layers], axis=1)

        # A layer of which a pass keeps all (that of a refresh does) computes every channel, and takes the experts that the model does.
        one, moe = jnp.float32(1), self.model.moe
        taken = 0 if moe is None else moe.num_experts_per_token
        distinct = 0 if moe is None else expected_distinct_experts(moe.num_experts, taken, num_tokens * active.sum())
        mask = active[:, None]
        # A refresh reads the rows of many steps, and so the experts of many: it says nothing of a dense step.
        sparse_part = part * any("distinct" in kinds and x is not None for kinds, x in zip(self.measured, work, strict=True))
        counts = dict(
            num_passes=active,
            passes=part,
            tokens=active * num_tokens,
            context=active * target_pass.context,
            channels_computed=mask * stack("channels", "channels", one),
            channels_read=mask * stack("channels", "channels_read", one),
            experts_per_token=mask * stack("experts", "experts_per_token", jnp.float32(taken)),
            distinct_experts=part[:, None] * stack("distinct", "distinct_experts", jnp.float32(distinct)),
            sparse_passes=sparse_part,
            dense_distinct_experts=sparse_part[:, None] * stack("distinct", "dense_distinct_experts", jnp.float32(distinct)),
        )
        added = {name: getattr(self, name) + new.astype(getattr(self, name).dtype) for name, new in counts.items()}
        return dataclasses.replace(self, **added)

    def total(self) -> PassCounts:
        """The sum over rows, as one row."""
        return one_row(self, row_axes=self.num_passes.ndim)

    def __add__(self, other: PassCounts) -> PassCounts:
        """Row by row."""
        names = ("model", "measured", "weight_bytes", "cache_bytes")
        ours, theirs = ({name: getattr(x, name) for name in names} for x in (self, other))
        if ours != theirs:
            raise ValueError(f"PassCounts of different settings or models do not add: {ours} and {theirs}")
        return added(self, other)

    def step_work(self, reads: AttentionReads | None) -> PassWork:
        """Operations and bytes of the mean step: one pass, for as many rows as took part on average.

        Args:
            reads: What attention read; `None` where it was dense.
        """
        sums = _sums(self)
        channels = min(self._mean("channels", self.channels_computed, sums, 1.0), 1.0)  # sums of float32 may round up
        kept = Kept(
            keys=1.0 if reads is None else _keys(reads, self.model),
            channels=channels,
            channels_read=min(max(channels, self._mean("channels", self.channels_read, sums, 1.0)), 1.0),
            experts_per_token=self._mean("experts", self.experts_per_token, sums, None),
            distinct_experts=self._mean("distinct", self.distinct_experts, sums, None, by="passes"),
        )
        work = self._work(sums, sums.tokens, kept)
        if reads is None:
            return work
        scored = Work(0.0, float(total(reads.blocks_scored)) * reads.summary_bytes / sums.passes)
        return dataclasses.replace(work, attention=work.attention + scored)

    def dense_step_work(self, num_tokens: int) -> PassWork:
        """The same for dense passes over `num_tokens` rows.

        Distinct experts are those that the model would have taken for the rows of sparse passes; where nothing of experts was measured,
        those expected of tokens that choose evenly and apart.
        """
        sums = _sums(self)
        distinct = self._mean("distinct", self.dense_distinct_experts, sums, None, by="sparse_passes")
        return self._work(sums, num_tokens, Kept(distinct_experts=distinct))

    def summary(self, reads: AttentionReads | None, num_tokens: int) -> dict[str, Any]:
        """Plain numbers, for printing and JSON. Empty before the first pass.

        Args:
            reads: What attention read; `None` where it was dense.
            num_tokens: T of a dense step, G + 1.
        """
        if not int(total(self.num_passes)):
            return {}
        sums = _sums(self)
        found: dict[str, Any] = {}
        if self._layers("channels"):
            found["sparse_ffn"] = {
                "keep_ratio": self._mean("channels", self.channels_computed, sums, 1.0),
                "keep_ratio_per_layer": self._per_layer("channels", self.channels_computed, sums),
                "read_ratio": self._mean("channels", self.channels_read, sums, 1.0),
            }
        if self._layers("experts"):
            assert self.model.moe is not None
            each = self._mean("experts", self.experts_per_token, sums, 0.0)
            found["sparse_moe"] = {
                "keep_ratio": each / self.model.moe.num_experts_per_token,
                "experts_per_token": each,
                "experts_per_token_per_layer": self._per_layer("experts", self.experts_per_token, sums),
                "distinct_experts_per_pass": self._mean("distinct", self.distinct_experts, sums, 0.0, by="passes"),
                "dense_distinct_experts_per_pass": self._mean("distinct", self.dense_distinct_experts, sums, 0.0, by="sparse_passes"),
            }
        found["step_work"] = _side_by_side(self.step_work(reads), self.dense_step_work(num_tokens))
        return found

    def _layers(self, kind: str) -> list[int]:
        return [layer for layer, measured in enumerate(self.measured) if kind in measured]

    def _mean(self, kind: str, sums_bl: jax.Array, sums: _Sums, otherwise: Any, *, by: str = "rows") -> Any:
        """Over passes and the layers of a kind; `otherwise` where there is none."""
        layers = self._layers(kind)
        count = {"rows": sums.row_passes, "passes": sums.passes, "sparse_passes": sums.sparse_passes}[by]
        return float(total(sums_bl, behind=1)[np.array(layers)].mean()) / count if layers and count else otherwise

    def _per_layer(self, kind: str, sums_bl: jax.Array, sums: _Sums) -> list[float | None]:
        values = total(sums_bl, behind=1) / sums.row_passes
        return [float(value) if kind in measured else None for value, measured in zip(values, self.measured, strict=True)]

    def _work(self, sums: _Sums, num_tokens: float, kept: Kept) -> PassWork:
        sizes = dict(weight_bytes=self.weight_bytes, cache_bytes=self.cache_bytes)
        rows = sums.row_passes / sums.passes
        return pass_work(self.model, batch_size=rows, num_tokens=num_tokens, context=sums.context, kept=kept, **sizes)


@dataclasses.dataclass(frozen=True)
class _Sums:
    row_passes: float  # over rows
    passes: float  # of batches
    sparse_passes: float  # likewise
    tokens: float  # mean of a pass
    context: float  # mean


def _sums(counts: PassCounts) -> _Sums:
    row_passes = max(float(total(counts.num_passes)), 1.0)
    passes = float(total(counts.passes)) or 1.0
    return _Sums(
        row_passes,
        passes,
        float(total(counts.sparse_passes)),
        float(total(counts.tokens)) / row_passes,
        float(total(counts.context)) / row_passes,
    )


def _keys(reads: AttentionReads, model: ModelConfig) -> float:
    """The share kept in layers without a window."""
    layers = np.array([layer for layer in range(model.num_layers) if model.window(layer) is None], np.int32)
    read, there = (float(total(x[..., layers])) for x in (reads.blocks_read, reads.blocks_there))
    return min(read / there, 1.0) if there else 1.0


def _side_by_side(sparse: PassWork, dense: PassWork) -> dict[str, dict[str, float]]:
    """By component, and in total; components without work are left out."""
    pairs = {name: (work, dense.parts()[name]) for name, work in sparse.parts().items()} | {"total": (sparse.total, dense.total)}
    return {
        name: {"flops": ours.flops, "dense_flops": whole.flops, "bytes": ours.moved_bytes, "dense_bytes": whole.moved_bytes}
        for name, (ours, whole) in pairs.items()
        if whole.flops
    }
