"""Inside a caller's `shard_map`, whose checks of types are on by default, each device decodes its rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from specjax import DraftModel, GenerateConfig, Lossless, MoEConfig, PromptLookup, SparseAttention, SparsityConfig, speculative_generate
from specjax.kernels.varying import varying_as
from tests.drafters import eagle3, hydra, medusa
from tests.helpers import random_model, tiny_config

PROMPTS = jnp.array([[5, 6, 7, 5, 6, 7, 5], [1, 2, 3, 4, 9, 8, 7]])
ROWS = PartitionSpec("rows")
SPARSE = SparseAttention(block_size=4, keep=0.0, dense_below=0)
FULL = pytest.mark.full


def by_rows(function: Any, num_by_rows: int) -> Any:
    """Over a mesh: the first arguments are divided, the last one is not."""
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("rows",))  # one device: types are checked as for many
    specs = (*(ROWS,) * num_by_rows, PartitionSpec())
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=ROWS))


def drafters(kind: str, model: Any, params: Any) -> tuple[Any, Any]:
    made = {"eagle3": eagle3, "medusa": medusa, "hydra": hydra}
    if kind in made:
        return made[kind](model, params)
    return (DraftModel(model), params) if kind == "model" else (PromptLookup(), None)


@pytest.mark.parametrize(
    ("kind", "do_sample", "sparsity"),
    [
        ("lookup", False, SparsityConfig()),
        pytest.param("eagle3", False, SparsityConfig(), marks=FULL),
        pytest.param("model", True, SparsityConfig(), marks=FULL),
        pytest.param("medusa", True, SparsityConfig(), marks=FULL),
        pytest.param("hydra", True, SparsityConfig(), marks=FULL),
        pytest.param("lookup", False, SparsityConfig(attention=SPARSE, refresh_every=2), marks=FULL),
        pytest.param("lookup", True, SparsityConfig(attention=SPARSE, lossless=Lossless(max_steps=2, step_cost=0.3)), marks=FULL),
    ],
)
def test_each_device_decodes_its_rows_and_goes_on(kind: str, do_sample: bool, sparsity: SparsityConfig) -> None:
    model, params = random_model(tiny_config(num_layers=1 if kind in ("lookup", "model") else 3), seed=2)
    drafter, drafter_params = drafters(kind, model, params)
    settings = dict(num_speculative_tokens=3, do_sample=do_sample, sparsity=sparsity, return_log_probs=True)
    config = GenerateConfig(max_new_tokens=8, prefill_chunk_size=4, cache_capacity=64, **settings)

    def two_calls(prompts: jax.Array, keys: jax.Array, params: Any) -> Any:
        call = dict(config=config, rng=keys)
        first = speculative_generate(model, params[0], drafter, params[1], prompts, **call)
        second = speculative_generate(model, params[0], drafter, params[1], prompts[:, :2], continue_from=first.continuation, **call)
        return first.tokens, first.log_probs, second.tokens, second.statistics.accepted_counts

    arrays = (PROMPTS, jax.random.split(jax.random.key(0), 2), (params, drafter_params))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), by_rows(two_calls, 2)(*arrays), two_calls(*arrays))


def loss(model: Any, params: Any, tokens: jax.Array) -> jax.Array:
    cache = model.init_cache(batch_size=tokens.shape[0], capacity=tokens.shape[1])
    output = model.apply({"params": params}, tokens, cache)
    return jnp.square(model.apply({"params": params}, output.hidden, method="logits")).mean(axis=(1, 2))


@pytest.mark.parametrize("moe", [None, pytest.param(MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=16), marks=FULL)])
def test_a_pass_and_its_gradient_are_those_of_one_device(moe: MoEConfig | None) -> None:
    model, params = random_model(tiny_config(num_layers=1, **({} if moe is None else {"moe": moe})), seed=2)

    def both(tokens: jax.Array, params: Any) -> Any:
        # Of params that are the same everywhere JAX would add up the gradient over the devices.
        own = varying_as(params["embedding"], tokens)
        return loss(model, params, tokens), jax.grad(lambda embedding: loss(model, params | {"embedding": embedding}, tokens).sum())(own)

    found, expected = by_rows(both, 1)(PROMPTS, params), both(PROMPTS, params)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), found, expected)
