"""A timed loop's steps are those of a call: what a call is given, the compiler must not know in the loop either."""

from __future__ import annotations

import dataclasses
import importlib
import re

import jax
import numpy as np
import pytest

from experiments.mid_decode import Middle, decoding_loop
from experiments.timing import _lower
from specjax import DraftModel, GenerateConfig, SamplingParams
from tests.helpers import random_model, tiny_config

# The package's name `generate` is the function.
generation = importlib.import_module("specjax.generate")
MIDDLE = Middle(batch=1, context=64, num_steps=4, num_speculative_tokens=2, margin=16, do_sample=True)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_timed_step_holds_no_array_that_a_call_would_pass(do_sample: bool) -> None:
    target, params = random_model(tiny_config(num_layers=1), seed=3)
    loop = decoding_loop(target, params, None, None, dataclasses.replace(MIDDLE, num_speculative_tokens=0, do_sample=do_sample))
    traced = jax.make_jaxpr(loop.step)(loop.params, loop.state)
    # The rotary frequencies are the model's own in a call as well.
    assert [constant.shape for constant in traced.consts] == [(target.config.head_dim // 2,)]


@pytest.mark.full
@pytest.mark.parametrize(("top_p", "in_a_call"), [(None, 0), (1.0, 4)])
def test_sampling_branches_for_every_token_only_where_a_filter_is_given(top_p: float | None, in_a_call: int) -> None:
    def branches(compiled: str) -> int:
        return len(re.findall(r" conditional\(", compiled))

    (target, params), (draft, draft_params) = (random_model(tiny_config(num_layers=1), seed=seed) for seed in (1, 2))
    drafter = DraftModel(draft)
    config = GenerateConfig(max_new_tokens=16, num_speculative_tokens=2, do_sample=True)
    sampled = dict(sampling=SamplingParams(top_p=top_p), rng=jax.random.key(0))
    request, static = generation.prepare_call(target, drafter, draft_params, np.zeros((1, 4), np.int32), config=config, **sampled)
    call = generation._generate.lower(target, drafter, static, params, draft_params, request, None).compile().as_text()
    # The first token is drawn before the loop, three in it.
    assert branches(call) == in_a_call
    if top_p is None:
        timed = _lower(decoding_loop(target, params, drafter, draft_params, MIDDLE)).compile().as_text()
        assert branches(timed) == 0
