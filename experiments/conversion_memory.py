"""How much memory does converting a large model take, and restoring it?

Command: python -m experiments.run conversion_memory --record
Hardware: any Linux machine with 40 GB of free disk and 20 GB of memory (for the restore of the 8B shape)
Time: 8 minutes on 2 cores
Result: see "Converting large models" in the README, made from results/conversion_memory.json

A Hugging Face folder of the model's shape is written with random weights, in shards, then converted by `specjax convert` and restored by
`load_checkpoint`, each in a process of its own whose anonymous memory (RssAnon: what the process holds itself, without the pages of files
that it has mapped) is read every few milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from experiments.experiment import ExperimentError, local_field
from specjax.checkpoints.formats.families import model_config
from specjax.checkpoints.formats.transformer_weights import transformer_table
from specjax.checkpoints.kinds import abstract_params
from specjax.checkpoints.source import FLOATING

_LLAMA31_8B = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
)
_GPT_OSS_20B = dict(
    architectures=["GptOssForCausalLM"],
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=24,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    num_local_experts=32,
    num_experts_per_tok=4,
    rope_theta=150000.0,
    rope_scaling=dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False),
    quantization_config=dict(quant_method="mxfp4"),
)
SHAPES: Mapping[str, dict[str, Any]] = {"llama31_8b": _LLAMA31_8B, "gpt_oss_20b": _GPT_OSS_20B}
_RESTORE = """
import sys, jax
from specjax.checkpoints.store import load_checkpoint
jax.block_until_ready(load_checkpoint(sys.argv[1]).params)
"""
_SHARD_BYTES = 2**30
_POLL_S = 0.005
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        cases: Model shapes, each with its number of layers: two of one model show that memory does not grow with it.
        restore: Restore what was converted, too.
        folder: Where the models are written (and removed); `None` is the system's folder for temporary files.
    """

    cases: tuple[str, ...] = ("llama31_8b:8", "llama31_8b:32", "gpt_oss_20b:4")
    restore: bool = True
    folder: str | None = local_field()


def run(config: Config) -> Iterator[dict]:
    """A row a case."""
    if not Path("/proc/self/status").exists():
        raise ExperimentError("conversion_memory reads /proc, which only Linux has")
    for case in config.cases:
        name, _, layers = case.partition(":")
        if name not in SHAPES or not layers.isdigit():
            raise ExperimentError(f"cases should be SHAPE:LAYERS with a shape out of {', '.join(SHAPES)}, got {case!r}")
        with tempfile.TemporaryDirectory(dir=config.folder) as folder:
            yield _measured(name, int(layers), Path(folder), restore=config.restore)


def _measured(name: str, num_layers: int, folder: Path, *, restore: bool) -> dict:
    raw = SHAPES[name] | dict(num_hidden_layers=num_layers)
    source, destination = folder / "source", folder / "converted"
    source_bytes = write_source(source, raw)
    leaves = jax.tree.leaves(abstract_params(model_config(raw), np.dtype(ml_dtypes.bfloat16)))
    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]
    converting = measured_process("-m", "specjax.checkpoints.convert", str(source), str(destination), "--no-check")
    shutil.rmtree(source)
    restoring = measured_process("-c", _RESTORE, str(destination)) if restore else None
    importing = measured_process("-c", "import jax, specjax.checkpoints.convert; jax.devices()")
    return {
        "model": name,
        "num_layers": num_layers,
        "weights": "random",
        "implementation": "none",
        "synthetic": False,
        "source_bytes": source_bytes,
        "params_bytes": sum(sizes),
        "largest_param_bytes": max(sizes),
        "import_peak_bytes": importing.peak_bytes,
        "convert_s": converting.seconds,
        "convert_peak_bytes": converting.peak_bytes,
        "restore_s": None if restoring is None else restoring.seconds,
        "restore_peak_bytes": None if restoring is None else restoring.peak_bytes,
    }


def write_source(folder: Path, raw: Mapping[str, Any]) -> int:
    """A Hugging Face folder of this shape: bfloat16, MXFP4 where config.json says so, in shards of a gigabyte with an index.

    Returns:
        Bytes of all tensors.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(raw)))
    quantised = "quantization_config" in raw
    table = transformer_table(model_config(raw), expert_layout="gpt_oss_mxfp4" if quantised else "separate")
    # Random bits, drawn once: nothing here looks at the values.
    bits = np.random.default_rng(0).integers(2**16, size=64 * _MIB, dtype=np.uint16)
    weight_map: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}
    total, held = 0, 0

    def write() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for parameter in table.values():
        dtype = np.dtype(ml_dtypes.bfloat16 if parameter.accepts == FLOATING else np.uint8)
        for tensor, shape in parameter.tensors.items():
            count = math.prod(shape)
            shard[tensor] = np.resize(bits, -(-count * dtype.itemsize // 2)).view(dtype)[:count].reshape(shape)
            total, held = total + shard[tensor].nbytes, held + shard[tensor].nbytes
            if held >= _SHARD_BYTES:
                write()
                held = 0
    if shard:
        write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a process took.

    Attributes:
        seconds: From its start to its end.
        peak_bytes: Most anonymous memory that it held.
    """

    seconds: float
    peak_bytes: int


def measured_process(*arguments: str) -> Measured:
    """Runs Python with these arguments on the CPU and watches its memory.

    Raises:
        ExperimentError: The process failed; the message ends with what it said last.
    """
    began, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile() as said:
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen([sys.executable, *arguments], env=environment, stdout=said, stderr=said)
        while process.poll() is None:
            peak = max(peak, _anonymous_bytes(process.pid))
            time.sleep(_POLL_S)
        if process.returncode != 0:
            said.seek(0)
            raise ExperimentError(f"{' '.join(arguments[:2])} failed: {said.read().decode(errors='replace')[-500:]}")
    return Measured(seconds=time.perf_counter() - began, peak_bytes=peak)


def _anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has just ended
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    shown = {
        "model": row["model"],
        "layers": row["num_layers"],
        "source, GB": row["source_bytes"] / 1e9,
        "parameters, GB": row["params_bytes"] / 1e9,
        "largest, GiB": row["largest_param_bytes"] / 2**30,
        "conversion, peak GiB": row["convert_peak_bytes"] / 2**30,
        "conversion, s": row["convert_s"],
        "conversion, GB/s": row["params_bytes"] / 1e9 / row["convert_s"],
    }
    if row["restore_s"] is not None:
        shown |= {"restore, peak GiB": row["restore_peak_bytes"] / 2**30, "restore, s": row["restore_s"]}
    return shown


def show(row: dict) -> str:
    """A row on one line."""
    return "  ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in columns(row).items())
