"""How much device memory a training will take at the least, said before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.commands.memory_plan import device_bytes, num_bytes
from specjax.models.transformer import Transformer
from specjax.training.partition import split_params
from specjax.training.settings import TrainSettings
from specjax.training.train_step import DrafterTraining, union_of_feature_layers

_GIB = 2**30
# float32 of each trained parameter: itself, and Adam's two moments.
_COPIES_OF_PARAMS = 3
# float32 of a chunk's positions, for each step of the chain: the drafter's logits and their gradient.
_LOGITS_A_STEP = 2


@dataclasses.dataclass(frozen=True)
class TrainingMemory:
    """Bytes on each device, by purpose; every device has all parameters.

    Attributes:
        target_bytes: The target's weights.
        drafter_bytes: By drafter: parameters and the optimizer's state.
        gradient_bytes: Gradients of the largest drafter: drafters are updated one after another.
        logits_bytes: Logits of a chunk of positions, and their gradients.
        batch_bytes: What the target makes of a batch, its keys and values included.
        available_bytes: What the device gives this process; `None` where it does not say.
    """

    target_bytes: int
    drafter_bytes: Mapping[str, int]
    gradient_bytes: int
    logits_bytes: int
    batch_bytes: int
    available_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """All of it: a training takes more, for the activations of a step."""
        return self.target_bytes + sum(self.drafter_bytes.values()) + self.gradient_bytes + self.logits_bytes + self.batch_bytes

    def check(self) -> None:
        """Refuses what cannot fit.

        Raises:
            ValueError: The least that the training takes is more than the device has; the message says what takes how much.
        """
        if self.available_bytes is None or self.total_bytes <= self.available_bytes:
            return
        parts = {"the target": self.target_bytes, **{f"drafter {name}": size for name, size in self.drafter_bytes.items()}}
        parts |= {"gradients": self.gradient_bytes, "logits of a chunk": self.logits_bytes, "the target's batch": self.batch_bytes}
        listed = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items())
        raise ValueError(
            f"the training needs {self.total_bytes / _GIB:.1f} GiB at least, the device gives this process "
            f"{self.available_bytes / _GIB:.1f} GiB: {listed}. Train fewer drafters at a time, lower chunk_size or batch_size, or raise "
            "XLA_PYTHON_CLIENT_MEM_FRACTION"
        )


def plan_training(
    target: Transformer,
    drafters: Mapping[str, DrafterTraining],
    networks: Mapping[str, Any],
    settings: TrainSettings,
    *,
    device: Any = None,
) -> TrainingMemory:
    """Adds up shapes; nothing is allocated.

    Args:
        target: The target.
        drafters: By name, how each is trained.
        networks: By the same names, their modules.
        settings: With a length of sequences.
        device: One of those that train; the default device if `None`.
    """
    length = settings.sequence_length
    assert length is not None
    rng, trained, drafter_bytes = jax.random.key(0), {}, {}
    for name, training in drafters.items():
        moving, fixed = split_params(jax.eval_shape(networks[name].init_params, rng), training.task.is_trained)
        trained[name] = jnp.dtype(jnp.float32).itemsize * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(moving))
        drafter_bytes[name] = _COPIES_OF_PARAMS * trained[name] + num_bytes(fixed)
    config, rows = target.config, -(-settings.batch_size // jax.device_count())
    cache = jax.eval_shape(lambda: target.init_cache(batch_size=rows, capacity=length))
    vectors = 1 + len(union_of_feature_layers(drafters))
    outputs = rows * length * vectors * config.hidden_size * jnp.dtype(target.dtype).itemsize
    # The largest head of them; a trimmed one scores fewer tokens than there are.
    scored = max(getattr(network.config.head, "num_tokens", config.vocab_size) for network in networks.values())
    positions = min(settings.positions.chunk_size, rows * length)
    return TrainingMemory(
        target_bytes=num_bytes(jax.eval_shape(target.init_params, rng)),
        drafter_bytes=drafter_bytes,
        gradient_bytes=max(trained.values()),
        logits_bytes=4 * positions * (config.vocab_size + _LOGITS_A_STEP * settings.chain * scored),
        batch_bytes=outputs + num_bytes((cache.keys, cache.values)),
        available_bytes=device_bytes(device),
    )


def warn_of_float32(target: Transformer) -> None:
    """Says what a float32 target costs where there is a faster dtype: all its matrix products are of full precision."""
    if target.dtype == jnp.float32 and jax.default_backend() != "cpu":
        warnings.warn(
            "the target computes in float32, with matrix products of full precision: several times slower than bfloat16, which "
            "--dtype bfloat16 chooses"
        )
