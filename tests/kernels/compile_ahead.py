"""Compiles our Triton kernels for GPUs that need not be there, with the very constants that a call would launch them with.

Run as a program: prints a JSON list with an entry for each kernel, shape and architecture. A process of its own, since what Triton has once
decorated for its interpreter it does not compile.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from specjax.kernels.shared_memory import compiled as compile_kernel


def compile_for(call: Callable[[], Any], architecture: int) -> list[dict[str, Any]]:
    """Compiles every kernel that `call` launches; nothing runs."""
    compiled, bounds = [], []

    def triton_call(
        *arrays: Any,
        kernel: Any,
        out_shape: Any,
        grid: Any,
        num_warps: int,
        num_stages: int,
        input_output_aliases: dict[int, int] | None = None,
        **constants: Any,
    ) -> tuple[jax.Array, ...]:
        del input_output_aliases
        compiled.append({"kernel": kernel.fn.__name__, "architecture": architecture, "grid": grid, "num_warps": num_warps})
        compiled[-1] |= {"most_shared_bytes": bounds.pop()}
        options = dict(num_warps=num_warps, num_stages=num_stages)
        compiled[-1] |= _found(compile_kernel(kernel, (*arrays, *out_shape), constants, options, architecture=architecture))
        return tuple(jnp.zeros(shape.shape, shape.dtype) for shape in out_shape)

    sys.modules["jax_triton"] = types.ModuleType("jax_triton")
    vars(sys.modules["jax_triton"])["triton_call"] = triton_call
    bound = lambda *_, at_most, **__: bounds.append(at_most)
    with (
        mock.patch("specjax.kernels.triton_call.what_is_missing", return_value=None),
        mock.patch("specjax.kernels.triton_call.check_shared_memory", bound),
    ):
        jax.eval_shape(call)
    return compiled


def _found(result: Any) -> dict[str, Any]:
    return {"shared_bytes": result.metadata.shared, **_registers(result.asm["cubin"]), "ptx_target": _target(result.asm["ptx"])}


def _registers(cubin: bytes) -> dict[str, int]:
    """From NVIDIA's own tool, which comes along with triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    fields = dict(word.split(":") for line in text.splitlines() if "REG:" in line for word in line.split())
    return {"registers": int(fields["REG"]), "spilled_bytes": int(fields["STACK"]) + int(fields["LOCAL"])}


def _target(ptx: str) -> str:
    return next(line.split()[1] for line in ptx.splitlines() if line.startswith(".target"))


def main() -> None:
    """Arguments: operations, architectures, a dtype. Every shape of `specjax.kernels.shape_lists`."""
    from specjax.kernels.cases import arguments, run
    from specjax.kernels.shape_lists import SHAPES

    ops, architectures, dtype = sys.argv[1].split(","), [int(word) for word in sys.argv[2].split(",")], sys.argv[3]
    found = []
    for shape in SHAPES:
        if shape.op not in ops:
            continue
        for architecture in architectures:
            entries = compile_for(lambda shape=shape: run(shape, arguments(shape, dtype, jax.random.key(0)), "triton"), architecture)
            found += [{"op": shape.op, "shape": str(shape), **entry} for entry in entries]
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
