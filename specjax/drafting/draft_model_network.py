"""A draft model whose LM head was replaced, as one thing to save: the whole model, and beside it the draft head. arXiv:2605.10453."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafting.draft_model import DraftModel
from specjax.drafting.heads import DraftHead
from specjax.drafting.heads.draft_head import DRAFT_HEAD, require_head
from specjax.kernel_settings import Kernels
from specjax.model_config import ModelConfig
from specjax.models.kv_cache import KVCache
from specjax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModelConfig:
    """Sizes.

    Attributes:
        decoder: The draft model, with its own LM head: other draft heads can be made from it again.
        head: What drafts in the place of that.

    Raises:
        ValueError: A head that does not fit the draft model.
    """

    decoder: ModelConfig
    head: DraftHead

    def __post_init__(self) -> None:
        sizes = dict(hidden_size=self.decoder.hidden_size, vocab_size=self.decoder.vocab_size)
        require_head("DraftModelConfig.head", self.head, **sizes)


@dataclasses.dataclass(frozen=True)
class DraftModelNetwork:
    """Makes what a `DraftModel` is called with; it computes nothing itself. Params: the draft model's, and `draft_head` beside them.

    Attributes:
        config: Sizes.
        dtype: Compute dtype, and that of the cache; see `Transformer`.
        param_dtype: Dtype that `init_params` gives the parameters; token ids are int32 whatever it is.
        kernels: Which implementation of each operation runs.
    """

    config: DraftModelConfig
    dtype: Any = jnp.bfloat16
    param_dtype: Any = jnp.bfloat16
    kernels: Kernels = Kernels()

    def clone(self, **changes: Any) -> DraftModelNetwork:
        """Another one, as a Flax module's `clone`."""
        return dataclasses.replace(self, **changes)

    @property
    def model(self) -> Transformer:
        """The draft model."""
        options: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        return Transformer(self.config.decoder, **options, kernels=self.kernels)

    @property
    def drafter(self) -> DraftModel:
        """The drafter."""
        return DraftModel(self.model, self.config.head)

    def init_params(self, rng: jax.Array) -> dict:
        """Random parameters, see `Transformer.init_params`; without `draft_head` if the head has no arrays of its own."""
        model_rng, head_rng = jax.random.split(rng)
        decoder = self.config.decoder
        sizes: dict[str, Any] = dict(hidden_size=decoder.hidden_size, vocab_size=decoder.vocab_size)
        head_params = self.config.head.init_params(head_rng, **sizes, dtype=self.param_dtype)
        return self.model.init_params(model_rng) | ({DRAFT_HEAD: head_params} if head_params else {})

    def init_cache(self, *, batch_size: int, capacity: int) -> KVCache:
        """See `Transformer.init_cache`."""
        return self.model.init_cache(batch_size=batch_size, capacity=capacity)
