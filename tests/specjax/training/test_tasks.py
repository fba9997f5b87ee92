"""Each task hands to the loss what its drafter drafts from, and trains what it says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import DraftModel
from specjax.drafting.heads import DraftHead, FullHead, LowRankHead, ScreenedHead, TrimmedHead
from specjax.drafting.hydra import Hydra, HydraConfig
from specjax.drafting.medusa import Medusa, MedusaConfig
from specjax.training import target_batch
from specjax.training.distillation import distill
from specjax.training.losses import DraftLoss
from specjax.training.partition import merge_params, split_params
from specjax.training.target_batch import TargetArrays, target_outputs
from specjax.training.tasks import DraftModelTask, Eagle3Task, HeadOnly, HydraTask, MedusaTask
from specjax.training.training_time_test import training_time_test
from tests.helpers import FLOAT32_TOLERANCE, random_model, tiny_config
from tests.training import VOCAB, WIDTH, eagle3_network, initial_params, perturbed, random_batch, sure_target

SHARED = ScreenedHead(rank=4, num_candidates=5, shared=True)


def target_arrays() -> TargetArrays:
    target, params = sure_target()
    return TargetArrays.of(target.config, params)


def several_heads(kind: Any, config: Any, head: DraftHead) -> tuple[Any, dict]:
    sizes = dict(hidden_size=WIDTH, vocab_size=VOCAB, num_draft_heads=3, num_layers=2)
    model = kind(config(head=head, **sizes), dtype=jnp.float32, param_dtype=jnp.float32)
    return model, perturbed(initial_params(model))


def scores_of(group: Any) -> np.ndarray:
    return np.asarray(group.head.scores(group.head_params, group.hidden[0], group.shared_head).logits)


@pytest.mark.parametrize("head", [pytest.param(LowRankHead(rank=4), marks=pytest.mark.full), SHARED], ids=["own", "shared"])
def test_medusas_states_give_the_scores_of_its_heads(head: DraftHead) -> None:
    model, params = several_heads(Medusa, MedusaConfig, head)
    batch, arrays = random_batch(), target_arrays()
    groups = jax.jit(MedusaTask(model).draft_states)(params, arrays, batch)
    expected = jax.jit(model.apply)({"params": params}, batch.hidden, arrays.lm_head)
    assert [group.ahead for group in groups] == [(1,), (2,), (3,)]
    for group, scores in zip(groups, expected, strict=True):
        np.testing.assert_allclose(scores_of(group), scores.logits, atol=FLOAT32_TOLERANCE * np.abs(scores.logits).max())


@pytest.mark.parametrize("head", [FullHead(bias=True), pytest.param(SHARED, marks=pytest.mark.full)], ids=["own", "shared"])
def test_hydras_states_give_the_scores_of_its_heads_for_the_tokens_of_the_text(head: DraftHead) -> None:
    model, params = several_heads(Hydra, HydraConfig, head)
    batch, arrays = random_batch(), target_arrays()
    groups = jax.jit(HydraTask(model).draft_states)(params, arrays, batch)
    apply = jax.jit(model.apply)
    assert [group.ahead for group in groups] == [(1,), (2,), (3,)]
    embeddings = arrays.embedding[batch.tokens]
    for index, group in enumerate(groups):
        for t in range(batch.tokens.shape[1] - 1 - index):
            known = embeddings[:, t + 1 : t + 2 + index]
            scores = apply({"params": params}, batch.hidden[:, t], known, arrays.lm_head).logits
            np.testing.assert_allclose(scores_of(group)[:, t], scores, atol=FLOAT32_TOLERANCE * np.abs(scores).max())


def test_eagle3s_states_are_those_of_the_training_time_test() -> None:
    network = eagle3_network(TrimmedHead(num_tokens=7), own_embedding=True, feature_layers=(0, 2))
    params = perturbed(initial_params(network))
    batch = random_batch(feature_layers=(0, 1, 2))

    @jax.jit
    def both(params: dict) -> Any:
        features = jnp.concatenate([batch.features[..., :WIDTH], batch.features[..., 2 * WIDTH :]], axis=-1)
        (group,) = Eagle3Task(network, num_steps=1).draft_states(params, target_arrays(), batch)
        return group, training_time_test(network, params, features, batch.tokens, num_steps=1)

    group, expected = both(params)
    np.testing.assert_array_equal(group.hidden, expected)
    assert group.ahead == (1,)
    jax.tree.map(np.testing.assert_array_equal, group.head_params, params["draft_head"])
    with pytest.raises(ValueError, match=r"the batch has features of boundaries \(0, 1\), \(0, 2\) are needed"):
        random_batch(feature_layers=(0, 1)).features_at((0, 2))


def draft_model(head: DraftHead, **changes: Any) -> tuple[DraftModel, dict]:
    model, params = random_model(tiny_config(vocab_size=VOCAB, num_layers=1, hidden_size=16, **changes))
    arrays = head.init_params(jax.random.key(0), hidden_size=16, vocab_size=VOCAB, dtype=jnp.float32)
    return DraftModel(model, head), {**params, "draft_head": arrays}


def test_a_draft_models_states_are_its_own_on_the_same_tokens() -> None:
    drafter, params = draft_model(SHARED, tie_word_embeddings=True)
    batch, model = random_batch(), drafter.model
    (group,) = jax.jit(DraftModelTask(drafter).draft_states)(params, target_arrays(), batch)
    expected = jax.jit(model.apply)({"params": params}, batch.tokens, model.init_cache(batch_size=2, capacity=9)).hidden
    np.testing.assert_allclose(group.hidden[0], expected, atol=FLOAT32_TOLERANCE * np.abs(expected).max())
    assert group.ahead == (0,)
    np.testing.assert_array_equal(group.shared_head, params["embedding"])


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.full)], ids=["in groups", "at once"])
def test_of_a_frozen_draft_model_nothing_is_kept_for_a_backward_pass(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch()
    num_heads, num_tokens = tiny_config().num_heads, batch.tokens.shape[1]
    monkeypatch.setattr(target_batch, "_MAX_SCORE_BYTES", rows * 4 * num_heads * num_tokens**2)

    def residuals(num_layers: int) -> int:
        model, params = random_model(tiny_config(vocab_size=VOCAB, num_layers=num_layers, hidden_size=16))
        head = LowRankHead(rank=2)
        arrays = head.init_params(jax.random.key(0), hidden_size=16, vocab_size=VOCAB, dtype=jnp.float32)

        def loss(arrays: dict) -> jax.Array:
            states = DraftModelTask(DraftModel(model, head)).draft_states({**params, "draft_head": arrays}, target_arrays(), batch)
            return distill(DraftLoss(), states, batch, target_arrays().lm_head)[0]

        # What a `vjp` returns as arrays is what it keeps.
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda arrays: jax.vjp(loss, arrays)[1], arrays)))

    assert residuals(1) == residuals(3) > 0


def names(tree: dict) -> set[str]:
    return {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def test_what_is_fixed_is_left_out_of_the_trained_params_and_comes_back() -> None:
    network = eagle3_network(TrimmedHead(num_tokens=7), own_embedding=True)
    params = initial_params(network)
    medusa, medusa_params = several_heads(Medusa, MedusaConfig, LowRankHead(rank=2))
    drafter, draft_params = draft_model(LowRankHead(rank=2))
    for task, all_params, fixed_names in (
        (Eagle3Task(network), params, {"embedding", "draft_head.token_ids"}),
        (Eagle3Task(network, train_embedding=True), params, {"draft_head.token_ids"}),
        (HeadOnly(Eagle3Task(network)), params, names(params) - {"draft_head.lm_head"}),
        (MedusaTask(medusa), medusa_params, set()),
        (HeadOnly(MedusaTask(medusa)), medusa_params, {name for name in names(medusa_params) if "draft_head" not in name}),
        (DraftModelTask(drafter), draft_params, names(draft_params) - {"draft_head.down", "draft_head.up"}),
    ):
        trained, fixed = split_params(all_params, task.is_trained)
        assert names(fixed) == fixed_names, task
        assert names(trained) == names(all_params) - fixed_names
        jax.tree.map(np.testing.assert_array_equal, merge_params(trained, fixed), all_params)


def test_what_does_not_fit_is_refused() -> None:
    target = sure_target()[0].config
    network = eagle3_network(LowRankHead(rank=4))
    params = initial_params(network)
    wrong = {**params, "draft_head": {**params["draft_head"], "up": params["draft_head"]["up"][:, :3]}}
    other = tiny_config(vocab_size=VOCAB + 1)
    medusa, medusa_params = several_heads(Medusa, MedusaConfig, LowRankHead(rank=2))
    drafter, draft_params = draft_model(LowRankHead(rank=2))
    for task, given, config, message in (
        (Eagle3Task(network), wrong, target, r"draft_head.up should have shape \(32, 4\) by its configuration, got \(32, 3\)"),
        (
            Eagle3Task(network),
            {},
            target,
            r"an EAGLE-3 drafter: draft_head.down should have shape \(4, 32\) by its configuration, got None",
        ),
        (Eagle3Task(network), params, other, "a vocabulary of 32 tokens, the target has 33"),
        (HeadOnly(MedusaTask(medusa)), medusa_params, other, "a target with vocab_size = 32, this one has 33"),
        (MedusaTask(medusa), {}, target, "Medusa's heads: head_0.block_0 should have shape"),
        (DraftModelTask(drafter), draft_params, other, "vocabulary of 32 tokens, the target one of 33"),
        (DraftModelTask(DraftModel(drafter.model)), draft_params, target, "there is nothing to train: FullHead"),
    ):
        with pytest.raises(ValueError, match=message):
            task.check(given, config)
    Eagle3Task(network).check(params, target)
    MedusaTask(medusa).check(medusa_params, target)
    DraftModelTask(drafter).check(draft_params, target)
    with pytest.raises(ValueError, match="num_steps must be a positive int, got 0"):
        Eagle3Task(network, num_steps=0)


@pytest.mark.parametrize("rows", [pytest.param(4, marks=pytest.mark.full), 2])
def test_the_targets_outputs_are_those_of_each_text_alone(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, params = sure_target()
    num_tokens, layers = 7, (0, 2)
    tokens = np.random.default_rng(0).integers(VOCAB, size=(4, num_tokens)).astype(np.int32)
    monkeypatch.setattr(target_batch, "_MAX_SCORE_BYTES", rows * 4 * target.config.num_heads * num_tokens**2)
    found = jax.jit(lambda tokens: target_outputs(target, params, tokens, tokens > 0, feature_layers=layers))(tokens)
    assert found.feature_layers == layers

    @jax.jit
    def alone(text: jax.Array) -> Any:
        output = target.apply({"params": params}, text[None], target.init_cache(batch_size=1, capacity=num_tokens), feature_layers=layers)
        return output.hidden[0], output.features[0]

    for row, text in enumerate(tokens):
        for ours, theirs in zip((found.hidden, found.features), alone(text), strict=True):
            np.testing.assert_allclose(ours[row], theirs, atol=FLOAT32_TOLERANCE * np.abs(theirs).max())
