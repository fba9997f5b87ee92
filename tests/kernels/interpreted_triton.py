"""Runs our Triton kernels in Triton's interpreter on the CPU, in jax-triton's place: everything but the compiled code is tested so."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

INSTALLED = all(find_spec(name) for name in ("triton", "torch"))
needs_triton = pytest.mark.skipif(not INSTALLED, reason="needs triton and torch: pip install 'specjax[kernels]'")
launches: list[str] = []  # names of the kernels that ran


def triton_call(
    *arguments: Any,
    kernel: Any,
    out_shape: Any,
    grid: Any,
    num_warps: int,
    num_stages: int,
    input_output_aliases: dict[int, int] | None = None,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Has the signature of jax-triton 0.3.1's. Works under `jax.jit` too."""
    aliases = {result: argument for argument, result in (input_output_aliases or {}).items()}

    def run(*arrays: Any) -> tuple[np.ndarray, ...]:
        launches.append(kernel.fn.__name__)
        given = iter(arrays)
        inputs = [argument if isinstance(argument, int) else _tensor(np.asarray(next(given))) for argument in arguments]
        # What a kernel leaves unwritten is not zero on a GPU either.
        outputs = [inputs[aliases[index]] if index in aliases else _tensor(_garbage(shape)) for index, shape in enumerate(out_shape)]
        with np.errstate(all="ignore"):  # a GPU warns of no division by zero either
            kernel[grid](*inputs, *outputs, **constants)
        return tuple(_array(tensor, shape) for tensor, shape in zip(outputs, out_shape, strict=True))

    return jax.pure_callback(run, tuple(out_shape), *(argument for argument in arguments if not isinstance(argument, int)))


def _garbage(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    if jnp.issubdtype(shape.dtype, jnp.floating):
        return np.full(shape.shape, np.nan, shape.dtype)
    return np.full(shape.shape, -(2**31) + 5, shape.dtype)


def _tensor(array: np.ndarray) -> Any:
    import torch

    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _array(tensor: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy().reshape(shape.shape)


@contextmanager
def interpreted() -> Iterator[None]:
    """Triton's interpreter as jax-triton, for as long as it lasts."""
    assert os.environ.get("TRITON_INTERPRET") == "1" or "triton" not in sys.modules, "TRITON_INTERPRET=1 must be set before triton"
    with pytest.MonkeyPatch.context() as patch:
        os.environ["TRITON_INTERPRET"] = "1"  # and stays: what triton has decorated cannot be compiled any more
        patch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_call=triton_call))
        patch.setattr("specjax.kernels.triton_call.what_is_missing", lambda: None)
        _multiply_bfloat16(patch)
        _convert_to_int(patch)
        launches.clear()
        yield


def _multiply_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as the integers that its bits make, and `tl.dot` multiplies these."""
    import triton.language as tl
    from triton.runtime import interpreter

    exact = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return exact(self, *(_as_float32(x, interpreter) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), d, *options)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _as_float32(handle: Any, interpreter: Any) -> Any:
    import triton.language as tl

    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _convert_to_int(patch: pytest.MonkeyPatch) -> None:
    """The interpreter's scalars are arrays of one dimension, which NumPy 2.4 no longer makes an int of."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
