"""A model whose attention is `"triton"`: whole passes and generations, the kernels in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    Eagle3Drafter,
    GenerateConfig,
    Kernels,
    KVCache,
    LowRankHead,
    MoEConfig,
    PromptLookup,
    SparseAttention,
    SparseFFN,
    SparsityConfig,
    Transformer,
    eagle3_params,
    speculative_generate,
)
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.models.projections import split_gate_up
from specjax.models.sparse_attention import prepare_cache
from tests.helpers import FLOAT32_TOLERANCE, random_model, tiny_config
from tests.kernels.interpreted_triton import interpreted, launches, needs_triton

CAPACITY = 96
PROMPTS = [[*range(1, 41), 5, 6, 7], [3, 1, 4, 1, 5, 9, 2, 6] * 5]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": dict(qkv_bias=True),
    "qwen3": dict(qk_norm="head"),
    "olmoe": dict(qk_norm="projection", clip_qkv=2.0, moe=MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=16)),
    "gpt-oss": dict(
        qkv_bias=True, output_bias=True, mlp_bias=True, attention_sinks=True, layer_windows=(4, None), activation="clamped_swiglu"
    ),
}
SPARSE = SparsityConfig(attention=SparseAttention(block_size=8, keep=0.0, dense_below=24, head_blocks=1, tail_blocks=1))


@functools.cache
def models() -> tuple[dict[str, Transformer], Any]:
    model, params = random_model(tiny_config(head_dim=16))
    settings = {"reference": Kernels.of("reference"), "triton": Kernels(attention="triton"), "all": Kernels.of("triton")}
    return {name: dataclasses.replace(model, kernels=kernels) for name, kernels in settings.items()}, params


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
    layer = {"attend_part", "multiply_strip", "rotate_and_write"}
    for name, sparsity, kernels in (("all", None, layer), ("triton", SPARSE, {"attend_part", "score_and_choose"})):
        with interpreted():
            got = jax.block_until_ready(hidden(name, sparsity))
            assert set(launches) - {"merge_parts"} == kernels
        expected = hidden("reference", sparsity)
        np.testing.assert_allclose(got, expected, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)
    assert [name for name in launches if name == "score_and_choose"] == ["score_and_choose"] * 2  # a layer each
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


@needs_triton
def test_a_layer_is_six_launches_and_the_merge_of_attention() -> None:
    with interpreted():
        jax.block_until_ready(hidden("all", None))
        layer = ["multiply_strip", "rotate_and_write", "attend_part", "merge_parts", *["multiply_strip"] * 3]
        assert launches == layer * 2


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
def test_every_family_equals_the_reference_with_what_kernels_fit_it(changes: dict[str, Any]) -> None:
    model, params = random_model(tiny_config(head_dim=16, **changes))
    fits = "clip_qkv" not in changes
    kernels = Kernels(projections="triton", cache_write="triton" if fits else "auto")
    tokens, found = np.random.default_rng(0).integers(0, 64, (2, 5)), {}
    for name, chosen in (("triton", kernels), ("reference", Kernels.of("reference"))):
        with interpreted():
            one = dataclasses.replace(model, kernels=chosen)
            found[name] = jax.block_until_ready(one_pass(one, params, tokens, one.init_cache(batch_size=2, capacity=8), None).hidden)
            assert ("rotate_and_write" in launches) == (fits and name == "triton")
            assert ("multiply_strip" in launches) == (name == "triton")
    np.testing.assert_allclose(found["triton"], found["reference"], atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)


@needs_triton
@pytest.mark.full
def test_a_sparse_network_of_split_weights_equals_the_reference() -> None:
    model, params = random_model(tiny_config(head_dim=16))
    sparsity, tokens, found = SparsityConfig(ffn=SparseFFN(keep=0.4)), np.random.default_rng(0).integers(0, 64, (1, 5)), {}
    for name in ("triton", "reference"):
        with interpreted():
            one = dataclasses.replace(model, kernels=Kernels(channels=name))
            cache = one.init_cache(batch_size=1, capacity=8)
            found[name] = jax.block_until_ready(one_pass(one, split_gate_up(params), tokens, cache, sparsity).hidden)
            assert launches == (["choose_largest", "chosen_up", "chosen_down"] * 2 if name == "triton" else [])  # a layer each
    np.testing.assert_allclose(found["triton"], found["reference"], atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)


@needs_triton
@pytest.mark.full
def test_an_eagle3_drafter_with_a_low_rank_head_drafts_what_the_reference_drafts() -> None:
    both, target_params = models()
    config = Eagle3Config(decoder=tiny_config(num_layers=1, head_dim=16), target_hidden_size=32, head=LowRankHead(rank=16))
    network = Eagle3(config, dtype=jnp.float32, param_dtype=jnp.float32, kernels=Kernels.of("reference"))
    network_params, found = network.init_params(jax.random.key(0)), {}
    for name in ("reference", "all"):
        target = both[name]
        drafter = Eagle3Drafter.for_target(network.clone(kernels=target.kernels), target.config)
        params = eagle3_params(drafter.model, network_params, target.config, target_params)
        options = GenerateConfig(max_new_tokens=4, num_speculative_tokens=2, cache_capacity=64)
        with interpreted():
            found[name] = speculative_generate(target, target_params, drafter, params, [PROMPTS[0][:9]], config=options)
            jax.block_until_ready(found[name].tokens)
            assert ({"best_of_part", "multiply_strip", "rotate_and_write", "attend_part"} <= set(launches)) == (name == "all")
    np.testing.assert_array_equal(found["all"].tokens, found["reference"].tokens)
    np.testing.assert_array_equal(found["all"].statistics.accepted_counts, found["reference"].statistics.accepted_counts)
