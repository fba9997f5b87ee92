"""What passes are counted as: refreshes beside the steps between them."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from specjax import MoEConfig
from specjax.sparsity.pass_counts import PassCounts, TargetPass
from specjax.sparsity.sparse_moe import ExpertWork
from tests.helpers import tiny_config

MODEL = tiny_config(num_layers=1, moe=MoEConfig(num_experts=64, num_experts_per_token=4, intermediate_size=8))


def counts(*passes: TargetPass) -> PassCounts:
    found = PassCounts.zeros(2, model=MODEL, measured=(("experts", "distinct"),), weight_bytes=2, cache_bytes=2)
    for one in passes:
        found = found.record(one, active=jnp.array([True, True]))
    return found


def test_a_refresh_reads_the_experts_of_many_steps_and_says_nothing_of_a_dense_step() -> None:
    work = ExpertWork(jnp.int32(15), jnp.int32(20), jnp.array([3.0, 3.0]))
    sparse = TargetPass(reads=None, mlp_work=(work,), context=jnp.array([9, 9]), num_tokens=6)
    refresh = TargetPass(reads=None, mlp_work=(None,), context=jnp.array([9, 9]), num_tokens=48)
    without, refreshed = (counts(*passes).summary(None, 6) for passes in ((sparse,), (sparse, refresh)))
    assert refreshed["sparse_moe"]["dense_distinct_experts_per_pass"] == without["sparse_moe"]["dense_distinct_experts_per_pass"] == 20
    steps = without["step_work"]["experts"], refreshed["step_work"]["experts"]
    assert steps[0]["dense_bytes"] == steps[1]["dense_bytes"]
    assert steps[0]["bytes"] == pytest.approx(steps[0]["dense_bytes"] * 15 / 20, rel=1e-6)
    assert steps[1]["bytes"] > steps[1]["dense_bytes"]  # half of the passes read nearly all 64


def test_of_refreshes_alone_a_dense_steps_experts_are_those_that_are_expected() -> None:
    refresh = TargetPass(reads=None, mlp_work=(None,), context=jnp.array([9, 9]), num_tokens=48)
    expected = 64 * (1 - (1 - 4 / 64) ** 12)
    assert counts(refresh).dense_step_work(6).experts.moved_bytes == pytest.approx(expected * 3 * 32 * 8 * 2, rel=1e-4)
