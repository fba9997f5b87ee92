"""How much device memory a run will take, said before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax

from specjax.capacity import whole_blocks
from specjax.models.sparse_attention import prepare_cache
from specjax.sparsity.sparsity_config import SparsityConfig

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose.

    Attributes:
        params_bytes: Weights of all models.
        cache_bytes: Keys and values of all models, and the block summaries of sparse attention. They are held twice where a loop may not
            overwrite its input.
        available_bytes: What the device gives this process; `None` where it does not say.
    """

    params_bytes: int
    cache_bytes: int
    available_bytes: int | None

    def describe(self) -> str:
        """One line for people."""
        text = f"memory: weights {self.params_bytes / _GIB:.2f} GiB, key/value caches {self.cache_bytes / _GIB:.2f} GiB"
        return text if self.available_bytes is None else f"{text}, of {self.available_bytes / _GIB:.1f} GiB"

    @property
    def fits(self) -> bool:
        """Whether weights and caches are no more than the device has, as far as it says."""
        return self.available_bytes is None or self.params_bytes + self.cache_bytes <= self.available_bytes

    def check(self) -> None:
        """Refuses what cannot fit.

        Raises:
            ValueError: Weights and caches are more than the device has.
        """
        if self.available_bytes is not None and not self.fits:
            needed = self.params_bytes + self.cache_bytes
            raise ValueError(
                f"weights and caches need {needed / _GIB:.1f} GiB, the device gives this process {self.available_bytes / _GIB:.1f} GiB: "
                "use a smaller model, dtype or number of tokens, or raise XLA_PYTHON_CLIENT_MEM_FRACTION"
            )


def plan_memory(
    models: list[Any], *, batch_size: int, capacity: int, sparsity: SparsityConfig | None = None, copies: int = 1, device: Any = None
) -> MemoryPlan:
    """Adds up shapes; nothing is allocated.

    Args:
        models: The modules: the target's, and that of its draft model or drafter if there is one.
        batch_size: B.
        capacity: S, cache slots a row.
        sparsity: What the target's passes leave out; with sparse attention its cache is whole blocks. `None` is nothing.
        copies: How often the caches are held at a time.
        device: Where; the default device if `None`.
    """
    params_bytes = sum(num_bytes(jax.eval_shape(model.init_params, jax.random.key(0))) for model in models)
    cache_bytes = 0
    for index, model in enumerate(models):
        # Heads without layers of their own (Medusa, Hydra) keep no cache.
        if hasattr(model, "init_cache"):
            left_out = sparsity if index == 0 and sparsity is not None else SparsityConfig()
            slots = whole_blocks(capacity, left_out)
            cache = jax.eval_shape(lambda model=model, slots=slots: model.init_cache(batch_size=batch_size, capacity=slots))
            cache_bytes += num_bytes((cache.keys, cache.values))
            if left_out.attention is not None:
                prepared = jax.eval_shape(partial(prepare_cache, sparsity=left_out, model=model.config), cache)
                cache_bytes += num_bytes(prepared.summaries)
    return MemoryPlan(params_bytes=params_bytes, cache_bytes=copies * cache_bytes, available_bytes=device_bytes(device))


def device_bytes(device: Any = None) -> int | None:
    """What a device, the default one if `None`, gives this process; `None` where it does not say."""
    stats = (device or jax.devices()[0]).memory_stats() or {}
    return stats.get("bytes_limit")


def num_bytes(tree: Any) -> int:
    """Of all arrays, or shapes of arrays, in a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
