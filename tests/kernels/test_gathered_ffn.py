"""Chosen channels of a feed-forward network: the reference against NumPy, and the Triton kernels, interpreted, against the reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.gated_unit import GatedUnit
from specjax.kernels.gathered_ffn import gathered_ffn
from tests.kernels.interpreted_triton import interpreted, launches, needs_triton

# Relative to results of order 1: float32 sums of up to 70 terms in another order; bfloat16 is rounded to 8 bits between the products.
TOLERANCES = {jnp.float32: 1e-5, jnp.bfloat16: 5e-2}
FULL = pytest.mark.full
SWIGLU, CLAMPED = GatedUnit(), GatedUnit(limit=0.7, alpha=1.702)


def case(*, groups: int = 1, rows: int, width: int, ffn: int, kept: int, dtype: Any = jnp.float32, bias: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(rows + ffn)
    channels = np.stack([np.sort(rng.permutation(ffn)[:kept]) for _ in range(groups)])
    arrays = dict(
        x=rng.normal(size=(groups, rows, width)),
        activated=rng.normal(size=(groups, rows, ffn)),
        up=rng.normal(size=(ffn, width)) * width**-0.5,
        down=rng.normal(size=(ffn, width + 8)) * kept**-0.5,
    )
    made: dict[str, Any] = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
    return made | dict(channels=jnp.asarray(channels, jnp.int32), up_bias=jnp.asarray(rng.normal(size=ffn), dtype) if bias else None)


def unchosen(arrays: dict[str, Any]) -> np.ndarray:
    return np.setdiff1d(np.arange(arrays["up"].shape[0]), arrays["channels"])


@pytest.mark.parametrize("unit", [SWIGLU, CLAMPED], ids=["swiglu", "clamped"])
def test_the_reference_is_the_sum_over_the_chosen_channels(unit: GatedUnit) -> None:
    arrays = case(groups=2, rows=3, width=12, ffn=20, kept=7, bias=True)
    x, activated, up, down, bias = (np.asarray(arrays[name], np.float64) for name in ("x", "activated", "up", "down", "up_bias"))
    raised = x @ up.T + bias
    inner = activated * (raised if unit.limit is None else np.clip(raised, -unit.limit, unit.limit) + 1)
    expected = [inner[group][:, chosen] @ down[chosen] for group, chosen in enumerate(np.asarray(arrays["channels"]))]
    np.testing.assert_allclose(gathered_ffn(**arrays, unit=unit), expected, atol=TOLERANCES[jnp.float32])


@needs_triton
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=FULL)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sizes", "unit"),
    [
        (dict(rows=1, width=40, ffn=90, kept=24), SWIGLU),
        (dict(groups=2, rows=5, width=33, ffn=100, kept=70, bias=True), CLAMPED),
        pytest.param(dict(groups=3, rows=17, width=130, ffn=60, kept=59), SWIGLU, marks=FULL),
        pytest.param(dict(rows=64, width=16, ffn=40, kept=1, bias=True), SWIGLU, marks=FULL),
        pytest.param(dict(rows=6, width=24, ffn=300, kept=300), CLAMPED, marks=FULL),
    ],
)
def test_the_kernels_equal_the_reference_and_read_chosen_channels_alone(sizes: dict[str, Any], unit: GatedUnit, dtype: Any) -> None:
    arrays = case(**sizes, dtype=dtype)
    expected = gathered_ffn(**arrays, unit=unit, implementation="reference")
    rest = unchosen(arrays)
    for name in ("up", "down"):
        arrays[name] = arrays[name].at[rest].set(jnp.nan)
    with interpreted():
        got, again = (gathered_ffn(**arrays, unit=unit, implementation="triton") for _ in range(2))
        assert launches == ["chosen_up", "chosen_down"] * 2
    np.testing.assert_array_equal(got, again)  # bit for bit
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), atol=TOLERANCES[dtype])


@needs_triton
def test_a_token_depends_on_no_other_token_of_its_group() -> None:
    arrays = case(rows=3, width=16, ffn=40, kept=16)
    spoilt = arrays | {"x": arrays["x"].at[0, 1].set(jnp.nan)}
    with interpreted():
        got, other = (gathered_ffn(**given, unit=SWIGLU, implementation="triton") for given in (arrays, spoilt))
    np.testing.assert_array_equal(got[0, ::2], other[0, ::2])
    assert np.isnan(other[0, 1]).all()


def test_what_does_not_fit_or_cannot_run_is_refused() -> None:
    arrays = case(rows=3, width=16, ffn=40, kept=16)
    with pytest.raises(ValueError, match="'triton' needs a CUDA device"):
        gathered_ffn(**arrays, unit=SWIGLU, implementation="triton")
    with pytest.raises(ValueError, match=r"expected x \[G,T,D\], activated \[G,T,F\]"):
        gathered_ffn(**arrays | {"up": arrays["up"].T}, unit=SWIGLU)
    with pytest.raises(ValueError, match="implementation must be one of"):
        gathered_ffn(**arrays, unit=SWIGLU, implementation="masked")
    more = case(rows=65, width=16, ffn=40, kept=16)  # the reference's, whatever was asked for
    np.testing.assert_array_equal(*(gathered_ffn(**more, unit=SWIGLU, implementation=name) for name in ("triton", "reference")))
    assert np.isfinite(np.asarray(jax.grad(lambda x: gathered_ffn(**arrays | {"x": x}, unit=SWIGLU).sum())(arrays["x"]))).all()
