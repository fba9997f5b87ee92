"""The loss in chunks equals the loss from all logits at once, gradients included, and never holds those logits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafting.heads import FullHead, LowRankHead, ScreenedHead, TrimmedHead
from specjax.models.layers import head_product
from specjax.training.distillation import LossPositions, distill
from specjax.training.draft_states import DraftStates
from specjax.training.losses import DraftLoss, position_losses
from specjax.training.target_batch import TargetBatch

BATCH_SIZE, NUM_TOKENS, WIDTH, VOCAB = 3, 11, 8, 40
# float32 sums of some hundred terms of order 1, in another order.
TOLERANCE = 1e-5

HEADS = {
    "one head, three steps": ((LowRankHead(rank=4), (1, 2, 3)),),
    "two heads, the second over a part of the tokens": ((FullHead(), (1,)), (TrimmedHead(num_tokens=13), (2, 3))),
    "a screened head over a shared one": ((ScreenedHead(rank=2, num_candidates=5, shared=True), (0, 4)),),
}


def batch() -> TargetBatch:
    rng = np.random.default_rng(0)
    return TargetBatch(
        tokens=jnp.asarray(rng.integers(VOCAB, size=(BATCH_SIZE, NUM_TOKENS)), jnp.int32),
        loss_mask=jnp.asarray(rng.random((BATCH_SIZE, NUM_TOKENS)) < 0.6),
        hidden=jnp.asarray(rng.normal(size=(BATCH_SIZE, NUM_TOKENS, WIDTH)), jnp.float32),
        features=None,
        feature_layers=(),
    )


def target_head() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(VOCAB, WIDTH)), jnp.float32)


def states_of(name: str) -> tuple[DraftStates, ...]:
    rng, groups = np.random.default_rng(2), []
    for index, (head, ahead) in enumerate(HEADS[name]):
        params = head.init_params(jax.random.key(index), hidden_size=WIDTH, vocab_size=VOCAB, dtype=jnp.float32)
        params = {key: rng.permutation(VOCAB)[:13].astype(np.int32) if key == "token_ids" else 20 * leaf for key, leaf in params.items()}
        hidden = jnp.asarray(rng.normal(size=(len(ahead), BATCH_SIZE, NUM_TOKENS, WIDTH)), jnp.float32)
        shared = 2 * target_head() if head.shared else None
        groups.append(DraftStates(hidden=hidden, head_params=params, shared_head=shared, head=head, ahead=ahead))
    return tuple(groups)


def trained_part(states: tuple[DraftStates, ...]) -> list[Any]:
    return [(group.hidden, {key: leaf for key, leaf in group.head_params.items() if key != "token_ids"}) for group in states]


def with_part(states: tuple[DraftStates, ...], part: list[Any]) -> tuple[DraftStates, ...]:
    pairs = zip(states, part, strict=True)
    return tuple(
        DraftStates(
            hidden=hidden, head_params=group.head_params | params, shared_head=group.shared_head, head=group.head, ahead=group.ahead
        )
        for group, (hidden, params) in pairs
    )


def plain(loss: DraftLoss, states: tuple[DraftStates, ...], chosen: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """From the logits of all positions; `chosen [B,T]` are the target's positions that count."""
    texts, total, sums, step = batch(), jnp.zeros(()), [], 0
    logits = head_product(texts.hidden, target_head())
    for group in states:
        for hidden, ahead in zip(group.hidden, group.ahead, strict=True):
            kept = slice(0, NUM_TOKENS - ahead)
            scores = group.head.training_scores(group.head_params, hidden[:, kept], group.shared_head)
            found = [position_losses(loss, logits[:, ahead:], one) for one in scores]
            mask, value = chosen[:, ahead:], sum(one.loss for one in found)
            total += loss.decay**step * (mask * value).sum() / mask.sum()
            sums.append(((mask * value).sum(), (mask * found[0].acceptance).sum(), mask.sum()))
            step += 1
    return total, jnp.asarray(sums).T


CASES = [(name, every) for name in HEADS for every in (1, 3)]
SHORT = ("two heads, the second over a part of the tokens", 3)


@pytest.mark.parametrize(("name", "every"), [case if case == SHORT else pytest.param(*case, marks=pytest.mark.full) for case in CASES])
def test_the_loss_in_chunks_equals_that_of_all_logits(name: str, every: int, full_grid: bool) -> None:
    loss, first = DraftLoss(kind="lk_lambda", decay=0.7), every // 2
    counted = np.zeros((BATCH_SIZE, NUM_TOKENS), bool)
    counted[:, :-1] = batch().loss_mask[:, 1:]
    chosen = np.zeros(counted.size, bool)
    chosen[np.flatnonzero(counted)[first::every]] = True

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def expected(part: Any) -> Any:
        return plain(loss, with_part(states_of(name), part), chosen.reshape(counted.shape))

    (value, sums), gradient = expected(trained_part(states_of(name)))

    for chunk_size in (4, 512) if full_grid else (4,):
        positions = LossPositions(every=every, chunk_size=chunk_size)

        @jax.jit
        def chunked(part: Any, states: Any, first: Any, positions: LossPositions = positions) -> Any:
            return distill(loss, with_part(states, part), batch(), target_head(), positions=positions, first=first)

        arguments = (trained_part(states_of(name)), states_of(name), jnp.int32(first))
        without = chunked(*arguments)
        (found, by_step), found_gradient = jax.jit(jax.value_and_grad(chunked, has_aux=True))(*arguments)
        for result in (found, without[0]):
            np.testing.assert_allclose(result, value, rtol=TOLERANCE)
        for result in (by_step, without[1]):
            np.testing.assert_allclose((result.loss, result.acceptance, result.count), sums, rtol=TOLERANCE)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=TOLERANCE), found_gradient, gradient)
        assert all(np.abs(leaf).max() > 100 * TOLERANCE for leaf in jax.tree.leaves(gradient))


def test_a_batch_in_which_nothing_counts_has_no_loss_and_no_gradient() -> None:
    texts = batch()
    empty = TargetBatch(texts.tokens, jnp.zeros_like(texts.loss_mask), texts.hidden * jnp.nan, None, ())
    states = states_of("one head, three steps")

    def loss(part: Any) -> jax.Array:
        return distill(DraftLoss(), with_part(states, part), empty, target_head())[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(trained_part(states))
    assert value == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


def equations(jaxpr: Any) -> list[Any]:
    pending, found = [jaxpr.jaxpr], []
    while pending:
        for equation in pending.pop().eqns:
            found.append(equation)
            pending += [getattr(value, "jaxpr", value) for value in equation.params.values() if hasattr(value, "eqns")]
    return found


def test_logits_of_a_chunk_only_and_no_gradient_of_what_is_frozen() -> None:
    states = states_of("one head, three steps")

    def loss(hidden: Any, params: Any) -> jax.Array:
        return distill(DraftLoss(), with_part(states, [(hidden, params)]), batch(), target_head(), positions=LossPositions(chunk_size=4))[0]

    (part,) = trained_part(states)
    both, head_only = (equations(jax.make_jaxpr(jax.grad(loss, argnums=which))(*part)) for which in ((0, 1), 1))
    shapes = {tuple(variable.aval.shape) for equation in both for variable in equation.outvars}
    assert (4, 3, VOCAB) in shapes
    assert not [shape for shape in shapes if shape[-1:] == (VOCAB,) and np.prod(shape) > 3 * 4 * VOCAB]

    def num_products(equations: list[Any]) -> int:
        return sum(equation.primitive.name == "dot_general" for equation in equations)

    # The target's, two of the low-rank head, two for their matrices; and two for the hidden states, of which one is on the way to `down`.
    assert num_products(both) == 7
    assert num_products(head_only) == 6


def test_impossible_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="LossPositions.every must be a positive int, got 0"):
        LossPositions(every=0)
    with pytest.raises(ValueError, match="LossPositions.chunk_size must be a positive int, got 2.5"):
        LossPositions(chunk_size=2.5)
