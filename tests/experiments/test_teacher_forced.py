"""The comparison along a text, against whole passes and against what decoding itself does."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.teacher_forced import teacher_forced
from specjax import GenerateConfig, SparseAttention, SparsityConfig, generate
from tests.helpers import numpy_log_softmax, random_prompts, tiny_target

# float32 sums of some dozen log-probabilities of order 1.
TOLERANCE = 1e-4
(TEXT,) = random_prompts((75,))
BLOCKS = dict(block_size=8, dense_below=0, head_blocks=1, tail_blocks=1)


def dense_log_probs(tokens: list[int]) -> np.ndarray:
    model, params = tiny_target()
    output = model.apply({"params": params}, jnp.asarray([tokens]), model.init_cache(batch_size=1, capacity=len(tokens)))
    return numpy_log_softmax(np.asarray(model.apply({"params": params}, output.hidden, method="logits")))[0]


@pytest.mark.full
@pytest.mark.parametrize(("start", "num_rows"), [(40, 3), (1, 4)])
def test_with_everything_kept_both_are_the_dense_target(start, num_rows):
    sparsity = SparsityConfig(attention=SparseAttention(**BLOCKS, keep=1.0))
    sums = teacher_forced(*tiny_target(), sparsity, TEXT, start=start, num_rows=num_rows, longest=75)
    predicted = np.arange(start + 1, len(TEXT))
    expected = -dense_log_probs(TEXT)[predicted - 1, np.array(TEXT)[predicted]].sum()
    assert (sums.num_tokens, sums.agreed) == (len(predicted), len(predicted))
    np.testing.assert_allclose([sums.nll_dense, sums.nll_sparse], expected, atol=TOLERANCE * len(predicted))
    np.testing.assert_allclose(sums.kl, 0, atol=TOLERANCE)


def test_along_its_own_text_the_sparse_target_says_what_it_said_when_decoding():
    model, params = tiny_target()
    sparsity = SparsityConfig(attention=SparseAttention(**BLOCKS, keep=0.0))
    config = GenerateConfig(max_new_tokens=24, sparsity=sparsity, return_log_probs=True)
    output = generate(model, params, [TEXT[:60]], config=config)
    sums = teacher_forced(model, params, sparsity, [*TEXT[:60], *output.tokens[0].tolist()], start=60, num_rows=1, longest=90)
    assert sums.num_tokens == 23  # the first token comes out of the prefill
    np.testing.assert_allclose(sums.nll_sparse, -output.log_probs[0, 1:].sum(), atol=TOLERANCE * 23)
    assert sums.kl > 0.01
    assert sums.agreed < 23
    assert sums.mean("kl") == pytest.approx(sums.kl / 23)


@pytest.mark.full
def test_refreshes_bring_the_sparse_target_back_to_the_dense_one():
    sparsity = SparsityConfig(attention=SparseAttention(**BLOCKS, keep=0.0))
    never, now_and_then, always = (
        teacher_forced(*tiny_target(), dataclasses.replace(sparsity, refresh_every=every), TEXT[:60], start=40, num_rows=2, longest=60)
        for every in (0, 3, 1)
    )
    assert never.num_tokens == now_and_then.num_tokens == always.num_tokens == 19
    assert (always.agreed, always.kl) == (19, 0)
    assert 0 < now_and_then.kl < never.kl
    np.testing.assert_allclose([now_and_then.nll_dense, always.nll_dense], never.nll_dense, atol=TOLERANCE * 19)


def test_a_text_with_nothing_to_predict_is_refused():
    for tokens, start in ((TEXT[:5], 4), (TEXT[:5], 0)):
        with pytest.raises(ValueError, match=f"5 tokens from token {start}"):
            teacher_forced(*tiny_target(), SparsityConfig(), tokens, start=start, num_rows=2, longest=9)
    with pytest.raises(ValueError, match="75 tokens, more than longest = 74"):
        teacher_forced(*tiny_target(), SparsityConfig(), TEXT, start=4, num_rows=2, longest=74)
