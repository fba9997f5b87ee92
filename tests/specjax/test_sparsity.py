"""Settings of sparse verification: the budget, the checks, JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import GenerateConfig, Lossless, MoEConfig, Reuse, SparseAttention, SparseFFN, SparseMoE, SparsityConfig
from specjax.sparsity.calibrated_for import CalibratedFor
from tests.helpers import tiny_config


@pytest.mark.parametrize(("keep", "dense_below"), [(0.2, 2048), (0.1, 4096), (0.29, 100), (0.0, 64), (1.0, 0), (0.7, 1)])
def test_the_budget_is_the_papers_piecewise_formula_exactly(keep: float, dense_below: int) -> None:
    settings = SparseAttention(keep=keep, dense_below=dense_below)
    lengths = [0, 1, dense_below, dense_below + 1, dense_below + 100, 32_768, 1_000_003, 100_000_000]
    share = Fraction(str(keep))
    expected = [length if length <= dense_below else math.floor((length - dense_below) * share + dense_below) for length in lengths]
    assert [settings.budget_tokens(length) for length in lengths] == expected
    traced = settings.budget_tokens(jnp.asarray(lengths, jnp.int32))
    assert traced.dtype == jnp.int32
    assert traced.tolist() == expected


def test_the_papers_example_keeps_a_fifth_of_32k_tokens() -> None:
    settings = SparseAttention(keep=0.1, dense_below=4096, block_size=64)
    assert settings.budget_tokens(32_768) == 6963
    assert settings.budget_blocks(32_768) == 109


def test_static_widths_are_clamped_to_the_blocks_there_are() -> None:
    settings = SparseAttention(block_size=8, keep=0.25, dense_below=16, head_blocks=1, tail_blocks=1)
    assert settings.max_chosen(capacity=16, num_rows=4) == 2
    assert settings.max_chosen(capacity=80, num_rows=4) == 4  # 16 + 64 / 4 = 32 tokens
    assert settings.max_forced(num_rows=1) == 3
    assert settings.max_forced(num_rows=2) == 4
    assert settings.max_forced(num_rows=10) == 5
    union = SparseAttention(block_size=8, keep=0.25, dense_below=16, head_blocks=1, tail_blocks=1, rows="union")
    assert union.max_read(capacity=80, num_rows=2) == 5  # 2 * 4, less the three that both keep in any case
    assert union.max_read(capacity=80, num_rows=9) == 10
    layer = dataclasses.replace(settings, budget="layer", head_limit=1.3)
    assert (layer.max_kept(capacity=80, num_rows=4), layer.max_chosen(capacity=80, num_rows=4)) == (4, 6)  # 5.2, rounded up
    assert layer.max_chosen(capacity=16, num_rows=4) == 2


BAD = [
    (SparseAttention, "block_size", 0, "SparseAttention.block_size must be an int of at least 1, got 0"),
    (SparseAttention, "block_size", 2.0, "SparseAttention.block_size must be an int of at least 1, got 2.0"),
    (SparseAttention, "keep", 1.5, "SparseAttention.keep must be from 0 to 1, got 1.5"),
    (SparseAttention, "keep", math.nan, "SparseAttention.keep must be from 0 to 1, got nan"),
    (SparseAttention, "dense_below", -1, "SparseAttention.dense_below must be an int of at least 0, got -1"),
    (SparseAttention, "head_blocks", True, "SparseAttention.head_blocks must be an int of at least 0, got True"),
    (SparseAttention, "tail_blocks", -2, "SparseAttention.tail_blocks must be an int of at least 0, got -2"),
    (SparseAttention, "score", "quest", "SparseAttention.score must be one of .* got 'quest'"),
    (SparseAttention, "group", "sum", "SparseAttention.group must be one of .* got 'sum'"),
    (SparseAttention, "budget", "model", "SparseAttention.budget must be one of .* got 'model'"),
    (SparseAttention, "head_limit", 0.5, "SparseAttention.head_limit must be a finite number of at least 1, got 0.5"),
    (SparseAttention, "rows", "last", "SparseAttention.rows must be one of .* got 'last'"),
    (Reuse, "anchors", (3, 1), r"Reuse.anchors must be None or an increasing tuple of layers, got \(3, 1\)"),
    (Reuse, "anchors", [0], r"Reuse.anchors must be None or an increasing tuple of layers, got \[0\]"),
    (Reuse, "anchors", (), r"Reuse.anchors must be None or an increasing tuple of layers, got \(\)"),
    (SparsityConfig, "attention", 0.2, "SparsityConfig.attention must be None or a SparseAttention, got 0.2"),
    (SparsityConfig, "ffn", 0.4, "SparsityConfig.ffn must be None or a SparseFFN, got 0.4"),
    (SparsityConfig, "moe", SparseFFN(), "SparsityConfig.moe must be None or a SparseMoE, got SparseFFN"),
    (SparsityConfig, "reuse", (0,), r"SparsityConfig.reuse must be a Reuse, got \(0,\)"),
    (SparsityConfig, "reuse", Reuse(anchors=(0,)), "SparsityConfig.reuse needs SparsityConfig.attention"),
    (partial(GenerateConfig, max_new_tokens=1), "sparsity", SparseFFN(), "GenerateConfig.sparsity must be a SparsityConfig, got SparseFFN"),
]


@pytest.mark.parametrize(("kind", "field", "value", "message"), BAD)
def test_a_bad_setting_is_refused_by_name_with_its_value(kind: Any, field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**{field: value})


def test_what_does_not_fit_the_model_is_refused() -> None:
    attention = SparseAttention()
    windows = tiny_config(layer_windows=(8, None))
    SparsityConfig(attention=attention, reuse=Reuse(anchors=(1,))).check(windows)
    with pytest.raises(ValueError, match=r"no layer of this model can be sparse: attention_sinks=True"):
        SparsityConfig(attention=attention).check(tiny_config(attention_sinks=True))
    with pytest.raises(ValueError, match=r"no layer of this model can be sparse.*layer_windows=\(8, 8\)"):
        SparsityConfig(attention=attention).check(tiny_config(layer_windows=(8, 8)))
    with pytest.raises(ValueError, match=r"must be layers with sparse attention, \(1,\), got \[0\]"):
        SparsityConfig(attention=attention, reuse=Reuse(anchors=(0, 1))).check(windows)
    with pytest.raises(ValueError, match=r"must begin with the first sparse layer, 0, got \(1,\)"):
        SparsityConfig(attention=attention, reuse=Reuse(anchors=(1,))).check(tiny_config())
    with pytest.raises(ValueError, match=r"must be layers with sparse attention, \(0, 1\), got \[2\]"):
        SparsityConfig(attention=attention, reuse=Reuse(anchors=(0, 2))).check(tiny_config())


def test_layers_reuse_the_nearest_anchor_before_them_and_layers_with_windows_stay_dense() -> None:
    model = tiny_config(num_layers=6, layer_windows=(None, None, 8, None, None, None))
    sparsity = SparsityConfig(attention=SparseAttention(), reuse=Reuse(anchors=(0, 3)))
    assert sparsity.attention_layers(model) == (0, 1, 3, 4, 5)
    assert sparsity.choosing_layers(model) == (0, 3)
    assert [sparsity.reuse.anchor(layer) for layer in (0, 1, 3, 4, 5)] == [0, 0, 3, 3, 3]
    assert SparsityConfig(attention=SparseAttention()).choosing_layers(model) == (0, 1, 3, 4, 5)


def test_rows_that_see_later_rows_are_named() -> None:
    for rows, sees in (("first", False), ("each", False), ("mean", True), ("union", True)):
        assert SparsityConfig(attention=SparseAttention(rows=rows)).sees_later_rows is sees
        assert not SparsityConfig(attention=SparseAttention(rows=rows, score="window")).sees_later_rows
    assert not SparsityConfig().sees_later_rows
    for ffn, sees in (
        (SparseFFN(), True),
        (SparseFFN(score="first"), False),
        (SparseFFN(per="token"), False),
        (SparseFFN(keep=1.0), False),
    ):
        assert SparsityConfig(ffn=ffn).sees_later_rows is sees
    for moe, sees in ((SparseMoE(max_skipped=2), False), (SparseMoE(expert_budget=8), True)):
        assert SparsityConfig(moe=moe).sees_later_rows is sees


def test_settings_go_through_json_and_are_hashable() -> None:
    for sparsity in (
        SparsityConfig(),
        SparsityConfig(attention=SparseAttention(keep=0.3, score="bounds")),
        SparsityConfig(attention=SparseAttention(), lossless=Lossless(max_steps=3, step_cost=0.5)),
        SparsityConfig(attention=SparseAttention(rows="each"), reuse=Reuse(anchors=(0, 4)), refresh_every=8),
        SparsityConfig(ffn=SparseFFN(select="threshold", tau=(0.1, 0.2)), moe=SparseMoE(max_skipped=1, beta=((0.1, 0.2), (0.0, 0.0)))),
        SparsityConfig(ffn=SparseFFN(select="threshold", tau=0.1), moe=SparseMoE(max_skipped=2, beta=(0.1, 0.2), expert_budget=4)),
    ):
        back = SparsityConfig.from_json(json.loads(json.dumps(sparsity.to_json())))
        assert back == sparsity
        assert hash(back) == hash(sparsity)
    with pytest.raises(ValueError, match=r"SparseAttention has no field \['rho'\]"):
        SparsityConfig.from_json({"attention": {"rho": 0.2}})
    with pytest.raises(ValueError, match="Reuse must be an object of fields, got 3"):
        SparsityConfig.from_json({"reuse": 3})


def test_a_calibration_is_refused_by_another_model_and_by_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moe = MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=16)
    models = {"dense": tiny_config(), "mixture": tiny_config(moe=moe)}
    hashed = {"source": "a.gguf", "source_sha256": {"b": "22", "a": "11"}}
    for name, model in models.items():
        made_for = CalibratedFor.of(model, name=name, metadata=hashed)
        sparsity = SparsityConfig(attention=SparseAttention(), calibrated_for=made_for)
        assert SparsityConfig.from_json(json.loads(json.dumps(sparsity.to_json()))) == sparsity
        (tmp_path / "x.json").write_text(
            json.dumps(
                {"rows": [{"setting": "s", "sparsity": sparsity.to_json(), "token_agreement": 1.0, "bytes_ratio": 1, "flops_ratio": 1}]}
            )
        )
        monkeypatch.setenv("HOME", str(tmp_path))
        found = SparsityConfig.from_calibration("~/x.json")
        assert found == sparsity
        found.check(model)
        with pytest.raises(
            ValueError, match=f"this calibration is of '{name}': expected num_layers = {model.num_layers}, got num_layers = 7"
        ):
            found.check(dataclasses.replace(model, num_layers=7))
    with pytest.raises(ValueError, match="expected .*num_experts = 4, num_experts_per_token = 2, got .*num_experts = 0, num_experts_per_"):
        found.check(models["dense"])
    for unknown in ({}, {"source_sha256": None}, hashed):
        made_for.check_source(unknown)
    with pytest.raises(ValueError, match="expected weights from files with SHA-256 11, 22, got 'b.gguf' with 33"):
        made_for.check_source({"source": "b.gguf", "source_sha256": {"b.gguf": "33"}})
    with pytest.raises(ValueError, match="source_sha256 must be a tuple of strings, got 3"):
        dataclasses.replace(made_for, source_sha256=3)


def test_nothing_is_sparse_by_default() -> None:
    assert GenerateConfig(max_new_tokens=1).sparsity == SparsityConfig()
    assert SparsityConfig().is_dense
    assert not SparsityConfig(attention=SparseAttention()).is_dense
    assert np.array_equal(SparseAttention().budget_tokens(np.arange(2049)), np.arange(2049))


def test_a_calibration_yields_its_cheapest_setting_that_agrees_often_enough(tmp_path: Path) -> None:
    settings = {keep: SparsityConfig(attention=SparseAttention(keep=keep)) for keep in (0.1, 0.2, 0.4)}
    measured = {0.1: (0.90, 0.5, 0.7), 0.2: (0.97, 0.6, 0.7), 0.4: (0.98, 0.8, 0.9)}
    keys = ("token_agreement", "bytes_ratio", "flops_ratio")
    rows = [
        {"setting": f"keep {keep}", "sparsity": setting.to_json()} | dict(zip(keys, measured[keep], strict=True))
        for keep, setting in settings.items()
    ]
    path = tmp_path / "calibrate.json"
    path.write_text(json.dumps({"rows": [{"kind": "something else"}, *rows]}))
    for agreement, keep in ((0.9, 0.1), (0.91, 0.2), (0.975, 0.4)):
        assert SparsityConfig.from_calibration(path, agreement=agreement) == settings[keep]
    with pytest.raises(ValueError, match=r"none of 3 settings agrees .* share of 0.99 of the tokens; the best, 'keep 0.4', does on 0.9800"):
        SparsityConfig.from_calibration(path)
    path.write_text(json.dumps({"rows": [rows[0] | {"token_agreement": None}]}))
    with pytest.raises(ValueError, match=r"of 'keep .*' these are to be numbers, got {'token_agreement': None}"):
        SparsityConfig.from_calibration(path)
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match=r"calibrate.json is no calibration: it needs rows with \['bytes_ratio'"):
        SparsityConfig.from_calibration(path)
    with pytest.raises(ValueError, match=r"nowhere.json is no calibration: .*No such file"):
        SparsityConfig.from_calibration(tmp_path / "nowhere.json")
