"""What XLA makes of the decode loop: no cache is copied or transposed in it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from experiments.presets import qwen25_15b
from specjax import (
    DraftModel,
    GenerateConfig,
    Lossless,
    ModelConfig,
    MoEConfig,
    PromptLookup,
    Reuse,
    RopeConfig,
    SparseAttention,
    SparsityConfig,
    Transformer,
)
from specjax.generate import _generate, prepare_call
from tests.compiled import instructions_in_loops

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=4096,
)
# All that GPT-OSS has, and rotary frequencies of each row's own.
GPT_OSS = dataclasses.replace(
    CONFIG,
    layer_windows=(6, None),
    attention_sinks=True,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    activation="clamped_swiglu",
    moe=MoEConfig(num_experts=6, num_experts_per_token=2, intermediate_size=24, router_bias=True),
    rope=RopeConfig(rope_type="dynamic", factor=4.0, original_max_position_embeddings=16),
)
CAPACITY = 320
# 20 blocks, of which at most 7 are read.
SPARSE = SparsityConfig(attention=SparseAttention(block_size=16, keep=0.2, dense_below=64), reuse=Reuse(anchors=(0,)))


def compiled_text(
    *,
    batch_size: int,
    dtype: jnp.dtype,
    with_draft_model: bool,
    prefill_chunk_size: int = 512,
    model_config: ModelConfig = CONFIG,
    sparsity: SparsityConfig = GenerateConfig.sparsity,
) -> str:
    model = Transformer(model_config, dtype=dtype, param_dtype=dtype)
    params = jax.eval_shape(model.init_params, jax.random.key(0))
    drafter, drafter_params = (DraftModel(model), params) if with_draft_model else (PromptLookup(), None)
    config = GenerateConfig(
        max_new_tokens=32, num_speculative_tokens=3, cache_capacity=CAPACITY, prefill_chunk_size=prefill_chunk_size, sparsity=sparsity
    )
    request, static = prepare_call(
        model,
        drafter,
        drafter_params,
        [[1] * 40] * batch_size,
        config=config,
    )
    return _generate.lower(model, drafter, static, params, drafter_params, request, None).compile().as_text()


def moves_of_the_cache(text: str, batch_size: int, operations: str) -> list[str]:
    """Instructions in loops whose result has as many elements as a layer's cache, and that only move it."""
    size = batch_size * CONFIG.num_kv_heads * CAPACITY * CONFIG.head_dim
    found = []
    for line in instructions_in_loops(text):
        match = re.search(rf"= \w+\[([\d,]+)\]\S* (?:{operations})\(", line)
        if match and jnp.prod(jnp.array([int(extent) for extent in match.group(1).split(",")])) == size:
            found.append(line)
    return found


def test_the_search_finds_a_copy_in_a_loop():
    def body(carry):
        index, cache = carry
        return index + 1, cache.swapaxes(0, 1).reshape(cache.shape) + 1.0

    shape = jax.ShapeDtypeStruct((CONFIG.num_kv_heads, CAPACITY, CONFIG.head_dim), jnp.float32)
    text = jax.jit(lambda cache: jax.lax.while_loop(lambda carry: carry[0] < 9, body, (0, cache))).lower(shape).compile().as_text()
    assert moves_of_the_cache(text, 1, "copy|transpose")


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("with_draft_model", [False, True])
def test_no_cache_is_copied_or_transposed_in_the_loop(batch_size, with_draft_model):
    text = compiled_text(batch_size=batch_size, dtype=jnp.float32, with_draft_model=with_draft_model)
    assert not moves_of_the_cache(text, batch_size, "copy|copy-start|transpose|convert")


@pytest.mark.parametrize("batch_size", [1, 5])
def test_no_cache_is_copied_or_transposed_in_bfloat16(batch_size):
    # A CPU without bfloat16 products converts the operands of attention, and JAX 0.10.2 the cache around each write: those are not counted.
    text = compiled_text(batch_size=batch_size, dtype=jnp.bfloat16, with_draft_model=False)
    assert not moves_of_the_cache(text, batch_size, "copy|copy-start|transpose")


def test_no_cache_is_copied_in_a_chunked_prefill():
    text = compiled_text(batch_size=2, dtype=jnp.float32, with_draft_model=True, prefill_chunk_size=16)
    assert not moves_of_the_cache(text, 2, "copy|copy-start|transpose|convert")


@pytest.mark.parametrize("batch_size", [1, pytest.param(5, marks=pytest.mark.full)])
def test_no_cache_is_copied_or_transposed_by_sparse_attention(batch_size):
    text = compiled_text(batch_size=batch_size, dtype=jnp.float32, with_draft_model=False, prefill_chunk_size=16, sparsity=SPARSE)
    assert not moves_of_the_cache(text, batch_size, "copy|copy-start|transpose|convert")
    # Nor is any of it computed with: the only things of its size are the cache itself and its writes.
    assert not moves_of_the_cache(text, batch_size, "dot|multiply|add|select|concatenate|pad")


@pytest.mark.parametrize("batch_size", [1, pytest.param(5, marks=pytest.mark.full)])
def test_no_cache_is_copied_or_transposed_by_refreshes(batch_size):
    sparsity = dataclasses.replace(SPARSE, refresh_every=3)
    text = compiled_text(batch_size=batch_size, dtype=jnp.float32, with_draft_model=False, prefill_chunk_size=16, sparsity=sparsity)
    assert not moves_of_the_cache(text, batch_size, "copy|copy-start|transpose|convert")


@pytest.mark.parametrize(
    ("batch_size", "with_draft_model"),
    [(1, False), *(pytest.param(*x, marks=pytest.mark.full) for x in ((1, True), (5, False), (5, True)))],
)
@pytest.mark.full
def test_no_cache_is_copied_or_transposed_by_two_levels(batch_size, with_draft_model):
    # Loops of one turn stand where a condition would copy what its branches write.
    sparsity = dataclasses.replace(SPARSE, lossless=Lossless(max_steps=2))
    text = compiled_text(batch_size=batch_size, dtype=jnp.float32, with_draft_model=with_draft_model, sparsity=sparsity)
    assert not moves_of_the_cache(text, batch_size, "copy|copy-start|transpose|convert")


@pytest.mark.full
@pytest.mark.parametrize("batch_size", [1, 5])
def test_no_cache_is_copied_with_windows_sinks_and_experts(batch_size):
    sizes = dict(batch_size=batch_size, model_config=GPT_OSS, prefill_chunk_size=16)
    text = compiled_text(dtype=jnp.float32, with_draft_model=True, **sizes)
    assert not moves_of_the_cache(text, batch_size, "copy|copy-start|transpose|convert")
    text = compiled_text(dtype=jnp.bfloat16, with_draft_model=False, **sizes)
    assert not moves_of_the_cache(text, batch_size, "copy|copy-start|transpose")


@pytest.mark.full
def test_a_32k_prompt_of_a_1_5b_model_fits_24_gb():
    """Compiled, not run: XLA's own account of arguments, output and scratch memory."""

    def bytes_needed(num_layers: int) -> int:
        model = Transformer(dataclasses.replace(qwen25_15b(), num_layers=num_layers), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
        params = jax.eval_shape(model.init_params, jax.random.key(0))
        request, static = prepare_call(
            model,
            PromptLookup(),
            None,
            [[1] * 32_000],
            config=GenerateConfig(max_new_tokens=256),
        )
        memory = _generate.lower(model, PromptLookup(), static, params, None, request, None).compile().memory_analysis()
        return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes

    one, two = bytes_needed(1), bytes_needed(2)
    assert one + 27 * (two - one) < 16e9  # leaves a third of 24 GB to everything else
