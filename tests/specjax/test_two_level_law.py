"""Two-level verification, sampled: what is emitted follows the dense target's exact law, although sparse passes verify the drafts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    BlockVerification,
    DraftModel,
    GenerateConfig,
    GenerateOutput,
    Lossless,
    SamplingParams,
    SparseAttention,
    SparseFFN,
    SparsityConfig,
    speculative_generate,
)
from tests.drafters import PROMPT, SMALL_VOCAB, eagle3, hydra, medusa, small_target
from tests.helpers import MIN_P_VALUE, FixedDrafter, chi_square_p_value, numpy_filtered_probs, numpy_forward

FULL = pytest.mark.full
NUM_EMITTED, NUM_ROWS = 4, 4096
PLAIN, NUCLEUS, COLD = (1.0, 0, 1.0), (1.0, 0, 0.8), (0.8, 3, 0.9)
# Rows attend to the block of two tokens that they stand in, and to the one before.
LITTLE = SparseAttention(block_size=2, keep=0.0, dense_below=0, head_blocks=0, tail_blocks=0)
FIXED, ADAPTING = Lossless(max_steps=2, adapt=False), Lossless(max_steps=3, step_cost=0.2)


@functools.cache
def dense_law(setting: tuple[float, int, float]) -> np.ndarray:
    """Probabilities `[V,V,V,V]` of what the dense target emits after `PROMPT`, by enumeration."""
    target, params = small_target()
    law = np.ones((SMALL_VOCAB,) * NUM_EMITTED)
    for length in range(NUM_EMITTED):
        for prefix in itertools.product(range(SMALL_VOCAB), repeat=length):
            probs = numpy_filtered_probs(numpy_forward(target.config, params, [*PROMPT, *prefix])[-1], *setting)
            law[prefix] *= probs.reshape(-1, *[1] * (NUM_EMITTED - length - 1))
    return law


def drafters(name: str) -> tuple[Any, Any]:
    if name == "none":
        return None, None
    if name == "point mass":
        return FixedDrafter(), {"tokens": jnp.array([1, 2])}
    if name in ("draft model", "target"):
        model, params = small_target(1 if name == "draft model" else 0)
        return DraftModel(model), params
    return {"EAGLE-3": eagle3, "Medusa": medusa, "Hydra": hydra}[name](*small_target())


def emitted(
    lossless: Lossless | None,
    drafter_name: str,
    *settings: tuple[float, int, float],
    seed: int = 5,
    attention: SparseAttention | None = LITTLE,
    ffn: SparseFFN | None = None,
    **changes: Any,
) -> GenerateOutput:
    """What the small target emits: `NUM_ROWS` rows for each of the settings."""
    drafter, drafter_params = drafters(drafter_name)
    sparsity = SparsityConfig(attention=attention, ffn=ffn, lossless=lossless)
    options = dict(max_new_tokens=NUM_EMITTED, num_speculative_tokens=2, do_sample=True, sparsity=sparsity) | changes
    temperature, top_k, top_p = (np.repeat(np.asarray(column), NUM_ROWS) for column in zip(*settings, strict=True))
    return speculative_generate(
        *small_target(),
        drafter,
        drafter_params,
        np.tile(np.int32(PROMPT), (len(settings) * NUM_ROWS, 1)),
        config=GenerateConfig(**options),
        sampling=SamplingParams(temperature, top_k, top_p),
        rng=jax.random.key(seed),
    )


def p_values(output: GenerateOutput, *settings: tuple[float, int, float]) -> list[float]:
    """How well each setting's rows fit the dense target's law."""
    found = []
    for tokens, setting in zip(np.split(np.asarray(output.tokens), len(settings)), settings, strict=True):
        counts = np.zeros((SMALL_VOCAB,) * NUM_EMITTED)
        np.add.at(counts, tuple(tokens.T), 1)
        found.append(chi_square_p_value(counts, dense_law(setting)))
    return found


def p_value(output: GenerateOutput) -> float:
    return p_values(output, PLAIN)[0]


CASES = [
    ("draft model", ADAPTING, (PLAIN, NUCLEUS)),
    *(
        pytest.param(*case, (PLAIN, NUCLEUS, COLD), marks=FULL)
        for case in (
            *itertools.product(("none", "point mass", "draft model", "EAGLE-3", "Medusa", "Hydra", "target"), (FIXED,)),
            *itertools.product(("none", "draft model", "EAGLE-3"), (ADAPTING,)),
        )
    ),
]


@pytest.mark.parametrize(("drafter_name", "lossless", "settings"), CASES)
def test_sampled_text_follows_the_exact_law_of_the_dense_target(drafter_name: str, lossless: Lossless, settings: tuple) -> None:
    output = emitted(lossless, drafter_name, *settings)
    assert min(p_values(output, *settings)) > MIN_P_VALUE
    levels = output.statistics.levels
    assert levels is not None
    assert 0.3 < levels.dense_acceptance_rate < 0.95, "both outcomes of a dense check must be common"
    assert levels.provisional.sum() > len(settings) * NUM_ROWS


@FULL
@pytest.mark.parametrize("drafter_name", ["draft model", "point mass", "EAGLE-3", "target"])
def test_the_law_is_exact_where_the_tokens_of_its_steps_decide_when_a_cycle_ends(drafter_name: str) -> None:
    (target, params), (drafter, drafter_params) = small_target(), drafters(drafter_name)
    lossless = Lossless(max_steps=4, max_tokens=4, adapt=False)  # another step where the first one committed a single token
    sparsity = SparsityConfig(attention=LITTLE, lossless=lossless)
    config = GenerateConfig(max_new_tokens=NUM_EMITTED, num_speculative_tokens=2, do_sample=True, sparsity=sparsity)

    @jax.jit
    @jax.vmap
    def emit(rng: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A row by itself: in a batch, the others' tokens would decide for it."""
        output = speculative_generate(target, params, drafter, drafter_params, np.int32([PROMPT]), config=config, rng=rng)
        levels = output.statistics.levels
        return output.tokens[0], jnp.stack([levels.sparse_steps[0], levels.dense_passes[0]])

    tokens, counts = emit(jax.random.split(jax.random.key(11), NUM_ROWS))
    found = np.zeros((SMALL_VOCAB,) * NUM_EMITTED)
    np.add.at(found, tuple(np.asarray(tokens).T), 1)
    assert chi_square_p_value(found, dense_law(PLAIN)) > MIN_P_VALUE
    steps, passes = np.asarray(counts).T
    assert (steps == passes).any(), "cycles of one step each"
    assert (steps > passes).any(), "and some of more"


@FULL
def test_the_sparse_law_is_another_one() -> None:
    assert p_value(emitted(None, "none", PLAIN)) < MIN_P_VALUE


@FULL
@pytest.mark.parametrize("drafter_name", ["draft model", "EAGLE-3"])
@pytest.mark.full
def test_block_verification_of_drafts_leaves_the_law_as_it_is(drafter_name: str) -> None:
    for seed in range(3):
        output = emitted(FIXED, drafter_name, PLAIN, seed=seed, verification=BlockVerification())
        assert p_value(output) > MIN_P_VALUE


@FULL
@pytest.mark.parametrize(
    "changes",
    [
        dict(rows="each", score="bounds"),
        dict(score="random", keep=0.5),
        dict(score="window", keep=0.3),
        dict(score="oracle", keep=0.3),
        dict(keep=0.3, budget="layer"),
    ],
)
@pytest.mark.full
def test_the_law_is_exact_whoever_chooses_blocks_without_looking_ahead(changes: dict) -> None:
    attention = dataclasses.replace(LITTLE, **changes)
    assert p_value(emitted(FIXED, "draft model", PLAIN, attention=attention)) > MIN_P_VALUE


@FULL
@pytest.mark.parametrize("attention", [LITTLE, None], ids=["both", "networks alone"])
@pytest.mark.full
def test_the_law_is_exact_with_sparse_networks_too(attention: SparseAttention | None) -> None:
    ffn = SparseFFN(select="threshold", tau=0.3, per="token")
    assert p_value(emitted(None, "draft model", PLAIN, attention=None, ffn=ffn)) < MIN_P_VALUE
    assert p_value(emitted(FIXED, "draft model", PLAIN, attention=attention, ffn=ffn)) > MIN_P_VALUE


@FULL
@pytest.mark.full
def test_the_law_is_exact_for_many_keys_and_longer_rounds() -> None:
    for seed in range(8):
        assert p_value(emitted(Lossless(max_steps=4, adapt=False), "draft model", PLAIN, seed=seed)) > MIN_P_VALUE
