"""Where a target's hidden states go: the mean of `h h^T`, by which low-rank draft heads are fitted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.models.transformer import Transformer
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


@jax.jit
def _moments(hidden: jax.Array, loss_mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Position t makes the prediction of token t + 1.
    counted = jnp.pad(loss_mask[:, 1:], ((0, 0), (0, 1)))
    rows = jnp.where(counted[..., None], hidden, 0).reshape(-1, hidden.shape[-1])
    moments = jax.lax.dot_general(rows, rows, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return moments, counted.sum()
