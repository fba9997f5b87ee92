"""A feed-forward network that leaves channels out: those whose activated gate is small take no part in the up and down projections.

Lossy: what is verified is then the sparse target's text. arXiv:2512.21911, with the channels of CATS (arXiv:2404.08763): one is left out
where `|act(x W_gate)| < tau`. The gate itself is always whole, so a third of the weights is always read.

A threshold for each token is the specification and saves nothing, for the shapes stay. A fixed number of channels that rows share saves
reading: their rows of `up [F,D]` and `down [F,D]` are gathered. A channel's column of `gate_up [D,2,F]` cannot be, not with profit: it is D
numbers that stand 2 F apart, and memory is read in pieces longer than one of them. So the gathered form takes its own layout of the same
weights, `specjax.models.projections.split_gate_up`; with `gate_up` as it is stored it reads the whole of up and gathers `down` alone. XLA
copies gathered rows, and so moves three times their bytes; the kernels of `gathered_ffn` read them where they lie.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specjax.kernels.gated_unit import GatedUnit
from specjax.kernels.gathered_ffn import gathered_ffn
from specjax.kernels.largest import largest
from specjax.models.layers import product
from specjax.models.projections import Projections

if TYPE_CHECKING:
    from specjax.model_config import ModelConfig

SELECTIONS = ("top_k", "threshold")
SHARING = ("token", "rows", "batch")
SCORES = ("max", "mean", "first")
IMPLEMENTATIONS = ("auto", "masked", "gathered")
# A gathered number of channels is a multiple of this (16 bytes of bfloat16: what tensor cores read at once), or all of them.
CHANNEL_MULTIPLE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseFFN:
    """Which channels a feed-forward network keeps. Lossy, unless all are kept.

    Attributes:
        select: `"top_k"` keeps a fixed number of channels, those of the largest score; `"threshold"` those whose score is not below `tau`.
        keep: Share of channels that `"top_k"` keeps, above 0 and at most 1; the number is rounded up to a multiple of 8. For
            `"threshold"` nothing reads it but a calibration, which finds the tau that comes to it.
        tau: The thresholds, one a layer or one for all; what a calibration finds. `None` for `"top_k"`, and until they are known.
        per: Who shares a choice of channels: `"token"` nobody, `"rows"` the T tokens of a batch row, `"batch"` all B T tokens. Shared by
            `"batch"`, a row's output depends on the other rows.
        score: What channels of several tokens are compared by: the largest `|act(gate)|` among them, the mean, or that of the row's first
            token, which is already committed (over batch rows: the largest of the first tokens').
        implementation: `"masked"` computes all channels and drops some: the specification. `"gathered"`, for `"top_k"`, reads the rows
            of the kept ones. `"auto"` gathers where that reads less.

    Raises:
        ValueError: A choice that does not exist, a share outside (0, 1], thresholds that are no numbers of at least 0, or that are to be
            gathered or not to be read.
    """

    select: str = "top_k"
    keep: float = 0.4
    tau: float | tuple[float, ...] | None = None
    per: str = "rows"
    score: str = "max"
    implementation: str = "auto"

    def __post_init__(self) -> None:
        choices = {"select": SELECTIONS, "per": SHARING, "score": SCORES, "implementation": IMPLEMENTATIONS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"SparseFFN.{name} must be one of {known}, got {getattr(self, name)!r}")
        is_number = isinstance(self.keep, int | float) and not isinstance(self.keep, bool)
        if not (is_number and 0 < self.keep <= 1):
            raise ValueError(f"SparseFFN.keep must be above 0 and at most 1, got {self.keep!r}")
        if self.select == "threshold" and self.implementation == "gathered":
            raise ValueError("SparseFFN.implementation 'gathered' needs a fixed number of channels: select 'top_k', got 'threshold'")
        tau = self.tau if isinstance(self.tau, tuple) else () if self.tau is None else (self.tau,)
        if not all(isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < math.inf for x in tau):
            raise ValueError(f"SparseFFN.tau must be None, a finite number of at least 0, or a tuple of them, got {self.tau!r}")
        if self.tau is not None and self.select != "threshold":
            raise ValueError(f"SparseFFN.tau is read with select 'threshold' only, got select={self.select!r} and tau={self.tau!r}")

    def check(self, model: ModelConfig) -> None:
        """Whether it fits a model.

        Args:
            model: The target's shape.

        Raises:
            ValueError: Thresholds missing, or of another number of layers; or channels of experts chosen other than by a threshold for each
                token.
        """
        layers = model.num_layers
        with_experts = [layer for layer in range(layers) if model.has_experts(layer)]
        if self.exact:
            return
        if with_experts and (self.select != "threshold" or self.per != "token"):
            raise ValueError(
                "in a mixture of experts channels are left out by a threshold for each token: SparseFFN(select='threshold', "
                f"per='token'), got select={self.select!r}, per={self.per!r}; layers with experts: {with_experts}"
            )
        fits = len(self.tau) == layers if isinstance(self.tau, tuple) else self.tau is not None
        if self.select == "threshold" and not fits:
            raise ValueError(f"SparseFFN(select='threshold') needs tau, a number or a tuple of {layers}, one a layer, got {self.tau!r}")

    def layer_tau(self, layer: int) -> float | None:
        """A layer's threshold; `None` where none is read."""
        return self.tau[layer] if isinstance(self.tau, tuple) else self.tau

    @property
    def exact(self) -> bool:
        """Every channel is kept, whatever the weights: the dense network."""
        return self.select == "top_k" and self.keep == 1

    @property
    def sees_later_rows(self) -> bool:
        """What a token reads may depend on the draft tokens behind it: such a pass may not stand below a lossless one."""
        return not self.exact and self.per != "token" and self.score != "first"

    def num_channels(self, intermediate_size: int) -> int:
        """Channels that `"top_k"` keeps of F."""
        # Rounded first: 0.56 * 100 is 56.00000000000001 in floats, and would be rounded up to 64.
        wanted = -(-round(self.keep * intermediate_size, 6) // CHANNEL_MULTIPLE) * CHANNEL_MULTIPLE
        return min(int(wanted), intermediate_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FeedForwardWork:
    """What one layer's feed-forward network kept.

    Attributes:
        channels: `[B]` float32, share of the F channels that a token keeps, mean over the row's T tokens that count.
        channels_read: `[B]` float32, share that any of those tokens keeps: what would have to be read for the row.
    """

    channels: jax.Array
    channels_read: jax.Array


def sparse_feed_forward(
    x: jax.Array,
    weights: Projections,
    sparse: SparseFFN,
    *,
    unit: GatedUnit,
    tau: jax.Array | None = None,
    counted: jax.Array | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, FeedForwardWork]:
    """`unit(x W_gate, x W_up) W_down` over the kept channels.

    Args:
        x: `[B,T,D]`.
        weights: Of the network.
        sparse: Static.
        unit: The inner activation; a channel's size is that of its activated gate.
        tau: Scalar float32, for `"threshold"`.
        counted: `[B,T]` bool, tokens whose scores count in a shared choice, and in what is measured; `None` is all. A row of which none
            counts keeps what it likes.
        implementation: Passed to `largest` and `gathered_ffn`.

    Returns:
        `[B,T,D]`, and what was kept.

    Raises:
        ValueError: `"threshold"` without a tau, or an implementation that the layout of the weights has no rows for.
    """
    if sparse.select == "threshold" and tau is None:
        raise ValueError("SparseFFN(select='threshold') needs tau, the layer's threshold; got None")
    size, batch = weights.down.shape[0], x.shape[:2]
    contributing = _group(_contributing(sparse, counted, batch), sparse)
    gathered = sparse.select == "top_k" and _gathers(sparse, num_groups=contributing.shape[0], size=size)
    if gathered:
        weights.require_rows(implementation)
    up = None
    if gathered and weights.gate_up is None:
        activated = unit.activate(weights.gate_half(x))
    else:
        gate, up = weights.halves(x)
        activated = unit.activate(gate)
    scores = channel_scores(_group(activated, sparse), sparse, contributing)
    if gathered:
        channels = largest(scores, sparse.num_channels(size), implementation=implementation)
        kept = _mask(channels, size)
        up = None if up is None else _group(up, sparse)
        options: dict[str, Any] = dict(unit=unit, implementation=implementation)
        out = _gathered(_group(x, sparse), _group(activated, sparse), up, channels, weights, **options).reshape(x.shape)
    else:
        assert up is not None
        kept = keep_channels(scores, sparse, tau, implementation=implementation)
        inner = unit.combine(activated, up)
        out = weights.out(jnp.where(kept[:, None], _group(inner, sparse), 0).reshape(inner.shape))
    return out, _work(kept, sparse, counted, x.shape[:2])


def channel_scores(activated: jax.Array, sparse: SparseFFN, counted: jax.Array) -> jax.Array:
    """What channels are chosen by: the size of the activated gate, over the tokens that share a choice.

    Args:
        activated: `[groups,tokens,F]`.
        sparse: Static; its `score`.
        counted: `[groups,tokens]` bool, tokens whose sizes count.

    Returns:
        `[groups,F]` float32.
    """
    sizes = jnp.abs(activated.astype(jnp.float32))
    # A token that is not a number chooses for itself only: of the channels that others choose it makes what it must.
    counts = counted[..., None] & ~jnp.isnan(sizes) if activated.shape[1] > 1 else counted[..., None]
    sizes = jnp.where(counts, sizes, 0.0)
    if sparse.score == "mean":
        return sizes.sum(axis=1) / jnp.maximum(counted.sum(axis=1, keepdims=True), 1)
    return sizes.max(axis=1)


def keep_channels(scores: jax.Array, sparse: SparseFFN, tau: jax.Array | None = None, *, implementation: str = "auto") -> jax.Array:
    """Which channels stay. One whose score is no number stays, so that the fault shows.

    Args:
        scores: `[groups,F]` float32.
        sparse: Static.
        tau: Scalar, for `"threshold"`.
        implementation: Passed to `largest`.

    Returns:
        `[groups,F]` bool.
    """
    if sparse.select == "threshold":
        assert tau is not None
        return ~(scores < tau)
    return _mask(largest(scores, sparse.num_channels(scores.shape[-1]), implementation=implementation), scores.shape[-1])


def _mask(channels: jax.Array, size: int) -> jax.Array:
    """`[groups,k]` → `[groups,F]` bool."""
    rows = jnp.arange(channels.shape[0])[:, None]
    return jnp.zeros((channels.shape[0], size), bool).at[rows, channels].set(True)


def _gathers(sparse: SparseFFN, *, num_groups: int, size: int) -> bool:
    """Whether rows are gathered: if asked to, or if all groups' together are fewer than the network has."""
    if sparse.implementation == "auto":
        return num_groups * sparse.num_channels(size) < size
    return sparse.implementation == "gathered"


def _gathered(
    x: jax.Array,
    activated: jax.Array,
    up: jax.Array | None,
    channels: jax.Array,
    weights: Projections,
    *,
    unit: GatedUnit,
    implementation: str,
) -> jax.Array:
    """The up and down projections of each group's channels. x `[groups,tokens,D]`, channels `[groups,k]`."""
    if up is None:
        assert weights.up is not None
        bias = None if weights.gate_up_bias is None else weights.gate_up_bias[1]
        options: dict[str, Any] = dict(unit=unit, up_bias=bias, implementation=implementation)
        return weights.with_down_bias(gathered_ffn(x, activated, channels, weights.up, weights.down, **options))

    def of_group(activated: jax.Array, up: jax.Array, channels: jax.Array) -> jax.Array:
        return product(unit.combine(activated[:, channels], up[:, channels]), weights.down[channels])

    if x.shape[0] == 1:  # a batch of one product is a product of another kind to XLA
        return weights.with_down_bias(of_group(activated[0], up[0], channels[0]))[None]
    return weights.with_down_bias(jax.vmap(of_group)(activated, up, channels))


def _group(array: jax.Array, sparse: SparseFFN) -> jax.Array:
    """`[B,T,...]` → `[groups,tokens,...]`: tokens that share a choice stand together."""
    batch_size, num_tokens = array.shape[:2]
    num_groups = {"token": batch_size * num_tokens, "rows": batch_size, "batch": 1}[sparse.per]
    return array.reshape(num_groups, batch_size * num_tokens // num_groups, *array.shape[2:])


def _contributing(sparse: SparseFFN, counted: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """`[B,T]` bool: tokens whose scores count. Where nobody shares, each one's own."""
    if sparse.per == "token":
        return jnp.ones(shape, bool)
    contributing = jnp.ones(shape, bool) if counted is None else counted
    return contributing & (jnp.arange(shape[1]) == 0) if sparse.score == "first" else contributing


def _work(kept: jax.Array, sparse: SparseFFN, counted: jax.Array | None, shape: tuple[int, ...]) -> FeedForwardWork:
    """Shares a row, of `[groups,F]`."""
    if sparse.per != "token":
        if sparse.select == "top_k":  # known beforehand: nothing has to be counted in the step
            share = jnp.full(shape[:1], sparse.num_channels(kept.shape[-1]) / kept.shape[-1], jnp.float32)
        else:
            share = jnp.broadcast_to(kept.mean(axis=-1, dtype=jnp.float32), shape[:1])
        return FeedForwardWork(channels=share, channels_read=share)
    counted = jnp.ones(shape, bool) if counted is None else counted
    kept = kept.reshape(*shape, -1) & counted[..., None]
    computed = kept.mean(axis=-1, dtype=jnp.float32).sum(axis=1) / jnp.maximum(counted.sum(axis=1), 1)
    return FeedForwardWork(channels=computed, channels_read=kept.any(axis=1).mean(axis=-1, dtype=jnp.float32))
