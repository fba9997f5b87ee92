"""What a draft LM head is: scores for some of the target's tokens, and which tokens those are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from specjax.kernels.low_rank_argmax import low_rank_argmax

# Where a drafter's params hold the arrays of its head.
DRAFT_HEAD = "draft_head"
# What a head calls the array that says which tokens it knows.
TOKEN_IDS = "token_ids"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRankFactors:
    """What scores of all tokens are a product of, `up (down hidden)`.

    Attributes:
        hidden: `[..., D]`.
        down: `[R,D]`.
        up: `[V,R]`.
    """

    hidden: jax.Array
    down: jax.Array
    up: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadScores:
    """Scores of M of the V tokens. What is not among them has no chance of being drafted.

    Attributes:
        logits: `[..., M]` float32.
        token_ids: Which tokens they are, in the target's vocabulary: `[M]` int32, or `[..., M]` if every position has its own; no id twice.
            `None`: M is V, and column i is token i.
        factors: What `logits` are the product of, or `None`: who wants the best token alone need not have them all. XLA computes no scores
            that nobody reads.
    """

    logits: jax.Array
    token_ids: jax.Array | None = None
    factors: LowRankFactors | None = None

    def best(self, *, implementation: str = "auto") -> tuple[jax.Array, jax.Array]:
        """The arg-max of scores `[B,M]`, of equal ones the first.

        Args:
            implementation: Passed to `low_rank_argmax` where the scores have factors.

        Returns:
            Tokens `[B]` int32 of the target, and `[B]` bool whether the greatest score is finite; if not, the first column's token stands
            there.
        """
        if self.factors is not None:
            tokens, greatest = low_rank_argmax(self.factors.hidden, self.factors.down, self.factors.up, implementation=implementation)
            usable = jnp.isfinite(greatest)
            return jnp.where(usable, tokens, 0), usable
        columns = jnp.argmax(self.logits, axis=-1)
        # A NaN counts as the largest, so one pass over the scores says both which is and whether it is finite.
        usable = jnp.isfinite(jnp.take_along_axis(self.logits, columns[:, None], axis=-1)[:, 0])
        return self.tokens(jnp.where(usable, columns, 0)), usable

    def tokens(self, columns: jax.Array) -> jax.Array:
        """`[...]` int32 columns → `[...]` int32 token ids of the target."""
        if self.token_ids is None:
            return columns.astype(jnp.int32)
        if self.token_ids.ndim == 1:
            return jnp.take(self.token_ids, columns).astype(jnp.int32)
        return jnp.take_along_axis(self.token_ids, columns[..., None], axis=-1)[..., 0].astype(jnp.int32)

    def over_vocabulary(self, values: jax.Array, vocab_size: int) -> jax.Array:
        """`[..., M]`, one value a column → `[..., V]`: each where its token stands, zero elsewhere."""
        if self.token_ids is None:
            return values
        if self.token_ids.ndim == 1:
            return jnp.zeros((*values.shape[:-1], vocab_size), values.dtype).at[..., self.token_ids].set(values, unique_indices=True)
        flat, ids = values.reshape(-1, values.shape[-1]), self.token_ids.reshape(-1, values.shape[-1])
        rows = jnp.arange(flat.shape[0])[:, None]
        out = jnp.zeros((flat.shape[0], vocab_size), values.dtype).at[rows, ids].set(flat, unique_indices=True)
        return out.reshape(*values.shape[:-1], vocab_size)


class DraftHead(Protocol):
    """A frozen, hashable dataclass of static sizes; its arrays are an argument of every call.

    A head that is `shared` multiplies by an LM head that lies elsewhere, `shared_head`: the target's, or the draft model's own.
    """

    @property
    def shared(self) -> bool:
        """Whether `scores` needs `shared_head`."""
        ...

    def check_sizes(self, *, hidden_size: int, vocab_size: int) -> None:
        """Refuses sizes that do not go together.

        Args:
            hidden_size: D, width of the drafter's hidden state.
            vocab_size: V, the target's vocabulary.

        Raises:
            ValueError: Such as a rank above D.
        """
        ...

    def init_params(self, rng: jax.Array, *, hidden_size: int, vocab_size: int, dtype: jnp.dtype) -> dict[str, jax.Array]:
        """Random arrays; empty if all there is is shared.

        Args:
            rng: A typed key.
            hidden_size: D.
            vocab_size: V.
            dtype: Of the matrices; token ids are int32.
        """
        ...

    def scores(self, params: Mapping[str, jax.Array], hidden: jax.Array, shared_head: jax.Array | None = None) -> HeadScores:
        """Scores to draft from.

        Args:
            params: As from `init_params`.
            hidden: `[..., D]`, after the drafter's final norm.
            shared_head: `[V,D]`; read only by a head that is `shared`.
        """
        ...

    def training_scores(
        self, params: Mapping[str, jax.Array], hidden: jax.Array, shared_head: jax.Array | None = None
    ) -> tuple[HeadScores, ...]:
        """Every distribution that has to be brought close to the target's. Arguments as those of `scores`."""
        ...


def matrix(params: Mapping[str, Any], shared_head: jax.Array | None, *, shared: bool) -> jax.Array:
    """The full LM head `[V,D]`, from where it lies."""
    if not shared:
        return params["lm_head"]
    if shared_head is None:
        raise ValueError("this draft head has no LM head of its own: pass the one that it shares, such as the target's")
    return shared_head


def require_head(what: str, head: Any, *, hidden_size: int, vocab_size: int) -> None:
    """Refuses what is no draft head, or one whose sizes do not go together.

    Args:
        what: What to call it, such as `"Eagle3Config.head"`.
        head: What was given.
        hidden_size: D.
        vocab_size: V.

    Raises:
        ValueError: As said.
    """
    # A class in the place of its instance is an easy slip: it has every method, but no sizes.
    if isinstance(head, type) or not hasattr(head, "check_sizes"):
        raise ValueError(f"{what} must be a draft head such as FullHead() or LowRankHead(rank=64), got {head!r}")
    head.check_sizes(hidden_size=hidden_size, vocab_size=vocab_size)


def declare_head(module: nn.Module, head: DraftHead, *, hidden_size: int, vocab_size: int, dtype: jnp.dtype) -> Mapping[str, Any]:
    """The arrays of a network's draft head, as its parameter `draft_head`; no parameter if the head has none of its own.

    Args:
        module: The network, in its `setup`.
        head: The head.
        hidden_size: D.
        vocab_size: V.
        dtype: Of the matrices.
    """
    if not _shapes(head, hidden_size=hidden_size, vocab_size=vocab_size):
        return {}
    return module.param(DRAFT_HEAD, lambda rng: head.init_params(rng, hidden_size=hidden_size, vocab_size=vocab_size, dtype=dtype))


def check_head(head: DraftHead, params: Any, *, hidden_size: int, vocab_size: int, where: str = DRAFT_HEAD) -> None:
    """Refuses a head's arrays that do not fit it. Shapes may be those of tracers; token ids are checked where they have values.

    Args:
        head: The head.
        params: Its arrays.
        hidden_size: D.
        vocab_size: V.
        where: What to call the place of the arrays.

    Raises:
        ValueError: Sizes that do not go together, an array that is missing or of another shape, or token ids that are no part of the
            vocabulary.
    """
    require_head("the draft head", head, hidden_size=hidden_size, vocab_size=vocab_size)
    name_of_head, params = type(head).__name__, params if isinstance(params, Mapping) else {}
    for name, expected in _shapes(head, hidden_size=hidden_size, vocab_size=vocab_size).items():
        found = getattr(params.get(name), "shape", None)
        if found != expected.shape:
            what = "is missing" if found is None else f"has shape {list(found)}"
            raise ValueError(f"{name_of_head}: {where}.{name} should have shape {list(expected.shape)}, it {what}")
    ids = params.get(TOKEN_IDS)
    if ids is not None and not isinstance(ids, Tracer) and getattr(ids, "is_fully_addressable", True):
        check_token_ids(f"{name_of_head}: {where}.{TOKEN_IDS}", ids, vocab_size=vocab_size)


def check_token_ids(what: str, token_ids: Any, *, vocab_size: int) -> np.ndarray:
    """Refuses what are not different tokens of the vocabulary.

    Args:
        what: What to call them.
        token_ids: `[M]` integers.
        vocab_size: V.

    Returns:
        `[M]` int32.

    Raises:
        ValueError: No integers, a token outside `[0, V)`, or one that stands there twice.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{what} must be a list of token ids, got {ids.dtype} of shape {list(ids.shape)}")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(f"{what} must be tokens from 0 to {vocab_size - 1}, got {outside[0]}")
    # A count a token, not a sort: this is done at every call.
    counts = np.bincount(ids, minlength=vocab_size)
    if ids.size and counts.max() > 1:
        twice = np.argmax(counts > 1)
        raise ValueError(f"{what} must be different tokens, {twice} is there {counts[twice]} times")
    return ids.astype(np.int32)


def _shapes(head: DraftHead, *, hidden_size: int, vocab_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Of the head's own arrays."""
    return jax.eval_shape(
        lambda: head.init_params(jax.random.key(0), hidden_size=hidden_size, vocab_size=vocab_size, dtype=jnp.dtype(jnp.float32))
    )
