"""Bad input is refused before anything is compiled, with what was expected and what came."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import DraftModel, GenerateConfig, ModelConfig, PromptLookup, SamplingParams, generate, speculative_generate, stream_generate
from specjax.generate import _generate, prepare_call
from specjax.verification.rejection_sampling import RejectionSampling
from tests.helpers import NUM_TOKENS, random_model, random_prompts, tiny_config, tiny_target


def refused(message: str, prompts: Any, error: type[Exception] = ValueError, **arguments: Any) -> None:
    target, params = tiny_target()
    config = arguments.pop("config", GenerateConfig(max_new_tokens=NUM_TOKENS))
    programs = _generate._cache_size()
    with pytest.raises(error, match=message):
        generate(target, params, prompts, config=config, **arguments)
    assert _generate._cache_size() == programs, "refused only after compiling"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], r"prompt lengths must be from 1 to 1, got \[0\]: an empty prompt has nothing to continue"),
        ([[1, 2], []], r"prompt lengths must be from 1 to 2, got \[2, 0\]"),
        ([], "non-empty integer array"),
        ([1, 2, 3], "prompt 0 must be a list of ints, got 1"),
        (np.array([1, 2, 3]), r"integer array \[batch, length\] or a list of lists of ints, got shape \(3,\)"),
        (np.zeros((2, 0), np.int32), r"got shape \(2, 0\)"),
        (np.zeros((2, 3, 1), np.int32), r"got shape \(2, 3, 1\)"),
        (np.zeros((2, 3)), "got shape .* and dtype float64"),
        ([[1], [1.5, 2.0]], r"prompt 1 must be a list of ints, got \[1.5, 2.0\]"),
        ([[1, 64]], "prompt token ids must be from 0 to 63, got ids from 1 to 64: is this another model's tokenizer"),
        ([[-1, 2]], "prompt token ids must be from 0 to 63, got ids from -1 to 2"),
        (np.array([[2**32 + 1]]), "prompt token ids must be from 0 to 63, got ids from 4294967297"),
        (["ab"], "prompt 0 must be a list of ints, got 'ab'"),
    ],
)
def test_impossible_prompts_are_refused(prompts: Any, message: str) -> None:
    refused(message, prompts)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([0, 3], r"prompt lengths must be from 1 to 3, got \[0, 3\]"),
        ([3, 4], r"prompt lengths must be from 1 to 3, got \[3, 4\]: prompt_tokens has 3 columns"),
        ([-1, 3], r"prompt lengths must be from 1 to 3, got \[-1, 3\]"),
        ([1, 2, 3], r"prompt_lengths must be a scalar or have one value for each of the 2 rows, got shape \(3,\)"),
        ([1.0, 2.0], "prompt_lengths must be int, got float64"),
    ],
)
def test_impossible_prompt_lengths_are_refused(lengths: Any, message: str) -> None:
    refused(message, np.ones((2, 3), np.int32), prompt_lengths=np.asarray(lengths))


def test_lengths_beside_lists_are_refused() -> None:
    refused("each list has its length", [[1, 2], [3]], prompt_lengths=[2, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(max_new_tokens=-1), r"from 0 to GenerateConfig.max_new_tokens = 24 in each row, got \[-1, -1\]"),
        (dict(max_new_tokens=[3, 25]), r"from 0 to GenerateConfig.max_new_tokens = 24 in each row, got \[3, 25\]"),
        (dict(max_new_tokens=2.5), "max_new_tokens must be int, got float64"),
        (dict(eos_token_ids=64), r"eos_token_ids must be from 0 to 63, got \[64\]"),
        (dict(eos_token_ids=[2, -1]), r"eos_token_ids must be from 0 to 63, got \[2, -1\]"),
        (dict(eos_token_ids=[1.5]), "eos_token_ids must be an int or a list of ints"),
        (dict(eos_token_ids=[[1]]), "eos_token_ids must be an int or a list of ints"),
        (dict(ignore_eos=[True]), r"ignore_eos must be a scalar or have one value for each of the 2 rows, got shape \(1,\)"),
        (dict(ignore_eos=1), "ignore_eos must be bool, got int64"),
        (dict(sampling={"temperature": 1.0}), r"sampling must be SamplingParams\(.*\), got \{'temperature': 1.0\}"),
    ],
)
def test_impossible_limits_and_eos_ids_are_refused(arguments: dict, message: str) -> None:
    refused(message, [[1, 2], [3]], **arguments)


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, -1, NAN, float("inf"), [0.5, -1.0], [1.0, 1.0, 1.0], "hot")],
        *[("top_p", value) for value in (0.0, -0.5, 1.01, NAN, [0.9, 0.0])],
        *[("top_k", value) for value in (-1, 1.5, [1, -2], [1, 2, 3])],
    ],
)
def test_impossible_sampling_parameters_are_refused_by_name(name: str, value: Any) -> None:
    value = np.asarray(value) if isinstance(value, list) else value
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, do_sample=True)
    arguments = dict(sampling=SamplingParams(**{name: value}), rng=jax.random.key(0), config=config)
    refused(f"SamplingParams.{name} must be .*, a scalar or one for each of 2 rows, got", [[1, 2], [3]], **arguments)


def test_top_k_and_top_p_that_are_not_given_are_no_part_of_the_program_and_greedily_never() -> None:
    target, _ = tiny_target()

    def structure(sampling: SamplingParams, **options: Any) -> Any:
        config = GenerateConfig(max_new_tokens=NUM_TOKENS, **options)
        request, _ = prepare_call(target, None, None, [[1, 2], [3]], config=config, sampling=sampling, rng=jax.random.key(0))
        return jax.tree.map(np.shape, request.sampling)

    assert structure(SamplingParams(0.5), do_sample=True) == SamplingParams((2,), None, None)
    assert structure(SamplingParams(0.5, 3, 0.9), do_sample=True) == SamplingParams((2,), (2,), (2,))
    assert structure(SamplingParams(0.5, top_p=0.9), do_sample=True) == SamplingParams((2,), None, (2,))
    assert structure(SamplingParams(0.5, 3, 0.9), do_sample=False) == SamplingParams((2,), None, None)
    refused("SamplingParams.temperature must be", [[1]], sampling=SamplingParams(None), config=GenerateConfig(max_new_tokens=4))  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["repetition_penalty", "presence_penalty", "logits_processor", "min_p", "stop_strings"])
def test_options_that_speculation_would_bypass_are_refused_not_ignored(argument: str) -> None:
    target, params = tiny_target()
    refused(argument, [[1]], TypeError, **{argument: 1.3})
    config = GenerateConfig(max_new_tokens=4)
    with pytest.raises(TypeError, match=argument):
        speculative_generate(target, params, PromptLookup(), None, [[1]], config=config, **{argument: 1.3})
    with pytest.raises(TypeError, match=f"stream_generate does not take .*{argument}"):
        stream_generate(target, params, PromptLookup(), None, [[1]], config=config, **{argument: 1.3})
    with pytest.raises(TypeError, match=argument):
        SamplingParams(**{argument: 1.3})
    with pytest.raises(TypeError, match=argument):
        GenerateConfig(max_new_tokens=4, **{argument: 1.3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_new_tokens=-1), "max_new_tokens must be an int of at least 0, got -1"),
        (dict(max_new_tokens=2.0), "max_new_tokens must be an int of at least 0, got 2.0"),
        (dict(num_speculative_tokens=0), "num_speculative_tokens must be a positive int, got 0"),
        (dict(num_speculative_tokens=True), "num_speculative_tokens must be a positive int, got True"),
        (dict(prefill_chunk_size=0), "prefill_chunk_size must be a positive int, got 0"),
        (dict(cache_capacity=-5), "cache_capacity must be a positive int, got -5"),
        (dict(pad_token_id=-1), "pad_token_id must be an int of at least 0, got -1"),
        (dict(do_sample="False"), "GenerateConfig.do_sample must be True or False, got 'False'"),
        (dict(return_log_probs=1), "GenerateConfig.return_log_probs must be True or False, got 1"),
        (dict(verification=RejectionSampling), r"GenerateConfig.verification must be a verification rule such as RejectionSampling\(\)"),
    ],
)
def test_impossible_generate_configs_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerateConfig(**(dict(max_new_tokens=4) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=0), "vocab_size must be a positive int, got 0"),
        (dict(hidden_size=32.0), "hidden_size must be a positive int, got 32.0"),
        (dict(head_dim=7), "head_dim must be even for the rotary embedding, got 7"),
        (dict(num_heads=5), "num_heads must be a multiple of num_kv_heads, got 5 and 2"),
    ],
)
def test_impossible_model_configs_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)
    assert isinstance(tiny_config(), ModelConfig)


def test_a_pad_id_outside_the_vocabulary_is_refused() -> None:
    refused("pad_token_id must be below the vocabulary size 64, got 64", [[1]], config=GenerateConfig(max_new_tokens=4, pad_token_id=64))


def test_the_class_of_a_drafter_is_no_drafter() -> None:
    target, params = tiny_target()
    with pytest.raises(ValueError, match=r"drafter must be an instance such as PromptLookup\(\), got the class PromptLookup"):
        speculative_generate(target, params, PromptLookup, None, [[1]], config=GenerateConfig(max_new_tokens=4))  # type: ignore[arg-type]


def test_a_draft_model_with_another_vocabulary_is_refused_before_compiling() -> None:
    target, params = tiny_target()
    model, draft_params = random_model(tiny_config(vocab_size=48))
    with pytest.raises(ValueError, match="vocabulary of 48 tokens, the target one of 64: they must be the same"):
        speculative_generate(target, params, DraftModel(model), draft_params, [[1]], config=GenerateConfig(max_new_tokens=4))


def test_configs_are_hashable_and_equal_by_value() -> None:
    assert hash(GenerateConfig(max_new_tokens=4, do_sample=np.float32(0.5) > 0)) == hash(GenerateConfig(max_new_tokens=4, do_sample=True))
    assert hash(GenerateConfig(max_new_tokens=4)) == hash(GenerateConfig(max_new_tokens=4))
    assert tiny_config() == tiny_config()
    assert hash(DraftModel(tiny_target()[0])) == hash(DraftModel(tiny_target()[0]))


def test_lists_tuples_and_arrays_of_any_integer_type_are_the_same_prompt() -> None:
    target, params = tiny_target()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS)
    prompts = random_prompts((5,) * 5)
    expected = generate(target, params, prompts, config=config).tokens
    for other in (np.array(prompts), np.array(prompts, np.uint8), jnp.array(prompts), tuple(tuple(row) for row in prompts)):
        np.testing.assert_array_equal(generate(target, params, other, config=config).tokens, expected)


def test_tokens_beyond_a_prompts_length_are_never_looked_at() -> None:
    target, params = tiny_target()
    config = GenerateConfig(max_new_tokens=NUM_TOKENS)
    prompts = random_prompts((5,) * 5)
    padded = np.full((5, 9), -100)  # as a collator leaves them
    padded[:, :5] = prompts
    output = generate(target, params, padded, config=config, prompt_lengths=5)
    np.testing.assert_array_equal(output.tokens, generate(target, params, prompts, config=config).tokens)
