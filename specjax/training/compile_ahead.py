"""The training steps of several drafters, compiled side by side before the first of them runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from specjax.models.transformer import Transformer
from specjax.training.target_batch import TargetArrays, TargetBatch
from specjax.training.train_step import DrafterTraining, by_rows, target_step, train_step, union_of_feature_layers


@dataclasses.dataclass(frozen=True)
class CompiledSteps:
    """Programs, and what one of them has made already.

    Attributes:
        outputs: What the target makes of the batch that was given.
        train_steps: By drafter, `train_step` without its static arguments. Arrays must be of the same shapes, dtypes and shardings.
    """

    outputs: TargetBatch
    train_steps: dict[str, Any]


def compile_steps(
    target: Transformer,
    target_params: Any,
    drafters: Mapping[str, DrafterTraining],
    states: Mapping[str, Any],
    fixed: Mapping[str, Any],
    arrays: TargetArrays,
    rows: tuple[jax.Array, jax.Array],
    num_steps: jax.Array,
    *,
    mesh: Mesh,
    threads: int,
) -> CompiledSteps:
    """Compiles `train_step` for every drafter, and meanwhile compiles and runs `target_step`.

    Programs are traced one after another, in the calling thread: there a caller's `with jax.default_matmul_precision(...)` holds.

    Args:
        target: The target.
        target_params: Its params.
        drafters: By name.
        states: By name, as the first step takes them. They are looked at, not used.
        fixed: By name, the params that are not trained.
        arrays: What drafters share with the target.
        rows: Tokens and loss mask of the first batch, placed.
        num_steps: int32, placed.
        mesh: With the axis `data`.
        threads: Drafters to compile at a time.
    """
    layers = union_of_feature_layers(drafters)
    run_target = functools.partial(target_step, target=target, feature_layers=layers, mesh=mesh)
    shapes = jax.eval_shape(run_target, target_params, *rows)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_rows(mesh)), shapes)
    compiling = {}
    with ThreadPoolExecutor(threads) as pool:
        for name, training in drafters.items():
            lowered = train_step.lower(states[name], fixed[name], arrays, batch, num_steps, training=training, mesh=mesh)
            compiling[name] = pool.submit(lowered.compile)
        # An ordinary call: where `hidden_covariance` ran the same program, it is compiled already.
        outputs = run_target(target_params, *rows)
        return CompiledSteps(outputs, {name: one.result() for name, one in compiling.items()})
