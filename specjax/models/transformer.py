"""One decoder for every family: pre-norm, grouped-query attention, rotary embedding, a gated feed-forward network or a mixture of experts.

Layers are unrolled, each with its own weights and cache arrays: `lax.scan` over stacked weights copies them. Python runs once for all
layers, passes and programs of a process in which shapes and settings are the same: a layer is a jitted function. Projections that read
the same input are one product: `qkv` is stored `[D,K,N/K+2,H]` (per key/value head: its query heads, its key, its value), `gate_up`
`[D,2,F]`. Those layouts shard over K and F without crossing a boundary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.kernel_settings import Kernels
from specjax.model_config import LENGTH_DEPENDENT_ROPE_TYPES, ModelConfig
from specjax.models.attention import Attend, Attention, attend_cached
from specjax.models.feed_forward import FeedForward
from specjax.models.kv_cache import KVCache, LayerCache
from specjax.models.layers import PROJECTION_INIT, PureModule, RMSNorm, head_product
from specjax.models.moe import ROUTER, MixtureOfExperts
from specjax.models.rope import rotary_angles
from specjax.models.sparse_attention import SparsePass
from specjax.sparsity.attention_reads import AttentionReads
from specjax.sparsity.sparse_ffn import FeedForwardWork
from specjax.sparsity.sparse_mlp import SparseMLP
from specjax.sparsity.sparse_moe import ExpertWork
from specjax.sparsity.sparsity_config import SparsityConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransformerOutput:
    """What one forward pass returns.

    Attributes:
        hidden: `[B,T,D]` after the final norm; `Transformer.logits` turns it into scores.
        cache: The cache with the T new positions written and `length` advanced by T.
        features: `[B,T,C*D]`, the residual stream at the C boundaries asked for, side by side; `None` if none were.
        reads: How much of the cache the pass read; `None` unless its attention is sparse.
        mlp_work: For each layer what a sparse pass kept of it; `None` where nothing is measured.
    """

    hidden: jax.Array
    cache: KVCache
    features: jax.Array | None
    reads: AttentionReads | None = None
    mlp_work: tuple[FeedForwardWork | ExpertWork | None, ...] = ()


class Transformer(PureModule):
    """The decoder. `apply({"params": p}, tokens, cache)` runs a pass, `apply(..., hidden, method="logits")` the LM head.

    Attributes:
        config: Sizes.
        dtype: Compute dtype: activations, and the cache that `init_cache` makes. Softmax, rotary angles, norms' statistics and logits are
            float32 whatever it is.
        param_dtype: Dtype that `init` gives the parameters. Parameters of another dtype than `dtype` are cast at each use; where speed
            counts store them in `dtype`.
        kernels: Which implementation of each operation runs. The derivative of experts is that of `"dense"`.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.bfloat16
    param_dtype: jnp.dtype = jnp.bfloat16
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        """Declares the parameters."""
        cfg = self.config
        self.embedding = self.param("embedding", PROJECTION_INIT, (cfg.vocab_size, cfg.hidden_size), self.param_dtype)
        self.blocks = [self._block(index, name=f"layer_{index}") for index in range(cfg.num_layers)]
        self.final_norm = RMSNorm(cfg.rms_norm_eps, self.param_dtype)
        if not cfg.tie_word_embeddings:
            self.lm_head = self.param("lm_head", PROJECTION_INIT, (cfg.vocab_size, cfg.hidden_size), self.param_dtype)

    def __call__(
        self,
        tokens: jax.Array,
        cache: KVCache,
        *,
        feature_layers: tuple[int, ...] = (),
        step_mask: jax.Array | None = None,
        sparsity: SparsityConfig | None = None,
        counted: jax.Array | None = None,
    ) -> TransformerOutput:
        """Runs T new positions a row.

        Args:
            tokens: `[B,T]` int32, standing at positions `cache.length ... cache.length + T - 1`.
            cache: Keys and values so far; its capacity must hold `length + T`.
            feature_layers: Boundaries 0 ... L at which to capture the residual stream: i is the input of layer i, L the output of the last
                layer before the final norm.
            step_mask: `[T,T]` bool among the new rows; `None` is causal.
            sparsity: What the pass leaves out. With sparse attention the cache must come from `prepare_cache`. `None` is dense.
            counted: `[B,T]` bool, rows that take part in what rows choose together and in what is measured; `None` is all. Of a dense pass
                it changes nothing.

        Returns:
            A `TransformerOutput`.

        Raises:
            ValueError: A feature layer outside 0 ... L, sparsity that does not fit the model, or a cache without what it needs.
        """
        cfg = self.config
        if any(not 0 <= index <= cfg.num_layers for index in feature_layers):
            raise ValueError(f"feature_layers must be boundaries from 0 to {cfg.num_layers}, got {feature_layers}")
        if sparsity is not None:
            sparsity.check(cfg)
        length = cache.length
        positions = length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        angles = rotary_angles(cfg.rope, cfg.head_dim, positions, cache.context_limit)
        x = jnp.take(self.embedding, tokens, axis=0, mode="clip").astype(self.dtype)
        options: dict[str, Any] = dict(step_mask=step_mask, kernels=self.kernels)
        sparse = None
        if sparsity is not None and sparsity.attention is not None:
            sparse = SparsePass(sparsity=sparsity, model=cfg, cache=cache, num_rows=tokens.shape[1], counted=counted, **options)
        captured: dict[int, jax.Array] = {}
        layers: list[LayerCache] = []
        all_work: list[FeedForwardWork | ExpertWork | None] = []
        # What modules declare or capture, they do themselves.
        by_modules = any(map(self.is_mutable_collection, ("params", "intermediates", ROUTER)))
        for index in range(cfg.num_layers):
            if index in feature_layers:
                captured[index] = x
            if sparse is not None and sparse.is_sparse(index):
                attend = sparse.attend(index, layers)
            else:
                attend = attend_cached(cache, index, window=cfg.window(index), **options)
            arguments = (x, angles, attend, SparseMLP.of_layer(sparsity, index, counted))
            if by_modules:
                x, kept, work = self.blocks[index](*arguments)
            else:
                x, kept, work = _run_block(self._block(index, parent=None), self.get_variable("params", f"layer_{index}"), *arguments)
            layers.append(kept)
            all_work.append(work)
        captured[cfg.num_layers] = x
        features = jnp.concatenate([captured[index] for index in feature_layers], axis=-1) if feature_layers else None
        cache = cache.with_layers(layers, length + tokens.shape[1])
        reads = None if sparse is None else sparse.reads(layers)
        hidden = self.final_norm(x)
        return TransformerOutput(hidden=hidden, cache=cache, features=features, reads=reads, mlp_work=tuple(all_work))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The LM head: `[..., D]` → `[..., V]` float32."""
        head = self.embedding if self.config.tie_word_embeddings else self.lm_head
        return head_product(hidden, head)

    def init_cache(self, *, batch_size: int, capacity: int, context_limit: jax.Array | None = None, sharding=None) -> KVCache:
        """An empty cache in the compute dtype.

        Args:
            batch_size: B, rows.
            capacity: S, slots a row.
            context_limit: `[B]` int32, tokens that each row may come to hold. Read by rotary embeddings whose frequencies depend on it
                (`dynamic`, `longrope`) and by nothing else; `None` is the capacity.
            sharding: Optional sharding of each `[B,K,S,H]` array.
        """
        cfg = self.config
        if cfg.rope.rope_type not in LENGTH_DEPENDENT_ROPE_TYPES:
            context_limit = None
        elif context_limit is None:
            context_limit = jnp.full((batch_size,), capacity, jnp.int32)
        return KVCache.zeros(
            num_layers=cfg.num_layers,
            batch_size=batch_size,
            num_kv_heads=cfg.num_kv_heads,
            capacity=capacity,
            head_dim=cfg.head_dim,
            dtype=self.dtype,
            context_limit=context_limit,
            sharding=sharding,
        )

    def init_params(self, rng: jax.Array) -> dict:
        """Random parameters (for tests and timing; untrained).

        Args:
            rng: A JAX key.

        Returns:
            The nested dict that `apply` takes under `"params"`.
        """
        tokens = jnp.zeros((1, 1), jnp.int32)
        return self.init(rng, tokens, self.init_cache(batch_size=1, capacity=1), method="_touch_all")["params"]

    def _block(self, layer: int, **flax_options: Any) -> _Block:
        return _Block(self.config, self.param_dtype, self.kernels, self.config.has_experts(layer), **flax_options)

    def _touch_all(self, tokens: jax.Array, cache: KVCache) -> jax.Array:
        return self.logits(self(tokens, cache).hidden)


class _Block(nn.Module):
    config: ModelConfig
    param_dtype: jnp.dtype
    kernels: Kernels
    routed: bool  # has experts

    @nn.compact
    def __call__(
        self, x: jax.Array, angles: tuple[jax.Array, jax.Array], attend: Attend, sparse_mlp: SparseMLP | None
    ) -> tuple[jax.Array, Any, FeedForwardWork | ExpertWork | None]:
        cfg, dtype = self.config, self.param_dtype
        normed = RMSNorm(cfg.rms_norm_eps, dtype, name="attention_norm").deferred(x)
        x, kept = Attention(cfg, dtype, self.kernels.projections, name="attention")(normed, angles, attend, x)
        normed = RMSNorm(cfg.rms_norm_eps, dtype, name="mlp_norm").deferred(x)
        if self.routed:
            out, work = MixtureOfExperts(cfg, dtype, self.kernels, name="mlp")(normed.value, sparse_mlp)
            return x + out, kept, work
        x, work = FeedForward(cfg, dtype, self.kernels, name="mlp")(normed, sparse_mlp, x)
        return x, kept, work


@functools.partial(jax.jit, static_argnums=0)
def _run_block(block: _Block, params: Any, x: jax.Array, angles: Any, attend: Attend, sparse_mlp: SparseMLP | None) -> Any:
    """A block as a function of its own: traced once for all layers, passes and programs in which its shapes are the same.

    A program is lowered with one function for them, which XLA inlines: what is compiled stays the same.
    """
    return block.apply({"params": params}, x, angles, attend, sparse_mlp)
