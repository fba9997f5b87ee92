"""What a sparse target says along a given text, beside the dense one: the next tokens that agree, the KL divergence, the likelihood.

The text's beginning is taken in densely, as a prompt is; from there on both targets go over the same tokens, in passes of as many rows as a
verification has, the sparse one over the keys and values that its own passes wrote.

`specjax.sparsity.agreement` says the same of texts of equal lengths. Here lengths are traced, so that the answers to many prompts run one
program, and the text's own likelihood is measured too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import SparsityConfig, Transformer
from specjax.capacity import bucket
from specjax.models.sparse_attention import prepare_cache

_PREFILL_CHUNK = 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForcedSums:
    """Sums over predicted tokens; two add up with `+`.

    Attributes:
        num_tokens: How many.
        agreed: Those whose most probable token is the same in both.
        kl: KL(dense, sparse), nats.
        nll_dense: -log p of the text's own token under the dense target, nats.
        nll_sparse: Likewise under the sparse one.
    """

    num_tokens: Any
    agreed: Any
    kl: Any
    nll_dense: Any
    nll_sparse: Any

    def __add__(self, other: ForcedSums) -> ForcedSums:
        """Both."""
        return jax.tree.map(lambda ours, theirs: ours + theirs, self, other)

    def mean(self, name: str) -> float:
        """One of the sums over the number of tokens."""
        return float(getattr(self, name)) / max(float(self.num_tokens), 1.0)


def teacher_forced(
    target: Transformer, params: Any, sparsity: SparsityConfig, tokens: Sequence[int], *, start: int, num_rows: int, longest: int
) -> ForcedSums:
    """Compares along one text. All texts of one `longest` run one program.

    Args:
        target: The target.
        params: Its params.
        sparsity: What the sparse passes leave out.
        tokens: The text.
        start: Tokens of it that are taken in densely, at least 1; those from `start + 1` on are predicted.
        num_rows: Rows a pass, G + 1.
        longest: Tokens that any text may have.

    Raises:
        ValueError: Nothing to predict, or a text that is too long.
    """
    if not 1 <= start < len(tokens) - 1:
        raise ValueError(f"there is nothing to predict in {len(tokens)} tokens from token {start} + 1 on")
    if len(tokens) > longest:
        raise ValueError(f"a text has {len(tokens)} tokens, more than longest = {longest}")
    chunk = min(_PREFILL_CHUNK, bucket(longest))
    block = 1 if sparsity.attention is None else sparsity.attention.block_size
    # Room for the last chunk, and for the last steps up to a refresh, which are written whole.
    behind = max(chunk, num_rows * max(sparsity.refresh_every, 1))
    capacity = -(-(bucket(longest) + behind) // block) * block
    padded = np.zeros((1, capacity), np.int32)
    padded[0, : len(tokens)] = tokens
    options = dict(target=target, sparsity=sparsity, num_rows=num_rows, chunk=chunk)
    return jax.device_get(_compare(params, padded, np.int32(start), np.int32(len(tokens)), **options))


@functools.partial(jax.jit, static_argnames=("target", "sparsity", "num_rows", "chunk"))
def _compare(
    params: Any,
    tokens: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    target: Transformer,
    sparsity: SparsityConfig,
    num_rows: int,
    chunk: int,
) -> ForcedSums:
    def run(cache, at, count, **options):
        rows = lax.dynamic_slice_in_dim(tokens, at, count, axis=1)
        return target.apply({"params": params}, rows, cache, **options)

    def log_probs(hidden):
        return jax.nn.log_softmax(target.apply({"params": params}, hidden, method="logits")[0])

    def prefill(carry):
        at, cache = carry
        return at + chunk, run(cache, at, chunk).cache

    empty = target.init_cache(batch_size=1, capacity=tokens.shape[1])
    _, cache = lax.while_loop(lambda carry: carry[0] < start, prefill, (jnp.int32(0), empty))
    # What chunks wrote beyond `start` is written again before anything sees it.
    cache = cache.with_length(start[None])

    def step(_, carry, *, dense_step=False):
        at, dense, sparse, sums = carry
        theirs = run(dense, at, num_rows)
        ours = theirs if dense_step else run(sparse, at, num_rows, sparsity=sparsity)
        q, p = log_probs(ours.hidden), log_probs(theirs.hidden)
        following = lax.dynamic_slice_in_dim(tokens, at + 1, num_rows, axis=1)[0]
        counted = at + 1 + jnp.arange(num_rows) < length

        def total(values):
            return jnp.where(counted, values, 0).sum().astype(jnp.float32)

        def nll(log_probs):
            return -jnp.take_along_axis(log_probs, following[:, None], axis=1)[:, 0]

        found = ForcedSums(
            num_tokens=total(counted),
            agreed=total(p.argmax(axis=-1) == q.argmax(axis=-1)),
            kl=total((jnp.exp(p) * (p - q)).sum(axis=-1)),
            nll_dense=total(nll(p)),
            nll_sparse=total(nll(q)),
        )
        return at + num_rows, theirs.cache, ours.cache, sums + found

    def up_to_refresh(carry):
        every = sparsity.refresh_every
        if not every:
            return step(0, carry)
        return step(0, lax.fori_loop(0, every - 1, step, carry), dense_step=True)

    none = ForcedSums(*(jnp.float32(0) for _ in dataclasses.fields(ForcedSums)))
    cache = prepare_cache(cache, sparsity, target.config)
    return lax.while_loop(lambda carry: carry[0] + 1 < length, up_to_refresh, (start, cache, cache, none))[-1]
