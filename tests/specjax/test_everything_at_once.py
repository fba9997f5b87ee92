"""A model with windows, sinks, experts and length-dependent rotary frequencies: what holds for the plain decoder holds for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from specjax import DraftModel, FinishReason, GenerateConfig, MoEConfig, RopeConfig, generate, speculative_generate, stream_generate
from specjax.generate import _generate
from tests.helpers import NUM_TOKENS, greedy_text, random_model, random_prompts, tiny_config

MODEL = random_model(
    tiny_config(
        layer_windows=(6, None),
        attention_sinks=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation="clamped_swiglu",
        rope=RopeConfig(rope_type="dynamic", factor=4.0, original_max_position_embeddings=16),
        moe=MoEConfig(num_experts=6, num_experts_per_token=2, intermediate_size=24, router_bias=True),
    ),
    seed=5,
)
PROMPTS = random_prompts()
# Nothing in the second row: it goes on where it stopped.
MORE = [[1, 2, 3], [], [4] * 20, [5], [6] * 11]


def drafter() -> tuple[DraftModel, dict]:
    """The target's first layer."""
    model, _ = random_model(dataclasses.replace(MODEL[0].config, num_layers=1, layer_windows=(6,)))
    return DraftModel(model), {name: part for name, part in MODEL[1].items() if name != "layer_1"}


def config(max_new_tokens: int, **changes: Any) -> GenerateConfig:
    # The frequencies are chosen for the capacity, so that one call and several have the same.
    return GenerateConfig(max_new_tokens=max_new_tokens, num_speculative_tokens=4, cache_capacity=160, **changes)


@pytest.mark.full
def test_chunks_continuations_and_streams_give_the_plain_text() -> None:
    first = generate(*MODEL, PROMPTS, config=config(NUM_TOKENS))
    chunked = config(NUM_TOKENS, prefill_chunk_size=8)
    *_, last = stream_generate(*MODEL, *drafter(), PROMPTS, config=chunked, steps_per_update=3)
    np.testing.assert_array_equal(last.output.tokens, first.tokens)
    assert last.output.statistics.num_accepted_tokens > 0

    # Twice from one continuation: nothing of it is donated.
    for _ in range(2):
        *_, second = stream_generate(*MODEL, *drafter(), MORE, config=chunked, continue_from=last.output.continuation)
    whole = [[*prompt, *text, *more] for prompt, text, more in zip(PROMPTS, first.tokens.tolist(), MORE, strict=True)]
    expected = generate(*MODEL, whole, config=config(NUM_TOKENS)).tokens
    np.testing.assert_array_equal(second.output.tokens, expected)
    np.testing.assert_array_equal(generate(*MODEL, MORE, config=config(NUM_TOKENS), continue_from=first.continuation).tokens, expected)


@pytest.mark.full
def test_a_row_that_is_not_a_number_leaves_the_other_rows_to_their_experts() -> None:
    text = greedy_text(PROMPTS, model=MODEL)
    token = next(token for token in PROMPTS[1] if sum(token in prompt for prompt in PROMPTS) == 1)
    target, params = MODEL
    params = params | {"embedding": params["embedding"].at[token].set(jnp.nan)}
    changes = dict(max_new_tokens=NUM_TOKENS, num_speculative_tokens=4, prefill_chunk_size=8)
    for output in (
        generate(target, params, PROMPTS, config=GenerateConfig(**changes)),
        speculative_generate(target, params, *drafter(), PROMPTS, config=GenerateConfig(**changes)),
    ):
        for row in range(5):
            # A row that emits the token itself stops behind it.
            positions = np.flatnonzero(text[row] == token)
            length = 0 if row == 1 else positions[0] + 1 if positions.size else NUM_TOKENS
            assert output.lengths[row] == length
            np.testing.assert_array_equal(output.tokens[row, :length], text[row, :length])
            assert output.finish_reason[row] == (FinishReason.LENGTH if length == NUM_TOKENS else FinishReason.NONFINITE_LOGITS)


@pytest.mark.full
def test_another_length_of_context_compiles_nothing() -> None:
    prompts = random_prompts((3, 9))
    speculative_generate(*MODEL, *drafter(), prompts, config=GenerateConfig(max_new_tokens=16, num_speculative_tokens=2))
    before = _generate._cache_size()
    for lengths, limit in (((16, 2), 9), ((1, 12), 13), ((7, 7), 16)):
        output = speculative_generate(
            *MODEL, *drafter(), random_prompts(lengths), config=GenerateConfig(max_new_tokens=limit, num_speculative_tokens=2)
        )
        assert output.continuation.target_cache.context_limit.tolist() == [length + limit for length in lengths]
    assert _generate._cache_size() == before


@pytest.mark.full
def test_it_exports_for_platforms_that_take_other_paths_through_the_experts() -> None:
    target, params = MODEL
    prompts = jnp.asarray([[3, 1, 4, 1, 5]] * 3, jnp.int32)

    def tokens(params: Any, prompts: jax.Array) -> jax.Array:
        return generate(target, params, prompts, config=GenerateConfig(max_new_tokens=8)).tokens

    exported = export.export(jax.jit(tokens), platforms=["cpu", "cuda", "tpu"])(params, prompts)
    np.testing.assert_array_equal(exported.call(params, prompts), tokens(params, prompts))
