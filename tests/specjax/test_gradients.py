"""A pass can be differentiated, through the cache and what earlier passes wrote to it: training needs that."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Transformer
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads import LowRankHead, TrimmedHead
from specjax.models.layers import head_product
from tests.helpers import random_model, tiny_config

# float32 sums of some hundred terms in another order, as a share of an array's largest gradient.
TOLERANCE = 1e-5


def loss(model: Transformer, params: Any, parts: list[int]) -> jax.Array:
    """Of nine tokens, taken in in passes that end at `parts`."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(64, size=(2, 9)), jnp.int32)
    cache, hidden = model.init_cache(batch_size=2, capacity=12), []
    for part in jnp.split(tokens, parts, axis=1):
        output = model.apply({"params": params}, part, cache)
        cache = output.cache
        hidden.append(output.hidden)
    return jnp.sin(model.apply({"params": params}, jnp.concatenate(hidden, axis=1), method="logits")).sum()


@pytest.mark.full
def test_the_gradient_of_several_passes_over_a_cache_is_that_of_one_pass() -> None:
    model, params = random_model(tiny_config(layer_windows=(4, None), attention_sinks=True), seed=1)
    whole = jax.jit(jax.grad(lambda params: loss(model, params, [])))(params)
    parts = jax.jit(jax.grad(lambda params: loss(model, params, [4, 6])))(params)

    def same(a: jax.Array, b: jax.Array) -> None:
        assert np.abs(a).max() > 0
        np.testing.assert_allclose(a, b, atol=TOLERANCE * np.abs(a).max())

    jax.tree.map(same, whole, parts)
    # Forward mode says the same of a direction.
    direction = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(2).normal(size=x.shape), x.dtype), params)
    forward = jax.jit(lambda: jax.jvp(lambda params: loss(model, params, [4]), (params,), (direction,))[1])()
    products = jax.tree.leaves(jax.tree.map(lambda a, b: (a * b).sum(), whole, direction))
    np.testing.assert_allclose(forward, sum(products), atol=100 * TOLERANCE * max(map(abs, products)))


CHANGES = (dict(head=LowRankHead(rank=4)), dict(head=TrimmedHead(num_tokens=40)), dict(norm_output=True, fc_norm=True))


@pytest.mark.full
@pytest.mark.parametrize("changes", CHANGES)
def test_every_parameter_of_an_eagle3_drafter_has_a_gradient_through_a_recursive_step(changes: dict) -> None:
    config = Eagle3Config(**(dict(decoder=tiny_config(num_layers=2), target_hidden_size=32) | changes))
    drafter = Eagle3(config, dtype=jnp.float32, param_dtype=jnp.float32)
    params = drafter.init_params(jax.random.key(0))
    fixed = {name: params["draft_head"].pop(name) for name in ("token_ids",) if name in params["draft_head"]}
    features, embeddings = (jax.random.normal(jax.random.key(width), (2, 5, width)) for width in (96, 32))

    def loss(params: Any) -> jax.Array:
        variables = {"params": params | {"draft_head": params["draft_head"] | fixed}}
        state = drafter.apply(variables, features, method="fuse")
        output = drafter.apply(variables, embeddings, state, drafter.init_cache(batch_size=2, capacity=8))
        output = drafter.apply(variables, embeddings[:, :1], output.next_state[:, -1:], output.cache)
        return jax.nn.log_softmax(drafter.apply(variables, output.hidden, method="scores").logits)[..., 7].sum()

    for path, gradient in jax.tree.leaves_with_path(jax.jit(jax.grad(loss))(params)):
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 0, path


def test_an_lm_heads_gradient_multiplies_arrays_of_one_dtype() -> None:
    hidden, weight = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((16, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(jax.grad(lambda hidden, weight: jnp.sin(head_product(hidden, weight)).sum(), argnums=(0, 1)))(hidden, weight)
    pending, pairs = [jaxpr.jaxpr], []
    while pending:
        for equation in pending.pop().eqns:
            if equation.primitive.name == "dot_general":
                pairs.append({str(variable.aval.dtype) for variable in equation.invars})
            pending += [getattr(value, "jaxpr", value) for value in equation.params.values() if hasattr(value, "eqns")]
    assert pairs == [{"bfloat16"}] * 3  # the product, and one for each argument
