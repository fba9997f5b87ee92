"""The training-time test computes what the drafter computes when it drafts, for every start at once."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import RopeConfig
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads import LowRankHead
from specjax.training import training_time_test as ttt
from specjax.training.training_time_test import training_time_test
from tests.helpers import FLOAT32_TOLERANCE, VOCAB_SIZE, tiny_config

BATCH_SIZE, NUM_TOKENS, NUM_STEPS, WIDTH = 2, 9, 4, 32

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "two layers, windows, sinks, biases, norms of heads, fed back normed, features normed": (
        dict(
            num_layers=2,
            layer_windows=(3, None),
            attention_sinks=True,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            qk_norm="head",
        ),
        dict(norm_output=True, fc_norm=True),
    ),
    "normed residual, own embedding": (dict(layer_windows=(1,), num_kv_heads=4), dict(norm_before_residual=True, own_embedding=True)),
    "norm before fc": ({}, dict(norm_before_fc=True)),
    "rotary embedding by length": (
        dict(rope=RopeConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=4), num_kv_heads=1),
        {},
    ),
}


def random_network(decoder: dict[str, Any], changes: dict[str, Any]) -> tuple[Eagle3, dict]:
    """In float32, with weights that keep activations at their size, so that every row attends to several."""
    sizes = dict(num_layers=1) | decoder
    config = Eagle3Config(decoder=tiny_config(**sizes), target_hidden_size=WIDTH, head=LowRankHead(rank=4), **changes)
    model = Eagle3(config, dtype=jnp.float32, param_dtype=jnp.float32)
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        centre, spread = (1.0, 0.3) if leaf.ndim == 1 else (0.0, leaf.shape[0] ** -0.5)
        return jnp.asarray(centre + spread * rng.normal(size=leaf.shape), leaf.dtype)

    return model, jax.tree.map(draw, jax.eval_shape(model.init_params, jax.random.key(0)))


def inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Features, tokens, and the target's embedding."""
    rng = np.random.default_rng(1)
    features = rng.normal(size=(BATCH_SIZE, NUM_TOKENS, 3 * WIDTH))
    return (
        jnp.asarray(features, jnp.float32),
        jnp.asarray(rng.integers(VOCAB_SIZE, size=(BATCH_SIZE, NUM_TOKENS)), jnp.int32),
        jnp.asarray(rng.normal(size=(VOCAB_SIZE, WIDTH)), jnp.float32),
    )


@functools.partial(jax.jit, static_argnames="model")
def one_pass(model: Eagle3, params: Any, state: jax.Array, tokens: jax.Array, embedding: jax.Array, cache: Any) -> Any:
    embeddings = model.apply({"params": params}, tokens, embedding, method="embed")
    return model.apply({"params": params}, embeddings, state, cache)


def chain(model: Eagle3, params: Any, start: int) -> list[jax.Array]:
    """Hidden states `[B,D]` of the steps of a draft that starts at a row, computed as `Eagle3Drafter` does, with the text's tokens."""
    features, tokens, embedding = inputs()
    cache = model.init_cache(batch_size=BATCH_SIZE, capacity=16, context_limit=jnp.full((BATCH_SIZE,), NUM_TOKENS))
    state = model.apply({"params": params}, features, method="fuse")
    # Rows behind the start are computed too, and rolled back: one shape for all starts.
    output = one_pass(model, params, state[:, :-1], tokens[:, 1:], embedding, cache)
    hidden, state, cache = output.hidden[:, start], output.next_state[:, start : start + 1], output.cache
    cache, steps = cache.with_length(jnp.full((BATCH_SIZE,), start + 1)), [hidden]
    for step in range(1, min(NUM_STEPS, NUM_TOKENS - 1 - start)):
        output = one_pass(model, params, state, tokens[:, start + 1 + step][:, None], embedding, cache)
        state, cache = output.next_state, output.cache
        steps.append(output.hidden[:, 0])
    return steps


FULL = ("plain", "normed residual, own embedding", "norm before fc", "rotary embedding by length")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) if name in FULL else name for name in CASES])
def test_every_step_of_every_start_equals_drafting(name: str) -> None:
    model, params = random_network(*CASES[name])
    features, tokens, embedding = inputs()
    test = jax.jit(functools.partial(training_time_test, model, num_steps=NUM_STEPS))
    found = np.asarray(test(params, features, tokens, target_embedding=embedding))
    assert found.shape == (NUM_STEPS, BATCH_SIZE, NUM_TOKENS, WIDTH)
    for start in range(NUM_TOKENS - 1):
        for step, expected in enumerate(chain(model, params, start)):
            np.testing.assert_allclose(found[step, :, start], expected, atol=FLOAT32_TOLERANCE, err_msg=f"start {start}, step {step}")


@pytest.mark.parametrize("rows", [BATCH_SIZE, 1])
def test_scores_neither_grow_with_the_steps_nor_stay_for_the_backward_pass(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = random_network({}, {})
    features, tokens, embedding = inputs()
    monkeypatch.setattr(ttt, "_MAX_SCORE_BYTES", rows * 4 * model.config.decoder.num_heads * NUM_TOKENS**2)

    def loss(params: Any) -> jax.Array:
        return training_time_test(model, params, features, tokens, num_steps=4, target_embedding=embedding).sum()

    def score_shapes(shapes: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
        return {shape for shape in shapes if len(shape) > 2 and shape[-2] == NUM_TOKENS and shape[-1] % NUM_TOKENS == 0}

    backward = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
    assert not score_shapes(leaf.shape for leaf in jax.tree.leaves(backward))
    pending, found = [jax.make_jaxpr(jax.grad(loss))(params).jaxpr], set()
    while pending:
        for equation in pending.pop().eqns:
            found |= {tuple(variable.aval.shape) for variable in equation.outvars}
            pending += [getattr(value, "jaxpr", value) for value in equation.params.values() if hasattr(value, "eqns")]
    decoder = model.config.decoder
    expected = (rows, decoder.num_kv_heads, decoder.num_heads // decoder.num_kv_heads, NUM_TOKENS, NUM_TOKENS)
    assert score_shapes(found) == {expected}


@pytest.mark.full
def test_groups_of_rows_give_the_gradients_of_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = random_network(*CASES["two layers, windows, sinks, biases, norms of heads, fed back normed, features normed"])
    features, tokens, embedding = inputs()

    def loss(params: Any) -> jax.Array:
        hidden = training_time_test(model, params, features, tokens, num_steps=3, target_embedding=embedding)
        return jnp.sin(hidden).sum()

    whole = jax.jit(jax.grad(loss))(params)
    monkeypatch.setattr(ttt, "_MAX_SCORE_BYTES", 1)
    grouped = jax.jit(jax.grad(lambda params: loss(params)))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(whole):
        found = grouped
        for part in path:
            found = found[part.key]
        np.testing.assert_allclose(found, leaf, atol=1e-5 * np.abs(leaf).max() + 1e-6, err_msg=str(path))
