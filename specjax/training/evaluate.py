"""How well a drafter predicts its target on texts that it was not trained on: the training's own numbers, without a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.models.transformer import Transformer
from specjax.training.metrics import acceptance_length
from specjax.training.partition import split_params
from specjax.training.target_batch import TargetArrays
from specjax.training.train_step import (
    DrafterTraining,
    data_mesh,
    evaluation_step,
    place_batch,
    replicated,
    target_step,
    union_of_feature_layers,
)
from specjax.training.trainer import check_drafters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One drafter on some texts.

    Attributes:
        step_losses: For each step of the chain the mean loss of its positions.
        acceptance: For each step of the chain the expected acceptance of a sampled draft token, where the ones before it were accepted.
        num_positions: For each step of the chain, how many positions counted.
    """

    step_losses: tuple[float, ...]
    acceptance: tuple[float, ...]
    num_positions: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Expected tokens a step of decoding, with a draft as long as the chain."""
        return acceptance_length(self.acceptance)


def evaluate(
    target: Transformer,
    target_params: Any,
    drafters: Mapping[str, DrafterTraining],
    params: Mapping[str, Any],
    batches: Iterable[Any],
    *,
    mesh: Mesh | None = None,
) -> dict[str, Evaluation]:
    """Loss and expected acceptance of drafters, side by side, at every position that counts.

    Args:
        target: The target.
        target_params: Its params.
        drafters: By name.
        params: By the same names.
        batches: With `tokens` and `loss_mask`, `[B,T]` of one shape; at least one.
        mesh: As in `train`.

    Raises:
        ValueError: As `train`, or there is no batch.
    """
    mesh = data_mesh() if mesh is None else mesh
    check_drafters(drafters, params, target.config)
    target_params = jax.device_put(target_params, replicated(mesh))
    parts = {name: jax.device_put(split_params(params[name], one.task.is_trained), replicated(mesh)) for name, one in drafters.items()}
    arrays = TargetArrays.of(target.config, target_params)
    feature_layers = union_of_feature_layers(drafters)
    sums: dict[str, Any] = {}
    for batch in batches:
        rows = [place_batch(mesh, part) for part in (batch.tokens, batch.loss_mask)]
        outputs = target_step(target_params, *rows, target=target, feature_layers=feature_layers, mesh=mesh)
        for name, training in drafters.items():
            _, new = evaluation_step(*parts[name], arrays, outputs, training=training, mesh=mesh)
            new = jax.tree.map(np.float64, jax.device_get(new))
            sums[name] = jax.tree.map(np.add, sums[name], new) if name in sums else new
    if not sums:
        raise ValueError("there is no batch to evaluate on")
    return {name: _evaluation(one) for name, one in sums.items()}


def _evaluation(sums: Any) -> Evaluation:
    count = np.maximum(sums.count, 1.0)
    return Evaluation(
        step_losses=tuple(map(float, sums.loss / count)),
        acceptance=tuple(map(float, sums.acceptance / count)),
        num_positions=tuple(map(int, sums.count)),
    )
