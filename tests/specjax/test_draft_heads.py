"""Draft LM heads: what each scores, with each drafter that samples; the text is the target's whatever head drafts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import DraftModel, GenerateConfig, SamplingParams, speculative_generate
from specjax.drafting.heads import FullHead, HeadScores, LowRankHead, ScreenedHead, TrimmedHead
from specjax.drafting.heads.draft_head import DRAFT_HEAD, check_head, check_token_ids
from specjax.drafting.heads.low_rank import low_rank_logits
from specjax.drafting.pick import pick
from specjax.models.layers import head_product
from tests.drafters import eagle3, emitted_p_value, random_params, small_target
from tests.helpers import (
    FLOAT32_TOLERANCE,
    MIN_P_VALUE,
    NUM_TOKENS,
    VOCAB_SIZE,
    greedy_text,
    random_prompts,
    tiny_draft_model,
    tiny_target,
)

WIDTH = 32
SIZES = dict(hidden_size=WIDTH, vocab_size=VOCAB_SIZE)
# Sums of 32 products of order 1, in another order.
TOLERANCE = 10 * FLOAT32_TOLERANCE
HEADS: dict[str, Any] = {
    "full": FullHead(),
    "full, bias": FullHead(bias=True),
    "full, shared": FullHead(shared=True),
    "low-rank": LowRankHead(rank=8),
    "trimmed": TrimmedHead(num_tokens=20),
    "screened": ScreenedHead(rank=8, num_candidates=12),
    "screened, shared": ScreenedHead(rank=8, num_candidates=12, shared=True),
}


def arrays(head: Any, *, seed: int = 0, hidden_size: int = WIDTH, vocab_size: int = VOCAB_SIZE) -> dict:
    shapes = jax.eval_shape(lambda: head.init_params(jax.random.key(0), hidden_size=hidden_size, vocab_size=vocab_size, dtype=jnp.float32))
    return random_params({DRAFT_HEAD: shapes}, vocab_size=vocab_size, seed=seed)[DRAFT_HEAD]


def hidden_states(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(*shape, WIDTH)), jnp.float32)


SHARED = jnp.asarray(np.random.default_rng(2).normal(size=(VOCAB_SIZE, WIDTH)) / 4, jnp.float32)


def with_draft_model(head: Any, target: Any, target_params: dict) -> tuple[DraftModel, dict]:
    """A draft model with this head: of the tiny target its own, of the small one another small model."""
    model, params = tiny_draft_model() if target is tiny_target()[0] else small_target(seed=3)
    own = arrays(head, hidden_size=model.config.hidden_size, vocab_size=model.config.vocab_size)
    return DraftModel(model, head=head), params | ({DRAFT_HEAD: own} if own else {})


DRAFTERS = {"EAGLE-3": lambda head, *target: eagle3(*target, head=head), "draft model": with_draft_model}


def combinations(heads: dict[str, Any], by_default: set[tuple[str, str]]) -> list:
    """Every drafter with every head; what is not `by_default` is marked full."""
    pairs = [(drafter, head) for drafter in DRAFTERS for head in heads]
    assert by_default <= set(pairs)
    return [pytest.param(*pair, marks=() if pair in by_default else pytest.mark.full, id=", ".join(pair)) for pair in pairs]


@pytest.mark.parametrize(("drafter", "head"), combinations(HEADS, {("EAGLE-3", "screened"), ("draft model", "trimmed")}))
def test_greedy_speculative_equals_plain_with_each_head(drafter: str, head: str) -> None:
    prompts = random_prompts()
    drafts, params = DRAFTERS[drafter](HEADS[head], *tiny_target())
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=3)
    output = speculative_generate(*tiny_target(), drafts, params, prompts, config=config)
    np.testing.assert_array_equal(output.tokens, greedy_text(prompts))
    assert output.statistics.num_draft_tokens > 0


SMALL_HEADS: dict[str, Any] = {
    "full": FullHead(),
    "full, bias": FullHead(bias=True),
    "full, shared": FullHead(shared=True),
    "low-rank": LowRankHead(rank=2),
    "trimmed": TrimmedHead(num_tokens=3),
    "screened": ScreenedHead(rank=2, num_candidates=2),
    "screened, shared": ScreenedHead(rank=2, num_candidates=3, shared=True),
}


@pytest.mark.parametrize(("drafter", "head"), combinations(SMALL_HEADS, {("EAGLE-3", "low-rank"), ("draft model", "screened")}))
def test_sampled_text_follows_the_law_of_the_target_with_each_head(drafter: str, head: str) -> None:
    p_value, acceptance_rate = emitted_p_value(*DRAFTERS[drafter](SMALL_HEADS[head], *small_target()))
    assert p_value > MIN_P_VALUE
    assert 0.05 < acceptance_rate < 0.95


@dataclasses.dataclass(frozen=True)
class MisrecordedScores(HeadScores):
    """Tokens come from the candidates; what is on record is another distribution."""

    recorded: Any = None

    def over_vocabulary(self, values: jax.Array, vocab_size: int) -> jax.Array:
        return jax.nn.softmax(self.recorded)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MisrecordedHead(ScreenedHead):
    """Records the softmax over all tokens, of the full head or of the screening."""

    record: str = "full"

    def scores(self, params: Any, hidden: jax.Array, shared_head: jax.Array | None = None) -> HeadScores:
        true = super().scores(params, hidden, shared_head)
        recorded = head_product(hidden, params["lm_head"]) if self.record == "full" else low_rank_logits(params, hidden)
        return MisrecordedScores(true.logits, true.token_ids, recorded=recorded)


@pytest.mark.parametrize("record", ["full", pytest.param("screening", marks=pytest.mark.full)])
@pytest.mark.full
def test_recording_another_softmax_than_that_of_the_candidates_is_caught(record: str) -> None:
    head = MisrecordedHead(**dataclasses.asdict(SMALL_HEADS["screened"]), record=record)
    p_value, _ = emitted_p_value(*with_draft_model(head, *small_target()))
    assert p_value < MIN_P_VALUE


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_a_hidden_state_with_a_nan_gives_no_draft_and_leaves_other_rows_alone(name: str, do_sample: bool) -> None:
    head, hidden = HEADS[name], hidden_states(4)
    keys = jax.random.split(jax.random.key(0), 4)
    sampling = SamplingParams(1.0).broadcast(4) if do_sample else None

    @jax.jit
    def run(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        picked = pick(head.scores(arrays(head), hidden, SHARED), sampling, keys, vocab_size=VOCAB_SIZE)
        return picked.tokens, picked.usable

    tokens, usable = run(hidden)
    assert usable.all()
    for fault in (jnp.nan, jnp.inf):
        others, still_usable = run(hidden.at[1, 5].set(fault))
        assert still_usable.tolist() == [True, False, True, True]
        np.testing.assert_array_equal(others[jnp.array([0, 2, 3])], tokens[jnp.array([0, 2, 3])])
        assert ((others >= 0) & (others < VOCAB_SIZE)).all()


@pytest.mark.parametrize("name", HEADS)
def test_what_is_drawn_has_the_recorded_probability_and_is_a_token_that_has_a_score(name: str) -> None:
    head, rows = HEADS[name], 256
    params = arrays(head)
    hidden = jnp.repeat(hidden_states(2), rows // 2, axis=0)
    scores = head.scores(params, hidden, SHARED)
    keys = jax.random.split(jax.random.key(0), rows)
    picked = pick(scores, SamplingParams(1.0).broadcast(rows), keys, vocab_size=VOCAB_SIZE)
    assert picked.probs.shape == (rows, VOCAB_SIZE)
    assert picked.tokens.dtype == jnp.int32
    np.testing.assert_allclose(picked.probs.sum(axis=-1), 1.0, atol=FLOAT32_TOLERANCE)
    assert (jnp.take_along_axis(picked.probs, picked.tokens[:, None], axis=1) > 0).all()
    assert ((picked.probs > 0).sum(axis=1) == scores.logits.shape[-1]).all()
    assert len(np.unique(picked.tokens)) > 4
    if isinstance(head, TrimmedHead):
        assert np.isin(picked.tokens, params["token_ids"]).all()
    greedy = pick(scores, None, keys, vocab_size=VOCAB_SIZE)
    np.testing.assert_array_equal(greedy.tokens, picked.probs.argmax(axis=1))


def test_values_go_where_their_tokens_stand_with_one_map_or_one_a_position() -> None:
    values = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (2, 3, 2)), jnp.float32)
    for ids in (jnp.array([4, 1]), jnp.array([[[4, 1], [0, 2], [3, 4]], [[1, 0], [2, 1], [0, 4]]])):
        scores = HeadScores(values, ids)
        spread = scores.over_vocabulary(values, 5)
        expected = np.zeros((2, 3, 5), np.float32)
        np.put_along_axis(expected, np.broadcast_to(ids, values.shape), np.asarray(values), axis=2)
        np.testing.assert_array_equal(spread, expected)
        columns = jnp.array([[0, 1, 0], [1, 1, 0]])
        found = scores.tokens(columns)
        np.testing.assert_array_equal(found, np.take_along_axis(np.broadcast_to(ids, values.shape), columns[..., None], axis=2)[..., 0])
        assert found.dtype == jnp.int32
    everything = HeadScores(values)
    assert everything.over_vocabulary(values, 2) is values
    np.testing.assert_array_equal(everything.tokens(columns), columns)


@pytest.mark.parametrize("rank", [1, 8, WIDTH])
def test_a_low_rank_head_equals_its_materialised_product(rank: int) -> None:
    params, hidden = arrays(LowRankHead(rank=rank)), hidden_states(2, 3)
    assert jax.tree.map(jnp.shape, params) == {"down": (rank, WIDTH), "up": (VOCAB_SIZE, rank)}
    product = jnp.matmul(params["up"], params["down"], precision="highest")
    scores = LowRankHead(rank=rank).scores(params, hidden)
    expected = FullHead().scores({"lm_head": product}, hidden)
    assert float(expected.logits.std()) > 0.3
    np.testing.assert_allclose(scores.logits, expected.logits, atol=10 * TOLERANCE)


def test_at_full_size_every_head_is_the_full_head() -> None:
    hidden = hidden_states(2, 3)
    expected = FullHead(shared=True).scores({}, hidden, SHARED).logits
    order = np.random.default_rng(3).permutation(VOCAB_SIZE)
    screening = arrays(LowRankHead(rank=4))
    for head, params in (
        (FullHead(), {"lm_head": SHARED}),
        (FullHead(shared=True, bias=True), {"bias": jnp.zeros(VOCAB_SIZE)}),
        (LowRankHead(rank=WIDTH), {"down": jnp.eye(WIDTH), "up": SHARED}),
        (TrimmedHead(num_tokens=VOCAB_SIZE), {"lm_head": SHARED[order], "token_ids": jnp.asarray(order)}),
        (ScreenedHead(rank=4, num_candidates=VOCAB_SIZE), screening | {"lm_head": SHARED}),
        (ScreenedHead(rank=4, num_candidates=VOCAB_SIZE, shared=True), screening),
    ):
        check_head(head, params, **SIZES)
        scores = head.scores(params, hidden, SHARED)
        np.testing.assert_allclose(scores.over_vocabulary(scores.logits, VOCAB_SIZE), expected, atol=TOLERANCE)


def test_a_screened_head_scores_exactly_what_its_screening_chooses() -> None:
    head, hidden = HEADS["screened"], hidden_states(2, 3)
    params = arrays(head)
    scores = head.scores(params, hidden)
    screening = np.asarray(hidden, np.float64) @ np.asarray(params["down"], np.float64).T @ np.asarray(params["up"], np.float64).T
    np.testing.assert_array_equal(np.sort(scores.token_ids), np.sort(np.argsort(-screening)[..., :12]))
    full = np.asarray(hidden, np.float64) @ np.asarray(params["lm_head"], np.float64).T
    np.testing.assert_allclose(scores.logits, np.take_along_axis(full, np.asarray(scores.token_ids), axis=-1), atol=TOLERANCE)


def test_a_screened_head_scores_the_same_whether_rows_are_gathered_or_all_are_multiplied() -> None:
    head, rng = HEADS["screened"], np.random.default_rng(4)
    sizes = dict(down=(8, WIDTH), up=(VOCAB_SIZE, 8), lm_head=(VOCAB_SIZE, WIDTH))
    # Whole numbers: both sums are exact, many candidates' and many screenings' scores are equal, and so must be all that is made of them.
    params = {name: jnp.asarray(rng.integers(-1, 2, size), jnp.float32) for name, size in sizes.items()}
    hidden = jnp.asarray(rng.integers(-1, 2, (6, WIDTH)), jnp.float32)
    one = lambda hidden: head.scores(params, hidden)
    ways = {"gathered": lambda hidden: jax.lax.map(one, hidden), "multiplied": one}
    scores, whole = {}, {}
    for name, way in ways.items():
        products = [e for e in equations(jax.make_jaxpr(way)(hidden).jaxpr) if e.primitive.name == "dot_general"]
        whole[name] = any(x.aval.shape == (VOCAB_SIZE, WIDTH) for product in products for x in product.invars)
        scores[name] = jax.jit(way)(hidden)
    assert whole == {"gathered": False, "multiplied": True}
    jax.tree.map(np.testing.assert_array_equal, *scores.values())

    logits, ids = (np.asarray(found) for found in (scores["multiplied"].logits, scores["multiplied"].token_ids))
    screening = np.asarray(low_rank_logits(params, hidden))
    np.testing.assert_array_equal(ids, np.sort(np.argsort(-screening, axis=1, kind="stable")[:, :12]))  # of equal ones the first
    assert all(len(np.unique(row)) < 12 for row in logits)
    keys = jax.random.split(jax.random.key(0), 6)
    greedy, _ = (pick(found, None, keys, vocab_size=VOCAB_SIZE) for found in scores.values())
    np.testing.assert_array_equal(greedy.tokens, np.where(logits == logits.max(axis=1, keepdims=True), ids, VOCAB_SIZE).min(axis=1))
    sampled = [pick(found, SamplingParams(1.0, 5, 0.9).broadcast(6), keys, vocab_size=VOCAB_SIZE) for found in scores.values()]
    for name in ("tokens", "probs"):
        np.testing.assert_array_equal(*(getattr(found, name) for found in sampled))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Of a program, and of the functions that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_no_product_with_a_matrix_over_vocabulary_and_width_is_formed_or_taken() -> None:
    dense, hidden = {(VOCAB_SIZE, WIDTH), (WIDTH, VOCAB_SIZE)}, hidden_states(1)

    def made(function: Any, params: dict) -> set:
        return {tuple(out.aval.shape) for equation in equations(jax.make_jaxpr(function)(params).jaxpr) for out in equation.outvars}

    def taken(function: Any, params: dict) -> set:
        found = equations(jax.make_jaxpr(function)(params).jaxpr)
        return {tuple(x.aval.shape) for equation in found if equation.primitive.name == "dot_general" for x in equation.invars}

    low_rank = lambda params: HEADS["low-rank"].scores(params, hidden).logits
    screened = lambda params: HEADS["screened"].scores(params, hidden).logits
    factors, all_three = arrays(HEADS["low-rank"]), arrays(HEADS["screened"])
    for function, params in ((low_rank, factors), (screened, all_three)):
        assert not made(function, params) & dense
        assert not taken(function, params) & dense
    # Training does not form it either.
    assert not made(jax.grad(lambda params: low_rank(params).sum()), factors) & dense
    # And the test would see it.
    materialised = lambda params: hidden @ (params["up"] @ params["down"]).T
    assert made(materialised, factors) & dense
    assert taken(materialised, factors) & dense


def test_the_screening_is_trained_without_pulling_at_the_drafters_body() -> None:
    head, hidden = HEADS["screened"], hidden_states(3)
    params = arrays(head)
    scores = head.training_scores(params, hidden)
    np.testing.assert_array_equal(scores[0].logits, FullHead().scores(params, hidden).logits)
    np.testing.assert_array_equal(scores[1].logits, LowRankHead(rank=8).scores(params, hidden).logits)

    def loss(params: dict, hidden: jax.Array, which: int) -> jax.Array:
        return jnp.sin(head.training_scores(params, hidden)[which].logits).sum()

    for which, trained in enumerate((("lm_head", "hidden"), ("down", "up"))):
        of_params, of_hidden = jax.grad(loss, argnums=(0, 1))(params, hidden, which)
        found = {name for name, gradient in (of_params | {"hidden": of_hidden}).items() if np.abs(gradient).max() > 0}
        assert found == set(trained)


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_hashable_and_score_in_float32_what_bfloat16_weights_give(name: str) -> None:
    head = HEADS[name]
    assert hash(head) == hash(dataclasses.replace(head))
    params = head.init_params(jax.random.key(0), **SIZES, dtype=jnp.bfloat16)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} <= {"bfloat16", "int32"}
    scores = head.scores(params, hidden_states(2).astype(jnp.bfloat16), SHARED.astype(jnp.bfloat16))
    assert scores.logits.dtype == jnp.float32
    assert scores.token_ids is None or scores.token_ids.dtype == jnp.int32
    assert head.shared == (not {"lm_head", "up"} & params.keys() or name == "screened, shared")


def test_a_fresh_low_rank_head_scores_on_the_scale_of_a_fresh_full_one() -> None:
    sizes, hidden = dict(hidden_size=256, vocab_size=2000), jax.random.normal(jax.random.key(1), (64, 256))
    full, *low_rank = (
        float(head.scores(head.init_params(jax.random.key(0), **sizes, dtype=jnp.float32), hidden).logits.std())
        for head in (FullHead(), LowRankHead(rank=8), LowRankHead(rank=64))
    )
    # Over 64 positions and 8 random directions the scale itself is random, by about a tenth.
    np.testing.assert_allclose(low_rank, full, rtol=0.3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LowRankHead(rank=0), "LowRankHead.rank must be a positive int, got 0"),
        (lambda: LowRankHead(rank=True), "LowRankHead.rank must be a positive int, got True"),
        (lambda: LowRankHead(rank=33).check_sizes(**SIZES), "LowRankHead.rank must be at most hidden_size = 32, got 33"),
        (lambda: LowRankHead(rank=33).init_params(jax.random.key(0), **SIZES, dtype=jnp.float32), "at most hidden_size = 32"),
        (lambda: LowRankHead.divided(32, 0), "the divisor of a low-rank head must be a positive int, got 0"),
        (lambda: LowRankHead.divided(32, 5), "the divisor of a low-rank head must divide hidden_size = 32, got 5"),
        (lambda: TrimmedHead(num_tokens=-1), "TrimmedHead.num_tokens must be a positive int, got -1"),
        (lambda: TrimmedHead(num_tokens=65).check_sizes(**SIZES), "TrimmedHead.num_tokens must be at most vocab_size = 64, got 65"),
        (lambda: ScreenedHead(rank=4.0), "ScreenedHead.rank must be a positive int, got 4.0"),
        (lambda: ScreenedHead(rank=4, num_candidates=0), "ScreenedHead.num_candidates must be a positive int, got 0"),
        (lambda: ScreenedHead(rank=4).check_sizes(**SIZES), "ScreenedHead.num_candidates must be at most vocab_size = 64, got 2048"),
        (lambda: ScreenedHead(rank=40, num_candidates=4).check_sizes(**SIZES), "ScreenedHead.rank must be at most hidden_size = 32"),
        (lambda: FullHead(shared=True).scores({}, hidden_states(1)), "no LM head of its own: pass the one that it shares"),
        (lambda: check_head(LowRankHead, {}, **SIZES), r"must be a draft head such as FullHead\(\) .*, got <class"),
        (lambda: check_token_ids("always", [0.5], vocab_size=4), r"always must be a list of token ids, got float64 of shape \[1\]"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_divisor_gives_the_rank() -> None:
    assert LowRankHead.divided(2880, 8) == LowRankHead(rank=360)
    assert LowRankHead.divided(32, 1) == LowRankHead(rank=32)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("low-rank", dict(down=...), r"LowRankHead: draft_head.down should have shape \[8, 32\], it is missing"),
        ("low-rank", dict(up=jnp.zeros((64, 7))), r"draft_head.up should have shape \[64, 8\], it has shape \[64, 7\]"),
        ("screened", dict(lm_head=...), r"ScreenedHead: draft_head.lm_head should have shape \[64, 32\], it is missing"),
        ("full, bias", dict(bias=...), r"FullHead: draft_head.bias should have shape \[64\], it is missing"),
        ("trimmed", dict(token_ids=jnp.arange(20) + 45), "TrimmedHead: draft_head.token_ids must be tokens from 0 to 63, got 64"),
        ("trimmed", dict(token_ids=jnp.arange(20) - 3), "draft_head.token_ids must be tokens from 0 to 63, got -3"),
        ("trimmed", dict(token_ids=jnp.arange(20) // 2), "draft_head.token_ids must be different tokens, 0 is there 2 times"),
        ("trimmed", dict(token_ids=jnp.arange(20.0)), "draft_head.token_ids must be a list of token ids, got float32"),
    ],
)
def test_arrays_that_do_not_fit_a_head_are_refused_before_compiling(name: str, changes: dict, message: str) -> None:
    head = HEADS[name]
    broken = {key: leaf for key, leaf in (arrays(head) | changes).items() if leaf is not ...}
    model, params = tiny_draft_model()
    with pytest.raises(ValueError, match=message):
        DraftModel(model, head=head).check(params | {DRAFT_HEAD: broken}, target=model.config, max_length=8)
    drafter, params = eagle3(*tiny_target(), head=head)
    params["network"][DRAFT_HEAD] = broken
    with pytest.raises(ValueError, match=message):
        drafter.check(params, target=tiny_target()[0].config, max_length=8)


def test_shapes_are_checked_while_tracing_and_token_ids_where_they_have_values() -> None:
    head = HEADS["trimmed"]
    params = arrays(head)

    def check(params: dict) -> jax.Array:
        check_head(head, params, **SIZES)
        return params["token_ids"]

    jax.jit(check)(params | {"token_ids": jnp.zeros(20, jnp.int32)})
    with pytest.raises(ValueError, match=r"draft_head.lm_head should have shape \[20, 32\]"):
        jax.jit(check)(params | {"lm_head": jnp.zeros((19, 32))})
