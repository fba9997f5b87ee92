"""How far sparse passes are from dense ones along given texts: equal next tokens, divergence, the text's own likelihood, what was kept.

The text is forced on both: the dense and the sparse target each read it in steps of G + 1 rows behind a context that was taken in densely,
as if every draft had been accepted, and keep a cache each. So what sparse passes write stays in the sparse cache, as it does in decoding,
until a refresh. Nothing here depends on a drafter.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.capacity import whole_blocks, whole_chunks
from specjax.counts import added
from specjax.models.kv_cache import KVCache
from specjax.models.sparse_attention import dense_reads, prepare_cache
from specjax.models.transformer import Transformer
from specjax.sparsity.attention_reads import AttentionReads
from specjax.sparsity.pass_counts import PassCounts, TargetPass
from specjax.sparsity.sparsity_config import SparsityConfig
from specjax.verification_pass import counts_of_nothing

# Tokens of a context that one dense pass takes in.
_CHUNK = 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """Sums over the tokens that passes predict; two of the same settings add up with `+`.

    Attributes:
        num_tokens: int32, tokens predicted.
        num_equal: int32, those for which dense and sparse take the same token for the most likely.
        kl_sum: float32, KL(dense || sparse) of the distributions at temperature 1, in nats.
        dense_nll_sum: float32, -log p of the text's own token under the dense target, in nats.
        sparse_nll_sum: float32, likewise under the sparse one.
        attention_reads: What sparse attention read; `None` without it.
        pass_counts: What the sparse passes kept; `None` where nothing is left out.
        num_rows: G + 1. Static.
    """

    num_tokens: jax.Array
    num_equal: jax.Array
    kl_sum: jax.Array
    dense_nll_sum: jax.Array
    sparse_nll_sum: jax.Array
    attention_reads: AttentionReads | None
    pass_counts: PassCounts | None
    num_rows: int = dataclasses.field(metadata={"static": True})

    def __add__(self, other: Agreement) -> Agreement:
        """Both."""
        if self.num_rows != other.num_rows:
            raise ValueError(f"Agreements of steps of {self.num_rows} and of {other.num_rows} rows do not add")

        def both(ours: Any, theirs: Any) -> Any:  # what can refuse other settings adds itself
            return ours + theirs if isinstance(ours, AttentionReads | PassCounts) else added(ours, theirs)

        return jax.tree.map(both, self, other, is_leaf=lambda x: isinstance(x, AttentionReads | PassCounts))

    @property
    def token_agreement(self) -> float:
        """The share of tokens for which both take the same one for the most likely."""
        return self._mean(self.num_equal)

    @property
    def mean_kl(self) -> float:
        """In nats a token."""
        return self._mean(self.kl_sum)

    @property
    def dense_nll(self) -> float:
        """Of the text under the dense target, in nats a token."""
        return self._mean(self.dense_nll_sum)

    @property
    def sparse_nll(self) -> float:
        """Of the text under the sparse target, in nats a token."""
        return self._mean(self.sparse_nll_sum)

    def summary(self) -> dict[str, Any]:
        """Plain numbers, with what was kept and what a step costs, as in `Statistics.summary`."""
        names = ("token_agreement", "mean_kl", "dense_nll", "sparse_nll")
        found: dict[str, Any] = {"num_tokens": int(self.num_tokens), **{name: getattr(self, name) for name in names}}
        if self.attention_reads is not None:
            found["sparse_attention"] = self.attention_reads.summary()
        if self.pass_counts is not None:
            found |= self.pass_counts.summary(self.attention_reads, num_tokens=self.num_rows)
        return found

    def _mean(self, total: jax.Array) -> float:
        return float(total) / int(self.num_tokens)


def measure_agreement(
    target: Transformer,
    target_params: Any,
    tokens: Any,
    *,
    sparsity: SparsityConfig,
    num_context: Any,
    num_rows: int,
    lengths: Any = None,
    cache: KVCache | None = None,
) -> Agreement:
    """Forces texts on the dense and the sparse target.

    A text's tokens are predicted from its context on, without the first of them: that one follows from the dense context. Texts of any
    lengths run one program, compiled for B and N.

    Example:
        >>> found = measure_agreement(target, params, tokens, sparsity=sparsity, num_context=4096, num_rows=6)
        >>> found.token_agreement, found.mean_kl

    Args:
        target: The target.
        target_params: Its params.
        tokens: `[B,N]` int, texts with any padding behind them.
        sparsity: What the sparse passes leave out.
        num_context: An int or `[B]`: tokens of each text that are taken in densely first, from 1 to its length - 2. Of a text that has
            one more alone nothing is predicted, and nothing counts; not all may be such.
        num_rows: Rows of a step, G + 1. The last step of a text may have fewer that count.
        lengths: `[B]` int, tokens of each text; `None` is N.
        cache: Has taken in the contexts densely already, whatever stands behind them, and has room for the texts and a step; whole blocks
            where attention is sparse. `None`: they are taken in here.

    Returns:
        The `Agreement`, on the host.

    Raises:
        ValueError: Texts with nothing to predict, a cache that is too small, or sparsity that does not fit the target.
    """
    sparsity.check(target.config)
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 2 or num_rows < 1:
        raise ValueError(f"measure_agreement needs texts [B,N] and num_rows >= 1, got shape {list(tokens.shape)} and num_rows = {num_rows}")
    batch_size, width = tokens.shape
    starts, ends = (np.broadcast_to(np.asarray(x, np.int32), (batch_size,)) for x in (num_context, width if lengths is None else lengths))
    if (starts < 1).any() or (starts + 1 > ends).any() or (starts + 2 > ends).all() or (ends > width).any():
        raise ValueError(
            f"measure_agreement needs contexts of at least 1 token, and texts of at least num_context + 1 tokens (and one of num_context "
            f"+ 2) within their {width} columns, got num_context = {starts.tolist()} and lengths = {ends.tolist()}"
        )
    if cache is not None and cache.capacity < int(ends.max()) + num_rows:
        raise ValueError(f"measure_agreement needs a cache of {int(ends.max()) + num_rows} slots for these texts, got {cache.capacity}")
    return jax.device_get(_compare(target, sparsity, num_rows, target_params, tokens, starts, ends, cache))


def read_context(
    target: Transformer, target_params: Any, tokens: jax.Array, *, sparsity: SparsityConfig, num_context: Any, lengths: Any, spare: int = 0
) -> KVCache:
    """A cache for sparse passes that has taken in the beginnings of texts densely, in chunks. For use inside `jit`.

    Args:
        target: The target.
        target_params: Its params.
        tokens: `[B,N]` int32.
        sparsity: What the passes leave out.
        num_context: `[B]` int32, tokens to take in.
        lengths: `[B]` int32, tokens that each row will come to hold.
        spare: Slots behind the texts, for a last pass that reaches beyond them.
    """
    batch_size, width = tokens.shape
    chunk = min(_CHUNK, width)
    capacity = whole_blocks(max(whole_chunks(width, chunk), width + spare), sparsity)
    cache = target.init_cache(batch_size=batch_size, capacity=capacity, context_limit=lengths)

    def take_in(cache: KVCache) -> KVCache:
        return target.apply({"params": target_params}, rows_from(tokens, cache.length, chunk), cache).cache

    cache = lax.while_loop(lambda cache: cache.length[0] < num_context.max(), take_in, cache)
    # What chunks wrote beyond a context is written again before anything sees it.
    return prepare_cache(cache.with_length(num_context), sparsity, target.config)


def rows_from(tokens: jax.Array, start: jax.Array, num_rows: int) -> jax.Array:
    """`[B,num_rows]`: of `tokens` `[B,N]` those from `start` `[B]` on; beyond the end the last one, again and again."""
    return jnp.take_along_axis(tokens, start[:, None] + jnp.arange(num_rows), axis=1, mode="clip")


@partial(jax.jit, static_argnums=(0, 1, 2))
def _compare(
    target: Transformer,
    sparsity: SparsityConfig,
    num_rows: int,
    params: Any,
    tokens: jax.Array,
    num_context: jax.Array,
    lengths: jax.Array,
    cache: KVCache | None,
) -> Agreement:
    if cache is None:
        cache = read_context(target, params, tokens, sparsity=sparsity, num_context=num_context, lengths=lengths, spare=num_rows)
    else:
        cache = prepare_cache(cache.with_length(num_context), sparsity, target.config)
    counts = {"attention_reads": None, "pass_counts": None} | counts_of_nothing(target, params, sparsity, cache)
    none = jnp.float32(0)
    sums = Agreement(
        num_tokens=jnp.int32(0), num_equal=jnp.int32(0), kl_sum=none, dense_nll_sum=none, sparse_nll_sum=none, **counts, num_rows=num_rows
    )

    def log_probs(hidden: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(target.apply({"params": params}, hidden, method="logits"), axis=-1)

    def step(_: Any, carry: Any, *, refresh: bool = False) -> Any:
        """One step of both; a refresh is dense, and leaves a dense cache."""
        dense, sparse, sums = carry
        start = dense.length
        predicts = start[:, None] + 1 + jnp.arange(num_rows) < lengths[:, None]
        active = predicts[:, 0]
        part, following = rows_from(tokens, start, num_rows), rows_from(tokens, start + 1, num_rows)
        ours = theirs = target.apply({"params": params}, part, dense)
        if not (refresh or sparsity.is_dense):
            theirs = target.apply({"params": params}, part, sparse, sparsity=sparsity, counted=predicts)
        log_p, log_q = log_probs(ours.hidden), log_probs(theirs.hidden)

        def total(values: jax.Array) -> jax.Array:
            return jnp.where(predicts, values, 0).sum(dtype=values.dtype)

        def nll(log_probs: jax.Array) -> jax.Array:
            return -jnp.take_along_axis(log_probs, following[..., None], axis=-1)[..., 0]

        sums = dataclasses.replace(
            sums,
            num_tokens=sums.num_tokens + total(predicts.astype(jnp.int32)),
            num_equal=sums.num_equal + total((log_p.argmax(axis=-1) == log_q.argmax(axis=-1)).astype(jnp.int32)),
            kl_sum=sums.kl_sum + total((jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)),
            dense_nll_sum=sums.dense_nll_sum + total(nll(log_p)),
            sparse_nll_sum=sums.sparse_nll_sum + total(nll(log_q)),
        )
        if refresh:
            one = refresh_pass(dense)
        else:
            one = TargetPass(reads=theirs.reads, mlp_work=theirs.mlp_work, context=start, num_tokens=num_rows)
        # A text that has come to its end stays where it is: what its rows still write, nothing reads.
        end = start + jnp.where(active, num_rows, 0)
        return ours.cache.with_length(end), theirs.cache.with_length(end), _counted(sums, one, active)

    def refresh_pass(dense: KVCache) -> TargetPass:
        rows = sparsity.refresh_rows(num_rows - 1)
        start = dense.length + num_rows - rows
        reads = None if sparsity.attention is None else dense_reads(dense.with_length(start), sparsity.attention, rows, target.config)
        return TargetPass(reads=reads, mlp_work=(None,) * target.config.num_layers, context=start, num_tokens=rows)

    def up_to_refresh(carry: Any) -> Any:
        if not sparsity.refresh_every:
            return step(0, carry)
        return step(0, lax.fori_loop(0, sparsity.refresh_every - 1, step, carry), refresh=True)

    *_, sums = lax.while_loop(lambda carry: (carry[0].length + 1 < lengths).any(), up_to_refresh, (cache, cache, sums))
    reads, counts = (None if x is None else x.total() for x in (sums.attention_reads, sums.pass_counts))
    return dataclasses.replace(sums, attention_reads=reads, pass_counts=counts)


def _counted(sums: Agreement, one: TargetPass, active: jax.Array) -> Agreement:
    reads, counts = sums.attention_reads, sums.pass_counts
    return dataclasses.replace(
        sums,
        attention_reads=None if reads is None or one.reads is None else reads + one.reads.of_rows(active),
        pass_counts=None if counts is None else counts.record(one, active=active),
    )
