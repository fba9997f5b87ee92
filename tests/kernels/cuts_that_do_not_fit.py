"""Calls kernels with cuts that are too large for a GPU's shared memory, as on GPUs that need not be there; nothing runs.

Run as a program: prints a JSON object, by compute capability and operation what is said, or null.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from specjax.kernels.cases import arguments, run
from specjax.kernels.shapes import AttentionShape, ExpertShape, LinearShape, Shape
from specjax.kernels.shared_memory import TooMuchSharedMemory

CUTS: tuple[tuple[Shape, str], ...] = (
    (LinearShape(rows=64, inner=2048, columns=96, gated=True), "triton@128:128:8:3:1:1"),
    (AttentionShape(batch=1, rows=6, kv_heads=2, group=4, head_dim=128, slots=1024), "triton@4:256:8:4:128"),
    (ExpertShape(rows=64, choices=4, experts=9, hidden=256, ffn=256), "triton@128:64:128:8:5"),
)


def main() -> None:
    """See the module's docstring."""
    launched = lambda *_, out_shape, **__: tuple(jnp.zeros(shape.shape, shape.dtype) for shape in out_shape)
    sys.modules["jax_triton"] = types.ModuleType("jax_triton")
    vars(sys.modules["jax_triton"])["triton_call"] = launched
    found: dict[str, dict[str, Any]] = {}
    for capability in ("9.0", "8.0"):
        device = types.SimpleNamespace(device_kind=f"GPU {capability}", compute_capability=capability)
        with (
            mock.patch("specjax.kernels.triton_call.what_is_missing", return_value=None),
            mock.patch("specjax.kernels.shared_memory.jax.devices", return_value=[device]),
        ):
            found[capability] = {shape.op: _said(shape, cut) for shape, cut in CUTS}
    print(json.dumps(found))


def _said(shape: Shape, cut: str) -> str | None:
    try:
        jax.eval_shape(lambda: run(shape, arguments(shape, jnp.bfloat16, jax.random.key(0)), cut))
    except TooMuchSharedMemory as error:
        return str(error)
    return None


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
