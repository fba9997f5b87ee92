"""The Triton kernels of a mixture of experts, in Triton's interpreter, against the reference; and when `"auto"` takes them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import GenerateConfig, Kernels, MoEConfig, PromptLookup, speculative_generate
from specjax.kernels.expert_products import ExpertTuning, expert_products
from specjax.kernels.expert_products.triton_launch import expert_products_triton
from specjax.kernels.gated_unit import GatedUnit
from tests.helpers import random_model, tiny_config
from tests.kernels.interpreted_triton import interpreted, launches, needs_triton

# Relative to results of order 1: float32 sums of up to 70 terms in another order; bfloat16 is rounded to 8 bits between the products.
TOLERANCES = {jnp.float32: 1e-5, jnp.bfloat16: 3e-2}
FULL = pytest.mark.full
SWIGLU, CLAMPED = GatedUnit(), GatedUnit(limit=0.7, alpha=1.702)
BOTH = ["gate_and_up", "weighted_down"]


def case(*, rows: int, experts: int = 6, choices: int = 3, width: int = 40, ffn: int = 24, dtype: Any = jnp.float32, biases: bool = False):
    rng = np.random.default_rng(rows + width)
    chosen = np.stack([rng.permutation(experts)[:choices] for _ in range(rows)])
    arrays = dict(x=rng.normal(size=(rows, width)), experts=chosen, weights=rng.uniform(0.1, 1.0, size=(rows, choices)))
    arrays |= dict(
        gate_up=rng.normal(size=(experts, width, 2, ffn)) * width**-0.5,
        down=rng.normal(size=(experts, ffn, width)) * ffn**-0.5,
    )
    if biases:
        arrays |= dict(gate_up_bias=rng.normal(size=(experts, 2, ffn)), down_bias=rng.normal(size=(experts, width)))
    dtypes = {"experts": jnp.int32, "weights": jnp.float32}
    return {name: jnp.asarray(array, dtypes.get(name, dtype)) for name, array in arrays.items()}


def check(arrays: dict[str, jax.Array], *, activation: GatedUnit = SWIGLU, may_skip: bool = False) -> jax.Array:
    options = dict(activation=activation, may_skip=may_skip)
    with interpreted():
        got = expert_products(**arrays, **options, implementation="triton")
        assert launches == BOTH
    expected = expert_products(**arrays, **options, implementation="reference")
    assert got.dtype == expected.dtype
    atol = TOLERANCES[got.dtype.type]
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), atol=atol)
    return got


@needs_triton
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=FULL)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sizes", "activation"),
    [
        (dict(rows=1, width=65, ffn=40), SWIGLU),
        (dict(rows=6, biases=True), CLAMPED),
        pytest.param(dict(rows=17, experts=3, choices=1), SWIGLU, marks=FULL),
        pytest.param(dict(rows=30, experts=4, choices=4, width=33, ffn=70, biases=True), CLAMPED, marks=FULL),
        pytest.param(dict(rows=64, experts=40, choices=2, width=16, ffn=16), SWIGLU, marks=FULL),
    ],
)
def test_the_kernels_equal_the_reference(sizes: dict[str, Any], activation: GatedUnit, dtype: Any) -> None:
    check(case(**sizes, dtype=dtype), activation=activation)


@needs_triton
def test_rows_that_choose_alike_or_apart_are_all_served() -> None:
    arrays = case(rows=5, experts=15, choices=3, width=16, ffn=16)
    check(arrays | {"experts": jnp.arange(15, dtype=jnp.int32).reshape(5, 3)})
    check(arrays | {"experts": jnp.broadcast_to(arrays["experts"][:1], (5, 3))})
    # One expert in every choice, which no router makes: 27 pairs of it are two blocks.
    more = case(rows=9, width=16, ffn=16)
    check(more | {"experts": jnp.full((9, 3), 2, jnp.int32)})
    # One row looks nothing up: each choice is a block by itself, that of no expert none at all.
    one = case(rows=1, width=16, ffn=16, biases=True)
    check(one | {"experts": jnp.asarray([[4, 4, 1]], jnp.int32)})
    check(one | {"experts": jnp.asarray([[6, 4, 6]], jnp.int32)}, may_skip=True)


@needs_triton
def test_more_pairs_than_are_looked_through_at_once_find_their_experts() -> None:
    arrays = case(rows=24, experts=5, choices=4, width=16, ffn=16)  # 96 pairs
    got = check(arrays)
    with interpreted():
        again = expert_products(**arrays, activation=SWIGLU, implementation="triton")
    np.testing.assert_array_equal(got, again)  # bit for bit


@needs_triton
def test_a_choice_of_no_expert_adds_nothing_and_no_expert_is_read_that_nobody_chose() -> None:
    arrays = case(rows=4, experts=6, biases=True)
    skipped = np.array([[1, 1, 1], [0, 0, 1], [0, 0, 0], [1, 0, 0]], bool)
    arrays["experts"] = jnp.where(skipped, 6, jnp.where(arrays["experts"] == 3, 2, arrays["experts"]))
    arrays["weights"] = jnp.where(skipped, jnp.nan, arrays["weights"])
    check(arrays | {"weights": jnp.where(skipped, 0.0, arrays["weights"])}, may_skip=True)
    spoilt = {name: arrays[name].at[3].set(jnp.nan) for name in ("gate_up", "down", "gate_up_bias", "down_bias")}
    got = check(arrays | spoilt, may_skip=True)
    np.testing.assert_array_equal(got[0], 0.0)


@needs_triton
def test_a_row_does_not_depend_on_the_other_rows_nor_on_an_expert_that_overflows_for_them() -> None:
    arrays = case(rows=7)
    arrays["gate_up"] = arrays["gate_up"].at[3].set(1e25)  # silu(gate) * up is infinite in float32
    spoilt = arrays | {"x": arrays["x"].at[2].set(jnp.nan)}
    with interpreted():
        got, other = (expert_products(**given, activation=SWIGLU, implementation="triton") for given in (arrays, spoilt))
    rest = np.array([0, 1, 3, 4, 5, 6])
    np.testing.assert_array_equal(got[rest], other[rest])
    assert np.isnan(other[2]).all()
    chose = np.asarray((arrays["experts"] == 3).any(axis=1))
    assert 0 < chose.sum() < 7
    assert np.isfinite(got[~chose]).all()
    assert not np.isfinite(got[chose]).all()


@needs_triton
@pytest.mark.full
def test_any_cut_of_the_work_gives_the_same() -> None:
    arrays = case(rows=3, width=70, ffn=50)
    expected = expert_products(**arrays, activation=SWIGLU, implementation="reference")
    for cut in ("16:128:16:4:4", "64:16:64:8:2"):
        with interpreted():
            got = expert_products(**arrays, activation=SWIGLU, implementation=f"triton@{cut}")
        np.testing.assert_allclose(got, expected, atol=TOLERANCES[jnp.float32])


@needs_triton
@pytest.mark.full
def test_the_derivative_is_that_of_the_dense_products() -> None:
    arrays = case(rows=3, width=16, ffn=16, biases=True)

    def loss(x: jax.Array, implementation: str) -> jax.Array:
        return jnp.sin(expert_products(**arrays | {"x": x}, activation=SWIGLU, implementation=implementation)).sum()

    with interpreted():
        got = jax.grad(loss)(arrays["x"], "triton")
    np.testing.assert_allclose(got, jax.grad(loss)(arrays["x"], "dense"), atol=TOLERANCES[jnp.float32])


@needs_triton
@pytest.mark.full
def test_a_model_whose_experts_are_the_kernels_writes_the_references_text() -> None:
    config = tiny_config(moe=MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=16))
    model, params = random_model(config)
    static = GenerateConfig(max_new_tokens=5, num_speculative_tokens=2, cache_capacity=96, prefill_chunk_size=96)
    prompts = [[*range(1, 41), 5, 6, 7]] * 2  # a prefill of more rows than the kernels are for

    def text(implementation: str) -> np.ndarray:
        ours = model.clone(kernels=Kernels(experts=implementation, expert_choice=implementation))
        return np.asarray(speculative_generate(ours, params, PromptLookup(), None, prompts, config=static).tokens)

    with interpreted():
        got = text("triton")
        assert set(launches) == {*BOTH, "choose_experts"}
    np.testing.assert_array_equal(got, text("reference"))


def test_auto_takes_the_kernels_where_they_were_measured_to_be_fastest_and_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, cuts = [], []
    # It is traced on a CPU too, and must not be asked for a device.
    kernel = "specjax.kernels.expert_products.expert_products_triton"
    monkeypatch.setattr(kernel, lambda x, *_, **how: cuts.append(how["tuning"]) or x + 100)
    monkeypatch.setattr("specjax.kernels.measured.fastest", lambda shape, dtype: asked.append((shape, dtype)) or "triton@16:32:64:4:2")
    arrays = case(rows=2)
    call = functools.partial(jax.jit(expert_products, static_argnames=("activation", "implementation")), **arrays)
    got = call(activation=SWIGLU)  # compiled for a CPU, where the others run
    np.testing.assert_allclose(got, call(activation=SWIGLU, implementation="reference"), atol=TOLERANCES[jnp.float32])
    ((shape, dtype),) = asked
    assert (shape.rows, shape.choices, shape.experts, shape.hidden, shape.ffn, dtype) == (2, 3, 6, 40, 24, jnp.float32)
    call(activation=lambda gate, up: gate * up)  # not one that the kernels know
    expert_products(**case(rows=65, width=16, ffn=16), activation=SWIGLU)
    assert len(asked) == 1
    assert set(cuts) == {ExpertTuning(channels=16, outputs=32, depth=64, num_warps=4, num_stages=2)}  # as the table cuts it


def test_what_the_kernels_are_not_for_is_refused() -> None:
    with pytest.raises(ValueError, match="'triton' needs a CUDA device, and JAX computes on 'cpu' here"):
        expert_products(**case(rows=2), activation=SWIGLU, implementation="triton")
    arrays = case(rows=65) | dict(gate_up_bias=None, down_bias=None)
    with pytest.raises(ValueError, match="up to 64 rows and 1024 pairs.*got 65 rows, 195 pairs"):
        expert_products_triton(**arrays, activation=SWIGLU, may_skip=False)
    small = case(rows=2, dtype=jnp.int32) | dict(gate_up_bias=None, down_bias=None)
    with pytest.raises(ValueError, match="needs 16- or 32-bit floats, got int32"):
        expert_products_triton(**small, activation=SWIGLU, may_skip=False)
    for changes, message in (
        (dict(channels=24), "channels must be a power of two from 16 to 256, got 24"),
        (dict(num_stages=0), "from 1 to 8"),
    ):
        with pytest.raises(ValueError, match=message):
            ExpertTuning(**dict(channels=32, outputs=64, depth=64) | changes)
