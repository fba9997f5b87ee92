"""The EAGLE-3 drafter's network: caches and rollback, heads, the target's features. See test_drafter_parity.py for what it computes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import KVCache, ModelConfig, RopeConfig
from specjax.drafting.eagle3 import Eagle3, Eagle3Output
from specjax.drafting.eagle3_config import Eagle3Config, default_feature_layers
from specjax.drafting.heads import FullHead, LowRankHead, ScreenedHead, TrimmedHead
from specjax.drafting.hydra import Hydra, HydraConfig
from specjax.drafting.medusa import Medusa, MedusaConfig
from tests.helpers import FLOAT32_TOLERANCE, VOCAB_SIZE, tiny_config

NUM_TOKENS, CAPACITY, WIDTH = 9, 16, 32


def drafter_config(decoder: dict[str, Any] | None = None, **changes: Any) -> Eagle3Config:
    fields = dict(decoder=tiny_config(**dict(num_layers=1) | (decoder or {})), target_hidden_size=WIDTH)
    return Eagle3Config(**fields | changes)


def random_drafter(config: Any, module: Any = Eagle3) -> tuple[Any, dict]:
    """A module in float32 with parameters that keep activations at their size."""
    model = module(config, dtype=jnp.float32, param_dtype=jnp.float32)
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == jnp.int32:
            return jnp.asarray(np.sort(rng.permutation(VOCAB_SIZE)[: leaf.shape[0]]), jnp.int32)
        fan_in = leaf.shape[-1] if leaf.ndim == 2 else np.prod(leaf.shape[:1])
        return jnp.asarray(
            1 + 0.3 * rng.normal(size=leaf.shape) if leaf.ndim == 1 else rng.normal(size=leaf.shape) / fan_in**0.5, leaf.dtype
        )

    return model, jax.tree.map(draw, jax.eval_shape(model.init_params, jax.random.key(0)))


def inputs(batch_size: int = 2) -> tuple[jax.Array, jax.Array]:
    """Embeddings and states `[B,T,D]`."""
    rng = np.random.default_rng(1)
    return tuple(jnp.asarray(rng.normal(size=(batch_size, NUM_TOKENS, WIDTH)), jnp.float32) for _ in range(2))


@functools.partial(jax.jit, static_argnames="model")
def run(
    model: Eagle3, params: dict, embeddings: jax.Array, state: jax.Array, cache: KVCache, step_mask: jax.Array | None = None
) -> Eagle3Output:
    return model.apply({"params": params}, embeddings, state, cache, step_mask=step_mask)


DECODERS = {
    "one layer": {},
    "two layers, window, biases": dict(num_layers=2, layer_windows=(3, None), qkv_bias=True, output_bias=True, mlp_bias=True),
    "rotary embedding by length": dict(rope=RopeConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=8)),
}


@pytest.mark.parametrize("name", DECODERS)
def test_chunked_passes_equal_one_pass(name: str) -> None:
    model, params = random_drafter(drafter_config(DECODERS[name]))
    embeddings, state = inputs()
    empty = model.init_cache(batch_size=2, capacity=CAPACITY)
    whole = run(model, params, embeddings, state, empty)
    cache, hidden, states = empty, [], []
    for part in (slice(0, 4), slice(4, 8), slice(8, 9)):
        output = run(model, params, embeddings[:, part], state[:, part], cache)
        cache = output.cache
        hidden.append(output.hidden)
        states.append(output.next_state)
    np.testing.assert_array_equal(cache.length, [NUM_TOKENS] * 2)
    np.testing.assert_allclose(jnp.concatenate(hidden, axis=1), whole.hidden, atol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(jnp.concatenate(states, axis=1), whole.next_state, atol=FLOAT32_TOLERANCE)


def test_rolled_back_rows_continue_as_if_nothing_had_been_drafted() -> None:
    model, params = random_drafter(drafter_config())
    embeddings, state = inputs()
    cache = run(model, params, embeddings, state, model.init_cache(batch_size=2, capacity=CAPACITY)).cache
    kept = jnp.asarray([5, 2])
    again = run(model, params, embeddings[:, :3] + 1, state[:, :3], cache.with_length(kept))
    np.testing.assert_array_equal(again.cache.length, kept + 3)
    for row, length in enumerate(kept.tolist()):
        tokens = jnp.concatenate([embeddings[row, :length], embeddings[row, :3] + 1])[None]
        states = jnp.concatenate([state[row, :length], state[row, :3]])[None]
        fresh = run(model, params, tokens, states, model.init_cache(batch_size=1, capacity=CAPACITY))
        np.testing.assert_allclose(again.hidden[row], fresh.hidden[0, length:], atol=FLOAT32_TOLERANCE)


def test_a_tree_mask_hides_the_rows_that_are_no_ancestors() -> None:
    model, params = random_drafter(drafter_config())
    embeddings, state = inputs(1)
    alone = jnp.eye(NUM_TOKENS, dtype=bool)
    output = run(model, params, embeddings, state, model.init_cache(batch_size=1, capacity=CAPACITY), step_mask=alone)
    changed = run(model, params, embeddings.at[:, :-1].add(1), state, model.init_cache(batch_size=1, capacity=CAPACITY), step_mask=alone)
    np.testing.assert_allclose(output.hidden[:, -1], changed.hidden[:, -1], atol=FLOAT32_TOLERANCE)


def test_the_state_fed_back_is_normed_only_where_the_config_says() -> None:
    for norm_output in (False, True):
        model, params = random_drafter(drafter_config(norm_output=norm_output))
        output = run(model, params, *inputs(), model.init_cache(batch_size=2, capacity=CAPACITY))
        assert np.array_equal(output.hidden, output.next_state) is norm_output


def test_the_targets_embedding_and_head_are_used_where_there_is_no_own() -> None:
    shared, params = random_drafter(drafter_config(head=FullHead(shared=True)))
    assert not {"embedding", "draft_head"} & params.keys()
    own, own_params = random_drafter(drafter_config(own_embedding=True))
    tokens, hidden = jnp.asarray([[3, 5, 63]]), inputs()[0]
    for method, argument, theirs in (("embed", tokens, own_params["embedding"]), ("scores", hidden, own_params["draft_head"]["lm_head"])):
        expected = own.apply({"params": own_params}, argument, method=method)
        assert_same(shared.apply({"params": params}, argument, theirs, method=method), expected)
        # An own one is not replaced by what is passed.
        assert_same(own.apply({"params": own_params}, argument, theirs + 1, method=method), expected)
        with pytest.raises(ValueError, match="of its own: pass the"):
            shared.apply({"params": params}, argument, method=method)


def assert_same(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_bfloat16_drafters_compute_in_bfloat16_and_score_in_float32() -> None:
    model = Eagle3(drafter_config(head=TrimmedHead(num_tokens=20), fc_norm=True))
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16", "int32"}
    state = model.apply({"params": params}, jnp.ones((1, 2, 3 * WIDTH)), method="fuse")
    output = run(model, params, state, state, model.init_cache(batch_size=1, capacity=2))
    assert output.hidden.dtype == output.next_state.dtype == output.cache.keys[0].dtype == jnp.bfloat16
    assert model.apply({"params": params}, output.hidden, method="scores").logits.dtype == jnp.float32


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(80, (2, 40, 77)), (32, (2, 16, 29)), (8, (2, 4, 5)), (7, (2, 3, 4)), (6, (2, 3, 4)), (4, (2, 3, 4)), (3, (1, 2, 3)), (2, (0, 1, 2))],
)
def test_default_feature_layers_are_three_different_boundaries(num_layers: int, expected: tuple[int, ...]) -> None:
    assert default_feature_layers(num_layers) == expected
    target = tiny_config(num_layers=num_layers)
    assert drafter_config().for_target(target).feature_layers == expected


def test_a_target_of_one_layer_is_too_shallow_for_three_features() -> None:
    assert default_feature_layers(1) == (0, 1)
    target = tiny_config(num_layers=1)
    with pytest.raises(ValueError, match=r"features of 3 boundaries, a target of 1 layers has only 2"):
        drafter_config().for_target(target)
    assert drafter_config(feature_layers=(0, 1)).for_target(target).num_features == 2


def test_a_drafter_for_another_target_is_refused() -> None:
    target = tiny_config(num_layers=6)
    assert drafter_config(feature_layers=(0, 3, 6)).for_target(target).feature_layers == (0, 3, 6)
    for config, message in (
        (drafter_config(feature_layers=(0, 3, 7)), r"boundaries from 0 to the target's 6, got \(0, 3, 7\)"),
        (drafter_config(dict(vocab_size=65)), "vocabulary of 65 tokens, the target has 64"),
        (drafter_config(target_hidden_size=64, own_embedding=True), "target of width 64, this one has 32"),
    ):
        with pytest.raises(ValueError, match=message):
            config.for_target(target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(target_hidden_size=0), "target_hidden_size must be a positive int, got 0"),
        (dict(head=TrimmedHead(num_tokens=65)), "TrimmedHead.num_tokens must be at most vocab_size = 64, got 65"),
        (dict(head=LowRankHead(rank=33)), "LowRankHead.rank must be at most hidden_size = 32, got 33"),
        (dict(head=FullHead), r"Eagle3Config.head must be a draft head such as FullHead\(\).*, got <class"),
        (dict(head=None), "Eagle3Config.head must be a draft head .*, got None"),
        (dict(feature_layers=(3, 1)), r"ascending boundaries from 0 on, got \(3, 1\)"),
        (dict(feature_layers=(2, 2)), "ascending boundaries"),
        (dict(feature_layers=[1, 2]), "must be a tuple"),
        (dict(feature_layers=()), "ascending boundaries"),
        (dict(target_hidden_size=64, own_embedding=True, head=FullHead(shared=True)), "without an embedding and an LM head of its own"),
        (dict(target_hidden_size=64), "without an embedding and an LM head of its own"),
        (dict(fc_norm=True, norm_before_fc=True), "exclude each other"),
        (dict(decoder=dict(tie_word_embeddings=True)), "tie_word_embeddings must be False"),
    ],
)
def test_impossible_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drafter_config(**changes)


def test_configurations_are_hashable_and_frozen() -> None:
    config = drafter_config(feature_layers=(0, 1, 2))
    assert hash(config) == hash(dataclasses.replace(config))
    assert isinstance(config.decoder, ModelConfig)


def test_medusa_heads_without_lm_heads_use_the_targets() -> None:
    config = MedusaConfig(hidden_size=WIDTH, vocab_size=VOCAB_SIZE, num_draft_heads=3, head=FullHead(shared=True), block_bias=False)
    shared, params = random_drafter(config, Medusa)
    own = Medusa(dataclasses.replace(config, head=FullHead()), dtype=jnp.float32, param_dtype=jnp.float32)
    head = jnp.asarray(np.random.default_rng(3).normal(size=(VOCAB_SIZE, WIDTH)), jnp.float32)
    hidden = inputs()[0]
    scores = shared.apply({"params": params}, hidden, head)
    assert [one.logits.shape for one in scores] == [(2, NUM_TOKENS, VOCAB_SIZE)] * 3
    assert np.std(scores[0].logits - scores[2].logits) > 0.3
    own_params = {name: {**head_params, "draft_head": {"lm_head": head}} for name, head_params in params.items()}
    assert_same(own.apply({"params": own_params}, hidden), scores)
    with pytest.raises(ValueError, match="pass the one that it shares"):
        shared.apply({"params": params}, hidden)


def test_hydra_has_no_head_for_more_tokens() -> None:
    model, params = random_drafter(HydraConfig(hidden_size=WIDTH, vocab_size=VOCAB_SIZE, num_draft_heads=2), Hydra)
    hidden = inputs()[0]
    scores = model.apply({"params": params}, hidden, jnp.stack([hidden] * 2, axis=-2))
    assert scores.logits.shape == (2, NUM_TOKENS, VOCAB_SIZE)
    with pytest.raises(ValueError, match="embeddings must hold 1 to 2 tokens, got 3"):
        model.apply({"params": params}, hidden, jnp.stack([hidden] * 3, axis=-2))


@pytest.mark.parametrize("head", [TrimmedHead(num_tokens=20), ScreenedHead(rank=4, num_candidates=8, shared=True)], ids=["own", "shared"])
def test_each_medusa_and_hydra_head_has_the_arrays_of_its_own_lm_head(head: Any) -> None:
    sizes = dict(hidden_size=WIDTH, vocab_size=VOCAB_SIZE, num_draft_heads=2, head=head)
    hidden, lm_head = inputs()[0], jnp.asarray(np.random.default_rng(3).normal(size=(VOCAB_SIZE, WIDTH)), jnp.float32)
    for module, config, arguments in (
        (Medusa, MedusaConfig(**sizes), (hidden,)),
        (Hydra, HydraConfig(**sizes), (hidden, jnp.stack([hidden] * 2, axis=-2))),
    ):
        model, params = random_drafter(config, module)
        wanted = head.init_params(jax.random.key(0), hidden_size=WIDTH, vocab_size=VOCAB_SIZE, dtype=jnp.float32)
        for index in range(2):
            found = params[f"head_{index}"]["draft_head"]
            assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, wanted)
        target_head = lm_head if head.shared else None
        scores = model.apply({"params": params}, *arguments, target_head)
        states = model.apply({"params": params}, *arguments, method="states" if module is Medusa else "state")
        last, state = (scores[-1], states[-1]) if module is Medusa else (scores, states)
        assert last.logits.shape[:2] == (2, NUM_TOKENS)
        assert last.token_ids.shape[-1] == last.logits.shape[-1] < VOCAB_SIZE
        from_state = head.scores(params["head_1"]["draft_head"], state, target_head)
        np.testing.assert_allclose(last.logits, from_state.logits, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("config", [MedusaConfig, HydraConfig])
def test_head_configurations_check_themselves(config: Any) -> None:
    with pytest.raises(ValueError, match="num_draft_heads must be a positive int, got 0"):
        config(hidden_size=WIDTH, vocab_size=VOCAB_SIZE, num_draft_heads=0)
    with pytest.raises(ValueError, match="TrimmedHead.num_tokens must be at most vocab_size = 64, got 65"):
        config(hidden_size=WIDTH, vocab_size=VOCAB_SIZE, num_draft_heads=1, head=TrimmedHead(num_tokens=65))
