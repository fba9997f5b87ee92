"""EAGLE-3: a small decoder that drafts from the target's own hidden states. arXiv:2503.01840.

```
g  = fc([features of C boundaries of the target])       once a target position: `fuse`
h  = layer_0([norm(embedding of the next token), norm(g)]), layer_1, ...
logits = draft head of norm(h)                            for all of the vocabulary, or a part of it
next g = h                                               the recursion: no fc
```

Row t of the drafter pairs the target's features at position t with the token at position t + 1. Its positions count from 0 at the first
such row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads import HeadScores
from specjax.drafting.heads.draft_head import declare_head
from specjax.kernel_settings import Kernels
from specjax.kernels.few_row_linear import few_row_linear
from specjax.models.attention import Attend, Attention, attend_cached
from specjax.models.feed_forward import FeedForward
from specjax.models.kv_cache import KVCache
from specjax.models.layers import PROJECTION_INIT, PureModule, RMSNorm
from specjax.models.rope import rotary_angles
from specjax.models.transformer import Transformer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Eagle3Output:
    """What one pass of the drafter returns.

    Attributes:
        hidden: `[B,T,D]` after the final norm, for `Eagle3.scores`.
        next_state: `[B,T,D]`, what stands in the place of fused features in the next recursive step.
        cache: The cache with the T new positions written and `length` advanced by T.
    """

    hidden: jax.Array
    next_state: jax.Array
    cache: KVCache


class Eagle3(PureModule):
    """The drafter's network: `fuse`, `embed`, a pass, `scores`, each a pure function of `{"params": p}`.

    Example of one recursive step:
        >>> g = model.apply(variables, features, method="fuse")
        >>> output = model.apply(variables, model.apply(variables, tokens, target_embedding, method="embed"), g, cache)
        >>> scores = model.apply(variables, output.hidden[:, -1:], method="scores")
        >>> draft = scores.tokens(jnp.argmax(scores.logits, axis=-1))
        >>> g = output.next_state[:, -1:]

    Attributes:
        config: Sizes.
        dtype: Compute dtype, and that of the cache; see `Transformer`.
        param_dtype: Dtype that `init` gives the parameters; token ids are int32 whatever it is.
        kernels: Which implementation of each operation runs.
    """

    config: Eagle3Config
    dtype: jnp.dtype = jnp.bfloat16
    param_dtype: jnp.dtype = jnp.bfloat16
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        """Declares the parameters."""
        cfg, decoder, dtype = self.config, self.config.decoder, self.param_dtype
        width, fused_width = decoder.hidden_size, cfg.num_features * cfg.target_hidden_size

        def norm() -> RMSNorm:
            return RMSNorm(decoder.rms_norm_eps, dtype)

        if cfg.own_embedding:
            self.embedding = self.param("embedding", PROJECTION_INIT, (decoder.vocab_size, width), dtype)
        if cfg.norm_before_fc:
            self.input_norm = norm()
        if cfg.fc_norm:
            self.fc_norm = [norm() for _ in range(cfg.num_features)]
        self.fc = self.param("fc", PROJECTION_INIT, (fused_width, width), dtype)
        self.layers = [_Layer(cfg, dtype, self.kernels, name=f"layer_{index}") for index in range(decoder.num_layers)]
        self.final_norm = norm()
        self.draft_head = declare_head(self, cfg.head, hidden_size=width, vocab_size=decoder.vocab_size, dtype=dtype)

    def __call__(self, embeddings: jax.Array, state: jax.Array, cache: KVCache, *, step_mask: jax.Array | None = None) -> Eagle3Output:
        """Runs T new positions a row, which stand at `cache.length ... cache.length + T - 1`.

        Args:
            embeddings: `[B,T,D]` of the tokens that follow those whose state is given; from `embed`.
            state: `[B,T,D]`: fused features, or `next_state` of the step before.
            cache: Keys and values so far; its capacity must hold `length + T`. Rolling back is `cache.with_length`.
            step_mask: `[T,T]` bool among the new rows; `None` is causal.
        """
        decoder, length = self.config.decoder, cache.length
        options: dict[str, Any] = dict(step_mask=step_mask, kernels=self.kernels)
        attends = [attend_cached(cache, index, window=decoder.window(index), **options) for index in range(decoder.num_layers)]
        positions = length[:, None] + jnp.arange(state.shape[1], dtype=jnp.int32)
        hidden, next_state, kept = self.attend(embeddings, state, positions, attends, context_limit=cache.context_limit)
        return Eagle3Output(hidden=hidden, next_state=next_state, cache=cache.with_layers(kept, length + state.shape[1]))

    def attend(
        self,
        embeddings: jax.Array,
        state: jax.Array,
        positions: jax.Array,
        attends: Sequence[Attend],
        *,
        context_limit: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, list[Any]]:
        """A pass whose rows attend to whatever `attends` says: a cache (then it is `__call__`), or the rows of a training step.

        Args:
            embeddings: `[B,T,D]`.
            state: `[B,T,D]`.
            positions: `[B,T]` int32.
            attends: One for each layer.
            context_limit: `[B]` int32; see `KVCache`.

        Returns:
            `hidden` and `next_state` as in `Eagle3Output`, and what each layer's attention keeps.
        """
        decoder = self.config.decoder
        angles = rotary_angles(decoder.rope, decoder.head_dim, positions, context_limit)
        x, all_kept = state.astype(self.dtype), []
        for index, (layer, attend) in enumerate(zip(self.layers, attends, strict=True)):
            x, kept = layer(x, embeddings.astype(self.dtype) if index == 0 else None, angles, attend)
            all_kept.append(kept)
        hidden = self.final_norm(x)
        return hidden, hidden if self.config.norm_output else x, all_kept

    def fuse(self, features: jax.Array) -> jax.Array:
        """`[..., C*target_hidden_size]`, the target's features in the order of `feature_layers` → `[..., D]`."""
        cfg, features = self.config, features.astype(self.dtype)
        if cfg.fc_norm:
            parts = jnp.split(self.input_norm(features) if cfg.norm_before_fc else features, cfg.num_features, axis=-1)
            features = jnp.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1)
        elif cfg.norm_before_fc:
            return few_row_linear(self.input_norm.deferred(features), self.fc, implementation=self.kernels.projections)
        return few_row_linear(features, self.fc, implementation=self.kernels.projections)

    def embed(self, tokens: jax.Array, target_embedding: jax.Array | None = None) -> jax.Array:
        """`[B,T]` token ids of the target's vocabulary → `[B,T,D]`.

        Args:
            tokens: `[B,T]` int32.
            target_embedding: `[V,D]`, the target's own array; needed where `own_embedding` is false, not read otherwise.
        """
        table = self.embedding if self.config.own_embedding else target_embedding
        if table is None:
            raise ValueError("this drafter has no embedding of its own: pass the target's as target_embedding")
        return jnp.take(table, tokens, axis=0, mode="clip").astype(self.dtype)

    def scores(self, hidden: jax.Array, target_head: jax.Array | None = None) -> HeadScores:
        """`[..., D]` after the final norm → scores of the target's tokens.

        Args:
            hidden: `[..., D]`.
            target_head: `[V,D]`, the target's own array; needed where the head is shared, not read otherwise.
        """
        return self.config.head.scores(self.draft_head, hidden, target_head)

    def init_cache(self, *, batch_size: int, capacity: int, context_limit: jax.Array | None = None, sharding=None) -> KVCache:
        """An empty cache in the compute dtype; see `Transformer.init_cache`."""
        decoder = Transformer(self.config.decoder, dtype=self.dtype, parent=None)
        return decoder.init_cache(batch_size=batch_size, capacity=capacity, context_limit=context_limit, sharding=sharding)

    def init_params(self, rng: jax.Array) -> dict:
        """Random parameters (for tests and timing; untrained); the drafter's vocabulary is the first Vd tokens.

        Args:
            rng: A JAX key.

        Returns:
            The nested dict that `apply` takes under `"params"`.
        """
        features = jnp.zeros((1, 1, self.config.num_features * self.config.target_hidden_size), self.dtype)
        return self.init(rng, features, self.init_cache(batch_size=1, capacity=1), method="_touch_all")["params"]

    def _touch_all(self, features: jax.Array, cache: KVCache) -> jax.Array:
        state = self.fuse(features)
        return self(jnp.zeros_like(state), state, cache).hidden


class _Layer(nn.Module):
    config: Eagle3Config
    param_dtype: jnp.dtype
    kernels: Kernels

    @nn.compact
    def __call__(
        self, x: jax.Array, embeddings: jax.Array | None, angles: tuple[jax.Array, jax.Array], attend: Attend
    ) -> tuple[jax.Array, Any]:
        """Layer 0 attends over embedding and state side by side, the others over the residual stream alone (`embeddings` is `None`)."""
        decoder = self.config.decoder

        def norm(name: str) -> RMSNorm:
            return RMSNorm(decoder.rms_norm_eps, self.param_dtype, name=name)

        normed = norm("attention_norm").deferred(x)
        rows: Any = normed
        if embeddings is not None:
            x = normed.value if self.config.norm_before_residual else x
            rows = jnp.concatenate([norm("embedding_norm")(embeddings), normed.value], axis=-1)
        x, kept = Attention(decoder, self.param_dtype, self.kernels.projections, name="attention")(rows, angles, attend, x)
        mlp = FeedForward(decoder, self.param_dtype, self.kernels, name="mlp")
        return mlp(norm("mlp_norm").deferred(x), residual=x)[0], kept
