"""The seam for drafters on the target's features: what `prefill` and `commit` hand them, position by position."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import DraftModel, GenerateConfig, ModelConfig, speculative_generate
from specjax.state import Commit, Context, PrefillChunk
from tests.helpers import FLOAT32_TOLERANCE, random_prompts, tiny_draft_model, tiny_target

LAYERS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class FeatureRecorder:
    """Drafts with a model, and pairs each feature with the token after it, as a drafter on features does: `(feature t, token t + 1)`."""

    inner: DraftModel
    width: int
    feature_layers = LAYERS

    def check(self, params: Any, *, target: ModelConfig, max_length: int | None) -> None:
        """As the draft model's."""

    def init(self, params: Any, *, batch_size: int, capacity: int, context_limit: Any = None) -> tuple:
        """Buffers by position."""
        inner = self.inner.init(params, batch_size=batch_size, capacity=capacity)
        return inner, jnp.zeros((batch_size, capacity, self.width)), jnp.full((batch_size, capacity), -1)

    def prefill(self, params: Any, state: tuple, chunk: PrefillChunk) -> tuple:
        """Records the chunk's pairs; the last real one is corrected by the commit that follows."""
        inner, features, tokens = state
        assert chunk.features is not None
        start = chunk.start[:, None]
        return self.inner.prefill(params, inner, chunk), _put(features, start, chunk.features), _put(tokens, start, chunk.next_tokens)

    def propose(self, params: Any, state: tuple, context: Context, **arguments: Any) -> tuple:
        """The draft model's."""
        draft, inner = self.inner.propose(params, state[0], context, **arguments)
        return draft, (inner, *state[1:])

    def commit(self, params: Any, state: tuple, commit: Commit) -> tuple:
        """Records the rows that committed tokens came from."""
        inner, features, tokens = state
        assert commit.features is not None
        num_rows = commit.features.shape[1]
        first = (commit.context.length - commit.num_committed)[:, None]  # where the first committed token stands
        committed = jnp.take_along_axis(commit.context.tokens, jnp.minimum(first + jnp.arange(num_rows), tokens.shape[1] - 1), axis=1)
        counts = jnp.arange(num_rows) < commit.num_committed[:, None]
        where = jnp.where(counts, first - 1 + jnp.arange(num_rows), tokens.shape[1])
        rows = jnp.arange(where.shape[0])[:, None]
        features = features.at[rows, where].set(commit.features, mode="drop")
        return self.inner.commit(params, inner, commit), features, tokens.at[rows, where].set(committed, mode="drop")


def _put(buffer: jax.Array, start: jax.Array, new: jax.Array) -> jax.Array:
    rows = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[rows, start + jnp.arange(new.shape[1])].set(new, mode="drop")


@pytest.mark.full
def test_features_pair_with_the_token_after_them_through_prefill_and_commits():
    target, params = tiny_target()
    draft_model, draft_params = tiny_draft_model()
    drafter = FeatureRecorder(DraftModel(draft_model), width=len(LAYERS) * target.config.hidden_size)
    prompts = random_prompts((5, 17, 1))
    config = GenerateConfig(max_new_tokens=16, num_speculative_tokens=3, prefill_chunk_size=8)  # three chunks for the longest prompt
    output = speculative_generate(target, params, drafter, draft_params, prompts, config=config)
    assert output.statistics.num_accepted_tokens > 0
    _, features, tokens = output.continuation.drafter_state
    for row, prompt in enumerate(prompts):
        text = [*prompt, *np.asarray(output.tokens[row]).tolist()]
        cache = target.init_cache(batch_size=1, capacity=len(text))
        expected = target.apply({"params": params}, jnp.asarray([text]), cache, feature_layers=LAYERS).features[0, :-1]
        np.testing.assert_allclose(features[row, : len(text) - 1], expected, atol=10 * FLOAT32_TOLERANCE)
        assert np.asarray(tokens[row, : len(text) - 1]).tolist() == text[1:]
