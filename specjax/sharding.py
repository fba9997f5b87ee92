"""Placing a model over a mesh: tensor-parallel params and a cache split over rows and key/value heads.

Nothing else changes: `generate` and `speculative_generate` take the sharded arrays, XLA inserts the collectives, and the tokens are those
of one device. An axis that its mesh axis does not divide is replicated instead. XLA decides about everything in between, so what is
placed here has a mesh of `Auto` axes; of one with `Explicit` axes (those of `jax.make_mesh`) the devices and names are taken.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.drafting.heads.draft_head import DRAFT_HEAD
from specjax.model_config import ModelConfig

# Which axis of each parameter is split over the model-parallel mesh axis. Per layer, one all-reduce after `output` and one after `down`.
_MODEL_AXIS = {
    "embedding": 0,  # [V,D]
    "lm_head": 0,  # [V,D]
    "qkv": 1,  # [D,K,N/K+2,H]
    "qkv_bias": 0,  # [K,N/K+2,H]
    "sinks": 0,  # [N], likewise in order of the key/value head
    "output": 0,  # [N*H,D], query heads in order of their key/value head
    "gate_up": 2,  # [D,2,F]
    "gate_up_bias": 1,  # [2,F]
    "gate": 1,  # [D,F]
    "up": 0,  # [F,D]
    "down": 0,  # [F,D]
    "expert_gate_up": 3,  # [E,D,2,F]: every device has a share of every expert, so that the load is even whatever the router does
    "expert_gate_up_bias": 2,  # [E,2,F]
    "expert_down": 1,  # [E,F,D]
}
# The same for a draft LM head: over the tokens. `down` and `token_ids` are small, and needed everywhere.
_HEAD_AXIS = {
    "lm_head": 0,  # [V,D]
    "bias": 0,  # [V]
    "up": 0,  # [V,R]
}


def param_shardings(params: Any, config: ModelConfig, mesh: Mesh, *, model_axis: str = "model") -> Any:
    """Where each parameter goes.

    Example:
        >>> mesh = jax.make_mesh((1, jax.device_count()), ("data", "model"))
        >>> params = jax.device_put(params, param_shardings(params, model.config, mesh))

    Args:
        params: A Transformer's params, or those of a drafter's network, arrays or their shapes.
        config: The model's shape.
        mesh: The devices.
        model_axis: The mesh axis over which heads, FFN channels and the vocabulary are split.

    Returns:
        The same tree with a `NamedSharding` in each place.

    Raises:
        ValueError: The mesh has no such axis.
    """
    size, mesh = _axis_size(mesh, model_axis), _auto(mesh)

    def place(path: tuple, leaf: Any) -> NamedSharding:
        names = [part.key for part in path]
        axis = (_HEAD_AXIS if DRAFT_HEAD in names else _MODEL_AXIS).get(names[-1])
        parts = None if axis is None else config.num_kv_heads if names[-1] in ("output", "sinks") else leaf.shape[axis]
        if axis is None or parts is None or parts % size:
            return NamedSharding(mesh, PartitionSpec())
        spec: list[str | None] = [None] * len(leaf.shape)
        spec[axis] = model_axis
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(place, params)


def cache_sharding(
    config: ModelConfig, mesh: Mesh, *, batch_size: int, data_axis: str = "data", model_axis: str = "model"
) -> NamedSharding:
    """For `GenerateConfig.cache_sharding`: rows over one mesh axis, key/value heads over the other.

    Args:
        config: The model's shape.
        mesh: The devices.
        batch_size: B.
        data_axis: The mesh axis over which rows are split.
        model_axis: The mesh axis over which heads are split.

    Returns:
        A sharding of `[B,K,S,H]`.

    Raises:
        ValueError: The mesh lacks one of the axes.
    """
    rows = data_axis if batch_size % _axis_size(mesh, data_axis) == 0 else None
    heads = model_axis if config.num_kv_heads % _axis_size(mesh, model_axis) == 0 else None
    return NamedSharding(_auto(mesh), PartitionSpec(rows, heads, None, None))


def check_auto_axes(what: str, tree: Any) -> None:
    """Refuses arrays that lie on a mesh with `Explicit` axes: there every operation would have to say how its result is divided.

    Args:
        what: The name of the argument.
        tree: Its arrays.

    Raises:
        ValueError: An array is one of those.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        mesh = jax.typeof(leaf).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} lies on a mesh with axes {mesh.axis_names} of types {mesh.axis_types}: expected Auto "
                "axes, as param_shardings gives them and jax.sharding.Mesh(mesh.devices, mesh.axis_names) has"
            )


def _auto(mesh: Mesh) -> Mesh:
    """A mesh of the same devices and names, whose axes are all `Auto`."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _axis_size(mesh: Mesh, axis: str) -> int:
    if axis not in mesh.shape:
        raise ValueError(f"the mesh has axes {tuple(mesh.shape)}, none named {axis!r} (its {math.prod(mesh.shape.values())} devices)")
    return mesh.shape[axis]
