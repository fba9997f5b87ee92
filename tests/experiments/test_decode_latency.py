"""Timing on a tiny shape: that it runs, and that its rows say what they must. The numbers themselves mean nothing here."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import decode_latency
from experiments.experiment import ExperimentError, parse_config
from experiments.latency_pair import Pair
from experiments.models import load_model
from experiments.presets import PRESETS, kv_bytes, tiny, weight_bytes_per_pass
from experiments.timing import count_executions, time_loop
from specjax import Transformer
from tests.checkpoints import published_drafters
from tests.drafters import write_drafter

SMALL = (
    "model=tiny",
    "pair_target=tiny",
    "pair_drafter=prompt_lookup",
    "rows=3",
    "num_speculative_tokens=2",
    "dtype=float32",
    "copy_mib=1",
)
SMALL += ("short_steps=1", "long_steps=3", "repeats=3")


def test_every_mode_yields_rows_with_their_floor_and_raw_times():
    config = parse_config(decode_latency.Config, [*SMALL, "contexts=64", "modes=decode,speculative_step,executions"])
    rows = list(decode_latency.run(config))
    assert [row["mode"] for row in rows] == ["decode", "executions", "speculative_step"]
    assert rows[0]["rows"] == 3
    decode, executions, step = rows
    for row in (decode, step):
        assert row["weights"] == "random"
        assert row["cache_capacity"] >= row["context"] == 64
        assert len(row["raw_long_ms"]) == len(row["raw_short_ms"]) == 3
        assert row["ms_per_step_min"] <= row["ms_per_step"] <= row["ms_per_step_max"]
        assert row["floor_ms"] > 0
    parts = step["propose_ms_per_step"] + step["verification_ms_per_step"] + step["rest_ms"]
    assert parts == pytest.approx(step["ms_per_step"])
    # One call of speculative_generate, several steps, one executable.
    assert executions["steps"] > 1
    assert executions["executions"] == 1


@pytest.mark.full
def test_an_eagle3_step_says_what_its_heads_take_at_the_points_that_are_asked_for():
    words = [word for word in SMALL if not word.startswith("pair_drafter")]
    words += ["modes=speculative_step", "pair_drafter=eagle3:low_rank:4", "points=1:64", "pair_points=2:48"]
    (row,) = decode_latency.run(parse_config(decode_latency.Config, words))
    assert (row["batch"], row["context"], row["drafter"], row["drafter_weights"]) == (2, 48, "eagle3:low_rank:4", "random")
    assert row["heads_ms"] == pytest.approx(row["propose_ms_per_step"] - row["bodies_ms_per_step"])
    assert row["floor_ms"] == pytest.approx(row["propose_floor_ms"] + row["verification_floor_ms"])
    # Two tokens from factors of rank 8: D = 32 and V = 96.
    assert row["propose_floor_ms"] > 2 * 4 * 8 * (32 + 96) / 4.3e12 * 1e3
    assert "of which heads" in decode_latency.columns(row)["proposing"]


def test_points_are_pairs_of_positive_numbers_in_the_place_of_batches_and_contexts():
    config = parse_config(decode_latency.Config, ["points=1:1024,16:4096", "pair_points=64:2048"])
    assert config.sizes("decode") == [(1, 1024), (16, 4096)]
    assert config.sizes("speculative_step") == [(64, 2048)]
    assert parse_config(decode_latency.Config, ["batches=1,2", "contexts=8"]).sizes("decode") == [(1, 8), (2, 8)]
    for point in ("1024", "1:0", "1:x"):
        with pytest.raises(ExperimentError, match=f"points must be BATCH:CONTEXT, such as 16:4096, got '{point}'"):
            parse_config(decode_latency.Config, [f"points={point}"])


def test_a_call_of_two_executables_is_counted_as_two():
    double, x = jax.jit(lambda x: x * 2), np.ones((4,), np.float32)

    def call():
        return double(double(x))

    call()
    assert count_executions(call) == 2


def test_the_floor_counts_an_untied_embedding_nowhere_and_a_tied_one_once():
    shape = tiny()
    params = jax.eval_shape(Transformer(shape, param_dtype=jnp.bfloat16).init_params, jax.random.key(0))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert weight_bytes_per_pass(params, shape) == 2 * (numbers - shape.vocab_size * shape.hidden_size)
    assert kv_bytes(shape, batch=3, context=10, itemsize=2) == 2 * (2 * 8) * 3 * 10 * 2


def test_the_floor_of_a_mixture_counts_the_experts_chosen_and_of_a_windowed_layer_its_window():
    shape = PRESETS["gpt_oss_20b"]()
    params = jax.eval_shape(Transformer(shape, param_dtype=jnp.bfloat16).init_params, jax.random.key(0))
    experts = 24 * 32 * (3 * 2880 * 2880 + 3 * 2880)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(params)) - shape.vocab_size * shape.hidden_size
    one = weight_bytes_per_pass(params, shape)
    assert one == pytest.approx(2 * (numbers - experts * 28 / 32))
    assert weight_bytes_per_pass(params, shape, num_tokens=6) == pytest.approx(2 * (numbers - experts * (28 / 32) ** 6))
    assert numbers == pytest.approx(20.3e9, rel=0.01)
    assert kv_bytes(shape, batch=1, context=1000, itemsize=2) == 2 * 8 * 64 * 12 * (128 + 1000) * 2


def test_the_8b_shape_reads_15_gb_a_step():
    model = Transformer(PRESETS["llama31_8b"](), param_dtype=jnp.bfloat16)
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    assert weight_bytes_per_pass(shapes, model.config) == pytest.approx(15.0e9, rel=0.01)


def test_a_context_shorter_than_the_loop_is_refused():
    config = parse_config(decode_latency.Config, [*SMALL, "contexts=4"])
    with pytest.raises(ExperimentError, match="4 tokens is too short"):
        list(decode_latency.run(config))


def test_unknown_modes_and_models_are_named():
    with pytest.raises(ExperimentError, match="got nothing_like_it"):
        parse_config(decode_latency.Config, ["modes=nothing_like_it"])
    with pytest.raises(ExperimentError, match="neither a preset"):
        list(decode_latency.run(parse_config(decode_latency.Config, ["model=no_such_model", "copy_mib=1"])))


def test_heads_for_a_target_are_refused_where_a_draft_model_is_expected(target_path: Path, tmp_path: Path):
    target = load_model(str(target_path), dtype="float32")
    # Published ones may leave to the target how many tokens there are.
    raw, width = dict(medusa_num_heads=1, medusa_num_layers=1, version="2"), target.model.config.hidden_size
    tensors = {"0.0.linear.weight": np.zeros((width, width), np.float32)}
    medusa = published_drafters.write_drafter(tmp_path / "tiny-medusa", raw, tensors, file="medusa_lm_head.safetensors")
    for heads, kind in ((write_drafter(tmp_path / "tiny-eagle3", target_path, "eagle3"), "Eagle3"), (medusa, "Medusa")):
        with pytest.raises(ExperimentError, match=f"must be a draft model, 'prompt_lookup' or 'eagle3:HEAD', got '{heads.name}': {kind}"):
            Pair.of("tiny", target, str(heads), passes=2, dtype="float32", implementation="auto", cache_dir=str(tmp_path))


def test_loops_that_measure_nothing_are_refused():
    with pytest.raises(ValueError, match="short=3, long=3"):
        time_loop(lambda _, x: x, None, jnp.zeros(()), short=3, long=3, repeats=1)
