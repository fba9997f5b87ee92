"""Where hidden states go: the mean of `h h^T`, by which low-rank draft heads are fitted; of a target, or of a finished drafter."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from specjax.models.transformer import Transformer
from specjax.training.target_batch import TargetArrays, TargetBatch
from specjax.training.tasks.task import TrainingTask
from specjax.training.train_step import data_mesh, place_batch, replicated, target_step


def hidden_covariance(
    target: Transformer, params: Any, batches: Iterable[Any], *, feature_layers: tuple[int, ...] = (), mesh: Mesh | None = None
) -> np.ndarray:
    """The mean of `h h^T` over the positions whose prediction counts; h is what the LM head reads. Not centred.

    Args:
        target: The target.
        params: Its params.
        batches: With `tokens` and `loss_mask`, `[B,T]` of one shape; at least one.
        feature_layers: Those of the training that follows: then both run one compiled program.
        mesh: From `data_mesh`; `None` is all devices.

    Returns:
        `[D,D]` float64.

    Raises:
        ValueError: There is no batch.
    """
    mesh = data_mesh() if mesh is None else mesh
    params = jax.device_put(params, replicated(mesh))
    total, count = np.zeros((target.config.hidden_size,) * 2), 0.0
    for batch in batches:
        rows = [place_batch(mesh, part) for part in (batch.tokens, batch.loss_mask)]
        outputs = target_step(params, *rows, target=target, feature_layers=feature_layers, mesh=mesh)
        moments, positions = _moments(outputs.hidden, outputs.loss_mask)
        total += np.asarray(moments, np.float64)
        count += float(positions)
    if not count:
        raise ValueError("there is no batch to take the hidden states of")
    return total / count


def draft_state_covariance(
    task: TrainingTask,
    params: Any,
    target: Transformer,
    target_params: Any,
    batches: Iterable[Any],
    *,
    feature_layers: tuple[int, ...] = (),
    mesh: Mesh | None = None,
) -> np.ndarray:
    """The same over what the draft heads of a drafter read, at all steps of its chain.

    Args:
        task: What the drafter computes.
        params: Its params.
        target: The target.
        target_params: Its params.
        batches: As in `hidden_covariance`.
        feature_layers: Likewise; those of the task at least.
        mesh: Likewise.

    Returns:
        `[D,D]` float64, D the drafter's width.

    Raises:
        ValueError: There is no batch.
    """
    mesh = data_mesh() if mesh is None else mesh
    target_params, params = jax.device_put((target_params, params), replicated(mesh))
    arrays, total, count = TargetArrays.of(target.config, target_params), np.zeros(()), 0.0
    for batch in batches:
        rows = [place_batch(mesh, part) for part in (batch.tokens, batch.loss_mask)]
        outputs = target_step(target_params, *rows, target=target, feature_layers=feature_layers, mesh=mesh)
        moments, positions = _draft_moments(params, arrays, outputs, task=task, mesh=mesh)
        total = total + np.asarray(moments, np.float64)
        count += float(positions)
    if not count:
        raise ValueError("there is no batch to take the drafter's hidden states of")
    return total / count


@functools.partial(jax.jit, static_argnames=("task", "mesh"))
def _draft_moments(params: Any, arrays: TargetArrays, batch: TargetBatch, *, task: TrainingTask, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    def share(params: Any, arrays: TargetArrays, batch: TargetBatch) -> tuple[jax.Array, jax.Array]:
        parts = []
        for group in task.draft_states(params, arrays, batch):
            for hidden, ahead in zip(group.hidden, group.ahead, strict=True):
                # Row t predicts token t + ahead + 1.
                mask = jnp.pad(batch.loss_mask[:, ahead:], ((0, 0), (0, ahead)))
                parts.append(_moments(hidden, mask))
        return jax.lax.psum(jax.tree.map(lambda *sums: sum(sums[1:], start=sums[0]), *parts), mesh.axis_names[0])

    specs = (PartitionSpec(), PartitionSpec(), PartitionSpec(mesh.axis_names[0]))
    return jax.shard_map(share, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(params, arrays, batch)


@jax.jit
def _moments(hidden: jax.Array, loss_mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Position t makes the prediction of token t + 1.
    counted = jnp.pad(loss_mask[:, 1:], ((0, 0), (0, 1)))
    rows = jnp.where(counted[..., None], hidden, 0).reshape(-1, hidden.shape[-1])
    moments = jax.lax.dot_general(rows, rows, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return moments, counted.sum()
