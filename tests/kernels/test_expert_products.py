"""The products of a mixture of experts against NumPy, expert by expert, and each row's independence of the others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.expert_products import expert_products as eager_expert_products

# float32: sums of 24 and 16 terms of order 1 in another order. bfloat16: 8 bits of mantissa, rounded three times on the way.
TOLERANCES = {jnp.float32: 1e-5, jnp.bfloat16: 5e-2}
WIDTH, FFN, NUM_CHOICES = 24, 16, 3
# The kernel's own tests are elsewhere.
IMPLEMENTATIONS = ("auto", "reference", "grouped", "dense")


def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


expert_products = jax.jit(eager_expert_products, static_argnames=("activation", "implementation", "may_skip"))


def case(*, num_rows: int, num_experts: int = 7, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return dict(
        x=rng.normal(size=(num_rows, WIDTH)),
        experts=np.stack([rng.permutation(num_experts)[:NUM_CHOICES] for _ in range(num_rows)]).astype(np.int32),
        weights=rng.uniform(0.1, 1.0, size=(num_rows, NUM_CHOICES)),
        gate_up=rng.normal(size=(num_experts, WIDTH, 2, FFN)) * WIDTH**-0.5,
        down=rng.normal(size=(num_experts, FFN, WIDTH)) * FFN**-0.5,
        gate_up_bias=rng.normal(size=(num_experts, 2, FFN)),
        down_bias=rng.normal(size=(num_experts, WIDTH)),
    )


def run(case: dict[str, np.ndarray], *, dtype: Any = jnp.float32, implementation: str = "auto", may_skip: bool = False) -> np.ndarray:
    floats = {"weights": jnp.float32}
    arrays = {name: jnp.asarray(x, jnp.int32 if name == "experts" else floats.get(name, dtype)) for name, x in case.items()}
    return np.asarray(expert_products(**arrays, activation=activation, implementation=implementation, may_skip=may_skip), np.float64)


def numpy_products(case: dict[str, np.ndarray]) -> np.ndarray:
    out = np.zeros_like(case["x"])
    for row, (experts, weights) in enumerate(zip(case["experts"], case["weights"], strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            gate, up = np.einsum("d,dcf->cf", case["x"][row], case["gate_up"][expert]) + bias_of(case, "gate_up_bias", expert)
            inner = gate / (1 + np.exp(-gate)) * up
            out[row] += weight * (inner @ case["down"][expert] + bias_of(case, "down_bias", expert))
    return out


def bias_of(case: dict[str, np.ndarray], name: str, expert: int) -> np.ndarray:
    return case[name][expert] if name in case else np.zeros(1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_rows", [1, 6, 45])
def test_the_products_equal_those_of_numpy(num_rows: int, implementation: str, dtype: Any) -> None:
    given = case(num_rows=num_rows)
    np.testing.assert_allclose(run(given, dtype=dtype, implementation=implementation), numpy_products(given), atol=TOLERANCES[dtype])
    without = {name: array for name, array in given.items() if not name.endswith("bias")}
    np.testing.assert_allclose(run(without, dtype=dtype, implementation=implementation), numpy_products(without), atol=TOLERANCES[dtype])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_row_is_dropped_when_all_choose_the_same_experts(implementation: str) -> None:
    given = case(num_rows=300)
    given["experts"] = np.broadcast_to(given["experts"][:1], given["experts"].shape)
    np.testing.assert_allclose(run(given, implementation=implementation), numpy_products(given), atol=1e-5)


def test_more_rows_than_a_dense_block_holds() -> None:
    given = case(num_rows=1100)
    np.testing.assert_allclose(run(given, implementation="dense"), numpy_products(given), atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_does_not_depend_on_the_other_rows(implementation: str) -> None:
    given, others = case(num_rows=45), case(num_rows=45, seed=1)
    others["x"][7] = np.nan  # not even on one that is not a number
    mixed = given | {name: np.concatenate([given[name][:20], others[name][:25]]) for name in ("x", "experts", "weights")}
    np.testing.assert_array_equal(run(mixed, implementation=implementation)[:20], run(given, implementation=implementation)[:20])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_expert_that_overflows_reaches_only_those_who_chose_it(implementation: str) -> None:
    given = case(num_rows=45)
    given["gate_up"][3] = 1e25  # silu(gate) * up is infinite in float32
    chose = (given["experts"] == 3).any(axis=1)
    assert 0 < chose.sum() < 45
    got = run(given, implementation=implementation)
    assert np.isfinite(got[~chose]).all()
    assert not np.isfinite(got[chose]).all()


@pytest.mark.parametrize("implementation", ["reference", "grouped", "dense"])
@pytest.mark.parametrize("num_rows", [1, 45])
def test_a_choice_of_no_expert_adds_nothing_whatever_its_weight(num_rows: int, implementation: str) -> None:
    given = case(num_rows=num_rows)
    skipped = np.random.default_rng(1).uniform(size=given["experts"].shape) < 0.5
    skipped[0] = True  # a row of none at all
    with_skips = given | {"experts": np.where(skipped, 7, given["experts"]).astype(np.int32)}
    expected = numpy_products(given | {"weights": np.where(skipped, 0.0, given["weights"])})
    np.testing.assert_allclose(run(with_skips, implementation=implementation, may_skip=True), expected, atol=1e-5)


def test_grouped_runs_no_block_for_choices_of_no_expert() -> None:
    given = case(num_rows=45)
    blocks: list[int] = []

    def counting(gate: jax.Array, up: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: blocks.append(gate.shape[0]))
        return activation(gate, up)

    arrays = {name: jnp.asarray(array, jnp.int32 if name == "experts" else jnp.float32) for name, array in given.items()}
    numbers = []
    for first in (0, 2, 4):
        experts = jnp.where(arrays["experts"] < first, 7, arrays["experts"])  # nobody takes the experts before
        jax.block_until_ready(
            eager_expert_products(**arrays | {"experts": experts}, activation=counting, implementation="grouped", may_skip=True)
        )
        jax.effects_barrier()
        pairs = np.bincount(np.asarray(experts).ravel(), minlength=8)[:7]
        assert len(blocks) == sum(-(-pairs // blocks[0]))
        numbers.append(len(blocks))
        blocks.clear()
    assert numbers[0] > numbers[1] > numbers[2]


def test_all_have_the_same_gradient() -> None:
    arrays = {name: jnp.asarray(array, jnp.int32 if name == "experts" else jnp.float32) for name, array in case(num_rows=6).items()}
    names = ("x", "weights", "gate_up", "down", "gate_up_bias", "down_bias")

    def gradient(implementation: str) -> dict[str, jax.Array]:
        def loss(some: dict[str, jax.Array]) -> jax.Array:
            return jnp.sin(expert_products(**arrays | some, activation=activation, implementation=implementation)).sum()

        return jax.grad(loss)({name: arrays[name] for name in names})

    reference = gradient("reference")
    for implementation in ("dense", "grouped", "auto"):
        for name, found in gradient(implementation).items():
            assert np.abs(reference[name]).max() > 0.1
            np.testing.assert_allclose(found, reference[name], atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    arrays = {name: jnp.asarray(array) for name, array in case(num_rows=2).items()}
    with pytest.raises(ValueError, match=r"implementation must be one of .*, got 'magic'"):
        eager_expert_products(**arrays, activation=activation, implementation="magic")
    with pytest.raises(ValueError, match=r"expected x \[M,D\], gate_up \[E,D,2,F\]"):
        eager_expert_products(**arrays | {"x": arrays["x"][:, :-1]}, activation=activation)
    with pytest.raises(ValueError, match=r"should be \[M,C\] with M = 2"):
        eager_expert_products(**arrays | {"weights": arrays["weights"][:1]}, activation=activation)
