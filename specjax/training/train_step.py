"""One training step: the target's pass over a batch, once for all drafters, and the update of one drafter.

Both run on all devices of a mesh with the axis `data`: each device has every parameter and a share of the rows, takes the gradient of its
own rows, and one sum over the devices follows. (XLA's partitioner would sum the LM head's gradient in every chunk of the loss.)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.models.transformer import Transformer
from specjax.training.distillation import LossPositions, StepSums, distill
from specjax.training.losses import DraftLoss
from specjax.training.optimizer import OptimizerConfig
from specjax.training.partition import merge_params
from specjax.training.target_batch import TargetArrays, TargetBatch, target_outputs
from specjax.training.tasks.task import TrainingTask

DATA_AXIS = "data"
_REPLICATED, _BY_ROWS = PartitionSpec(), PartitionSpec(DATA_AXIS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterTraining:
    """How one drafter is trained; static.

    Attributes:
        task: What it computes.
        loss: What it is to lower.
        optimizer: How its parameters follow.
        positions: Where the loss is taken.
    """

    task: TrainingTask
    loss: DraftLoss = DraftLoss()
    optimizer: OptimizerConfig = OptimizerConfig()
    positions: LossPositions = LossPositions()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What changes from step to step.

    Attributes:
        step: int32, training steps done.
        trained: The trained params, float32.
        optimizer: Optax's state of them.
    """

    step: jax.Array
    trained: Any
    optimizer: Any

    @classmethod
    def of(cls, optimizer: OptimizerConfig, trained: Any) -> TrainState:
        """The state that a run begins with, however long it is."""
        return cls(step=jnp.zeros((), jnp.int32), trained=trained, optimizer=optimizer.build(num_steps=1).init(trained))

    def updated(self, optimizer: OptimizerConfig, gradients: Any, num_steps: jax.Array) -> TrainState:
        """The state one step on.

        Args:
            optimizer: That of `of`. Static.
            gradients: Of the trained params.
            num_steps: int32, of the whole run, for the learning rate.
        """
        updates, state = optimizer.build(num_steps).update(gradients, self.optimizer, self.trained)
        return TrainState(step=self.step + 1, trained=optax.apply_updates(self.trained, updates), optimizer=state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What one step says of itself.

    Attributes:
        loss: float32, what is lowered: means by step of the chain, weighted.
        sums: By step of the chain, over the whole batch.
        gradient_norm: float32, before clipping.
        learning_rate: float32.
    """

    loss: jax.Array
    sums: StepSums
    gradient_norm: jax.Array
    learning_rate: jax.Array


def union_of_feature_layers(drafters: Mapping[str, DrafterTraining]) -> tuple[int, ...]:
    """The boundaries of the target that any of these drafters reads, in ascending order."""
    return tuple(sorted({layer for training in drafters.values() for layer in training.task.feature_layers}))


def data_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the one axis `data` over these devices; `None` is all there are."""
    return Mesh(np.array(jax.devices() if devices is None else devices), (DATA_AXIS,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Where parameters go: whole, on every device."""
    return NamedSharding(mesh, _REPLICATED)


def by_rows(mesh: Mesh) -> NamedSharding:
    """Where batches go: each device has a share of the rows."""
    return NamedSharding(mesh, _BY_ROWS)


def place_batch(mesh: Mesh, rows: np.ndarray) -> jax.Array:
    """A batch's rows, spread over the devices; of several hosts each brings its own.

    Args:
        mesh: With the axis `data`.
        rows: `[B,T]`, or this host's part of it.

    Raises:
        ValueError: The devices cannot share the rows evenly.
    """
    devices = len(mesh.local_devices)
    if rows.shape[0] % devices:
        raise ValueError(f"a batch of {rows.shape[0]} rows cannot be shared evenly by {devices} devices")
    return jax.make_array_from_process_local_data(by_rows(mesh), np.asarray(rows))


@functools.partial(jax.jit, static_argnames=("target", "feature_layers", "mesh"))
def target_step(
    params: Any, tokens: jax.Array, loss_mask: jax.Array, *, target: Transformer, feature_layers: tuple[int, ...], mesh: Mesh
) -> TargetBatch:
    """`target_outputs`, each device for its own rows."""
    run = functools.partial(target_outputs, target, feature_layers=feature_layers)
    specs = (_REPLICATED, _BY_ROWS, _BY_ROWS)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=_BY_ROWS, check_vma=False)(params, tokens, loss_mask)


@functools.partial(jax.jit, static_argnames=("training", "mesh"), donate_argnames="state")
def train_step(
    state: TrainState, fixed: Any, arrays: TargetArrays, batch: TargetBatch, num_steps: jax.Array, *, training: DrafterTraining, mesh: Mesh
) -> tuple[TrainState, StepMetrics]:
    """One update of one drafter.

    Args:
        state: Donated: it cannot be used again.
        fixed: The params that are not trained.
        arrays: What the drafter shares with its target.
        batch: From `target_step`.
        num_steps: int32, of the whole run, for the learning rate.
        training: Static.
        mesh: Static.
    """
    # Another one of every k positions in each step.
    first = state.step % training.positions.every

    def share(trained: Any, fixed: Any, arrays: TargetArrays, batch: TargetBatch, first: jax.Array) -> Any:
        """Of the loss and its gradient, what this device's rows make; then the sum over all devices."""
        result = jax.value_and_grad(functools.partial(_loss, training), has_aux=True)(trained, fixed, arrays, batch, first)
        return jax.lax.psum(result, DATA_AXIS)

    specs = (_REPLICATED, _REPLICATED, _REPLICATED, _BY_ROWS, _REPLICATED)
    summed = jax.shard_map(share, mesh=mesh, in_specs=specs, out_specs=_REPLICATED, check_vma=False)
    (loss, sums), gradients = summed(state.trained, fixed, arrays, batch, first)
    metrics = StepMetrics(
        loss=loss,
        sums=sums,
        gradient_norm=optax.tree.norm(gradients),
        learning_rate=training.optimizer.learning_rate_at(state.step, num_steps),
    )
    return state.updated(training.optimizer, gradients, num_steps), metrics


@functools.partial(jax.jit, static_argnames=("training", "mesh"))
def evaluation_step(
    trained: Any, fixed: Any, arrays: TargetArrays, batch: TargetBatch, *, training: DrafterTraining, mesh: Mesh
) -> tuple[jax.Array, StepSums]:
    """The loss of a batch and its sums by step, at every position that counts; nothing changes."""
    training = dataclasses.replace(training, positions=dataclasses.replace(training.positions, every=1))

    def share(trained: Any, fixed: Any, arrays: TargetArrays, batch: TargetBatch) -> Any:
        return jax.lax.psum(_loss(training, trained, fixed, arrays, batch, jnp.int32(0)), DATA_AXIS)

    specs = (_REPLICATED, _REPLICATED, _REPLICATED, _BY_ROWS)
    return jax.shard_map(share, mesh=mesh, in_specs=specs, out_specs=_REPLICATED, check_vma=False)(trained, fixed, arrays, batch)


def _loss(
    training: DrafterTraining, trained: Any, fixed: Any, arrays: TargetArrays, batch: TargetBatch, first: jax.Array
) -> tuple[jax.Array, StepSums]:
    states = training.task.draft_states(merge_params(trained, fixed), arrays, batch)
    options: dict[str, Any] = dict(positions=training.positions, first=first, axis_name=DATA_AXIS)
    return distill(training.loss, states, batch, arrays.lm_head, **options)
