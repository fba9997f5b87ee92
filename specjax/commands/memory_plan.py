"""How much device memory a run will take, said before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.transformer import Transformer

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose.

    Attributes:
        params_bytes: Weights of all models.
        cache_bytes: Keys and values of all models. They are held twice where a loop may not overwrite its input.
        available_bytes: What the device gives this process; `None` where it does not say.
    """

    params_bytes: int
    cache_bytes: int
    available_bytes: int | None

    def describe(self) -> str:
        """One line for people."""
        text = f"memory: weights {self.params_bytes / _GIB:.2f} GiB, key/value caches {self.cache_bytes / _GIB:.2f} GiB"
        return text if self.available_bytes is None else f"{text}, of {self.available_bytes / _GIB:.1f} GiB"

    def check(self) -> None:
        """Refuses what cannot fit.

        Raises:
            ValueError: Weights and caches are more than the device has.
        """
        needed = self.params_bytes + self.cache_bytes
        if self.available_bytes is not None and needed > self.available_bytes:
            raise ValueError(
                f"weights and caches need {needed / _GIB:.1f} GiB, the device gives this process {self.available_bytes / _GIB:.1f} GiB: "
                "use a smaller model, dtype or number of tokens, or raise XLA_PYTHON_CLIENT_MEM_FRACTION"
            )


def plan_memory(models: list[Transformer], *, batch_size: int, capacity: int, device: Any = None) -> MemoryPlan:
    """Adds up shapes; nothing is allocated.

    Args:
        models: The target, and the draft model if there is one.
        batch_size: B.
        capacity: S, cache slots a row.
        device: Where; the default device if `None`.
    """
    params = [jax.eval_shape(model.init_params, jax.random.key(0)) for model in models]
    params_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    cache_bytes = 0
    for model in models:
        slots = batch_size * capacity * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim
        cache_bytes += 2 * slots * jnp.dtype(model.dtype).itemsize
    stats = (device or jax.devices()[0]).memory_stats() or {}
    return MemoryPlan(params_bytes=params_bytes, cache_bytes=cache_bytes, available_bytes=stats.get("bytes_limit"))
