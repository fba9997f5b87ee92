"""What the target makes of a batch of texts: computed once, for all drafters that learn from it side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.model_config import ModelConfig
from specjax.models.transformer import Transformer
from specjax.training.row_groups import over_row_groups

# Attention scores of one layer that a pass may hold.
_MAX_SCORE_BYTES = 4 * 2**30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetArrays:
    """The arrays of the target that drafters use as they are.

    Attributes:
        embedding: `[V,D]`.
        lm_head: `[V,D]`.
    """

    embedding: jax.Array
    lm_head: jax.Array

    @classmethod
    def of(cls, config: ModelConfig, params: Any) -> TargetArrays:
        """Those of a target's params; nothing is copied."""
        return cls(embedding=params["embedding"], lm_head=params["embedding" if config.tie_word_embeddings else "lm_head"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetBatch:
    """Texts, and what the target made of them.

    Attributes:
        tokens: `[B,T]` int32, padded on the right.
        loss_mask: `[B,T]` bool: whether the prediction of this token counts.
        hidden: `[B,T,D]` after the target's final norm; the LM head makes of position t what is predicted of token t + 1.
        features: `[B,T,C*D]`, the residual stream at `feature_layers`; `None` if there are none.
        feature_layers: C boundaries of the target (see `Transformer.__call__`). Static.
    """

    tokens: jax.Array
    loss_mask: jax.Array
    hidden: jax.Array
    features: jax.Array | None
    feature_layers: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))

    def features_at(self, layers: tuple[int, ...]) -> jax.Array:
        """`[B,T,len(layers)*D]`: those of some of the boundaries, in the order asked for."""
        if self.features is None or not set(layers) <= set(self.feature_layers):
            raise ValueError(f"the batch has features of boundaries {self.feature_layers}, {layers} are needed")
        if layers == self.feature_layers:
            return self.features
        parts = jnp.split(self.features, len(self.feature_layers), axis=-1)
        return jnp.concatenate([parts[self.feature_layers.index(layer)] for layer in layers], axis=-1)


def target_outputs(
    target: Transformer, params: Any, tokens: jax.Array, loss_mask: jax.Array, *, feature_layers: tuple[int, ...] = ()
) -> TargetBatch:
    """One pass of the target over whole texts, without gradients and without logits.

    Beyond its results it holds the keys and values, and the attention scores of one layer: about 4 GiB, or one row's if that is more.

    Args:
        target: The target.
        params: Its params.
        tokens: `[B,T]` int32, padded on the right.
        loss_mask: `[B,T]` bool.
        feature_layers: Boundaries to capture; of several drafters the union.
    """
    hidden, features = whole_texts(target, params, tokens, feature_layers=feature_layers)
    return TargetBatch(tokens=tokens, loss_mask=loss_mask, hidden=hidden, features=features, feature_layers=feature_layers)


def whole_texts(
    model: Transformer, params: Any, tokens: jax.Array, *, feature_layers: tuple[int, ...] = ()
) -> tuple[jax.Array, jax.Array | None]:
    """`hidden [B,T,D]` and `features [B,T,C*D]` of a pass over whole texts; see `target_outputs`."""
    num_tokens = tokens.shape[1]

    def run(tokens: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        cache = model.init_cache(batch_size=tokens.shape[0], capacity=num_tokens)
        output = model.apply({"params": params}, tokens, cache, feature_layers=feature_layers)
        return output.hidden, output.features

    return over_row_groups(run, (tokens,), bytes_a_row=4 * model.config.num_heads * num_tokens**2, max_bytes=_MAX_SCORE_BYTES)
