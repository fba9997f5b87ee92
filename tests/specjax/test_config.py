"""Configs refuse what could not work, by name, and are hashable once made."""

from __future__ import annotations

import pytest

from specjax import MoEConfig, RopeConfig
from tests.helpers import tiny_config

MOE = dict(num_experts=6, num_experts_per_token=2, intermediate_size=24)
LONGROPE = dict(rope_type="longrope", short_factor=(1.0,) * 4, long_factor=(2.0,) * 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_experts_per_token=0), "MoEConfig.num_experts_per_token must be a positive int, got 0"),
        (dict(num_experts_per_token=7), "MoEConfig.num_experts_per_token must be at most num_experts, got 7 of 6"),
        (dict(dense_layers=[0]), r"MoEConfig.dense_layers must be a tuple of ints, got \[0\]"),
        (dict(dense_layers=("0",)), r"MoEConfig.dense_layers must be a tuple of ints, got \('0',\)"),
        (dict(dense_layers=(0, 2)), r"MoEConfig.dense_layers must be layers from 0 to 1, got \[2\]"),
    ],
)
def test_an_impossible_mixture_of_experts_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(moe=MoEConfig(**(MOE | changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(layer_windows=[4, None]), r"layer_windows must be \(\) or a tuple of num_layers = 2 entries, got \[4, None\]"),
        (dict(layer_windows=(4,)), r"layer_windows must be \(\) or a tuple of num_layers = 2 entries, got \(4,\)"),
        (dict(layer_windows=(4, 0)), r"layer_windows must hold positive ints or None, got \(4, 0\)"),
        (dict(layer_windows=(4, True)), r"layer_windows must hold positive ints or None, got \(4, True\)"),
        (dict(qk_norm=True), r"qk_norm must be None or one of \('head', 'projection'\), got True"),
        (dict(activation="gelu"), "activation must be one of .* got 'gelu'"),
        (dict(clip_qkv=0.0), "clip_qkv must be None or a positive number, got 0.0"),
    ],
)
def test_an_impossible_model_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(short_factor=[1.0] * 4), r"RopeConfig.short_factor must be a tuple, got \[1.0"),
        (dict(long_factor=[1.0] * 4), r"RopeConfig.long_factor must be a tuple, got \[1.0"),
        (dict(long_factor=(1.0,) * 3), "must hold head_dim / 2 positive numbers each, got 4 and 3"),
        (dict(long_factor=(1.0, 1.0, 0.0, 1.0)), "got 4 and 4, some of them not positive"),
        (dict(short_factor=(1.0,) * 3, long_factor=(1.0,) * 3), "RopeConfig.long_factor must hold head_dim / 2 = 4 numbers, got 3"),
    ],
)
def test_impossible_longrope_factors_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(rope=RopeConfig(**(LONGROPE | changes)))


def test_a_config_with_everything_in_it_is_hashable() -> None:
    def config():
        return tiny_config(rope=RopeConfig(**LONGROPE), moe=MoEConfig(**MOE, dense_layers=(1,)), layer_windows=(4, None))

    assert hash(config()) == hash(config())
