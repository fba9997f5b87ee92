"""A mixture of experts of which tokens take fewer: those that would weigh little are skipped, or the rows share a budget of experts.

Lossy: what is verified is then the sparse target's text. Skipping is arXiv:2512.21911's, which carries arXiv:2402.14800 (two experts a
token) to more of them: of a token's k experts the i lightest are skipped, at most m, where a ratio of their routing weights is below
beta_i, the median of that ratio over calibration texts; the largest i first. The budget is MoE-Spec's (arXiv:2602.16052): the experts are
ranked by their routing weight summed over the rows of a verification, and each token takes its best among the first few, so that fewer are
read.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specjax.checks import is_int

if TYPE_CHECKING:
    from specjax.model_config import ModelConfig, MoEConfig

RATIOS = ("share", "pair")
SHARING = ("rows", "batch")
SURVIVORS = ("family", "renormalise", "original")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseMoE:
    """Which experts tokens do without. Lossy, unless nothing is left out.

    Attributes:
        max_skipped: m, the most experts that a token may skip by the thresholds `beta`; below the number that it takes. 0 skips none. (A
            token skips m / 2 or somewhat more where beta are medians.)
        beta: The thresholds beta_1, beta_2, ..., at least m of them, for all layers or in a tuple for each; what a calibration finds.
            `None` where none are skipped, and until they are known.
        experts_per_token: Experts that every token takes, at most those of the model; `None` is the model's own number. Skipping starts
            from these.
        expert_budget: Experts that the tokens which share a choice may use between them; `None` is all. ("Shared experts" would be
            something else: those that some families run for every token.)
        per: Who shares the budget: `"rows"` the T tokens of a batch row, `"batch"` all B T tokens. Shared by `"batch"`, a row's output
            depends on the other rows.
        ratio: What beta_i bounds: `"share"`, the share of the i lightest in the weight of all k; `"pair"`, the heaviest of the i lightest
            over the heaviest of all (for two experts, that of arXiv:2402.14800).
        survivors: Weights of the experts that are left: `"renormalise"` scales them to the sum that the model's own choice has;
            `"original"` leaves them as they would be beside the skipped ones; `"family"` is the first where the family normalises its
            weights, and else the second.

    Raises:
        ValueError: A number out of range, or a choice that does not exist.
    """

    max_skipped: int = 0
    beta: tuple[float, ...] | tuple[tuple[float, ...], ...] | None = None
    experts_per_token: int | None = None
    expert_budget: int | None = None
    per: str = "rows"
    ratio: str = "share"
    survivors: str = "family"

    def __post_init__(self) -> None:
        choices = {"per": SHARING, "ratio": RATIOS, "survivors": SURVIVORS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"SparseMoE.{name} must be one of {known}, got {getattr(self, name)!r}")
        if not is_int(self.max_skipped, 0):
            raise ValueError(f"SparseMoE.max_skipped must be an int of at least 0, got {self.max_skipped!r}")
        for name in ("experts_per_token", "expert_budget"):
            value = getattr(self, name)
            if value is not None and not is_int(value, 1):
                raise ValueError(f"SparseMoE.{name} must be None or a positive int, got {value!r}")
        beta = () if self.beta is None else self.beta
        rows: Any = beta if isinstance(beta, tuple) and beta and isinstance(beta[0], tuple) else (beta,)
        if not all(isinstance(row, tuple) and all(map(_is_threshold, row)) for row in rows) or len({len(row) for row in rows}) > 1:
            raise ValueError(
                "SparseMoE.beta must be None, a tuple of finite numbers of at least 0, or one such tuple a layer, all of a length, "
                f"got {self.beta!r}"
            )

    def check(self, model: ModelConfig) -> None:
        """Whether it fits a model.

        Args:
            model: The target's shape.

        Raises:
            ValueError: A model without experts, more experts a token than the model's, all of them skipped, a budget that is less than one
                token takes or more than there are, or thresholds missing or of another number of layers.
        """
        layers = model.num_layers
        if model.moe is None or not any(model.has_experts(layer) for layer in range(layers)):
            raise ValueError(f"SparseMoE needs a model with experts, this one has none in its {layers} layers")
        self.check_experts(model.moe)
        least, beta = self.max_skipped, self.beta
        if not least:
            return
        per_layer = bool(beta) and isinstance(beta[0], tuple)
        rows: Any = () if beta is None else beta if per_layer else (beta,)
        if beta is None or len(rows) != (layers if per_layer else 1) or len(rows[0]) < least:
            raise ValueError(
                f"SparseMoE(max_skipped={least}) needs beta, {least} thresholds or a tuple of {layers} times as many, one a layer, "
                f"got {beta!r}"
            )

    def check_experts(self, moe: MoEConfig) -> None:
        """Whether its numbers of experts fit a mixture.

        Raises:
            ValueError: As `check`.
        """
        most, taken = moe.num_experts_per_token, self._taken(moe)
        if taken > most:
            raise ValueError(f"SparseMoE.experts_per_token must be at most the model's num_experts_per_token = {most}, got {taken}")
        if self.max_skipped >= taken:
            raise ValueError(f"SparseMoE.max_skipped must be below the {taken} experts that a token takes, got {self.max_skipped}")
        if self.expert_budget is not None and not taken <= self.expert_budget <= moe.num_experts:
            raise ValueError(
                f"SparseMoE.expert_budget must be from {taken}, which one token takes, to num_experts = {moe.num_experts}, "
                f"got {self.expert_budget}"
            )

    def layer_beta(self, layer: int) -> Any:
        """A layer's thresholds, a tuple of floats; `None` where none are read."""
        return self.beta[layer] if self.beta and isinstance(self.beta[0], tuple) else self.beta

    def exact(self, moe: MoEConfig) -> bool:
        """Nothing is left out, whatever the weights: the dense mixture."""
        return self.max_skipped == 0 and self._taken(moe) == moe.num_experts_per_token and not self._limits(moe)

    @property
    def sees_later_rows(self) -> bool:
        """What a token takes may depend on the draft tokens behind it: such a pass may not stand below a lossless one."""
        return self.expert_budget is not None

    def _taken(self, moe: MoEConfig) -> int:
        return moe.num_experts_per_token if self.experts_per_token is None else self.experts_per_token

    def _limits(self, moe: MoEConfig) -> bool:
        return self.expert_budget is not None and self.expert_budget < moe.num_experts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertChoice:
    """The experts of M tokens.

    Attributes:
        experts: `[M,C]` int32, from the heaviest down; one that is skipped is E, which stands for none.
        weights: `[M,C]` float32; of those that are skipped 0.
        own: `[M,k]` int32, those that the model itself would take, without anything left out; `None` where these are `experts`.
        may_skip: Some of `experts` may be E. Static.
    """

    experts: jax.Array
    weights: jax.Array
    own: jax.Array | None = None
    may_skip: bool = dataclasses.field(metadata={"static": True}, default=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWork:
    """What one layer's mixture of experts did.

    Attributes:
        distinct_experts: Scalar int32, experts that any of the pass's tokens took, those that do not count included: what had to be read.
        dense_distinct_experts: Scalar int32, likewise of what the model itself would have taken for the same tokens.
        experts_per_token: `[B]` float32, mean over the row's tokens that count.
        channels: `[B]` float32, share of the channels of its experts that a token computes, the same mean; `None` where it computes all.
    """

    distinct_experts: jax.Array
    dense_distinct_experts: jax.Array
    experts_per_token: jax.Array
    channels: jax.Array | None = None


def choose_experts(
    probs: jax.Array, moe: MoEConfig, sparse: SparseMoE, *, beta: jax.Array | None = None, counted: jax.Array | None = None
) -> ExpertChoice:
    """The experts that each token takes, and their weights.

    Args:
        probs: `[B,T,E]` float32, the router's softmax.
        moe: Static.
        sparse: Static; checked against `moe`.
        beta: `[at least m]` float32: beta_1, beta_2, ...; needed if `sparse.max_skipped` is not 0.
        counted: `[B,T]` bool, tokens by whose weights a budget's experts are ranked; `None` is all.

    Returns:
        Of B T tokens.

    Raises:
        ValueError: Settings that do not fit the model, or too few thresholds.
    """
    sparse.check_experts(moe)
    if sparse.max_skipped and (beta is None or beta.ndim != 1 or beta.shape[0] < sparse.max_skipped):
        got = None if beta is None else list(beta.shape)
        raise ValueError(f"SparseMoE(max_skipped={sparse.max_skipped}) needs beta, as many thresholds a layer; got {got}")
    taken = sparse._taken(moe)
    own_weights, own_experts = (part.reshape(-1, part.shape[-1]) for part in jax.lax.top_k(probs, moe.num_experts_per_token))
    own = own_weights.sum(axis=-1, keepdims=True)
    allowed = probs
    if sparse._limits(moe):
        allowed = jnp.where(_within_budget(probs, sparse, counted)[:, None], probs, -1.0)
    weights, experts = (part.reshape(-1, taken) for part in jax.lax.top_k(allowed, taken))
    if sparse.max_skipped:
        assert beta is not None
        ratios = skip_ratios(weights, sparse.max_skipped, ratio=sparse.ratio)
        numbers = jnp.arange(1, sparse.max_skipped + 1)
        num_skipped = jnp.max(jnp.where(ratios < beta[: sparse.max_skipped], numbers, 0), axis=-1, keepdims=True)
        kept = jnp.arange(taken) < taken - num_skipped
        weights, experts = jnp.where(kept, weights, 0.0), jnp.where(kept, experts, moe.num_experts)
    renormalises = moe.normalise if sparse.survivors == "family" else sparse.survivors == "renormalise"
    if moe.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) if renormalises else own)
    elif renormalises:
        weights = weights * (own / weights.sum(axis=-1, keepdims=True))
    return ExpertChoice(experts=experts, weights=weights, own=own_experts, may_skip=sparse.max_skipped > 0)


def skip_ratios(weights: jax.Array, max_skipped: int, *, ratio: str = "share") -> jax.Array:
    """By what a token decides to skip its i lightest experts, for i = 1 ... m.

    Args:
        weights: `[..., k]`, in descending order; of any scale.
        max_skipped: m, below k.
        ratio: As in `SparseMoE`.

    Returns:
        `[..., m]`.
    """
    if ratio == "pair":
        return weights[..., ::-1][..., :max_skipped] / weights[..., :1]
    lightest = jnp.cumsum(weights[..., ::-1], axis=-1)
    return lightest[..., :max_skipped] / weights.sum(axis=-1, keepdims=True)


def expert_work(
    choice: ExpertChoice,
    num_experts: int,
    shape: tuple[int, int],
    counted: jax.Array | None = None,
    channels: jax.Array | None = None,
) -> ExpertWork:
    """What a choice comes to.

    Args:
        choice: Of B T tokens.
        num_experts: E.
        shape: B and T.
        counted: `[B,T]` bool or `None`.
        channels: `[M]`, the share of their channels that each token's experts compute together; `None` is all.
    """

    def distinct(experts: jax.Array) -> jax.Array:
        used = jnp.zeros((num_experts,), bool).at[experts.reshape(-1)].set(True)  # E is out of bounds, and dropped
        return used.sum(dtype=jnp.int32)

    number = (choice.experts < num_experts).sum(axis=-1, dtype=jnp.int32).reshape(shape)
    counted = jnp.ones(shape, bool) if counted is None else counted

    def mean(values: jax.Array) -> jax.Array:
        return (jnp.where(counted, values.reshape(shape), 0).sum(axis=1) / jnp.maximum(counted.sum(axis=1), 1)).astype(jnp.float32)

    return ExpertWork(
        distinct_experts=distinct(choice.experts),
        dense_distinct_experts=distinct(choice.experts if choice.own is None else choice.own),
        experts_per_token=mean(number),
        channels=None if channels is None else mean(channels),
    )


def _within_budget(probs: jax.Array, sparse: SparseMoE, counted: jax.Array | None) -> jax.Array:
    """`[B or 1,E]` bool: the experts of the largest weight summed over the tokens that share."""
    counts = ~jnp.isnan(probs)  # a token that is not a number may not choose for the others
    if counted is not None:
        counts &= counted[..., None]
    summed = jnp.where(counts, probs, 0.0).sum(axis=1 if sparse.per == "rows" else (0, 1))
    summed = summed.reshape(-1, probs.shape[-1])
    chosen = jax.lax.top_k(summed, sparse.expert_budget or probs.shape[-1])[1]
    return jnp.zeros(summed.shape, bool).at[jnp.arange(summed.shape[0])[:, None], chosen].set(True)


def _is_threshold(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
