"""Words of the command line as sparse verifications, and what does not fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import five_ways, sparse_latency
from experiments.experiment import ExperimentError, parse_config
from experiments.models import Model
from experiments.sparse_settings import SparseWords, check_weights, laid_out_for, named_settings
from experiments.timed_ways import Case
from specjax import MoEConfig, SparseAttention, SparsityConfig
from specjax.sparsity.calibrated_for import CalibratedFor
from specjax.sparsity.calibration import MLPSamples
from specjax.sparsity.histogram import NUM_BINS
from tests.helpers import random_model, tiny_config

DENSE = tiny_config(num_layers=6)
MIXTURE = tiny_config(moe=MoEConfig(num_experts=4, num_experts_per_token=3, intermediate_size=8))


def samples_of(model) -> MLPSamples:
    """Histograms with a value in every bin."""
    ones = np.ones((model.num_layers, NUM_BINS), np.int64)
    ratios = np.ones((model.num_layers, 2, NUM_BINS), np.int64)
    return MLPSamples(gates=ones, ratios=ratios, ratio="share")


def words(**changes) -> SparseWords:
    return SparseWords(**(dict(attention=(), block_size=16, dense_below=32) | changes))


def test_attention_comes_with_each_reuse_and_controls_keep_as_much():
    found = named_settings(words(attention=(0.5, 0.1)), DENSE)
    assert [(named.method, named.setting, named.reuse) for named in found[:4]] == [
        ("attention", "0.5", "none"),
        ("attention", "0.5", "draft tokens"),
        ("attention", "0.5", "layers"),
        ("attention", "0.5", "draft tokens and layers"),
    ]
    assert [named.sparsity.attention.rows for named in found[:4]] == ["each", "first", "each", "first"]
    assert [named.sparsity.reuse.anchors for named in found[:4]] == [None, None, (0, 1, 2, 3), (0, 1, 2, 3)]
    controls = [named for named in found if named.method in ("window", "random")]
    assert [(named.method, named.setting) for named in controls] == [
        (method, keep) for keep in ("0.5", "0.1") for method in ("window", "random")
    ]
    for named in controls:
        same = next(other.sparsity.attention for other in found if other.setting == named.setting and other.method == "attention")
        assert named.sparsity.attention.budget_tokens(400) == same.budget_tokens(400)
    assert len({named.name for named in found}) == len(found) == 12


def test_reuses_and_controls_may_be_compared_at_some_shares_alone():
    found = named_settings(words(attention=(0.5, 0.25, 0.1), reuse=("none", "tokens"), controls=("random",), compare_at=(0.25,)), DENSE)
    assert [(named.method, named.setting, named.reuse) for named in found] == [
        ("attention", "0.5", "draft tokens"),
        ("attention", "0.25", "none"),
        ("attention", "0.25", "draft tokens"),
        ("attention", "0.1", "draft tokens"),
        ("random", "0.25", "draft tokens"),
    ]


def test_channels_of_a_dense_model_are_shared_and_those_of_experts_have_thresholds():
    (dense,) = named_settings(words(ffn=(0.5,)), DENSE)
    assert (dense.sparsity.ffn.select, dense.sparsity.ffn.per, dense.sparsity.ffn.keep) == ("top_k", "rows", 0.5)
    samples = samples_of(MIXTURE)
    (experts,) = named_settings(words(ffn=(0.5,)), MIXTURE, samples)
    assert experts.sparsity.ffn.tau == tuple(samples.tau(0.5).tolist())
    assert not words(ffn=(0.5,)).needs_samples(DENSE)
    assert words(ffn=(0.5,)).needs_samples(MIXTURE)


def test_experts_are_skipped_by_medians_and_hybrids_have_all_three():
    samples = samples_of(MIXTURE)
    skipped, hybrid = named_settings(words(moe=(2,), hybrid=("0.25+0.5+1",)), MIXTURE, samples)
    assert (skipped.method, skipped.sparsity.moe.max_skipped) == ("moe", 2)
    assert skipped.sparsity.moe.beta == tuple(map(tuple, samples.beta(0.5).tolist()))
    assert (hybrid.sparsity.attention.keep, hybrid.sparsity.ffn.keep, hybrid.sparsity.moe.max_skipped) == (0.25, 0.5, 1)
    (partly,) = named_settings(words(hybrid=("0.25+0.5+-",)), DENSE)
    assert partly.sparsity.moe is None


def test_heads_share_the_blocks_of_attention_and_of_hybrids_where_they_are_a_layers():
    found = named_settings(
        words(attention=(0.25,), reuse=("tokens",), controls=(), hybrid=("0.25+0.5+-", "-+0.5+-"), budget="layer"), DENSE
    )
    attention, hybrid, channels = found
    assert attention.sparsity.attention == hybrid.sparsity.attention
    assert (hybrid.sparsity.attention.budget, channels.sparsity.attention) == ("layer", None)
    assert [named.setting for named in found] == ["0.25 of a layer", "0.25 of a layer+0.5+-", "-+0.5+-"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(reuse=("all",)), "reuse must be some of none, tokens, layers, both, got all"),
        (dict(attention=(0.5,), compare_at=(0.25,)), r"compare_at must be some of attention=\(0.5,\), got \(0.25,\)"),
        (dict(controls=("oracle",)), "controls must be some of window, random, got oracle"),
        (dict(attention=(1.5,)), "keep must be from 0 to 1, got 1.5"),
        (dict(hybrid=("0.5+0.5",)), "got '0.5[+]0.5'"),
        (dict(hybrid=("0.5+x+1",)), "got '0.5[+]x[+]1'"),
        (dict(attention=(0.5,), reuse=("layers",), anchors=(1, 2)), "must begin with the first sparse layer"),
        (dict(moe=(2,)), "are those of a calibration: give calibration=FILE"),
    ],
)
def test_words_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ExperimentError, match=message):
        named_settings(words(**changes), DENSE)


def test_all_experts_may_not_be_skipped():
    with pytest.raises(ExperimentError, match="max_skipped"):
        named_settings(words(moe=(3,)), MIXTURE, samples_of(MIXTURE))


@pytest.fixture
def calibration(tmp_path):
    """What the experiment `calibrate` leaves, in short."""
    setting = SparsityConfig(attention=SparseAttention(keep=0.2)).to_json()
    rows = [
        {"kind": "selection", "anchors": [0, 3]},
        {"kind": "thresholds", "tau": {"0.5": [0.1, 0.2]}, "beta": [[0.1, 0.2], [0.3, 0.4]]},
        {"kind": "setting", "setting": "mild", "sparsity": setting, "token_agreement": 0.97, "bytes_ratio": 0.9, "flops_ratio": 0.8},
    ]
    path = tmp_path / "calibrate.json"
    path.write_text(json.dumps({"rows": rows}))
    return str(path)


def test_a_calibration_brings_anchors_thresholds_and_settings(calibration):
    layers, wished = named_settings(
        words(attention=(0.5,), reuse=("both",), controls=(), calibration=calibration, agreements=(0.95,)), DENSE
    )
    assert layers.sparsity.reuse.anchors == (0, 3)
    assert (wished.method, wished.setting, wished.sparsity.attention.keep) == ("calibrated", "agreement 0.95", 0.2)
    experts, skipped = named_settings(words(ffn=(0.5,), moe=(1,), calibration=calibration), MIXTURE)
    assert experts.sparsity.ffn.tau == (0.1, 0.2)
    assert skipped.sparsity.moe.beta == ((0.1, 0.2), (0.3, 0.4))
    assert not words(moe=(1,), calibration=calibration).needs_samples(MIXTURE)


def test_a_calibration_of_another_model_is_refused(calibration):
    path, weights = Path(calibration), {"source": "theirs", "source_sha256": {"theirs": "22"}}
    rows = json.loads(path.read_text())["rows"]
    made_for = CalibratedFor.of(DENSE, name="mine", metadata={"source_sha256": {"mine": "11"}})
    rows[1]["calibrated_for"] = dataclasses.asdict(made_for)
    path.write_text(json.dumps({"rows": rows}))
    asked = words(attention=(0.5,), reuse=("both",), controls=(), calibration=calibration)
    target = Model("tiny", None, {}, "real", SimpleNamespace(metadata=weights))
    with pytest.raises(ExperimentError, match="expected weights from files with SHA-256 11, got 'theirs' with 22"):
        check_weights(named_settings(asked, DENSE), asked, target)
    with pytest.raises(ExperimentError, match="this calibration is of 'mine': expected num_layers = 6.* got num_layers = 2"):
        named_settings(asked, MIXTURE)


def test_what_a_calibration_has_not_is_refused(calibration, tmp_path):
    with pytest.raises(ExperimentError, match="shares of channels 0.5, not 0.4"):
        named_settings(words(ffn=(0.4,), calibration=calibration), MIXTURE)
    with pytest.raises(ExperimentError, match="none of 1 settings agrees"):
        named_settings(words(calibration=calibration, agreements=(0.99,)), DENSE)
    with pytest.raises(ExperimentError, match="give calibration=FILE"):
        words(agreements=(0.9,))
    with pytest.raises(ExperimentError, match="is none"):
        named_settings(words(calibration=str(tmp_path / "nothing.json")), DENSE)
    (tmp_path / "other.json").write_text('{"rows": [{"kind": "selection", "anchors": null}]}')
    with pytest.raises(ExperimentError, match="other.json is none"):
        named_settings(words(calibration=str(tmp_path / "other.json")), DENSE)


def test_channels_are_gathered_from_weights_laid_out_for_it_which_are_made_once():
    dense, params = random_model(tiny_config())
    target, made = Model("tiny", dense, params, "random"), {}
    attention, channels = named_settings(words(attention=(0.5,), reuse=("tokens",), controls=(), ffn=(0.5,)), dense.config)
    assert laid_out_for(target, attention.sparsity, made) is target
    split = laid_out_for(target, channels.sparsity, made)
    assert split is laid_out_for(target, channels.sparsity, made)
    mlp, stored = split.params["layer_0"]["mlp"], params["layer_0"]["mlp"]
    np.testing.assert_array_equal(mlp["up"], stored["gate_up"][:, 1].T)
    mixture = Model("mixture", *random_model(MIXTURE), "random")
    (experts,) = named_settings(words(ffn=(0.5,)), MIXTURE, samples_of(MIXTURE))
    assert laid_out_for(mixture, experts.sparsity, made) is mixture


def test_refreshes_are_of_all_settings():
    found = named_settings(words(attention=(0.5,), ffn=(0.5,), refresh_every=4), DENSE)
    assert {named.sparsity.refresh_every for named in found} == {4}


class _Seen(Exception):
    pass


def test_caches_are_whole_blocks_of_calibrated_settings_too(tmp_path, monkeypatch):
    setting = SparsityConfig(attention=SparseAttention(keep=0.2, block_size=48)).to_json()
    row = {"kind": "setting", "setting": "mild", "sparsity": setting, "token_agreement": 0.97, "bytes_ratio": 0.9, "flops_ratio": 0.8}
    path = tmp_path / "calibrate.json"
    path.write_text(json.dumps({"rows": [row]}))
    asked = ("attention=0.25", "reuse=tokens", "block_size=32", f"calibration={path}", "agreements=0.95", "contexts=128", "dtype=float32")
    target = Model("tiny", *random_model(tiny_config()), "random")
    capacities = []

    def seen(model, params, drafter, drafter_params, place, **settings):
        capacities.append(place.capacity)
        raise _Seen

    monkeypatch.setattr(sparse_latency, "load_model", lambda name, **options: target)
    monkeypatch.setattr(sparse_latency, "decoding_loop", seen)
    with pytest.raises(_Seen):
        list(sparse_latency.run(parse_config(sparse_latency.Config, asked)))

    def ways(config, target, settings):
        capacities.append(Case(config=config, target=target, drafter=None, batch=1, context=128).middle.capacity)
        yield {}

    monkeypatch.setattr(five_ways, "load_model", lambda name, **options: target)
    monkeypatch.setattr(five_ways, "timed_ways", ways)
    list(five_ways.run(parse_config(five_ways.Config, ("target=tiny", *asked))))
    assert len(capacities) == 2
    assert [(capacity % 32, capacity % 48) for capacity in capacities] == [(0, 0)] * 2
