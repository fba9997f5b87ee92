"""Batches of one shape, and what is said where two outputs part."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.decoding import Decoder, LogitGap, first_divergence
from experiments.models import load_model
from specjax import GenerateConfig

# Float32 on a CPU: the two passes differ in their padding alone.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def target(target_path):
    return load_model(str(target_path), dtype="float32")


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
