"""EAGLE-3's training-time test: the recursive steps of drafting, for every start row of a text at once. arXiv:2503.01840.

In a draft that starts at row t, step i stands at position t + i. It sees the rows 0 ... t, which are made of the target's features, and
what the draft's own steps 1 ... i wrote. So in step i, row t attends causally to the rows of step 0, and of each later step to row t alone:

```
          rows of step 0      step 1   ...  step i
start t   0 ... t             t        ...  t
```

The tokens are those of the text, as if each draft token had been accepted: only then does the next one matter.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from specjax.drafting.eagle3 import Eagle3
from specjax.kernels.rope_and_write import Heads
from specjax.models.attention import Attend
from specjax.models.layers import float32_einsum
from specjax.training.row_groups import over_row_groups

# Keys and values, each [B,T,K,H], of a layer's steps from 0 on.
Steps = tuple[tuple[jax.Array, jax.Array], ...]

# Attention scores that a step may hold. Backward there are several arrays of this size.
_MAX_SCORE_BYTES = 2**30
_ATTENDED = "attended"


def training_time_test(
    model: Eagle3,
    params: Any,
    features: jax.Array,
    tokens: jax.Array,
    *,
    num_steps: int,
    target_embedding: jax.Array | None = None,
    context_limit: jax.Array | None = None,
) -> jax.Array:
    """Hidden states of all steps: those that `Eagle3Drafter` would draft from, had it started at each row.

    Row t of step i is what predicts token t + 2 + i. Rows whose token t + 1 + i lies beyond the text hold nothing that counts.

    Args:
        model: The network.
        params: Its params.
        features: `[B,T,C*target_hidden_size]` of the target.
        tokens: `[B,T]` int32.
        num_steps: I, static: the first pass and I - 1 recursive steps.
        target_embedding: `[V,D]`; needed where the network has none of its own.
        context_limit: `[B]` int32, see `KVCache`; `None` is T.

    Returns:
        `[I,B,T,D]` after the final norm.
    """
    batch_size, num_rows = tokens.shape
    decoder, variables = model.config.decoder, {"params": params}
    context_limit = jnp.full((batch_size,), num_rows, jnp.int32) if context_limit is None else context_limit
    embeddings = model.apply(variables, tokens, target_embedding, method="embed")
    state = model.apply(variables, features, method="fuse")

    # Backward, a step's elementwise work is computed again. Kept are its projections (products without batch axes) and what its attention
    # gave, whose scores are computed again a group of rows at a time.
    policies = jax.checkpoint_policies
    kept_backward = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(_ATTENDED))

    @functools.partial(jax.checkpoint, policy=kept_backward)
    def run(
        variables: Any, embeddings: jax.Array, state: jax.Array, earlier: tuple[Steps, ...]
    ) -> tuple[jax.Array, jax.Array, tuple[Steps, ...]]:
        step = len(earlier[0])
        positions = jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32) + step, tokens.shape)
        attends = [_attend(steps, decoder.window(layer)) for layer, steps in enumerate(earlier)]
        hidden, state, kept = model.apply(variables, embeddings, state, positions, attends, context_limit=context_limit, method="attend")
        return hidden, state, tuple((*steps, new) for steps, new in zip(earlier, kept, strict=True))

    earlier: tuple[Steps, ...] = ((),) * decoder.num_layers
    all_hidden = []
    for step in range(num_steps):
        hidden, state, earlier = run(variables, rows_ahead(embeddings, step + 1), state, earlier)
        all_hidden.append(hidden)
    return jnp.stack(all_hidden)


def rows_ahead(x: jax.Array, distance: int) -> jax.Array:
    """`[B,T,...]`: at t what stood at t + distance; zeros beyond the end."""
    return jnp.pad(x[:, distance:], ((0, 0), (0, min(distance, x.shape[1])), *((0, 0),) * (x.ndim - 2)))


def _attend(earlier: Steps, window: int | None) -> Attend:
    """Attention of the next step: causal over the rows of step 0, and to its own row of the others."""

    def attend(heads: Heads, sinks: jax.Array | None) -> tuple[jax.Array, Any]:
        query, key, value = heads.rotated()
        steps, step = (*earlier, (key, value)), len(earlier)
        # A later step j of the same draft stands i - j positions back.
        own_row = [pair for j, pair in enumerate(steps) if j > 0 and (window is None or step - j < window)]
        run = jax.checkpoint(functools.partial(step_attention, step=step, window=window, sinks=sinks))
        bytes_a_row = 4 * query.shape[2] * query.shape[1] ** 2
        mixed = over_row_groups(run, (query, steps[0], own_row), bytes_a_row=bytes_a_row, max_bytes=_MAX_SCORE_BYTES)
        return checkpoint_name(mixed, _ATTENDED), (key, value)

    return attend


def step_attention(
    query: jax.Array,
    causal: tuple[jax.Array, jax.Array],
    own_row: Sequence[tuple[jax.Array, jax.Array]],
    *,
    step: int,
    window: int | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Softmax attention over two kinds of keys at once. Scores are float32, `[B,N,T,T]` whatever the number of steps.

    Args:
        query: `[B,T,N,H]`, standing at positions `t + step`.
        causal: Keys and values `[B,T,K,H]`; row t attends to rows 0 ... t.
        own_row: Keys and values `[B,T,K,H]`, of which row t attends to row t.
        step: Static.
        window: Latest positions that a row attends to, its own included; `None` is all.
        sinks: `[N]`, or `None`.

    Returns:
        `[B,T,N,H]`.
    """
    batch_size, num_rows, num_heads, head_dim = query.shape
    num_kv_heads = causal[0].shape[2]
    q_btkmh = query.reshape(batch_size, num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scale = head_dim**-0.5

    offset = jnp.arange(num_rows)[:, None] + step - jnp.arange(num_rows)[None, :]
    visible_ts = (offset >= step) & (offset < (window or num_rows + step))
    scores_bkmts = jnp.where(visible_ts, float32_einsum("btkmh,bskh->bkmts", q_btkmh, causal[0]) * scale, -jnp.inf)
    own_bkmt = [float32_einsum("btkmh,btkh->bkmt", q_btkmh, keys) * scale for keys, _ in own_row]
    sinks_km1 = [] if sinks is None else [sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1)]

    largest = jax.lax.stop_gradient(functools.reduce(jnp.maximum, [*own_bkmt, *sinks_km1], scores_bkmts.max(axis=-1)))
    weights_bkmts = jnp.exp(scores_bkmts - largest[..., None])
    weights_bkmt = [jnp.exp(scores - largest) for scores in own_bkmt]
    total_bkmt = functools.reduce(jnp.add, [*weights_bkmt, *(jnp.exp(sink - largest) for sink in sinks_km1)], weights_bkmts.sum(axis=-1))
    out_btkmh = float32_einsum("bkmts,bskh->btkmh", weights_bkmts.astype(query.dtype), causal[1])
    for weights, (_, values) in zip(weights_bkmt, own_row, strict=True):
        out_btkmh += jnp.moveaxis(weights, -1, 1)[..., None] * values.astype(jnp.float32)[:, :, :, None]
    out_btkmh /= jnp.moveaxis(total_bkmt, -1, 1)[..., None]
    return out_btkmh.reshape(query.shape).astype(query.dtype)
