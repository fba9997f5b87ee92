"""Lowers our Triton kernels for CUDA through the jax-triton that is installed, with no device: as a call inside `jit` on an H200 does.

Run as a program: prints a JSON object, the kernel calls in the program of each operation's first shape, and the results of `rope_and_write`
that are written where an argument lies. Needs JAX's CUDA plugin.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from specjax.kernels import measured
from specjax.kernels.cases import arguments, run
from specjax.kernels.shapes import SHAPES, Shape


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
        found["aliases"] = _lowered(first["rope_and_write"], "triton", "cuda").count("#stablehlo.output_operand_alias<")
        with mock.patch.object(measured, "fastest", return_value="triton"):
            found["auto"] = {platform: _num_calls(first["cached_attention"], "auto", platform) for platform in ("cuda", "cpu")}
    print(json.dumps(found))


def _num_calls(shape: Shape, implementation: str, platform: str) -> int:
    return _lowered(shape, implementation, platform).count("@triton_kernel_call")


def _lowered(shape: Shape, implementation: str, platform: str) -> str:
    arrays = jax.eval_shape(lambda: arguments(shape, jnp.bfloat16, jax.random.key(0)))
    traced = jax.jit(lambda *arrays: run(shape, arrays, implementation)).trace(*arrays)
    return traced.lower(lowering_platforms=(platform,)).as_text()


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
