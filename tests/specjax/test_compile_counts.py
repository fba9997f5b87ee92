"""Lengths, limits, EOS ids, temperatures and seeds are data and compile nothing; only buckets and static choices are programs."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    DraftModel,
    GenerateConfig,
    PromptLookup,
    SamplingParams,
    SparseAttention,
    SparsityConfig,
    Transformer,
    speculative_generate,
)
from specjax.capacity import bucket, whole_chunks
from specjax.generate import _generate, prepare_call
from specjax.models.attention import Attention
from tests.helpers import NUM_TOKENS, greedy_text, param_shapes, random_model, random_prompts, tiny_config, tiny_target

PROMPT_LENGTHS = (3, 5, 8, 13, 16, 17, 21, 24, 30, 40, 55, 64, 80, 100, 130, 170, 200)


def arguments_of(call: int, batch_size: int) -> dict[str, Any]:
    """Other values of everything that may change from call to call."""
    rng = np.random.default_rng(call)
    per_row = call % 2 == 0
    return dict(
        sampling=SamplingParams(
            temperature=rng.uniform(0, 2, batch_size) if per_row else float(rng.uniform(0, 2)),
            top_k=int(rng.integers(0, 70)),
            top_p=rng.uniform(0.1, 1, batch_size).astype(np.float32) if per_row else 1.0,
        ),
        eos_token_ids=[(), 2, [2], [2, 7], np.array([1, 2, 3, 4, 5])][call % 5],
        ignore_eos=[False, True, np.arange(batch_size) % 2 == 0][call % 3],
        max_new_tokens=[None, 3, rng.integers(0, 6, batch_size)][call % 3],
        rng=jax.random.key(call) if call % 2 else jax.random.key(call + 100),
    )


def program_key(model: Any, prompts: list[list[int]], config: GenerateConfig, call: int) -> tuple:
    """What jit distinguishes programs by: the static config and the shapes and dtypes of all arrays."""
    arguments = dict(prompt_lengths=None, continue_from=None) | arguments_of(call, len(prompts))
    request, static = prepare_call(*model, None, prompts, config=config, **arguments)
    leaves, structure = jax.tree.flatten(request)
    return static, structure, tuple((leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False)) for leaf in leaves)


def test_seventeen_prompt_lengths_at_two_batch_sizes_need_no_more_programs_than_there_are_buckets() -> None:
    target, _ = tiny_target()
    keys, buckets, call = set(), set(), 0
    for batch_size in (1, 4):
        for length in PROMPT_LENGTHS:
            for max_new_tokens in (5, 9, 16):
                call += 1
                config = GenerateConfig(max_new_tokens=max_new_tokens, do_sample=True)
                lengths = (length, *[max(1, length // 2)] * (batch_size - 1))
                keys.add(program_key((target, PromptLookup()), random_prompts(lengths), config, call))
                buckets.add((batch_size, bucket(length)))
    assert len(keys) == len(buckets) == 2 * 9


def test_calls_that_differ_in_values_alone_share_one_compiled_program() -> None:
    target, params = random_model(tiny_config(num_layers=1, max_position_embeddings=500), seed=3)
    before = _generate._cache_size()
    for call, length in enumerate((3, 9, 16, 1, 12, 7)):
        config = GenerateConfig(max_new_tokens=9 + call, num_speculative_tokens=2, do_sample=True)
        output = speculative_generate(
            target, params, PromptLookup(), None, random_prompts((length, 2)), config=config, **arguments_of(call, 2)
        )
        assert output.tokens.shape == (2, 9 + call)
        assert _generate._cache_size() == before + 1
    speculative_generate(target, params, PromptLookup(), None, random_prompts((17, 2)), config=config, **arguments_of(0, 2))
    assert _generate._cache_size() == before + 2, "the counter counts"


@pytest.mark.full
def test_a_call_inside_the_callers_own_jit_equals_the_call_itself_and_is_traced_once() -> None:
    target, params = tiny_target()
    prompts = random_prompts()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, do_sample=True)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def answer(
        params: Any, tokens: jax.Array, lengths: jax.Array, sampling: SamplingParams, eos: jax.Array, rng: jax.Array, limit: jax.Array
    ):
        output = speculative_generate(
            target,
            params,
            PromptLookup(),
            None,
            tokens,
            config=config,
            prompt_lengths=lengths,
            sampling=sampling,
            eos_token_ids=eos,
            ignore_eos=lengths == 33,
            max_new_tokens=limit,
            rng=rng,
        )
        return output.tokens, output.lengths, output.finish_reason, output.statistics

    lengths = np.array([len(prompt) for prompt in prompts])
    padded = np.zeros((5, 33), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    text = greedy_text(prompts)
    for call in range(3):
        sampling = SamplingParams(jnp.array([0.0, 0.7, 0.0, 1.0, 2.0]) * (call > 0), jnp.int32(5 * call), jnp.float32(1 - 0.2 * call))
        eos, rng, limit = jnp.array([int(text[0, 8]), int(text[3, 5 + call])]), jax.random.key(call), jnp.array([24, 20, 24, 24, 7 + call])
        got = answer(params, padded, lengths, sampling, eos, rng, limit)
        expected = speculative_generate(
            target,
            params,
            PromptLookup(),
            None,
            prompts,
            config=config,
            sampling=sampling,
            eos_token_ids=eos,
            ignore_eos=lengths == 33,
            max_new_tokens=limit,
            rng=rng,
        )
        jax.tree.map(np.testing.assert_array_equal, got, (expected.tokens, expected.lengths, expected.finish_reason, expected.statistics))
        if call == 0:
            np.testing.assert_array_equal(got[0][3], text[3])


def test_plain_generate_compiles_once_whatever_the_draft_length() -> None:
    keys = set()
    target, _ = tiny_target()
    for num_speculative_tokens in (1, 5):
        config = GenerateConfig(max_new_tokens=16, do_sample=True, num_speculative_tokens=num_speculative_tokens)
        keys.add(program_key((target, None), random_prompts((3, 4)), config, 0))
    assert len(keys) == 1


def test_preparing_a_call_runs_no_jax_computation() -> None:
    target, _ = tiny_target()
    arguments = dict(prompt_lengths=None, continue_from=None) | arguments_of(0, 2)
    config = GenerateConfig(max_new_tokens=16, do_sample=True)
    with jax.transfer_guard("disallow"):
        prepare_call(target, PromptLookup(), None, [[1, 2], [3]], config=config, **arguments)


def test_a_prefill_writes_whole_chunks_of_any_bucket():
    assert {width: whole_chunks(width, 512) for width in (96, 512, 768, 1536)} == {96: 96, 512: 512, 768: 1024, 1536: 1536}


def test_layers_of_equal_shapes_are_traced_and_lowered_once(monkeypatch):
    runs = []

    def counted(*arguments, **options):
        runs.append(1)
        return Attention(*arguments, **options)

    def traced(num_speculative_tokens, keep, max_new_tokens=16):
        """Runs of a layer's Python that a program took, and how much it was lowered to."""
        model = Transformer(tiny_config(num_layers=6, hidden_size=40), dtype=jnp.float32)  # of no other test's shapes
        params = param_shapes(model)
        sparsity = SparsityConfig(attention=SparseAttention(block_size=16, keep=keep, dense_below=32))
        sizes = dict(max_new_tokens=max_new_tokens, num_speculative_tokens=num_speculative_tokens, cache_capacity=256)
        config = GenerateConfig(**sizes, sparsity=sparsity)
        drafter = DraftModel(model)
        request, static = prepare_call(model, drafter, params, [[1] * 40], config=config)
        runs.clear()
        with monkeypatch.context() as patch:
            patch.setattr("specjax.models.transformer.Attention", counted)
            lowered = _generate.lower(model, drafter, static, params, params, request, None)
        return len(runs), lowered.as_text().count("dot_general")

    six, products = traced(2, 0.25)
    # The prefill of each model (the target's cache has summaries), a verification, a draft step of two rows and one of one: 5 kinds of
    # pass, where 6 layers and 2 draft tokens have 30 layers to run.
    assert six == 5
    again, more_products = traced(4, 0.25)
    assert again == 1  # the verification of 5 rows
    assert more_products == products  # the draft steps behind the first are one body, head included
    assert traced(4, 0.5)[0] == 1  # another choice of blocks
    one_token = traced(2, 0.25, max_new_tokens=1)  # two of the five kinds of pass: no loop
    assert one_token[0] == 0
    assert one_token[1] < products / 2
