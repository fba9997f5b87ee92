"""What a call takes and refuses at its edges: traced continuations, other key kinds, 64-bit mode, continuations of other models."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    DraftModel,
    FinishReason,
    GenerateConfig,
    PromptLookup,
    SamplingParams,
    SparseAttention,
    SparsityConfig,
    generate,
    left_align,
    speculative_generate,
)
from specjax.verification.rejection_sampling import assemble
from tests.helpers import random_model, random_prompts, tiny_config, tiny_draft_model, tiny_target

TARGET, PARAMS = tiny_target()
CONFIG = GenerateConfig(max_new_tokens=16, num_speculative_tokens=4)


def speculate(prompts: Any, *, config: GenerateConfig = CONFIG, **arguments: Any) -> Any:
    return speculative_generate(TARGET, PARAMS, DraftModel(TARGET), PARAMS, prompts, config=config, **arguments)


@pytest.mark.parametrize("limits", [[0, 16], [16, 0]])
def test_a_row_of_one_token_that_never_starts_does_not_stop_the_others_drafts(limits):
    prompts = [[5], [1, 2, 3]] if limits[0] == 0 else [[1, 2, 3], [5]]
    output = speculate(prompts, max_new_tokens=np.array(limits))
    assert output.statistics.draft_acceptance_rate == 1.0


@pytest.mark.full
def test_64_bit_mode_changes_no_token():
    expected = np.asarray(speculate(random_prompts((3, 9))).tokens)
    with jax.enable_x64(True):
        assert np.asarray(speculate(random_prompts((3, 9))).tokens).tolist() == expected.tolist()


@pytest.mark.parametrize(("capacity", "has_room"), [(48, [True, False]), (128, [True, True])])
@pytest.mark.full
def test_a_traced_continuation_ends_the_rows_without_room_and_goes_on_with_the_others(capacity, has_room):
    # Contexts of 25 and 28 tokens: continuing takes 24 + 22 and 27 + 22 slots.
    first = speculative_generate(TARGET, PARAMS, PromptLookup(), None, random_prompts((9, 12)), config=CONFIG)
    run = functools.partial(speculative_generate, TARGET, PARAMS, PromptLookup(), None)
    expected = run([[], []], config=CONFIG, continue_from=first.continuation)
    cut = dataclasses.replace(first.continuation, target_cache=_cut(first.continuation.target_cache, 48), context=_cut_context(first))
    config = dataclasses.replace(CONFIG, cache_capacity=capacity)
    empty, lengths = jnp.zeros((2, 1), jnp.int32), jnp.zeros((2,), jnp.int32)
    second = jax.jit(lambda continuation: run(empty, prompt_lengths=lengths, config=config, continue_from=continuation))(cut)
    for row, room in enumerate(has_room):
        assert second.finish_reason[row] == (FinishReason.LENGTH if room else FinishReason.NO_CAPACITY)
        assert second.lengths[row] == (16 if room else 0)
        if room:
            assert second.tokens[row].tolist() == expected.tokens[row].tolist()


def _cut(cache, capacity):
    return dataclasses.replace(
        cache, keys=tuple(x[:, :, :capacity] for x in cache.keys), values=tuple(x[:, :, :capacity] for x in cache.values)
    )


def _cut_context(output):
    return dataclasses.replace(output.continuation.context, tokens=output.continuation.context.tokens[:, :48])


def test_a_traced_prompt_wider_than_the_given_capacity_is_refused_by_numbers():
    config = dataclasses.replace(CONFIG, cache_capacity=64)
    with pytest.raises(ValueError, match="cache_capacity = 64 slots are too few: this call needs 117"):
        jax.jit(lambda prompts: generate(TARGET, PARAMS, prompts, config=config).tokens)(jnp.zeros((1, 100), jnp.int32))


def test_a_given_capacity_is_held_against_what_the_call_needs_and_not_against_its_bucket():
    config = GenerateConfig(max_new_tokens=33, cache_capacity=60)
    assert generate(TARGET, PARAMS, [[1] * 16], config=config).lengths.tolist() == [33]


@pytest.mark.parametrize(("limit", "expected"), [(40, 16), (-5, 0)])
def test_a_traced_limit_is_clipped(limit, expected):
    run = jax.jit(lambda limit: generate(TARGET, PARAMS, [[1, 2]], config=CONFIG, max_new_tokens=limit).lengths)
    assert run(jnp.int32(limit)).tolist() == [expected]


def test_the_window_counts_every_token_of_a_continued_context():
    target, params = random_model(tiny_config(max_position_embeddings=64))
    first = generate(target, params, [[1] * 48], config=CONFIG)
    with pytest.raises(ValueError, match="0 tokens after 64 earlier ones and up to 1 new ones exceed the model's window of 64"):
        generate(target, params, [[]], config=CONFIG, max_new_tokens=1, continue_from=first.continuation)


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
@pytest.mark.full
def test_a_row_draws_the_same_alone_and_in_a_batch_whatever_its_keys_kind(implementation):
    config = dataclasses.replace(CONFIG, do_sample=True)
    keys = jax.random.split(jax.random.key(3, impl=implementation), 2)
    run = functools.partial(generate, TARGET, PARAMS, config=config, sampling=SamplingParams(temperature=2.0))
    both = run([[1, 2], [3]], rng=keys)
    alone = run([[3]], rng=keys[1:])
    assert both.tokens[1].tolist() == alone.tokens[0].tolist()
    other = run([[1, 2], [3]], rng=jnp.stack([keys[0], keys[0]]))
    assert other.tokens[0].tolist() == both.tokens[0].tolist()
    assert other.tokens[1].tolist() != both.tokens[1].tolist()


def test_a_continuation_of_other_models_is_refused():
    plain = generate(TARGET, PARAMS, [[1, 2]], config=CONFIG)
    with pytest.raises(ValueError, match=r"continue_from.drafter_state comes from a call with another drafter: expected .*, got nothing"):
        speculate([[]], continue_from=plain.continuation)
    with pytest.raises(ValueError, match="must be an earlier output's `continuation`, got GenerateOutput"):
        generate(TARGET, PARAMS, [[]], config=CONFIG, continue_from=plain)
    deeper, params = random_model(tiny_config(num_layers=3))
    with pytest.raises(ValueError, match=r"continue_from.target_cache comes from a call with another target"):
        generate(deeper, params, [[]], config=CONFIG, continue_from=plain.continuation)


def test_plain_decoding_goes_on_from_a_speculative_call():
    first = speculate([[1, 2], [3]])
    one = generate(TARGET, PARAMS, [[1, 2], [3]], config=GenerateConfig(max_new_tokens=32))
    second = generate(TARGET, PARAMS, [[], []], config=CONFIG, continue_from=first.continuation)
    assert np.concatenate([first.tokens, second.tokens], axis=1).tolist() == np.asarray(one.tokens).tolist()


def test_a_draft_model_with_a_shorter_window_or_without_params_is_refused():
    short, params = random_model(tiny_config(max_position_embeddings=16))
    with pytest.raises(ValueError, match="the draft model's window is 16 tokens, this call may reach 18"):
        speculative_generate(TARGET, PARAMS, DraftModel(short), params, [[1, 2]], config=CONFIG)
    with pytest.raises(ValueError, match="drafter_params must be the draft model's params, got NoneType"):
        speculative_generate(TARGET, PARAMS, DraftModel(TARGET), None, [[1, 2]], config=CONFIG)


@dataclasses.dataclass(frozen=True)
class AlwaysKeep:
    """A rule from outside: keeps every draft token."""

    lossless = False
    synthetic = True

    def __call__(self, draft, target_probs, row_keys):
        """Keeps all."""
        return assemble(draft, draft.num_drafted, jnp.argmax(target_probs[:, -1], axis=-1).astype(jnp.int32))


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_synthetic_rule_from_outside_is_asked(do_sample):
    model, params = tiny_draft_model()
    config = dataclasses.replace(CONFIG, verification=AlwaysKeep(), do_sample=do_sample)
    output = speculative_generate(TARGET, PARAMS, DraftModel(model), params, [[1, 2]], config=config, rng=jax.random.key(0))
    assert output.statistics.draft_acceptance_rate == 1.0
    assert output.statistics.synthetic


def test_prompts_may_be_arrays_of_different_lengths():
    expected = np.asarray(generate(TARGET, PARAMS, [[1, 2, 3], [4]], config=CONFIG).tokens).tolist()
    for prompts in ([np.array([1, 2, 3]), np.array([4])], [jnp.array([1, 2, 3]), [4]], ((1, 2, 3), range(4, 5))):
        assert np.asarray(generate(TARGET, PARAMS, prompts, config=CONFIG).tokens).tolist() == expected


@pytest.mark.parametrize("prompts", [[[[1]]], [[1.5]], ["ab"], [3]])
def test_prompts_that_are_no_lists_of_ints_are_named(prompts):
    with pytest.raises(ValueError, match="prompt 0 must be a list of ints"):
        generate(TARGET, PARAMS, prompts, config=CONFIG)


def test_left_align_takes_lists_and_refuses_shapes_that_disagree():
    tokens, lengths = left_align([[0, 0, 5], [1, 2, 3]], [[0, 0, 1], [1, 1, 1]])
    assert (tokens[0, 0], lengths.tolist()) == (5, [1, 3])
    with pytest.raises(ValueError, match=r"of one shape \[B,P\], got \(1, 2\) and \(1, 3\)"):
        left_align([[1, 2]], [[1, 1, 1]])


def test_sampling_fields_of_any_float_type_and_a_huge_top_k():
    config = dataclasses.replace(CONFIG, do_sample=True)
    run = functools.partial(generate, TARGET, PARAMS, [[1, 2]], config=config, rng=jax.random.key(0))
    expected = run(sampling=SamplingParams(temperature=2.0)).tokens.tolist()
    assert run(sampling=SamplingParams(temperature=jnp.bfloat16(2.0), top_k=2**32 + 1)).tokens.tolist() == expected


def test_a_feature_layer_beyond_the_model_is_named():
    cache = TARGET.init_cache(batch_size=1, capacity=8)
    with pytest.raises(ValueError, match=r"boundaries from 0 to 2, got \(-1,\)"):
        TARGET.apply({"params": PARAMS}, jnp.zeros((1, 1), jnp.int32), cache, feature_layers=(-1,))


@pytest.mark.full
def test_a_row_whose_prompt_had_no_room_ends_so_again_where_it_is_continued():
    target, params = random_model(tiny_config(num_layers=1), seed=1)
    small, large = (GenerateConfig(max_new_tokens=8, cache_capacity=capacity) for capacity in (64, 256))
    first = generate(target, params, [random_prompts((40,))[0], [5, 6, 7]], config=small)
    prompts, lengths = np.zeros((2, 30), np.int32), jnp.array([30, 3])
    go_on = functools.partial(generate, target, params, prompt_lengths=lengths)
    second = jax.jit(lambda continuation: go_on(prompts, config=small, continue_from=continuation))(first.continuation)
    assert second.finish_reason.tolist() == [FinishReason.NO_CAPACITY, FinishReason.LENGTH]
    eager = go_on(prompts, config=large, continue_from=second.continuation)
    third = jax.jit(lambda continuation: go_on(prompts, config=large, continue_from=continuation))(second.continuation)
    assert third.finish_reason.tolist() == eager.finish_reason.tolist() == [FinishReason.NO_CAPACITY, FinishReason.LENGTH]
    np.testing.assert_array_equal(third.tokens, eager.tokens)
    lost = dataclasses.replace(second.continuation, context=dataclasses.replace(second.continuation.context, length=jnp.array([65, 65])))
    with pytest.raises(ValueError, match=r"every row of continue_from ended with NO_CAPACITY and lost its context of up to 64 tokens"):
        go_on(prompts, config=large, continue_from=lost)
    instead = jax.jit(lambda continuation: go_on(prompts, config=large, continue_from=continuation))(first.continuation)
    assert instead.finish_reason.tolist() == [FinishReason.LENGTH] * 2


def test_a_call_inside_jit_goes_on_from_one_outside_under_one_structure():
    target, params = random_model(tiny_config(num_layers=1), seed=1)
    sparsity = SparsityConfig(attention=SparseAttention(block_size=4, keep=0.0, dense_below=0))
    config = GenerateConfig(max_new_tokens=6, cache_capacity=128, sparsity=sparsity)
    first = generate(target, params, [[5, 6, 7]], config=config).continuation

    def turn(continuation, token):
        output = generate(target, params, token[None, None], config=config, continue_from=continuation)
        return output.continuation, output.lengths

    assert jax.lax.scan(turn, first, jnp.array([3, 4]))[1].tolist() == [[6], [6]]
