"""The arithmetic of two-level verification, and the number of sparse steps that it recommends."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Lossless, SparseAttention, SparsityConfig, Transformer
from specjax.sparsity.step_cost import step_cost_from_bytes
from specjax.two_level.level_counts import LevelCounts
from specjax.two_level.pace import Pace
from specjax.two_level.two_level_cost import break_even_dense_acceptance, two_level_speedup
from tests.helpers import random_model, tiny_config


def simulated_speedup(num_steps: int, tokens: int, acceptance: float, step_cost: float, check_cost: float) -> float:
    """Cycles of a coin a token, against dense steps."""
    coins = np.random.default_rng(0).random((200_000, num_steps * tokens)) < acceptance
    settled = 1 + np.cumprod(coins, axis=1).sum(axis=1)
    return settled.mean() / (num_steps * step_cost + check_cost) / tokens


@pytest.mark.parametrize("acceptance", [0.0, 0.8, 0.99, 1.0])
@pytest.mark.parametrize(("num_steps", "tokens"), [(1, 3), (4, 2)])
def test_the_speed_up_is_that_of_simulated_rounds(num_steps: int, tokens: int, acceptance: float) -> None:
    sizes = dict(acceptance=acceptance, step_cost=0.4, check_cost=1.1)
    got = two_level_speedup(num_steps=num_steps, tokens_per_step=tokens, **sizes)
    # A cycle settles up to nine tokens, so that its mean over 200,000 is known to a hundredth at four standard errors.
    assert got == pytest.approx(simulated_speedup(num_steps, tokens, acceptance, 0.4, 1.1), abs=0.01)


def test_an_8b_model_gains_at_128k_tokens_and_loses_at_32k() -> None:
    # Bytes of a sparse over a dense pass: 4.0 of 7.5 ms, and 1 / 1.24; three tokens a step.
    far = [two_level_speedup(num_steps=n, tokens_per_step=3.0, acceptance=0.98, step_cost=4.0 / 7.5) for n in range(1, 9)]
    near = [two_level_speedup(num_steps=n, tokens_per_step=3.0, acceptance=0.98, step_cost=1 / 1.24) for n in range(1, 9)]
    assert 1.2 < max(far) < 1.35
    assert 0.8 < max(near) < 1.0


def test_at_the_break_even_acceptance_both_are_equally_fast() -> None:
    sizes = dict(num_steps=4, tokens_per_step=2.5, step_cost=0.4)
    even = break_even_dense_acceptance(**sizes)
    assert even is not None
    assert 0.5 < even < 1
    assert two_level_speedup(acceptance=even, **sizes) == pytest.approx(1.0, abs=1e-9)
    assert two_level_speedup(acceptance=even + 0.01, **sizes) > 1
    assert break_even_dense_acceptance(num_steps=1, tokens_per_step=3.0, step_cost=0.5) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(acceptance=1.1), "acceptance must be from 0 to 1, got 1.1"),
        (dict(acceptance=float("nan")), "acceptance must be from 0 to 1, got nan"),
        (dict(num_steps=0), "num_steps must be a positive finite number, got 0"),
        (dict(step_cost=-1.0), "step_cost must be a positive finite number, got -1.0"),
    ],
)
def test_impossible_numbers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        two_level_speedup(**dict(num_steps=2, tokens_per_step=2.0, acceptance=0.9, step_cost=0.5) | changes)


def seen(acceptance: float, tokens_per_step: float) -> Pace:
    """After so much evidence that the prior no longer counts."""
    many = jnp.float32(1e6)
    return Pace(examined=many, accepted=acceptance * many, tokens=tokens_per_step * many, steps=many)


def test_the_pace_is_the_fastest_number_of_steps_and_none_where_dense_verification_is_faster() -> None:
    settings = Lossless(max_steps=6, check_cost=1.15)
    for acceptance in (0.3, 0.9, 0.97, 0.995):
        for tokens in (1.0, 3.5):
            for cost in (0.1, 0.5, 0.9):
                sizes = dict(acceptance=acceptance, tokens_per_step=tokens, step_cost=cost, check_cost=1.15)
                speedups = [two_level_speedup(num_steps=n, **sizes) for n in range(1, 7)]
                expected = int(np.argmax(speedups)) + 1 if max(speedups) > 1 else 0
                assert int(seen(acceptance, tokens).best_num_steps(jnp.float32(cost), settings, draft_length=5)) == expected
    assert int(seen(1.0, 2.0).best_num_steps(jnp.float32(0.1), settings, draft_length=5)) == 6


def test_the_pace_takes_no_more_steps_than_there_is_room_for_their_tokens() -> None:
    settings, cost = Lossless(max_steps=8, max_tokens=24), jnp.float32(0.1)
    for tokens, most in ((1.0, 8), (2.0, 8), (3.0, 7), (3.5, 6), (6.0, 4)):  # 18 may wait before a step of up to 6
        assert int(seen(1.0, tokens).best_num_steps(cost, settings, draft_length=5)) == most
        assert int(settings.most_steps(5, tokens)) >= most


def test_without_evidence_sparse_steps_are_tried_and_evidence_fades() -> None:
    settings, cost = Lossless(), jnp.float32(0.3)
    assert int(Pace.unknown().best_num_steps(cost, settings, draft_length=5)) > 1
    pace, none = Pace.unknown(), jnp.float32(0)
    for _ in range(40):
        pace = pace.after(examined=jnp.float32(3), accepted=none, tokens=jnp.float32(1), steps=jnp.float32(1))
    assert int(pace.best_num_steps(cost, settings, draft_length=5)) == 0
    waited = 0
    while int(pace.best_num_steps(cost, settings, draft_length=5)) == 0:
        pace, waited = pace.after(examined=none, accepted=none, tokens=jnp.float32(1), steps=jnp.float32(1)), waited + 1
    assert 10 < waited < 200


def paced_speedup(acceptance: float, num_tokens: int, seed: int) -> tuple[float, float]:
    """Over dense verification, of cycles with a coin a token and checks as dear as over XLA's attention; and the share of dense ones."""
    settings, sizes, coins = Lossless(max_steps=8, check_cost=2.25), dict(step_cost=0.43, tokens=3), np.random.default_rng(seed)
    best = jax.jit(lambda pace: pace.best_num_steps(jnp.float32(sizes["step_cost"]), settings, draft_length=5))
    after = jax.jit(lambda pace, *seen: pace.after(**dict(zip(("examined", "accepted", "tokens", "steps"), seen, strict=True))))
    pace, time, settled, paces = Pace.unknown(), 0.0, 0, []
    while settled < num_tokens:
        paces.append(num_steps := int(best(pace)))
        waiting = num_steps * sizes["tokens"]
        passed = int(np.cumprod(coins.random(waiting) < acceptance).sum())
        settled += passed + 1 if num_steps else sizes["tokens"]
        time += num_steps * sizes["step_cost"] + settings.check_cost if num_steps else 1.0
        seen = (min(passed + 1, waiting), passed, waiting or sizes["tokens"], num_steps or 1)
        pace = after(pace, *map(jnp.float32, seen))
    return settled / time / sizes["tokens"], paces.count(0) / len(paces)


def test_a_dear_check_is_still_tried_where_it_pays_and_little_where_it_does_not() -> None:
    # Always eight steps: 1.30 x, 1.16 x and at 80 % 0.42 x. One rejection in the first cycle must not end it for good.
    good, fair, bad = (np.mean([paced_speedup(rate, 600, seed) for seed in range(4)], axis=0) for rate in (0.99, 0.98, 0.8))
    assert good[0] > 1.2
    assert fair[0] > 1.05
    assert fair[1] < 0.7
    assert bad[0] > 0.9
    assert bad[1] > 0.9


def test_the_cost_by_bytes_is_weights_and_what_attention_keeps() -> None:
    config = tiny_config(num_layers=3, layer_windows=(None, 8, None))
    model, _ = random_model(config)
    params = jax.eval_shape(model.init_params, jax.random.key(0))
    attention = SparseAttention(block_size=8, keep=0.25, dense_below=20)
    cache = model.init_cache(batch_size=2, capacity=104)
    got = step_cost_from_bytes(SparsityConfig(attention=attention), config, params, cache, jnp.array([100, 20]))
    weights = 4 * sum(leaf.size for leaf in jax.tree.leaves(params)) - 4 * 64 * 32  # the embedding is looked up
    token_bytes = 2 * 2 * 8 * 4  # a layer's key and value of two heads of eight float32
    dense = weights + token_bytes * (2 * (100 + 20) + 8 + 8)
    sparse = weights + token_bytes * (2 * (40 + 20) + 8 + 8)
    assert float(got) == pytest.approx(sparse / dense, rel=1e-6)


def test_the_cost_by_bytes_counts_weights_of_more_than_two_gigabytes() -> None:
    config = tiny_config(vocab_size=2**19, hidden_size=2**12)  # 8.6 GB of float32 for the head alone: a Python integer that no int32 holds
    model = Transformer(config)
    params = jax.eval_shape(model.init_params, jax.random.key(0))
    cache = jax.eval_shape(lambda: model.init_cache(batch_size=1, capacity=64))
    sparsity = SparsityConfig(attention=SparseAttention(block_size=8, keep=0.25, dense_below=16))
    got = jax.jit(lambda length: step_cost_from_bytes(sparsity, config, params, cache, length))(jnp.array([64]))
    assert float(got) == pytest.approx(1.0, abs=1e-5)  # keys and values of 64 tokens are nothing beside them


def test_the_summary_names_the_acceptance_and_the_break_even() -> None:
    numbers = dict(sparse_steps=8, dense_passes=2, dense_steps=1, provisional=24, accepted=18, examined=20)
    arrays = {name: jnp.array([value, 0]) for name, value in numbers.items()}
    summary = LevelCounts(**arrays, step_costs=jnp.array([0.8, 0.0]), check_cost=1.3).total().summary()
    sizes = dict(num_steps=4.0, tokens_per_step=3.0, step_cost=0.4, check_cost=1.3)
    assert summary["dense_acceptance_rate"] == pytest.approx(0.9)
    assert summary["break_even_dense_acceptance"] == pytest.approx(break_even_dense_acceptance(**sizes), rel=1e-6)
    assert summary["modelled_speedup"] == pytest.approx(two_level_speedup(acceptance=0.9, **sizes), rel=1e-6)
    nothing = LevelCounts.zeros(3).summary()
    # A rate of 1 would say that all was accepted, where every step was verified densely and nothing was checked.
    assert all(nothing[name] is None for name in ("dense_acceptance_rate", "break_even_dense_acceptance", "modelled_speedup", "step_cost"))
    assert {field.name for field in dataclasses.fields(LevelCounts)} - set(summary) == {"examined", "step_costs", "check_cost"}
