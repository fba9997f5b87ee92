"""Lowers our Triton kernels for CUDA through the jax-triton that is installed, with no device: as a call inside `jit` on an H200 does.

Run as a program: prints a JSON object, the kernel calls in the program of each operation's first shape, and those in a decode loop beside
the results that are written where an argument lies. Needs JAX's CUDA plugin.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from specjax import GenerateConfig, Kernels, ModelConfig, MoEConfig, PromptLookup, Transformer
from specjax.generate import _generate, prepare_call
from specjax.kernels import measured
from specjax.kernels.cases import arguments, run
from specjax.kernels.shape_lists import SHAPES
from specjax.kernels.shapes import Shape


def main() -> None:
    """See the module's docstring."""
    from jax_triton import triton_lib

    library = triton_lib.triton_kernel_call_lib
    first: dict[str, Shape] = {}
    for shape in SHAPES:
        first.setdefault(shape.op, shape)
    on_hopper = mock.patch.object(library, "get_compute_capability", return_value=90)
    with on_hopper, mock.patch.object(jax, "default_backend", return_value="gpu"):
        found: dict[str, Any] = {op: _num_calls(shape, "triton", "cuda") for op, shape in first.items()}
        with mock.patch.object(measured, "fastest", return_value="triton"):
            found["loop"] = {name: _decode_loop(name) for name in ("auto", "triton")}
            mixture = MoEConfig(num_experts=8, num_experts_per_token=2, intermediate_size=128)
            found["mixture"] = {name: _decode_loop(name, moe=mixture) for name in ("auto", "triton")}
            found["auto"] = {platform: _num_calls(first["cached_attention"], "auto", platform) for platform in ("cuda", "cpu")}
    print(json.dumps(found))


def _decode_loop(name: str, **changes: Any) -> list[int]:
    """Calls and aliased results in a whole generation, whose prefill has too many rows for all but the choice of experts."""
    sizes: dict[str, Any] = dict(vocab_size=256, hidden_size=256, intermediate_size=512, num_layers=2, max_position_embeddings=512)
    model = Transformer(ModelConfig(**sizes, **changes, num_heads=4, num_kv_heads=2, head_dim=64), kernels=Kernels.of(name))
    params = jax.eval_shape(model.clone(kernels=Kernels.of("reference")).init_params, jax.random.key(0))
    settings = GenerateConfig(max_new_tokens=8, num_speculative_tokens=3, cache_capacity=256)
    request, static = prepare_call(model, PromptLookup(), None, [[1] * 100], config=settings)
    traced = _generate.trace(model, PromptLookup(), static, params, None, request, None)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return [text.count(words) for words in ("@triton_kernel_call", "#stablehlo.output_operand_alias<")]


def _num_calls(shape: Shape, implementation: str, platform: str) -> int:
    arrays = jax.eval_shape(lambda: arguments(shape, jnp.bfloat16, jax.random.key(0)))
    traced = jax.jit(lambda *arrays: run(shape, arrays, implementation)).trace(*arrays)
    return traced.lower(lowering_platforms=(platform,)).as_text().count("@triton_kernel_call")


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
