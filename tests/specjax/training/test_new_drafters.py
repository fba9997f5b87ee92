"""Drafters to begin a training with: their shapes, and heads made from the target's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafting.heads import FullHead, LowRankHead, ScreenedHead, TrimmedHead
from specjax.drafting.heads.named_head import named_head
from specjax.model_config import ModelConfig
from specjax.models.layers import head_product
from specjax.training.new_drafters import INITS, HeadStart, initial_params, new_eagle3, new_hydra, new_medusa
from tests.helpers import tiny_config

TARGET = tiny_config(num_layers=4)
WIDTH, VOCAB_SIZE = TARGET.hidden_size, TARGET.vocab_size
KEPT = np.arange(1, 34, 2)
NAMES = ("full", "shared", "low_rank:4", f"trimmed:{len(KEPT)}", "screened:4:8")
# Two products in float32 on one side, one on the other, of numbers around 6.
PRODUCT_TOLERANCE = 1e-4


def lm_head() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (VOCAB_SIZE, WIDTH))


def start(init: str) -> HeadStart:
    return HeadStart(lm_head=lm_head(), init=init, covariance=np.eye(WIDTH), token_ids={len(KEPT): KEPT})


@pytest.mark.parametrize("init", ["weighted_svd", *(pytest.param(init, marks=pytest.mark.full) for init in INITS[1:])])
@pytest.mark.full
def test_every_drafter_begins_with_every_head(init: str, full_grid: bool) -> None:
    for name in NAMES:
        head = named_head(name, hidden_size=WIDTH, vocab_size=VOCAB_SIZE)
        others = new_medusa(TARGET, head, num_draft_heads=2), new_hydra(TARGET, head, num_draft_heads=2)
        for network in (new_eagle3(TARGET, head), *(others if full_grid else ())):
            params = initial_params(network, start(init), jax.random.key(1))
            expected = jax.eval_shape(network.init_params, jax.random.key(0))
            assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)


def test_a_warm_start_scores_as_the_target_does() -> None:
    hidden = jax.random.normal(jax.random.key(2), (5, WIDTH))
    exact = jax.nn.softmax(head_product(hidden, lm_head()))
    for head in (FullHead(), LowRankHead(rank=WIDTH), TrimmedHead(num_tokens=VOCAB_SIZE), ScreenedHead(rank=4, num_candidates=VOCAB_SIZE)):
        begin = HeadStart(lm_head=lm_head(), init="svd", token_ids={VOCAB_SIZE: np.arange(VOCAB_SIZE)})
        scores = head.scores(begin.params(head, jax.random.key(3)), hidden)
        probs = scores.over_vocabulary(jax.nn.softmax(scores.logits), VOCAB_SIZE)
        np.testing.assert_allclose(probs, exact, atol=PRODUCT_TOLERANCE)


@pytest.mark.full
def test_drafters_that_differ_in_their_heads_begin_with_the_same_body() -> None:
    bodies = []
    for name in ("full", "low_rank:4"):
        network = new_eagle3(TARGET, named_head(name, hidden_size=WIDTH, vocab_size=VOCAB_SIZE))
        bodies.append(initial_params(network, start("svd"), jax.random.key(1)))
        del bodies[-1]["draft_head"]
    jax.tree.map(np.testing.assert_array_equal, *bodies)


def test_a_drafters_layer_has_the_shape_of_its_targets() -> None:
    config = new_eagle3(TARGET, FullHead()).config
    assert config.feature_layers == (2, 3, 4)
    for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings"):
        assert getattr(config.decoder, name) == getattr(TARGET, name)
    assert isinstance(config.decoder, ModelConfig)
    assert config.decoder.num_layers == 1
    assert new_eagle3(TARGET, FullHead(), dtype=jnp.float32).param_dtype == jnp.float32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fulll", "'fulll': expected full, shared, low_rank:DIVISOR"),
        ("full:2", "expected full"),
        ("low_rank", "expected full"),
        ("low_rank:x", "invalid literal"),
        ("low_rank:5", "must divide hidden_size = 32, got 5"),
        ("low_rank:0", "must be a positive int, got 0"),
        ("trimmed:65", "must be at most vocab_size = 64, got 65"),
        ("screened:4:65", "must be at most vocab_size = 64, got 65"),
    ],
)
def test_wrong_names_of_heads_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named_head(name, hidden_size=WIDTH, vocab_size=VOCAB_SIZE)


def test_starts_without_what_they_need_are_refused() -> None:
    with pytest.raises(ValueError, match="init must be one of weighted_svd, svd, random, got 'zeros'"):
        HeadStart(lm_head=lm_head(), init="zeros")
    with pytest.raises(ValueError, match="weighted_svd needs the covariance"):
        HeadStart(lm_head=lm_head()).params(LowRankHead(rank=4), jax.random.key(0))
    with pytest.raises(ValueError, match="which 7 tokens it has"):
        start("random").params(TrimmedHead(num_tokens=7), jax.random.key(0))
