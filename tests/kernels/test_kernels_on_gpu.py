"""The compiled kernels on a real device, with `--full` over their full grids.

Command: XLA_PYTHON_CLIENT_PREALLOCATE=false python -m pytest -m gpu -n 8 -v --durations=20 tests/kernels/test_kernels_on_gpu.py > log 2>&1
(a test has its line as soon as it is done: the log of a run that was cut short says what passed).

An interpreter cannot see wrong layouts or races, and both have given wrong numbers on Hopper (chained products above all).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import GenerateConfig, Kernels, ModelConfig, PromptLookup, Transformer
from specjax.generate import _generate, prepare_call
from specjax.kernels.block_sparse_attention import block_sparse_attention
from specjax.kernels.cached_attention import cached_attention
from specjax.kernels.cases import arguments, run
from specjax.kernels.expert_products import expert_products
from specjax.kernels.few_row_attention import ListedBlocks, TuningConfig, few_row_attention
from specjax.kernels.few_row_linear import Normed, few_row_linear
from specjax.kernels.gated_unit import GatedUnit
from specjax.kernels.shape_lists import SHAPES
from specjax.kernels.shapes import (
    AttentionShape,
    ChoiceShape,
    ExpertShape,
    GatheredShape,
    LargestShape,
    LinearShape,
    LowRankShape,
    SelectionShape,
    Shape,
)
from specjax.kernels.shared_memory import TooMuchSharedMemory, shared_bytes_there
from specjax.kernels.triton_call import what_is_missing
from tests.compiled import instructions_in_loops
from tests.kernels.low_rank_bounds import check_best

# Relative to the largest result. bfloat16: weights and results of 8 bits, as in the reference. float32: another order of sums.
TOLERANCES = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-5}
FULL = pytest.mark.full
MOST_BYTES = 2**31  # the largest shapes are the benchmark's
SMALL = AttentionShape(batch=3, rows=5, kv_heads=2, group=4, head_dim=128, slots=1024)
# Rows 1 and 2 are siblings under row 0; rows 3 and 4 are children of row 2.
TREE = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 0, 1]], bool)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _compiles() -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1", "unset TRITON_INTERPRET: these tests are about compiled kernels"
    assert what_is_missing() is None, what_is_missing()


@functools.lru_cache(maxsize=8)
def program(shape: Shape, implementation: str) -> Callable[..., Any]:
    """Compiled once for all arrays of a shape: compiling is most of what these tests take."""
    return jax.jit(lambda *arrays: run(shape, arrays, implementation))


def check(shape: Shape, dtype: str, arrays: tuple[jax.Array, ...] | None = None) -> None:
    arrays = arguments(shape, jnp.dtype(dtype), jax.random.key(0)) if arrays is None else arrays
    got, again = (program(shape, "triton")(*arrays) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, got, again)  # bit for bit
    expected = program(shape, "reference")(*arrays)
    if isinstance(shape, SelectionShape):
        _check_selection(shape, arrays, got, expected)
    elif isinstance(shape, LowRankShape):
        check_best(arrays, got, expected)
    elif isinstance(shape, ChoiceShape):
        np.testing.assert_array_equal(got[1], expected[1])
        np.testing.assert_allclose(got[0], expected[0], rtol=TOLERANCES["float32"])
    elif isinstance(shape, LargestShape):
        np.testing.assert_array_equal(got, expected)
    else:
        jax.tree.map(lambda ours, theirs: _check_close(ours, theirs, dtype), got, expected)


def _check_close(got: Any, expected: Any, dtype: str) -> None:
    got, expected = (np.asarray(x, np.float32) for x in (got, expected))
    np.testing.assert_allclose(got, expected, atol=TOLERANCES[dtype] * np.abs(expected).max())


def _check_selection(shape: SelectionShape, arrays: Any, got: Any, expected: Any) -> None:
    """Scores that differ in their last bits may swap neighbours at the edge, and nothing else."""
    np.testing.assert_array_equal(got[1], expected[1])
    for ours, theirs in zip(np.asarray(got[0]).reshape(-1, shape.chosen), np.asarray(expected[0]).reshape(-1, shape.chosen), strict=True):
        assert (np.diff(ours) > 0).all()
        assert len(set(ours) & set(theirs)) >= shape.chosen - 1


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.moved_bytes(2) < MOST_BYTES], ids=str)
def test_every_measured_shape_equals_the_reference(shape: Shape) -> None:
    check(shape, "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", pytest.param("float16", marks=FULL)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, pytest.param(256, marks=FULL)])
@pytest.mark.parametrize("rows", [1, 2, 5, 9, 16, 49, *(pytest.param(rows, marks=FULL) for rows in (3, 4, 6, 7, 8, 12, 25, 64))])
def test_dense_attention_equals_the_reference_on_the_device(rows: int, head_dim: int, dtype: str) -> None:
    for group in (1, 4, 7):
        shape = dataclasses.replace(SMALL, rows=rows, group=group, head_dim=head_dim)
        query, keys, values, _ = arguments(shape, jnp.dtype(dtype), jax.random.key(1))
        for lengths in ([0, 1, 63], [64, 65, shape.slots - rows]):
            length = jnp.asarray(lengths, jnp.int32)
            beyond = (jnp.arange(shape.slots) >= length[:, None] + rows)[:, None, :, None]
            check(shape, dtype, (query, jnp.where(beyond, jnp.nan, keys), values, length))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_sparse_attention_equals_the_reference_on_the_device(rows: int, block_size: int, dtype: str) -> None:
    check(dataclasses.replace(SMALL, rows=rows, kept_slots=512, block_size=block_size), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=FULL)])
@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
@pytest.mark.parametrize("block_slots", [16, 32, 64, 128])
def test_any_cut_of_the_work_gives_the_same_on_the_device(block_slots: int, num_warps: int, dtype: str) -> None:
    for rows, group in ((1, 4), (5, 4), (16, 4)):
        shape = dataclasses.replace(SMALL, rows=rows, group=group)
        query, keys, values, _ = arguments(shape, jnp.dtype(dtype), jax.random.key(6))
        tuning = TuningConfig(parts=4, block_slots=block_slots, num_warps=num_warps, num_stages=2)
        check_attention(query, keys, values, jnp.asarray([7, 64, 1000], jnp.int32), dtype=dtype, tuning=tuning)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("parts", [1, 8])
def test_windows_sinks_and_trees_equal_the_reference_on_the_device(parts: int, dtype: str) -> None:
    query, keys, values, _ = arguments(SMALL, jnp.dtype(dtype), jax.random.key(2))
    length = jnp.asarray([0, 63, 1000], jnp.int32)
    sinks = jax.random.normal(jax.random.key(3), (SMALL.kv_heads * SMALL.group,), jnp.dtype(dtype))
    for options in (dict(window=100), dict(sinks=sinks), dict(step_mask=TREE), dict(window=1, sinks=sinks, step_mask=TREE)):
        check_attention(query, keys, values, length, dtype=dtype, tuning=TuningConfig(parts=parts, block_slots=32), **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("parts", [1, 8])
def test_rows_that_read_blocks_of_their_own_equal_the_reference_on_the_device(parts: int, dtype: str) -> None:
    shape = dataclasses.replace(SMALL, kept_slots=512)
    *arrays, ids, counts = arguments(shape, jnp.dtype(dtype), jax.random.key(4))
    row_mask = jax.random.bernoulli(jax.random.key(5), 0.5, (*ids.shape[:2], shape.rows, ids.shape[2])).at[..., -1].set(True)
    listed = ListedBlocks(ids, counts, row_mask, block_size=shape.block_size)
    check_attention(*arrays, dtype=dtype, tuning=TuningConfig(parts=parts, block_slots=32), listed=listed, step_mask=TREE)


def check_attention(*arrays: jax.Array, dtype: str, tuning: TuningConfig, **options: Any) -> None:
    got = few_row_attention(*arrays, scale=0.1, tuning=tuning, **options)
    if (listed := options.pop("listed", None)) is not None:
        options |= dict(row_mask=listed.row_mask, block_size=listed.block_size)
        expected = block_sparse_attention(*arrays, listed.block_ids, listed.num_blocks, scale=0.1, **options, implementation="reference")
    else:
        expected = cached_attention(*arrays, scale=0.1, **options, implementation="reference")
    got, expected = (np.asarray(x, np.float32) for x in (got, expected))
    np.testing.assert_allclose(got, expected, atol=TOLERANCES[dtype] * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 6, 16, 17, 64])
@pytest.mark.parametrize("sizes", [(4096, 6144), (1000, 333), (896, 1152)])
def test_products_of_few_rows_equal_the_reference_on_the_device(sizes: tuple[int, int], rows: int, dtype: str) -> None:
    for gated, normed in itertools.product((False, True), repeat=2):
        check(LinearShape(rows=rows, inner=sizes[0], columns=sizes[1], gated=gated, normed=normed), dtype)


@pytest.mark.parametrize("cut", ["64:32:4:5:1", "256:16:2:4:1", "128:128:8:2:1", "256:32:4:3:2", "128:64:4:4:8"])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_any_cut_of_a_product_gives_the_same_on_the_device(rows: int, cut: str) -> None:
    sizes = (rows, 2048), (2048, 2, 96), (2, 96), (rows, 96)
    x, weight, bias, residual = (jax.random.normal(jax.random.key(index), size, jnp.bfloat16) for index, size in enumerate(sizes))
    options: dict[str, Any] = dict(bias=bias, residual=residual)
    for given in (x, Normed(x, jnp.ones(2048, jnp.bfloat16), 1e-6)):
        got, again = (
            few_row_linear(given, weight, **options, gated=True, implementation=f"triton@{cut}:{int(rows > 1)}") for _ in range(2)
        )
        np.testing.assert_array_equal(got, again)
        wide, others = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (given, options))
        _check_close(got, few_row_linear(wide, weight.astype(jnp.float32), **others, gated=True, implementation="reference"), "bfloat16")


def test_a_cut_that_does_not_fit_is_refused_before_anything_runs() -> None:
    x, weight = jnp.ones((64, 2048), jnp.bfloat16), jnp.ones((2048, 2, 96), jnp.bfloat16)
    run = jax.jit(lambda x, weight: few_row_linear(x, weight, gated=True, implementation="triton@256:256:8:8:1:1"))
    with pytest.raises(TooMuchSharedMemory, match=rf"takes \d+ bytes of shared memory, and {jax.devices()[0].device_kind} has \d+ "):
        run.lower(x, weight)
    # The device's own word for it is the one that its compute capability has.
    own = shared_bytes_there(jax.devices()[0])
    assert own == shared_bytes_there(types.SimpleNamespace(compute_capability=jax.devices()[0].compute_capability))


def test_no_cache_is_copied_in_a_decode_loop_that_writes_it_by_kernel() -> None:
    sizes: dict[str, Any] = dict(vocab_size=256, hidden_size=256, intermediate_size=512, num_layers=2, max_position_embeddings=4096)
    config = ModelConfig(**sizes, num_heads=4, num_kv_heads=2, head_dim=64)
    capacity, copies = 1536, {}
    for name in ("reference", "triton"):
        model = Transformer(config, kernels=Kernels(cache_write=name, projections=name))
        params = jax.eval_shape(Transformer(config).init_params, jax.random.key(0))
        settings = GenerateConfig(max_new_tokens=32, num_speculative_tokens=3, cache_capacity=capacity)
        request, static = prepare_call(model, PromptLookup(), None, [[1] * 100], config=settings)
        text = _generate.lower(model, PromptLookup(), static, params, None, request, None).compile().as_text()
        assert text is not None
        assert ("triton_kernel_call" in text) == (name == "triton")
        size = f"[1,{config.num_kv_heads},{capacity},{config.head_dim}]"
        copies[name] = [line for line in instructions_in_loops(text) if re.search(rf"= \w+{re.escape(size)}\S* (copy|copy-start)\(", line)]
    assert copies == {"reference": [], "triton": []}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", pytest.param("float16", marks=FULL)])
@pytest.mark.parametrize("rows", [1, 6, 16, 17, 33, 64])
def test_experts_with_biases_and_skipped_choices_equal_the_reference_on_the_device(rows: int, dtype: str) -> None:
    shape = ExpertShape(rows=rows, choices=4, experts=9, hidden=200, ffn=328)
    x, experts, weights, gate_up, down = arguments(shape, jnp.dtype(dtype), jax.random.key(7))
    experts = jnp.where(jax.random.bernoulli(jax.random.key(8), 0.3, experts.shape), shape.experts, experts)
    biases = [jax.random.normal(jax.random.key(9), size, jnp.dtype(dtype)) for size in ((9, 2, 328), (9, 200))]
    for activation in (GatedUnit(), GatedUnit(limit=0.7, alpha=1.702)):
        options: Any = dict(activation=activation, may_skip=True, gate_up_bias=biases[0], down_bias=biases[1])
        got, expected = (
            np.asarray(expert_products(x, experts, weights, gate_up, down, **options, implementation=name), np.float32)
            for name in ("triton", "reference")
        )
        np.testing.assert_allclose(got, expected, atol=TOLERANCES[dtype] * np.abs(expected).max())


@pytest.mark.parametrize("cut", ["32:64:64:4:2", "16:32:128:2:4", "64:128:64:8:3"])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_any_cut_of_a_mixture_gives_the_same_on_the_device(rows: int, cut: str) -> None:
    shape = ExpertShape(rows=rows, choices=4, experts=9, hidden=200, ffn=328)
    arrays = arguments(shape, jnp.bfloat16, jax.random.key(10))
    _check_close(run(shape, arrays, f"triton@{cut}"), run(shape, arrays, "reference"), "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", pytest.param("float16", marks=FULL)])
@pytest.mark.parametrize("rows", [1, 6, 17, 64])
def test_channels_of_several_groups_equal_the_reference_on_the_device(rows: int, dtype: str) -> None:
    check(GatheredShape(groups=3, rows=rows, hidden=200, ffn=500, kept=104), dtype)


@pytest.mark.parametrize("size", [17, 64, 4097, 16384])
def test_the_largest_of_several_rows_equal_the_reference_on_the_device(size: int) -> None:
    check(LargestShape(rows=5, size=size, chosen=size // 3), "bfloat16")  # and so many are equal


@pytest.mark.parametrize("shape", [SMALL, ExpertShape(rows=6, choices=2, experts=8, hidden=64, ffn=32)], ids=["attention", "experts"])
def test_the_kernel_is_in_the_compiled_program(shape: Shape) -> None:
    arrays = arguments(shape, jnp.bfloat16, jax.random.key(0))
    text = jax.jit(lambda *arrays: run(shape, arrays, "triton")).lower(*arrays).compile().as_text()
    assert text.count("triton_kernel_call") >= 2  # the parts and their merge, or gate with up and down
