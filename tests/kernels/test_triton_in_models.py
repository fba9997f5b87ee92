"""A model whose attention is `"triton"`: whole passes and generations, the kernels in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from specjax import GenerateConfig, Kernels, KVCache, PromptLookup, SparseAttention, SparsityConfig, Transformer, speculative_generate
from specjax.models.sparse_attention import prepare_cache
from tests.helpers import FLOAT32_TOLERANCE, random_model, tiny_config
from tests.kernels.interpreted_triton import interpreted, launches, needs_triton

CAPACITY = 96
PROMPTS = [[*range(1, 41), 5, 6, 7], [3, 1, 4, 1, 5, 9, 2, 6] * 5]
SPARSE = SparsityConfig(attention=SparseAttention(block_size=8, keep=0.0, dense_below=24, head_blocks=1, tail_blocks=1))


@functools.cache
def models() -> tuple[dict[str, Transformer], Any]:
    model, params = random_model(tiny_config(head_dim=16))
    return {name: dataclasses.replace(model, kernels=Kernels(attention=name)) for name in ("reference", "triton")}, params


def hidden(implementation: str, sparsity: SparsityConfig | None) -> jax.Array:
    """Of three rows behind 70 tokens."""
    both, params = models()
    model, tokens = both[implementation], np.random.default_rng(0).integers(0, 64, (2, 73))
    cache = one_pass(both["reference"], params, tokens[:, :70], model.init_cache(batch_size=2, capacity=CAPACITY), None).cache
    return one_pass(model, params, tokens[:, 70:], cache, sparsity).hidden


@functools.partial(jax.jit, static_argnums=(0, 4))
def one_pass(model: Transformer, params: Any, tokens: Any, cache: KVCache, sparsity: SparsityConfig | None) -> Any:
    if sparsity is not None:
        cache = prepare_cache(cache, sparsity, model.config)
    return model.apply({"params": params}, tokens, cache, sparsity=sparsity)


@needs_triton
def test_a_dense_and_a_sparse_pass_equal_those_of_the_reference() -> None:
    for sparsity, kernels in ((None, {"attend_part"}), (SPARSE, {"attend_part", "score_and_choose"})):
        with interpreted():
            got = jax.block_until_ready(hidden("triton", sparsity))
            assert set(launches) - {"merge_parts"} == kernels
        expected = hidden("reference", sparsity)
        np.testing.assert_allclose(got, expected, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)
    assert not np.allclose(expected, hidden("reference", None), atol=1e-2)  # the sparse pass leaves something out


@needs_triton
def test_a_speculative_generation_writes_the_references_text() -> None:
    both, params = models()
    config = GenerateConfig(max_new_tokens=6, num_speculative_tokens=3, cache_capacity=CAPACITY, prefill_chunk_size=32, sparsity=SPARSE)

    def text(implementation: str) -> np.ndarray:
        return np.asarray(speculative_generate(both[implementation], params, PromptLookup(), None, PROMPTS, config=config).tokens)

    with interpreted():
        got = text("triton")
        assert "score_and_choose" in launches
    np.testing.assert_array_equal(got, text("reference"))
