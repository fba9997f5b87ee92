"""Medusa and Hydra as drafters: the output is the target's, and each draft is what the network gives for its position."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    BlockVerification,
    GenerateConfig,
    GenerateOutput,
    MedusaDrafter,
    RejectionSampling,
    SamplingParams,
    speculative_generate,
)
from specjax.drafting.heads import FullHead, LowRankHead, ScreenedHead, TrimmedHead
from specjax.state import Context, Draft
from tests.drafters import REJECTION, Replayed, emitted_p_value, fresh_state, hydra, medusa, small_target
from tests.helpers import (
    FLOAT32_TOLERANCE,
    MIN_P_VALUE,
    NUM_TOKENS,
    VOCAB_SIZE,
    greedy_text,
    numpy_filtered_probs,
    random_model,
    random_prompts,
    recorded,
    tiny_config,
    tiny_target,
)

KINDS = {"medusa": medusa, "hydra": hydra}
NUM_HEADS = 3
HEADS = {
    "full": FullHead(bias=True),
    "shared": FullHead(shared=True),
    "low-rank": LowRankHead(rank=8),
    "trimmed": TrimmedHead(num_tokens=24),
    "screened": ScreenedHead(rank=8, num_candidates=12, shared=True),
}
# Of the rows: temperature, top-k, top-p.
SAMPLING = [(0.0, 0, 1.0), (0.7, 5, 0.9), (1.0, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.5)]
PROMPTS = random_prompts()
LENGTHS = [len(prompt) for prompt in PROMPTS]
# Two rows of thirteen new tokens: 26 hidden states of width 32, so that a linear head can be right about all of them.
FEW, NUM_FEW_TOKENS = [0, 3], 13
FEW_PROMPTS = [PROMPTS[row] for row in FEW]


def every_other_head_in_full(*default: tuple[str, str]) -> list:
    """All drafters with all heads, of which only these run by default."""
    pairs = itertools.product(KINDS, HEADS)
    return [pytest.param(*pair, marks=[] if pair in default else pytest.mark.full) for pair in pairs]


def texts() -> list[list[int]]:
    """Prompts with what the target says."""
    return [[*prompt, *row.tolist()] for prompt, row in zip(PROMPTS, greedy_text(PROMPTS), strict=True)]


@functools.cache
def hidden_states() -> np.ndarray:
    """`[B,T,D]` of the texts, after the final norm, by the target itself."""
    target, params = tiny_target()
    width = max(LENGTHS) + NUM_TOKENS
    tokens = jnp.asarray([text + [0] * (width - len(text)) for text in texts()])
    forward = jax.jit(lambda params: target.apply({"params": params}, tokens, target.init_cache(batch_size=len(tokens), capacity=width)))
    return np.asarray(forward(params).hidden)


def knowing(kind: str, *, wrong_head: int | None = None) -> tuple[Any, dict]:
    """Heads that know what the target says after `FEW_PROMPTS`: head i token t + 2 + i, by the hidden state at t. One may be wrong."""
    drafter, params = KINDS[kind](*tiny_target(), head=FullHead(), num_layers=1)
    rows = [(row, LENGTHS[row] - 1 + step) for row in FEW for step in range(NUM_FEW_TOKENS)]
    inverse = np.linalg.pinv(np.stack([hidden_states()[at] for at in rows]).astype(np.float64))
    network = jax.tree.map(jnp.zeros_like, params["network"])
    for head in range(NUM_HEADS):
        tokens = [(texts()[row][t + 2 + head] + (head == wrong_head)) % VOCAB_SIZE for row, t in rows]
        layer = network[f"head_{head}"]
        layer["draft_head"] = {"lm_head": jnp.asarray((inverse @ np.eye(VOCAB_SIZE)[tokens]).T, jnp.float32)}
        if kind == "hydra":  # the residual branch passes the hidden state, and no embedding
            layer["residual"] = jnp.eye(*layer["residual"].shape)
    return drafter, params | {"network": network}


@pytest.mark.parametrize(
    ("kind", "num_speculative_tokens", "wrong_head"),
    [
        ("medusa", 5, None),
        ("hydra", 3, 2),
        *(pytest.param(kind, 2, head, marks=pytest.mark.full) for kind in KINDS for head in (None, 0, 1)),
    ],
)
def test_heads_that_know_the_text_are_accepted_up_to_the_one_that_is_wrong(
    kind: str, num_speculative_tokens: int, wrong_head: int | None
) -> None:
    target, target_params = tiny_target()
    drafter, params = knowing(kind, wrong_head=wrong_head)
    config = GenerateConfig(max_new_tokens=NUM_FEW_TOKENS, num_speculative_tokens=num_speculative_tokens)

    @jax.jit  # inside a caller's own
    def call(target_params: dict, params: dict) -> GenerateOutput:
        return speculative_generate(target, target_params, drafter, params, FEW_PROMPTS, config=config)

    output = call(target_params, params)
    np.testing.assert_array_equal(output.tokens, greedy_text(PROMPTS)[FEW, :NUM_FEW_TOKENS])
    num_drafted = min(num_speculative_tokens, NUM_HEADS)
    num_accepted = num_drafted if wrong_head is None else wrong_head
    steps = (NUM_FEW_TOKENS - 1) / (num_accepted + 1)  # the first token is the prefill's
    histogram = output.statistics.acceptance_histogram
    assert histogram[num_accepted] == histogram.sum() == 2 * steps
    assert output.statistics.drafted_counts.sum(axis=0)[num_drafted] == 2 * steps


@pytest.mark.parametrize(("kind", "name"), every_other_head_in_full(("medusa", "shared")))
def test_greedy_speculative_equals_plain_with_every_draft_head(kind: str, name: str) -> None:
    target, target_params = tiny_target()
    drafter, params = KINDS[kind](target, target_params, head=HEADS[name])
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=2)
    output = speculative_generate(target, target_params, drafter, params, PROMPTS, config=config)
    np.testing.assert_array_equal(output.tokens, greedy_text(PROMPTS))
    assert output.statistics.num_draft_tokens > 0


def states_of(drafter: Any, params: dict) -> tuple[Any, Context]:
    """After the texts but for their last three tokens."""
    rows = [text[:-3] for text in texts()]
    tokens = jnp.asarray([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
    return fresh_state(*tiny_target(), drafter, params, rows), Context(tokens, jnp.asarray([len(row) for row in rows]))


@functools.partial(jax.jit, static_argnums=(0, 4))
def proposed(drafter: Any, params: dict, state: Any, context: Context, num_speculative_tokens: int) -> Draft:
    """With another temperature, top-k and top-p in each row; the first is greedy."""
    sampling = SamplingParams(*(jnp.asarray(column) for column in zip(*SAMPLING, strict=True)))
    keys = jax.random.split(jax.random.key(3), len(SAMPLING))
    arguments: dict[str, Any] = dict(num_speculative_tokens=num_speculative_tokens, sampling=sampling, row_keys=keys)
    draft, after = drafter.propose(params, state, context, **arguments)
    assert after is state
    return draft


@pytest.mark.parametrize(
    ("kind", "name"),
    every_other_head_in_full(("medusa", "full"), ("hydra", "shared"), ("medusa", "screened"), ("hydra", "trimmed"), ("hydra", "low-rank")),
)
def test_drafts_are_what_the_network_gives_for_the_targets_own_hidden_state(kind: str, name: str) -> None:
    drafter, params = KINDS[kind](*tiny_target(), head=HEADS[name])
    state, context = states_of(drafter, params)
    draft = proposed(drafter, params, state, context, NUM_HEADS)
    assert draft.probs is not None
    assert draft.num_drafted.tolist() == [NUM_HEADS] * len(PROMPTS)
    for row, tokens in enumerate(draft.tokens.tolist()):
        last = int(context.length[row]) - 1
        hidden = jnp.asarray(hidden_states()[row, last - 1])
        for head in range(NUM_HEADS):
            scores = scores_by_hand(kind, drafter, params, hidden, [int(context.tokens[row, last]), *tokens[:head]], head)
            expected = numpy_filtered_probs(scores, *SAMPLING[row])
            np.testing.assert_allclose(draft.probs[row, head], expected, atol=100 * FLOAT32_TOLERANCE)
            assert expected[tokens[head]] > 0


def scores_by_hand(kind: str, drafter: Any, params: dict, hidden: jax.Array, tokens: list[int], head: int) -> np.ndarray:
    """`[V]`, -inf where the head has none."""
    target_params = tiny_target()[1]
    embeddings = () if kind == "medusa" else (target_params["embedding"][np.asarray(tokens)],)
    scores = _apply(drafter.model, params["network"], hidden, *embeddings, target_params["lm_head"])
    scores = scores[head] if kind == "medusa" else scores
    logits = np.full(VOCAB_SIZE, -np.inf)
    logits[slice(None) if scores.token_ids is None else np.asarray(scores.token_ids)] = scores.logits
    return logits


@functools.partial(jax.jit, static_argnums=0)
def _apply(model: Any, params: dict, *arguments: jax.Array) -> Any:
    return model.apply({"params": params}, *arguments)


def test_medusa_heads_that_share_the_targets_lm_head_read_it_once() -> None:
    _, target_params = tiny_target()
    drafter, params = medusa(*tiny_target(), head=FullHead(shared=True))
    lm_head, hidden = target_params["lm_head"], hidden_states()[:, 3]
    variables = {"params": params["network"]}
    scores = drafter.model.apply(variables, hidden, lm_head)
    states = drafter.model.apply(variables, hidden, method="states")
    for ours, state in zip(scores, states, strict=True):
        np.testing.assert_allclose(ours.logits, np.asarray(state) @ np.asarray(lm_head).T, atol=100 * FLOAT32_TOLERANCE)
    program = str(jax.make_jaxpr(lambda lm_head: drafter.model.apply(variables, hidden, lm_head))(lm_head))
    products = [line for line in program.splitlines() if "dot_general" in line and str(VOCAB_SIZE) in line.split("=")[0]]
    assert len(products) == 1


@pytest.mark.parametrize("kind", [pytest.param("medusa", marks=pytest.mark.full), "hydra"])
def test_after_any_acceptance_the_state_is_that_of_a_prefill_on_the_emitted_text(kind: str) -> None:
    target, target_params = tiny_target()
    drafter, params = KINDS[kind](target, target_params)
    both = {"drafter": params, "recorded": recorded(greedy_text(PROMPTS), LENGTHS)}
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=4, prefill_chunk_size=8)
    output = speculative_generate(target, target_params, Replayed(drafter), both, PROMPTS, config=config)
    assert (output.statistics.acceptance_histogram > 0).sum() >= 4
    expected = fresh_state(target, target_params, drafter, params, texts())
    np.testing.assert_allclose(output.continuation.drafter_state.hidden, expected.hidden, atol=20 * FLOAT32_TOLERANCE)
    for row, text in enumerate(texts()):
        np.testing.assert_allclose(expected.hidden[row], hidden_states()[row, len(text) - 2], atol=20 * FLOAT32_TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_drafts_as_one_call_would(kind: str) -> None:
    target, target_params = tiny_target()
    drafter, params = knowing(kind)
    half = GenerateConfig(max_new_tokens=6, num_speculative_tokens=3)
    first = speculative_generate(target, target_params, drafter, params, FEW_PROMPTS, config=half)
    second = speculative_generate(target, target_params, drafter, params, [[]] * 2, config=half, continue_from=first.continuation)
    np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens], axis=1), greedy_text(PROMPTS)[FEW, :12])
    assert second.statistics.draft_acceptance_rate == 1.0


@pytest.mark.parametrize(
    ("kind", "rule", "num_draft_heads"),
    [
        ("medusa", REJECTION, 2),
        pytest.param("hydra", REJECTION, 2, marks=pytest.mark.full),
        # Every draft is shorter than the two tokens asked for.
        pytest.param("hydra", BlockVerification(), 1, marks=pytest.mark.full),
        pytest.param("medusa", BlockVerification(), 1, marks=pytest.mark.full),
        pytest.param("medusa", BlockVerification(), 2, marks=pytest.mark.full),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, RejectionSampling | BlockVerification) else str(value),
)
def test_sampled_text_follows_the_exact_law_of_the_target(kind: str, rule: Any, num_draft_heads: int) -> None:
    drafter, params = KINDS[kind](*small_target(), head=FullHead(), num_draft_heads=num_draft_heads)
    p_value, acceptance_rate = emitted_p_value(drafter, params, rule=rule)
    assert p_value > MIN_P_VALUE
    assert 0.05 < acceptance_rate < 0.95


@pytest.mark.parametrize("kind", ["medusa", pytest.param("hydra", marks=pytest.mark.full)])
def test_a_draft_has_no_more_tokens_than_there_are_heads_and_none_before_the_first_commit(kind: str) -> None:
    drafter, params = KINDS[kind](*tiny_target(), head=HEADS["full"])
    state, context = states_of(drafter, params)
    longer, exact = (proposed(drafter, params, state, context, length) for length in (5, NUM_HEADS))
    assert longer.num_drafted.tolist() == exact.num_drafted.tolist() == [NUM_HEADS] * len(PROMPTS)
    np.testing.assert_array_equal(longer.tokens[:, :NUM_HEADS], exact.tokens)
    assert longer.tokens.shape == (len(PROMPTS), 5)
    assert longer.probs is not None
    assert longer.probs.shape == (len(PROMPTS), 5, VOCAB_SIZE)
    nothing = proposed(drafter, params, drafter.init(params, batch_size=len(PROMPTS), capacity=64), context, NUM_HEADS)
    assert nothing.num_drafted.tolist() == [0] * len(PROMPTS)


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused_before_compiling(kind: str) -> None:
    target, target_params = tiny_target()
    drafter, params = KINDS[kind](target, target_params, head=FullHead(shared=True, bias=True))
    names = "network, target_norm, target_head" if kind == "medusa" else "network, target_norm, target_embedding, target_head"
    network = params["network"]
    for broken, message in (
        (None, f"drafter_params must have {names}, got NoneType: make them with {kind}_params"),
        (target_params, f"must have {names}, got embedding, "),
        (params | {"target_norm": jnp.ones((8,))}, r"drafter_params.target_norm should have the target's shape \[32\], got \[8\]"),
        (params | {"target_head": jnp.ones((9, 32))}, r"target_head should have the target's shape \[64, 32\], got \[9, 32\]"),
        (
            params | {"network": {"head_0": network["head_0"]}},
            "drafter_params.network should have head_1, as there are 3 heads, got head_0",
        ),
        (
            params | {"network": network | {"head_1": network["head_1"] | {"draft_head": {"bias": jnp.ones((5,))}}}},
            r"FullHead: head_1.draft_head.bias should have shape \[64\], it has shape \[5\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            speculative_generate(target, target_params, drafter, broken, PROMPTS, config=GenerateConfig(max_new_tokens=4))


def test_a_drafter_for_another_target_is_refused_before_compiling() -> None:
    target, target_params = tiny_target()
    drafter, params = medusa(target, target_params)
    for changes, message in (
        (dict(hidden_size=64), "made for a target of width 32, this one has 64"),
        (dict(vocab_size=96), "made for a vocabulary of 64 tokens, the target has 96"),
        (dict(num_layers=3), r"a target of 2 layers .* this one has 3 .*use MedusaDrafter.for_target"),
        (dict(rms_norm_eps=0.5), "the epsilon .* this one has 2 and 0.5"),
    ):
        other = random_model(tiny_config(**changes))
        with pytest.raises(ValueError, match=message):
            speculative_generate(*other, drafter, params, PROMPTS, config=GenerateConfig(max_new_tokens=4))
    assert MedusaDrafter.for_target(drafter.model, tiny_config(num_layers=7)).feature_layers == (7,)
    assert hash(drafter) == hash(dataclasses.replace(drafter))


def test_heads_of_another_dtype_than_the_targets_draft_in_their_own() -> None:
    target, target_params = tiny_target()
    drafter, params = medusa(target, target_params)
    drafter = dataclasses.replace(drafter, model=drafter.model.clone(dtype=jnp.bfloat16))
    state = fresh_state(target, target_params, drafter, params, PROMPTS[:2])
    assert state.hidden.dtype == drafter.init(params, batch_size=2, capacity=64).hidden.dtype == jnp.bfloat16
