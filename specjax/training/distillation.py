"""The loss of a batch and its gradient, without the logits of all positions: those of V = 152,000 tokens are 0.6 MB a position.

Target positions are processed in chunks. A chunk's target logits are computed once for all steps of the drafter, and the gradient of the
head and of the hidden states is taken in the same pass: three products with the LM head for each step, where computing the logits again in
a backward pass would take four. Chunks hold positions that count and no others, and there are as many of them as the batch needs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafting.heads import DraftHead
from specjax.models.layers import head_product
from specjax.training.draft_states import DraftStates
from specjax.training.losses import DraftLoss, position_losses
from specjax.training.target_batch import TargetBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossPositions:
    """Which positions the loss is taken at, and how many at once.

    Attributes:
        every: The loss is taken at every k-th position that counts, beginning with another one in each training step. The LM heads' part
            of the time is divided by it.
        chunk_size: Target positions whose logits are held at once; `[chunk_size, I, V]` float32 for I steps.

    Raises:
        ValueError: Not a positive int.
    """

    every: int = 1
    chunk_size: int = 512

    def __post_init__(self) -> None:
        for name in ("every", "chunk_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"LossPositions.{name} must be a positive int, got {value!r}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepSums:
    """Sums over the positions that counted, for each of I steps; they add up over batches and devices.

    Attributes:
        loss: `[I]` float32, unweighted.
        acceptance: `[I]` float32, expected acceptance of a sampled draft token; of a head with several training scores, by the first.
        count: `[I]` float32, positions.
    """

    loss: jax.Array
    acceptance: jax.Array
    count: jax.Array


def distill(
    loss: DraftLoss,
    states: tuple[DraftStates, ...],
    batch: TargetBatch,
    target_head: jax.Array,
    *,
    positions: LossPositions = LossPositions(),
    first: jax.Array | int = 0,
    axis_name: str | None = None,
) -> tuple[jax.Array, StepSums]:
    """The drafter's loss on a batch: of each step the mean over its positions, times the step's weight, summed.

    It can be differentiated once, in reverse, with respect to `states`.

    Args:
        loss: Which.
        states: The drafter's steps in order.
        batch: What the target made of the texts.
        target_head: `[V,D]`.
        positions: Where, and how many at once.
        first: Which of every `positions.every` positions to begin with; traced.
        axis_name: Mesh axis over which the batch is split. Means are over all of it; the result is this device's share, to be summed.

    Returns:
        The loss, a scalar, and sums by step.
    """
    num_positions = batch.tokens.shape[1]
    # Position u makes the prediction of token u + 1.
    counted = jnp.pad(batch.loss_mask[:, 1:], ((0, 0), (0, 1))).reshape(-1)
    chunk_size = min(positions.chunk_size, -(-counted.size // positions.every))
    chosen, is_counted = _choose(counted, positions.every, first, chunk_size)
    ahead = jnp.asarray([distance for group in states for distance in group.ahead])
    valid = is_counted & (chosen % num_positions >= ahead[:, None])
    count = valid.sum(axis=1).astype(jnp.float32)
    total = count if axis_name is None else jax.lax.psum(count, axis_name)
    weights = valid * (loss.step_weights(len(ahead)) / jnp.maximum(total, 1.0))[:, None]

    hidden = []
    for group in states:
        rows = jnp.maximum(chosen - jnp.asarray(group.ahead)[:, None], 0)
        flat = group.hidden.reshape(len(group.ahead), counted.size, -1)
        hidden.append(jnp.take_along_axis(flat, rows[..., None], axis=1))
    plan = _Plan(loss=loss, heads=tuple(group.head for group in states), chunk_size=chunk_size)
    fixed = _Fixed(
        target_hidden=batch.hidden.reshape(counted.size, -1)[chosen],
        target_head=target_head,
        shared_heads=tuple(group.shared_head for group in states),
        weights=weights,
        valid=valid,
        num_chunks=-(-is_counted.sum() // chunk_size),
    )
    sums: Any = _chunked(plan, tuple(hidden), tuple(group.head_params for group in states), fixed)
    value, loss_sums, acceptance_sums = sums
    return value, StepSums(loss=loss_sums, acceptance=acceptance_sums, count=count)


def _choose(counted: jax.Array, every: int, first: jax.Array | int, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """Flat positions, those that count in front and in order, as many as fill chunks; and which of them count."""
    order = jnp.argsort(~counted, stable=True)
    padding = -counted.size % (every * chunk_size)
    order, counted = jnp.pad(order, (0, padding)), jnp.pad(counted[order], (0, padding))

    def pick(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x.reshape(-1, every), first, axis=1, keepdims=False)

    return pick(order), pick(counted)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static."""

    loss: DraftLoss
    heads: tuple[DraftHead, ...]
    chunk_size: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Fixed:
    """Arrays without a gradient."""

    target_hidden: jax.Array  # [P,D]
    target_head: jax.Array  # [V,D]
    shared_heads: tuple[jax.Array | None, ...]
    weights: jax.Array  # [I,P]
    valid: jax.Array  # [I,P]
    num_chunks: jax.Array


def _chunk_loss(
    plan: _Plan, hidden: tuple[jax.Array, ...], head_params: tuple[Any, ...], fixed: _Fixed, start: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Weighted loss of one chunk, and its sums by step; `hidden` is the chunk's, `[I,n,D]` for each group."""

    def here(x: jax.Array, axis: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, start, plan.chunk_size, axis)

    target_logits = head_product(here(fixed.target_hidden, 0), fixed.target_head)
    weights, valid = here(fixed.weights, 1), here(fixed.valid, 1)
    losses, acceptances = [], []
    for head, states, params, shared_head in zip(plan.heads, hidden, head_params, fixed.shared_heads, strict=True):
        # [n,I,D]: all steps' scores of a position side by side, so that what they are compared with is read from memory once.
        scored = head.training_scores(params, jnp.swapaxes(states, 0, 1), shared_head)
        found = [position_losses(plan.loss, target_logits[:, None], scores) for scores in scored]
        losses.append(functools.reduce(jnp.add, [one.loss for one in found]).T)
        acceptances.append(found[0].acceptance.T)
    # Positions that do not count may hold anything.
    loss = jnp.where(valid, jnp.concatenate(losses), 0.0)
    acceptance = jnp.where(valid, jnp.concatenate(acceptances), 0.0)
    return (weights * loss).sum(), (loss.sum(axis=1), acceptance.sum(axis=1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(plan: _Plan, hidden: tuple[jax.Array, ...], head_params: tuple[Any, ...], fixed: _Fixed) -> tuple[jax.Array, ...]:
    """Loss, loss sums `[I]` and acceptance sums `[I]`, of which only the first has a gradient."""

    def body(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = index * plan.chunk_size
        value, by_step = _chunk_loss(plan, _slice(hidden, start, plan.chunk_size), head_params, fixed, start)
        return tuple(a + b for a, b in zip(sums, (value, *by_step), strict=True))

    return jax.lax.fori_loop(0, fixed.num_chunks, body, _zero_sums(fixed))


def _chunked_forward(plan: _Plan, hidden: Any, head_params: Any, fixed: Any) -> tuple[tuple[jax.Array, ...], Any]:
    """The same, with the gradient as the residual: nothing is left to the backward pass but a factor."""
    # Only what is being differentiated: not token ids, nor the hidden states of a drafter that is frozen.
    trained = [
        [leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.inexact) for leaf in jax.tree.leaves(part, is_leaf=_is_primal)]
        for part in (hidden, head_params)
    ]
    hidden, head_params, fixed = jax.tree.map(lambda leaf: leaf.value, (hidden, head_params, fixed), is_leaf=_is_primal)
    hidden_leaves, hidden_tree = jax.tree.flatten(hidden)
    head_leaves, head_tree = jax.tree.flatten(head_params)
    # Cast once, not in every chunk.
    compute_dtype = hidden_leaves[0].dtype
    cast = [leaf.astype(compute_dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf for leaf in head_leaves]

    def loss_of(variables: tuple[list[jax.Array], list[jax.Array]], states: list[jax.Array], start: jax.Array) -> tuple[jax.Array, Any]:
        states = _replaced(states, trained[0], variables[0])
        params = _replaced(cast, trained[1], variables[1])
        return _chunk_loss(plan, jax.tree.unflatten(hidden_tree, states), jax.tree.unflatten(head_tree, params), fixed, start)

    def body(index: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        sums, of_hidden, of_head = carry
        start = index * plan.chunk_size
        states = _slice(hidden_leaves, start, plan.chunk_size)
        variables = (_selected(states, trained[0]), _selected(cast, trained[1]))
        (value, by_step), (new_hidden, new_head) = jax.value_and_grad(loss_of, has_aux=True)(variables, states, start)
        sums = tuple(a + b for a, b in zip(sums, (value, *by_step), strict=True))
        of_hidden = [jax.lax.dynamic_update_slice_in_dim(all_, new, start, 1) for all_, new in zip(of_hidden, new_hidden, strict=True)]
        of_head = [total + new.astype(jnp.float32) for total, new in zip(of_head, new_head, strict=True)]
        return sums, of_hidden, of_head

    of_hidden = [jnp.zeros_like(leaf) for leaf in _selected(hidden_leaves, trained[0])]
    of_head = [jnp.zeros(leaf.shape, jnp.float32) for leaf in _selected(head_leaves, trained[1])]
    sums, of_hidden, of_head = jax.lax.fori_loop(0, fixed.num_chunks, body, (_zero_sums(fixed), of_hidden, of_head))
    of_head = [gradient.astype(leaf.dtype) for gradient, leaf in zip(of_head, _selected(head_leaves, trained[1]), strict=True)]
    nothing = [None] * len(hidden_leaves), [None] * len(head_leaves)
    gradients = (
        jax.tree.unflatten(hidden_tree, _replaced(nothing[0], trained[0], of_hidden)),
        jax.tree.unflatten(head_tree, _replaced(nothing[1], trained[1], of_head)),
    )
    return sums, gradients


def _chunked_backward(plan: _Plan, gradients: tuple[Any, Any], cotangents: tuple[Any, ...]) -> tuple[Any, Any, None]:
    of_loss = cotangents[0]
    scaled = [
        jax.tree.map(lambda x: None if x is None else (x * of_loss).astype(x.dtype), part, is_leaf=lambda x: x is None)
        for part in gradients
    ]
    return (*scaled, None)


_chunked.defvjp(_chunked_forward, _chunked_backward, symbolic_zeros=True)


def _is_primal(leaf: Any) -> bool:
    return isinstance(leaf, jax.custom_derivatives.CustomVJPPrimal)


def _zero_sums(fixed: _Fixed) -> tuple[jax.Array, ...]:
    steps = jnp.zeros((fixed.valid.shape[0],), jnp.float32)
    return jnp.zeros((), jnp.float32), steps, steps


def _slice(arrays: Any, start: jax.Array, size: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, 1), arrays)


def _selected(leaves: list[Any], chosen: list[bool]) -> list[Any]:
    return [leaf for leaf, is_chosen in zip(leaves, chosen, strict=True) if is_chosen]


def _replaced(leaves: list[Any], chosen: list[bool], new: list[Any]) -> list[Any]:
    """The leaves with the chosen ones replaced, in order."""
    replacements = iter(new)
    return [next(replacements) if is_chosen else leaf for leaf, is_chosen in zip(leaves, chosen, strict=True)]
