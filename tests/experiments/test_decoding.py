"""Batches of one shape, and what is said where two outputs part."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.decoding import Decoder, LogitGap, Prefilled, first_divergence
from experiments.models import load_model
from specjax import GenerateConfig, PromptLookup

# Float32 on a CPU: the two passes differ in their padding alone.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def target(target_path):
    return load_model(str(target_path), dtype="float32")


def test_decoders_go_on_from_prompts_that_were_taken_in_once(target):
    prompts = [[5, 3, 8], [2, 2], [9]]
    config = GenerateConfig(max_new_tokens=16, num_speculative_tokens=2, cache_capacity=128)
    sizes = dict(config=config, batch=2, width=16)
    alone = Decoder(target, PromptLookup(), None, eos_token_ids=(), **sizes)(prompts)
    prefilled = Prefilled.of(target, PromptLookup(), None, prompts, **sizes)
    eos = [alone.tokens[0][0]]  # the first prompt's answer ends at once
    for drafter, ends in ((PromptLookup(), ()), (None, ()), (PromptLookup(), eos)):
        decoder = Decoder(target, drafter, None, eos_token_ids=ends, prefilled=prefilled, **sizes)
        expected = alone.tokens if not ends else Decoder(target, drafter, None, eos_token_ids=ends, **sizes)(prompts).tokens
        assert decoder(prompts).tokens == expected
        assert decoder(prompts, ignore_eos=True).tokens == alone.tokens
        assert decoder.prefill_seconds(prompts) == 0.0
    assert prefilled.first == [tokens[0] for tokens in alone.tokens]
    assert (prefilled.cache(2).keys[0] == prefilled.batches[1].target_cache.keys[0][:1]).all()


def test_the_first_difference_is_found():
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 5, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2


def test_the_logit_gap_is_that_of_a_pass_over_the_unpadded_text(target):
    text = [5, 3, 8, 13]
    output = target.model.apply({"params": target.params}, jnp.array([text]), target.model.init_cache(batch_size=1, capacity=len(text)))
    logits = np.asarray(target.model.apply({"params": target.params}, output.hidden, method="logits"))[0, -1]
    assert LogitGap(target, 24)(text, 7, 9) == pytest.approx(abs(logits[7] - logits[9]), abs=TOLERANCE)


def test_rows_that_fill_up_the_last_batch_are_not_counted(target):
    prompts = [[5, 3, 8], [2, 2], [9]]
    config = GenerateConfig(max_new_tokens=16)
    decoder = Decoder(target, None, None, config=config, batch=2, width=16, eos_token_ids=())
    together = decoder(prompts)
    assert together.num_tokens == 3 * 16
    assert int(together.statistics.num_steps) == 3 * 15  # the prefill gives the first token
    assert [decoder([prompt]).tokens[0] for prompt in prompts] == together.tokens
