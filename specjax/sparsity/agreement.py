"""How far sparse passes are from dense ones along a given text: the share of equal next tokens, and the divergence of the distributions.

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
from jax import lax

from specjax.models.kv_cache import KVCache
from specjax.models.sparse_attention import dense_reads, prepare_cache
from specjax.models.transformer import Transformer
from specjax.sparsity.attention_reads import AttentionReads
from specjax.sparsity.pass_counts import PassCounts, TargetPass
from specjax.sparsity.sparsity_config import SparsityConfig
from specjax.verification_pass import counts_of_nothing

# Tokens of a context that one dense pass takes in.
_CHUNK = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """Sums over the positions of texts; two of the same settings add up with `+`.

    Attributes:
        num_tokens: Positions compared.
        num_equal: Those at which dense and sparse take the same token for the most likely.
        kl_sum: KL(dense || sparse) of the next token's distributions at temperature 1, summed, in nats.
        attention_reads: What sparse attention read; `None` without it.
        pass_counts: What the sparse passes kept.
        num_rows: G + 1.
    """

    num_tokens: int
    num_equal: int
    kl_sum: float
    attention_reads: AttentionReads | None
    pass_counts: PassCounts | None
    num_rows: int

    def __add__(self, other: Agreement) -> Agreement:
        """Both."""
        if self.num_rows != other.num_rows:
            raise ValueError(f"Agreements of steps of {self.num_rows} and of {other.num_rows} rows do not add")

        def both(ours: Any, theirs: Any) -> Any:
            return None if ours is None else ours.total() + theirs.total()

        return Agreement(
            num_tokens=self.num_tokens + other.num_tokens,
            num_equal=self.num_equal + other.num_equal,
            kl_sum=self.kl_sum + other.kl_sum,
            attention_reads=both(self.attention_reads, other.attention_reads),
            pass_counts=both(self.pass_counts, other.pass_counts),
            num_rows=self.num_rows,
        )

    @property
    def token_agreement(self) -> float:
        """The share of positions with the same most likely token."""
        return self.num_equal / self.num_tokens

    @property
    def mean_kl(self) -> float:
        """In nats a token."""
        return self.kl_sum / self.num_tokens

    def summary(self) -> dict[str, Any]:
        """Plain numbers, with what was kept and what a step costs, as in `Statistics.summary`."""
        found: dict[str, Any] = {"num_tokens": self.num_tokens, "token_agreement": self.token_agreement, "mean_kl": self.mean_kl}
        if self.attention_reads is not None:
            found["sparse_attention"] = self.attention_reads.summary()
        if self.pass_counts is not None:
            found |= self.pass_counts.summary(self.attention_reads, num_tokens=self.num_rows)
        return found


def measure_agreement(
    target: Transformer, target_params: Any, tokens: Any, *, sparsity: SparsityConfig, num_context: int, num_rows: int
) -> Agreement:
    """Forces texts on the dense and the sparse target.

    Example:
        >>> found = measure_agreement(target, params, tokens, sparsity=sparsity, num_context=4096, num_rows=6)
        >>> found.token_agreement, found.mean_kl

    Args:
        target: The target.
        target_params: Its params.
        tokens: `[B,N]` int, texts of equal length.
        sparsity: What the sparse passes leave out.
        num_context: Tokens that are taken in densely first, from 1 to N - num_rows.
        num_rows: Rows of a step, G + 1. What does not fill a step (with refreshes: the steps up to one) at the end is left out.

    Returns:
        The `Agreement`.

    Raises:
        ValueError: Texts that are too short, or sparsity that does not fit the target.
    """
    sparsity.check(target.config)
    tokens = jnp.asarray(tokens, jnp.int32)
    group = num_rows * max(sparsity.refresh_every, 1)
    if num_rows < 1 or num_context < 1 or tokens.ndim != 2 or tokens.shape[1] < num_context + group:
        raise ValueError(
            f"measure_agreement needs texts [B,N] of at least num_context + {group} tokens, got shape {list(tokens.shape)}, "
            f"num_context = {num_context} and num_rows = {num_rows}"
        )
    num_groups = (tokens.shape[1] - num_context) // group
    tokens = tokens[:, : num_context + num_groups * group]
    equal, kl, reads, counts = _compare(target, sparsity, num_context, num_rows, target_params, tokens)
    return Agreement(
        num_tokens=tokens.shape[0] * num_groups * group,
        num_equal=int(equal),
        kl_sum=float(kl),
        attention_reads=reads,
        pass_counts=counts,
        num_rows=num_rows,
    )


def read_context(target: Transformer, target_params: Any, tokens: jax.Array, *, capacity: int) -> KVCache:
    """A cache that has taken in texts densely, in chunks. For use inside `jit`.

    Args:
        target: The target.
        target_params: Its params.
        tokens: `[B,N]` int32.
        capacity: Its slots.
    """
    cache = target.init_cache(batch_size=tokens.shape[0], capacity=capacity)
    chunk = min(_CHUNK, tokens.shape[1])
    first = tokens.shape[1] % chunk
    if first:
        cache = target.apply({"params": target_params}, tokens[:, :first], cache).cache

    def take_in(index: jax.Array, cache: KVCache) -> KVCache:
        part = lax.dynamic_slice_in_dim(tokens, first + index * chunk, chunk, axis=1)
        return target.apply({"params": target_params}, part, cache).cache

    return lax.fori_loop(0, tokens.shape[1] // chunk, take_in, cache)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _compare(target: Transformer, sparsity: SparsityConfig, num_context: int, num_rows: int, params: Any, tokens: jax.Array) -> Any:
    attention = sparsity.attention
    block = 1 if attention is None else attention.block_size
    cache = read_context(target, params, tokens[:, :num_context], capacity=-(-tokens.shape[1] // block) * block)
    cache = prepare_cache(cache, sparsity, target.config)
    counts = counts_of_nothing(target, params, sparsity, cache)
    sums = (jnp.int32(0), jnp.float32(0), counts.get("attention_reads"), counts.get("pass_counts"))
    everyone = jnp.ones((tokens.shape[0],), bool)

    def log_probs(hidden: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(target.apply({"params": params}, hidden, method="logits"), axis=-1)

    def counted(sums: Any, reads: Any, work: Any, context: jax.Array, rows: int) -> Any:
        equal, kl, all_reads, all_counts = sums
        if all_counts is not None:
            one = TargetPass(reads=reads, mlp_work=work, context=context, num_tokens=rows)
            all_counts = all_counts.record(one, active=everyone)
        return equal, kl, None if all_reads is None else all_reads + reads, all_counts

    def both(dense: KVCache, sparse: KVCache, sums: Any) -> Any:
        """One step of the sparse target and of the dense one."""
        start = dense.length
        part = lax.dynamic_slice_in_dim(tokens, start[0], num_rows, axis=1)
        ours = target.apply({"params": params}, part, dense)
        theirs = target.apply({"params": params}, part, sparse, sparsity=sparsity)
        log_p, log_q = log_probs(ours.hidden), log_probs(theirs.hidden)
        equal = (log_p.argmax(axis=-1) == log_q.argmax(axis=-1)).sum(dtype=jnp.int32)
        kl = (jnp.exp(log_p) * (log_p - log_q)).sum()
        sums = (sums[0] + equal, sums[1] + kl, *sums[2:])
        return ours.cache, theirs.cache, counted(sums, theirs.reads, theirs.mlp_work, start, num_rows)

    def refreshed(dense: KVCache, sums: Any) -> Any:
        """A step that is dense, and leaves a dense cache."""
        rows = sparsity.refresh_rows(num_rows - 1)
        part = lax.dynamic_slice_in_dim(tokens, dense.length[0], num_rows, axis=1)
        start = dense.length + num_rows - rows
        dense = target.apply({"params": params}, part, dense).cache
        reads = None if attention is None else dense_reads(dense.with_length(start), attention, rows)
        sums = (sums[0] + part.size, *sums[1:])
        return dense, dense, counted(sums, reads, (None,) * target.config.num_layers, start, rows)

    def group(carry: Any, _: None) -> tuple[Any, None]:
        num_sparse = sparsity.refresh_every - 1 if sparsity.refresh_every else 1
        carry = lax.fori_loop(0, num_sparse, lambda _, carry: both(*carry), carry)
        if sparsity.refresh_every:
            carry = refreshed(carry[0], carry[2])
        return carry, None

    num_groups = (tokens.shape[1] - num_context) // (num_rows * max(sparsity.refresh_every, 1))
    (_, _, sums), _ = lax.scan(group, (cache, cache, sums), None, length=num_groups)
    return sums
