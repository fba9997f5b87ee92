"""Prompt lookup against a plain Python search."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import PromptLookup
from specjax.state import Context, Draft


def propose(drafter: PromptLookup, rows: list[list[int]], num_speculative_tokens: int, *, capacity: int = 48) -> Draft:
    # Beyond the context stand tokens that would match everything, were they looked at.
    tokens = np.array([row + [row[-1]] * (capacity - len(row)) for row in rows], np.int32)
    context = Context(tokens=jnp.asarray(tokens), length=jnp.asarray([len(row) for row in rows], jnp.int32))
    keys = jax.random.split(jax.random.key(0), len(rows))
    draft, state = drafter.propose(None, None, context, num_speculative_tokens=num_speculative_tokens, sampling=None, row_keys=keys)
    assert state is None
    assert draft.probs is None
    return draft


def search(row: list[int], num_speculative_tokens: int, *, max_ngram: int, min_ngram: int) -> list[int]:
    for ngram in range(max_ngram, min_ngram - 1, -1):
        best: list[int] = []
        for start in range(ngram, len(row)):
            found = row[start : start + num_speculative_tokens]
            if row[start - ngram : start] == row[-ngram:] and len(found) >= len(best):
                best = found
        if best:
            return best
    return []


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(3, 1), (1, 1), (4, 2), (5, 5)])
@pytest.mark.parametrize("num_speculative_tokens", [1, 4])
def test_prompt_lookup_proposes_what_a_plain_search_finds(max_ngram: int, min_ngram: int, num_speculative_tokens: int) -> None:
    rng = np.random.default_rng(max_ngram)
    rows = [rng.integers(0, 3, rng.integers(2, 40)).tolist() for _ in range(64)]
    draft = propose(PromptLookup(max_ngram=max_ngram, min_ngram=min_ngram), rows, num_speculative_tokens)
    expected = [search(row, num_speculative_tokens, max_ngram=max_ngram, min_ngram=min_ngram) for row in rows]
    got = [draft.tokens[index, : draft.num_drafted[index]].tolist() for index in range(len(rows))]
    assert got == expected
    assert {len(tokens) for tokens in expected} >= {0, num_speculative_tokens}


def test_the_longest_match_decides_and_then_the_latest() -> None:
    row = [1, 2, 3, 7, 9, 2, 3, 8, 9, 4, 3, 5, 5, 1, 2, 3]
    assert propose(PromptLookup(), [row], 1).tokens.tolist() == [[7]]  # after 1 2 3
    assert propose(PromptLookup(max_ngram=2), [row], 1).tokens.tolist() == [[8]]  # the later of two 2 3
    assert propose(PromptLookup(max_ngram=1), [row], 1).tokens.tolist() == [[5]]  # the latest 3


def test_a_draft_never_runs_past_the_context() -> None:
    draft = propose(PromptLookup(), [[5, 6, 5], [4, 4]], 4)
    assert draft.num_drafted.tolist() == [2, 1]
    assert draft.tokens[0, :2].tolist() == [6, 5]


def test_a_token_that_never_occurred_before_proposes_nothing() -> None:
    assert propose(PromptLookup(), [[1, 2, 3, 4]], 4).num_drafted.tolist() == [0]


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(0, 0), (2, 3), (3, 0), (-1, 1)])
def test_prompt_lookup_refuses_impossible_ngram_lengths(max_ngram: int, min_ngram: int) -> None:
    with pytest.raises(ValueError, match=f"1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}"):
        PromptLookup(max_ngram=max_ngram, min_ngram=min_ngram)
