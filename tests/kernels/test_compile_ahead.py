"""The Triton kernels compile for Hopper and Ampere, and fit their multiprocessors: with no GPU here, and the constants of real calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from specjax.kernels.shape_lists import SHAPES
from tests.kernels.interpreted_triton import needs_triton

# Shared memory that one program may have, by architecture (CUDA programming guide, "Technical Specifications per Compute Capability").
MOST_SHARED_BYTES = {90: 227 * 1024, 80: 163 * 1024}
MOST_WITHOUT_TILES = 48 * 1024  # what any of them has unasked
FULL = pytest.mark.full
ATTENTION, OTHERS = "cached_attention,block_sparse_attention", "block_selection,low_rank_argmax"
LAYER, MLP = "few_row_linear,rope_and_write", "expert_choice,expert_products,gathered_ffn,largest"
KERNELS = {
    ATTENTION: {"attend_part", "merge_parts"},
    OTHERS: {"score_and_choose", "best_of_part", "best_of_parts"},
    LAYER: {"multiply_strip", "rotate_and_write"},
    MLP: {"gate_and_up", "weighted_down", "chosen_up", "chosen_down", "choose_largest", "choose_experts"},
}


@needs_triton
@pytest.mark.parametrize(
    ("ops", "dtype"),
    [
        (OTHERS, "bfloat16"),
        pytest.param(ATTENTION, "bfloat16", marks=FULL),
        pytest.param(ATTENTION, "float32", marks=FULL),
        pytest.param(OTHERS, "float32", marks=FULL),
        pytest.param(LAYER, "bfloat16", marks=FULL),
        pytest.param(LAYER, "float32", marks=FULL),
        pytest.param(MLP, "bfloat16", marks=FULL),
    ],
)
def test_every_shape_compiles_for_every_architecture(ops: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "" if ops == OTHERS else str(tmp_path))  # empty, as jax-triton leaves it once it is imported
    entries = run_program("tests/kernels/compile_ahead.py", ops, ",".join(map(str, MOST_SHARED_BYTES)), dtype)
    assert {entry["kernel"] for entry in entries} == KERNELS[ops]
    assert {entry["shape"] for entry in entries} == {str(shape) for shape in SHAPES if shape.op in ops.split(",")}
    for entry in entries:
        assert entry["ptx_target"].startswith(f"sm_{entry['architecture']}"), entry
        assert entry["shared_bytes"] <= MOST_SHARED_BYTES[entry["architecture"]], entry
        assert entry["shared_bytes"] <= (entry["most_shared_bytes"] or MOST_WITHOUT_TILES), entry
        assert entry["spilled_bytes"] == 0, entry


def run_program(*words: str) -> Any:
    """Of this folder, in a process of its own where nothing is interpreted; what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": "."}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_jax_triton_lowers_every_kernel_for_cuda_and_auto_for_either_platform() -> None:
    if not find_spec("jax_triton"):
        pytest.skip("needs jax-triton: pip install 'specjax[gpu]'")
    if subprocess.run([sys.executable, "-c", "import jax_triton"], capture_output=True, check=False).returncode:
        pytest.skip("jax-triton needs JAX's CUDA plugin: pip install 'specjax[gpu]'")
    found = run_program("tests/kernels/lower_for_cuda.py")
    auto, loop, mixture = (found.pop(name) for name in ("auto", "loop", "mixture"))
    assert found == {
        "cached_attention": 2,
        "block_sparse_attention": 2,
        "block_selection": 1,
        "low_rank_argmax": 2,
        "few_row_linear": 1,
        "rope_and_write": 1,
        "expert_products": 2,
        "expert_choice": 1,
        "gathered_ffn": 2,
        "largest": 1,
    }
    assert auto == {"cuda": 2, "cpu": 0}
    # Both layers are one function of seven launches, of which one writes keys and values where they lie.
    assert loop == {"auto": [7, 2], "triton": [7, 2]}
    # With experts eight; their choice is a launch of the prefill's function too, whatever its rows.
    assert mixture == {"auto": [9, 2], "triton": [9, 2]}
