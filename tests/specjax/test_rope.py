"""Rotary angles: independent formulas, float32 at any position, rotation by relative position only."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import RopeConfig
from specjax.kernels.rope_and_write import apply_rotary
from specjax.models.rope import inverse_frequencies, rotary_angles

LLAMA3 = dict(rope_type="llama3", theta=500000.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def test_default_frequencies_are_a_geometric_series() -> None:
    got = inverse_frequencies(RopeConfig(theta=10000.0), 8)
    np.testing.assert_allclose(got, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    assert got.dtype == np.float32


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies_follow_the_published_piecewise_formula(factor: float) -> None:
    head_dim = 128
    expected = []
    for index in range(head_dim // 2):
        frequency = 500000.0 ** (-2 * index / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > 8192 / 1.0:
            frequency = frequency / factor
        elif wavelength > 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        expected.append(frequency)
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(factor=factor, **LLAMA3), head_dim), expected, rtol=1e-6)


def test_llama3_frequencies_equal_those_of_transformers() -> None:
    pytest.importorskip("torch")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    parameters = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters=parameters | dict(original_max_position_embeddings=8192),
    )
    expected, _ = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(factor=8.0, **LLAMA3), 128), expected.numpy(), rtol=1e-6)


def test_angles_are_float32_and_right_at_large_positions() -> None:
    # A bfloat16 position is wrong above 256: these are off by none.
    positions = jnp.array([[0, 1, 255, 257, 1023, 2049, 8191]], jnp.int32)
    cos, sin = rotary_angles(RopeConfig(), 8, positions)
    assert cos.dtype == sin.dtype == jnp.float32
    angles = np.asarray(positions)[0, :, None].astype(np.float64) * np.array([1.0, 0.1, 0.01, 0.001])
    # Half an ulp of a float32 angle of 8191 radians.
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=6e-4)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=6e-4)


def test_bfloat16_vectors_are_rotated_in_float32() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 3, 2, 8)), jnp.bfloat16)
    angles = rotary_angles(RopeConfig(), 8, jnp.array([[300, 2049, 5000]], jnp.int32))
    got = apply_rotary(x, *angles)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, apply_rotary(x.astype(jnp.float32), *angles).astype(jnp.bfloat16))


def test_scores_depend_on_relative_positions_only() -> None:
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(query_position: int, key_position: int) -> float:
        turned = [
            apply_rotary(x, *rotary_angles(RopeConfig(), 8, jnp.array([[at]]))) for x, at in [(query, query_position), (key, key_position)]
        ]
        return float((turned[0] * turned[1]).sum())

    # float32 angles of a hundred radians are good to 4e-6.
    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)


def test_the_layout_is_half_split() -> None:
    x = jnp.zeros((1, 1, 1, 4)).at[..., 0].set(1.0)
    cos, sin = rotary_angles(RopeConfig(), 4, jnp.array([[1]], jnp.int32))
    np.testing.assert_allclose(apply_rotary(x, cos, sin)[0, 0, 0], [math.cos(1), 0, math.sin(1), 0], atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rope_type="ntk"), "rope_type must be one of .*got 'ntk'"),
        (dict(theta=-1.0), "theta must be positive, got -1.0"),
        (dict(rope_type="llama3", factor=0.5), "factor must be at least 1, got 0.5"),
        (dict(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0), "low_freq_factor < high_freq_factor"),
    ],
)
def test_an_impossible_rope_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig(**changes)
