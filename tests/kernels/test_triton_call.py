"""The way to jax-triton: either version's names, and what is said where it cannot run."""

from __future__ import annotations

import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.block_selection import block_selection
from specjax.kernels.block_sparse_attention import block_sparse_attention
from specjax.kernels.cached_attention import cached_attention
from specjax.kernels.expert_choice import expert_choice
from specjax.kernels.expert_products import expert_products
from specjax.kernels.few_row_linear import few_row_linear
from specjax.kernels.gated_unit import GatedUnit
from specjax.kernels.gathered_ffn import gathered_ffn
from specjax.kernels.low_rank_argmax import low_rank_argmax
from specjax.kernels.rope_and_write import Heads, rope_and_write
from specjax.kernels.triton_call import triton_call, what_is_missing

QUERY, CACHE, LENGTH = jnp.ones((1, 2, 2, 16)), jnp.ones((1, 1, 32, 16)), jnp.zeros((1,), jnp.int32)
IDS, COUNTS = jnp.zeros((1, 1, 2), jnp.int32), jnp.ones((1, 1), jnp.int32)
ONE = jnp.ones((1,), jnp.int32)
HEADS = Heads(qkv=jnp.ones((1, 2, 1, 4, 16)), cos=jnp.ones((1, 2, 8)), sin=jnp.ones((1, 2, 8)))
EXPERTS = jnp.ones((2, 16, 2, 4)), jnp.ones((2, 4, 16))
CALLS = {
    "cached_attention": lambda **how: cached_attention(QUERY, CACHE, CACHE, LENGTH, scale=1.0, **how),
    "block_sparse_attention": lambda **how: block_sparse_attention(
        QUERY, CACHE, CACHE, LENGTH, IDS, COUNTS, block_size=16, scale=1.0, **how
    ),
    "block_selection": lambda **how: block_selection(QUERY[:, 0], CACHE, ONE, ONE, ONE, head_blocks=0, max_chosen=2, **how),
    "few_row_linear": lambda **how: few_row_linear(QUERY[0, 0], jnp.ones((16, 4)), **how),
    "rope_and_write": lambda **how: rope_and_write(HEADS, CACHE, CACHE, LENGTH, **how),
    "low_rank_argmax": lambda **how: low_rank_argmax(QUERY[0, 0], jnp.ones((4, 16)), jnp.ones((9, 4)), **how),
    "expert_products": lambda **how: expert_products(
        QUERY[0, 0], jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)), *EXPERTS, activation=GatedUnit(), **how
    ),
    "expert_choice": lambda **how: expert_choice(QUERY[0, 0], choices=2, normalise=True, **how),
    "gathered_ffn": lambda **how: gathered_ffn(
        QUERY[0], jnp.ones((2, 2, 8)), jnp.zeros((2, 1), jnp.int32), jnp.ones((8, 16)), jnp.ones((8, 16)), unit=GatedUnit(), **how
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_forced_kernel_without_a_device_raises_and_auto_does_not(name: str) -> None:
    with pytest.raises(ValueError, match="'triton' needs a CUDA device, and JAX computes on 'cpu' here: use 'auto' or 'reference'"):
        CALLS[name](implementation="triton")
    jax.tree.map(np.testing.assert_array_equal, CALLS[name](implementation="auto"), CALLS[name](implementation="reference"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(ValueError, match=r"needs jax-triton, which comes with specjax\[gpu\] and cannot be imported here"):
        CALLS["cached_attention"](implementation="triton")


@pytest.mark.parametrize(
    ("jax_version", "their_version", "works"),
    [((0, 10, 2), (0, 3, 1), True), ((0, 11, 2), (0, 4, 0), True), ((0, 12, 0), (0, 4, 1), False), ((0, 12, 0), (0, 3, 1), True)],
)
def test_versions_that_do_not_work_together_are_named(
    jax_version: tuple[int, ...], their_version: tuple[int, ...], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = types.SimpleNamespace(__version_info__=their_version, __version__=".".join(map(str, their_version)))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "__version_info__", jax_version)
    for name, module in (("jax_triton", theirs), ("triton", types.ModuleType("triton"))):
        monkeypatch.setitem(sys.modules, name, module)
    missing = what_is_missing()
    assert missing is None if works else missing is not None and "install jax-triton 0.3.1" in missing


@pytest.mark.parametrize("name_of_results", ["out_shape", "out_type"])
def test_both_versions_of_jax_triton_are_called_by_their_own_names(name_of_results: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def old(*arrays: Any, kernel: Any, out_shape: Any, grid: Any, num_warps: Any, num_stages: Any, **constants: Any) -> Any:
        seen.update(arrays=arrays, kernel=kernel, results=out_shape, grid=grid, constants=constants, options=(num_warps, num_stages))
        return [jnp.zeros(shape.shape, shape.dtype) for shape in out_shape]

    def new(*arrays: Any, kernel: Any, out_type: Any, grid: Any, num_warps: Any, num_stages: Any, **constants: Any) -> Any:
        return old(*arrays, kernel=kernel, out_shape=out_type, grid=grid, num_warps=num_warps, num_stages=num_stages, **constants)

    function = old if name_of_results == "out_shape" else new
    monkeypatch.setattr("specjax.kernels.triton_call.what_is_missing", lambda: None)
    monkeypatch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_call=function))
    monkeypatch.setitem(sys.modules, "specjax.kernels.some_op.triton", types.SimpleNamespace(some_kernel="the kernel"))
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    options = dict(out_shapes=[shape], grid=(2,), constants={"SIZE": 4}, num_warps=8, num_stages=2)
    (result,) = triton_call("some_op", "some_kernel", ONE, **options)
    assert result.shape == (3,)
    assert seen == dict(arrays=(ONE,), kernel="the kernel", results=(shape,), grid=(2,), constants={"SIZE": 4}, options=(8, 2))
    triton_call("some_op", "some_kernel", ONE, 7, **options, aliases={0: 0})
    assert seen["arrays"] == (ONE, 7)
    assert seen["constants"] == {"SIZE": 4, "input_output_aliases": {0: 0}}


def test_nothing_is_missing_is_never_said_on_a_cpu() -> None:
    assert what_is_missing() is not None
