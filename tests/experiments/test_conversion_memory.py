"""The memory of a conversion: what is written converts, and at the size of an 8B model the bound holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from experiments import conversion_memory
from experiments.experiment import ExperimentError
from specjax.checkpoints.formats import hugging_face
from specjax.checkpoints.source import check_source, read_params

GIB = 2**30


@pytest.fixture
def tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    shapes = {name: raw | small for name, raw in conversion_memory.SHAPES.items()}
    monkeypatch.setattr(conversion_memory, "SHAPES", shapes | {"gpt_oss_20b": shapes["gpt_oss_20b"] | dict(num_local_experts=4)})


@pytest.mark.parametrize("name", ["llama31_8b", "gpt_oss_20b"])
@pytest.mark.usefixtures("tiny_shapes")
def test_what_is_written_is_a_model_of_the_shape_in_shards(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion_memory, "_SHARD_BYTES", 20_000)
    raw = conversion_memory.SHAPES[name] | dict(num_hidden_layers=2)
    num_bytes = conversion_memory.write_source(tmp_path / "source", raw)
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    source = hugging_face.open_source(tmp_path / "source")
    check_source(source)
    assert source.quantisation == ("MXFP4" if name == "gpt_oss_20b" else "none")
    assert sum(tensor.num_bytes for tensor in source.tensors.values()) == num_bytes
    assert np.unique(read_params(source, "bfloat16")["embedding"].view(np.uint16)).size > 1000


@pytest.mark.full
@pytest.mark.usefixtures("tiny_shapes")
def test_a_row_says_what_was_measured(tmp_path: Path) -> None:
    (row,) = conversion_memory.run(conversion_memory.Config(cases=("gpt_oss_20b:1",), folder=str(tmp_path)))
    assert (row["num_layers"], row["weights"], row["synthetic"]) == (1, "random", False)
    assert row["params_bytes"] > row["source_bytes"] > 0  # 4-bit blocks become bfloat16
    for peak in ("import_peak_bytes", "convert_peak_bytes", "restore_peak_bytes"):
        assert 10e6 < row[peak] < 1e9
    assert conversion_memory.show(row)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_case_and_a_process_that_fails_are_said() -> None:
    with pytest.raises(ExperimentError, match=r"SHAPE:LAYERS with a shape out of llama31_8b, gpt_oss_20b, got 'llama'"):
        next(conversion_memory.run(conversion_memory.Config(cases=("llama",))))
    with pytest.raises(ExperimentError, match="oh no"):
        conversion_memory.measured_process("-c", "raise SystemExit('oh no')")


@pytest.mark.slow
def test_a_sharded_8b_model_converts_within_4_gib(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 40e9:
        pytest.skip("needs 40 GB of free disk")
    (row,) = conversion_memory.run(conversion_memory.Config(cases=("llama31_8b:32",), restore=False, folder=str(tmp_path)))
    assert row["params_bytes"] > 16e9
    assert row["convert_peak_bytes"] < 4 * GIB
    assert row["convert_peak_bytes"] <= row["largest_param_bytes"] + 2 * GIB
