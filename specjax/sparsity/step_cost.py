"""What a sparse pass costs beside a dense one, by the bytes that each must read: a stand-in for a measured time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax.model_config import ModelConfig
from specjax.sparsity.sparsity_config import SparsityConfig


def step_cost_from_bytes(sparsity: SparsityConfig, model: ModelConfig, params: Any, cache: Any, length: jax.Array) -> jax.Array:
    """Bytes that a pass with sparse attention reads over those of a dense one: weights, and the rows' keys and values.

    All experts of a mixture count as read, of an embedding that is not the LM head too nothing.

    Args:
        sparsity: What is left out; only its `attention` counts.
        model: The target's shape.
        params: Its params, for their sizes.
        cache: Its cache, for its dtype.
        length: `[B]` int32, the rows' contexts.

    Returns:
        Scalar float32.
    """
    sizes = {name: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part)) for name, part in params.items()}
    weights = sum(sizes.values()) - (0 if model.tie_word_embeddings else sizes["embedding"])
    token_bytes = 2 * model.num_kv_heads * model.head_dim * cache.keys[0].dtype.itemsize
    sparse = sparsity.attention_layers(model)
    dense_tokens = sparse_tokens = jnp.float32(0)
    for layer in range(model.num_layers):
        window = model.window(layer)
        seen = length if window is None else jnp.minimum(length, window)
        kept = length if sparsity.attention is None else sparsity.attention.budget_tokens(length)
        dense_tokens += seen.astype(jnp.float32).sum()
        sparse_tokens += (kept if layer in sparse else seen).astype(jnp.float32).sum()
    # As floats: beside arrays a Python integer becomes an int32, which bytes of a few GB exceed.
    weights, token_bytes = float(weights), float(token_bytes)
    return (weights + token_bytes * sparse_tokens) / (weights + token_bytes * dense_tokens)
