"""A kernel that takes more shared memory than the device has is refused by name before anything runs; `"auto"` and tuning go on without."""

from __future__ import annotations

import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments import kernels as experiment
from specjax.kernels.few_row_linear import few_row_linear
from specjax.kernels.measured import dispatch
from specjax.kernels.shapes import LinearShape
from specjax.kernels.shared_memory import TooMuchSharedMemory, shared_bytes_there
from tests.kernels.interpreted_triton import needs_triton
from tests.kernels.test_compile_ahead import run_program

X, WEIGHT = jnp.ones((64, 128), jnp.bfloat16), jnp.ones((128, 2, 128), jnp.bfloat16)
CUT = "triton@128:128:8:3:1:1"
SHAPE = LinearShape(rows=64, inner=128, columns=128, gated=True)


def device(capability: str, **more: Any) -> Any:
    return types.SimpleNamespace(device_kind="GPU X", compute_capability=capability, **more)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """On a GPU of compute capability 9.0: what is compiled for its bytes takes the last number of this list, which grows by each asking."""
    asked: list[int] = [245_760]

    def compiled(*_: Any, **__: Any) -> Any:
        asked.insert(0, 0)
        return types.SimpleNamespace(metadata=types.SimpleNamespace(shared=asked[-1]))

    def triton_call(*_: Any, out_shape: Any, **__: Any) -> Any:
        return [jnp.zeros(shape.shape, shape.dtype) for shape in out_shape]

    monkeypatch.setattr("specjax.kernels.triton_call.what_is_missing", lambda: None)
    monkeypatch.setattr("specjax.kernels.shared_memory.jax.devices", lambda: [device("9.0")])
    monkeypatch.setattr("specjax.kernels.shared_memory.compiled", compiled)
    monkeypatch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_call=triton_call))
    monkeypatch.setitem(sys.modules, "specjax.kernels.few_row_linear.triton", types.SimpleNamespace(multiply_strip="the kernel"))
    return asked


def test_what_a_device_has_is_its_own_word_or_that_of_its_compute_capability() -> None:
    assert shared_bytes_there(device("9.0")) == 232_448
    assert shared_bytes_there(device("8.0")) == 166_912
    assert shared_bytes_there(device("9.0", shared_memory_per_block_optin=200_000)) == 200_000
    assert shared_bytes_there(device("99.0")) is None
    assert shared_bytes_there(jax.devices("cpu")[0]) is None


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "jit"])
def test_a_cut_that_does_not_fit_is_refused_by_name(compile: bool, compiles: list[int]) -> None:
    run = lambda x, weight: few_row_linear(x, weight, gated=True, implementation=CUT)
    message = (
        r"few_row_linear: kernel 'multiply_strip' takes 245760 bytes of shared memory, and GPU X has 232448 for a program: "
        r"choose smaller tiles or fewer stages than BLOCK_M 64, BLOCK_D 128, BLOCK_N 128, num_warps 8, num_stages 3"
    )
    with pytest.raises(TooMuchSharedMemory, match=message):
        (jax.jit(run) if compile else run)(X, WEIGHT)


def test_a_cut_is_compiled_only_where_it_may_take_too_much_and_runs_where_it_does_not(compiles: list[int]) -> None:
    few_row_linear(X, WEIGHT, gated=True, implementation="triton@64:32:4:4:1:1")
    assert compiles == [245_760]
    compiles[-1] = 232_448
    few_row_linear(X, WEIGHT, gated=True, implementation=CUT)
    assert compiles == [0, 232_448]


def test_auto_takes_the_reference_where_a_measured_cut_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specjax.kernels.measured.fastest", lambda shape, dtype: CUT)

    def kernel(x: jax.Array) -> jax.Array:
        if x.shape[0] > 2:
            raise TooMuchSharedMemory("it does not fit")
        return jnp.sin(x)

    def run(x: jax.Array) -> jax.Array:
        return dispatch("auto", SHAPE, x.dtype, triton=kernel, reference=jnp.cos, arrays=(x,))

    def on_cuda(function: Any, size: int) -> str:
        return jax.jit(function).trace(jnp.ones(size)).lower(lowering_platforms=("cuda",)).as_text()

    assert "stablehlo.sine " in on_cuda(run, 2)
    assert "stablehlo.cosine " in on_cuda(run, 3)
    assert "stablehlo.sine " in on_cuda(jax.grad(lambda x: run(x).sum()), 3)  # the derivative of a cosine
    with pytest.raises(TooMuchSharedMemory):
        dispatch("triton", SHAPE, X.dtype, triton=kernel, reference=jnp.cos, arrays=(jnp.ones(3),))


def test_what_does_not_fit_is_left_out_of_timing_and_a_line_says_so(compiles: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    config = experiment.Config(implementations=("reference", "triton", CUT), l2_bytes=0)
    assert list(experiment.loops(SHAPE, config)) == [experiment.EMPTY, "reference", "triton"]
    said = capsys.readouterr().err
    assert f"{CUT} left out of few_row_linear rows=64 inner=128 columns=128 gated=True normed=False: few_row_linear: kernel" in said
    assert "takes 245760 bytes of shared memory, and GPU X has 232448" in said


@needs_triton
@pytest.mark.full
def test_triton_says_what_a_cut_takes_on_each_architecture() -> None:
    found = run_program("tests/kernels/cuts_that_do_not_fit.py")
    # For tensor cores of Hopper Triton keeps a tile more in flight than for those of Ampere.
    assert "takes 245760 bytes of shared memory, and GPU 9.0 has 232448" in found["9.0"]["few_row_linear"]
    assert found["8.0"]["few_row_linear"] is None
    for capability, there in (("9.0", 232_448), ("8.0", 166_912)):
        for op, kernel in (("cached_attention", "attend_part"), ("expert_products", "gate_and_up")):
            assert f"kernel {kernel!r} takes " in found[capability][op]
            assert f"and GPU {capability} has {there} for a program" in found[capability][op]
