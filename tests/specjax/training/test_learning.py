"""Drafters learn a target's texts by heart, and then decoding accepts what they draft."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Eagle3Drafter, GenerateConfig, eagle3_params, speculative_generate
from specjax.drafting.heads import FullHead, LowRankHead, ScreenedHead, TrimmedHead
from specjax.drafting.hydra import Hydra, HydraConfig
from specjax.drafting.medusa import Medusa, MedusaConfig
from specjax.training.losses import DraftLoss
from specjax.training.optimizer import OptimizerConfig
from specjax.training.tasks import Eagle3Task, HydraTask, MedusaTask
from specjax.training.train_config import TrainConfig
from specjax.training.train_step import DrafterTraining
from specjax.training.trainer import TrainResult, train
from tests.training import PROMPT_LENGTH, TEXT_LENGTH, VOCAB, WIDTH, MemoryTexts, eagle3_network, greedy_texts, initial_params, sure_target

NUM_DRAFTS = 2
HEADS = [
    LowRankHead(rank=16),
    *(
        pytest.param(head, marks=pytest.mark.full)
        for head in (FullHead(), TrimmedHead(num_tokens=VOCAB), ScreenedHead(rank=8, num_candidates=8))
    ),
]
OPTIMIZER = OptimizerConfig(learning_rate=0.03, warmup_steps=10, clip_norm=1.0)


def learnt(training: DrafterTraining, params: Any, num_steps: int) -> TrainResult:
    target, target_params = sure_target()
    _, tokens, loss_mask = greedy_texts()
    config = TrainConfig(num_steps=num_steps, report_every=num_steps // 4)
    return train(config, target, target_params, {"it": training}, {"it": params}, MemoryTexts(tokens, loss_mask))


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_an_eagle3_drafter_learns_64_texts_and_its_drafts_of_them_are_accepted(head: Any) -> None:
    network = eagle3_network(head)
    training = DrafterTraining(task=Eagle3Task(network, num_steps=NUM_DRAFTS), optimizer=OPTIMIZER)
    result = learnt(training, initial_params(network), 140)
    report = result.reports["it"]
    assert min(report.acceptance) > 0.95, report
    first, second = report.acceptance
    np.testing.assert_allclose(report.acceptance_length, 1 + first + first * second)

    target, target_params = sure_target()
    prompts, tokens, _ = greedy_texts()
    params = eagle3_params(network, result.params["it"], target.config, target_params)
    config = GenerateConfig(max_new_tokens=TEXT_LENGTH - PROMPT_LENGTH, num_speculative_tokens=NUM_DRAFTS)
    output = speculative_generate(target, target_params, Eagle3Drafter(network), params, prompts, config=config)
    np.testing.assert_array_equal(output.tokens, tokens[:, PROMPT_LENGTH:])
    assert output.statistics.draft_acceptance_rate > 0.95


@pytest.mark.full
@pytest.mark.parametrize("kind", ["lk_alpha", "lk_lambda"])
def test_lk_losses_train_a_drafter_too(kind: str) -> None:
    network = eagle3_network(FullHead())
    training = DrafterTraining(task=Eagle3Task(network, num_steps=NUM_DRAFTS), loss=DraftLoss(kind=kind), optimizer=OPTIMIZER)
    report = learnt(training, initial_params(network), 200).reports["it"]
    # From scratch the gradient of log alpha is small where the two hardly meet: slower than the divergence.
    assert min(report.acceptance) > 0.75, report


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Medusa", "Hydra"])
def test_each_head_learns_the_token_that_it_is_for(kind: str) -> None:
    sizes = dict(hidden_size=WIDTH, vocab_size=VOCAB, num_draft_heads=2)
    _, tokens, _ = greedy_texts()
    if kind == "Medusa":
        model, task = (network := Medusa(MedusaConfig(**sizes), dtype=jnp.float32, param_dtype=jnp.float32)), MedusaTask(network)
    else:
        model, task = (network := Hydra(HydraConfig(**sizes), dtype=jnp.float32, param_dtype=jnp.float32)), HydraTask(network)
    result = learnt(DrafterTraining(task=task, optimizer=OPTIMIZER), initial_params(model), 140)
    variables = {"params": result.params["it"]}

    target, target_params = sure_target()
    hidden = target.apply({"params": target_params}, tokens, target.init_cache(batch_size=len(tokens), capacity=TEXT_LENGTH)).hidden
    embeddings = target_params["embedding"][tokens]
    for index, expected in enumerate(result.reports["it"].acceptance):
        rows = slice(PROMPT_LENGTH, TEXT_LENGTH - 2 - index)
        if kind == "Medusa":
            scores = model.apply(variables, hidden[:, rows])[index]
        else:
            following = [embeddings[:, PROMPT_LENGTH + 1 + ahead : TEXT_LENGTH - 1 - index + ahead] for ahead in range(index + 1)]
            scores = model.apply(variables, hidden[:, rows], jnp.stack(following, axis=-2))
        right = jnp.argmax(scores.logits, axis=-1) == tokens[:, PROMPT_LENGTH + 2 + index :]
        assert expected > 0.5
        assert right.mean() > 0.6
