"""The draft model as a drafter: what it proposes, and the distributions that it says it drew from."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import DraftModel, SamplingParams
from specjax.state import Commit, Context, Draft
from tests.helpers import numpy_filtered_probs, numpy_forward, random_prompts, tiny_draft_model

# float32 logits of order 5 against float64 ones.
TOLERANCE = 1e-4
NUM_DRAFTED = 3
CONTEXTS = random_prompts((2, 5, 12, 7), seed=6)
TEMPERATURES, TOP_K, TOP_P = [0.0, 0.8, 1.0, 2.0], [0, 3, 0, 10], [1.0, 0.9, 1.0, 0.5]


@functools.cache
def run(do_sample: bool) -> tuple[Draft, Any, Context]:
    """Drafts for four contexts from a cache that a fresh pass filled."""
    model, params = tiny_draft_model()
    capacity = 24
    tokens = np.zeros((4, capacity), np.int32)
    for row, context in enumerate(CONTEXTS):
        tokens[row, : len(context)] = context
    context = Context(tokens=jnp.asarray(tokens), length=jnp.array([len(row) for row in CONTEXTS]))
    sampling = SamplingParams(jnp.array(TEMPERATURES), jnp.array(TOP_K), jnp.array(TOP_P)) if do_sample else None
    drafter = DraftModel(model)

    @jax.jit
    def propose(params: Any, context: Context) -> tuple[Draft, Any]:
        cache = model.apply({"params": params}, context.tokens, model.init_cache(batch_size=4, capacity=capacity)).cache
        # Slots that the drafter is to write itself hold nonsense.
        keep = (jnp.arange(capacity) < context.length[:, None] - 2)[:, None, :, None]
        spoil = lambda arrays: tuple(jnp.where(keep, x, 3.0) for x in arrays)
        cache = dataclasses.replace(cache, keys=spoil(cache.keys), values=spoil(cache.values))
        keys = jax.random.split(jax.random.key(2), 4)
        return drafter.propose(params, cache, context, num_speculative_tokens=NUM_DRAFTED, sampling=sampling, row_keys=keys)

    draft, cache = propose(params, context)
    return draft, cache, context


def draft_logits(row: int, num_drafts: int, draft: Draft) -> np.ndarray:
    model, params = tiny_draft_model()
    return numpy_forward(model.config, params, CONTEXTS[row] + draft.tokens[row, :num_drafts].tolist())[-1]


def test_greedy_drafts_are_the_draft_models_own_greedy_text() -> None:
    draft, _, _ = run(do_sample=False)
    assert draft.probs is None
    assert draft.num_drafted.tolist() == [NUM_DRAFTED] * 4
    for row in range(4):
        for position in range(NUM_DRAFTED):
            assert draft.tokens[row, position] == draft_logits(row, position, draft).argmax()


def test_the_recorded_distributions_are_the_filtered_ones_that_the_tokens_were_drawn_from() -> None:
    draft, _, _ = run(do_sample=True)
    assert draft.probs is not None
    for row in range(4):
        for position in range(NUM_DRAFTED):
            expected = numpy_filtered_probs(draft_logits(row, position, draft), TEMPERATURES[row], TOP_K[row], TOP_P[row])
            np.testing.assert_allclose(draft.probs[row, position], expected, atol=TOLERANCE)
            assert expected[int(draft.tokens[row, position])] > 0


def test_committing_rolls_the_cache_back_to_all_but_the_last_two_tokens() -> None:
    model, params = tiny_draft_model()
    _, cache, context = run(do_sample=False)
    for committed in (0, 1, 4):
        after = Context(tokens=context.tokens, length=context.length + committed)
        commit = Commit(context=after, num_committed=jnp.full((4,), committed), features=None)
        rolled = DraftModel(model).commit(params, cache, commit)
        assert rolled.length.tolist() == (after.length - 2).tolist()
        assert rolled.keys is cache.keys
