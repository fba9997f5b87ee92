"""Training a mixture-of-experts language model from nothing: its loss, its step, and how well it predicts text."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specjax import Transformer
from specjax.models.moe import ROUTER
from specjax.training.data import TokenBatch
from specjax.training.load_balance import load_balance
from specjax.training.optimizer import OptimizerConfig
from specjax.training.train_step import TrainState


@dataclasses.dataclass(frozen=True)
class MoETraining:
    """How a model is trained. Static.

    Attributes:
        model: With experts, whose `kernels.experts` has a gradient ("dense").
        optimizer: AdamW.
        balance_weight: What the load-balancing loss counts beside the predictions'.
        micro_batch: Rows whose activations are held at a time; divides the batch.
    """

    model: Transformer
    optimizer: OptimizerConfig
    balance_weight: float
    micro_batch: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TextLoss:
    """What a model makes of some texts.

    Attributes:
        sum_nll: float32, -log p of the tokens that count, summed (nats).
        num_tokens: float32, how many count.
        balance: float32, the load-balancing loss, mean over the layers.
        shares: `[L,E]` float32, of all choices in a layer those that fell on each expert.
    """

    sum_nll: jax.Array
    num_tokens: jax.Array
    balance: jax.Array
    shares: jax.Array


def text_loss(model: Transformer, params: Any, batch: TokenBatch) -> TextLoss:
    """Of whole texts, each token predicted from those before it.

    Args:
        model: With experts.
        params: Its params.
        batch: The texts.
    """
    tokens, loss_mask = jnp.asarray(batch.tokens), jnp.asarray(batch.loss_mask)
    moe = model.config.moe
    assert moe is not None
    cache = model.init_cache(batch_size=tokens.shape[0], capacity=tokens.shape[1])
    output, captured = model.apply({"params": params}, tokens, cache, mutable=[ROUTER])
    logits = model.apply({"params": params}, output.hidden[:, :-1], method="logits")
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    counted = loss_mask[:, 1:].astype(jnp.float32)
    layers = [layer["mlp"]["probs"][0] for layer in captured[ROUTER].values()]
    balance = [load_balance(probs, num_experts_per_token=moe.num_experts_per_token) for probs in layers]
    return TextLoss(
        sum_nll=(nll * counted).sum(),
        num_tokens=counted.sum(),
        balance=jnp.stack([layer.loss for layer in balance]).mean(),
        shares=jnp.stack([layer.shares for layer in balance]),
    )


@functools.partial(jax.jit, static_argnames="training", donate_argnames="state")
def moe_step(state: TrainState, batch: TokenBatch, num_steps: jax.Array, *, training: MoETraining) -> tuple[TrainState, TextLoss]:
    """One update: the mean loss of the tokens that count, and the load-balancing loss of every few rows.

    Args:
        state: Donated.
        batch: `[B,T]`.
        num_steps: int32, of the whole run, for the learning rate.
        training: Static.

    Returns:
        The new state, and what the old one made of the batch.
    """
    micro = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, training.micro_batch, x.shape[1]), batch)
    num_tokens = jnp.asarray(batch.loss_mask)[:, 1:].sum().astype(jnp.float32)
    num_micro = micro.tokens.shape[0]

    def objective(params: Any, rows: TokenBatch) -> tuple[jax.Array, TextLoss]:
        found = text_loss(training.model, params, rows)
        return found.sum_nll / num_tokens + training.balance_weight * found.balance / num_micro, found

    def add(gradients: Any, rows: TokenBatch) -> tuple[Any, TextLoss]:
        more, found = jax.grad(objective, has_aux=True)(state.trained, rows)
        return jax.tree.map(jnp.add, gradients, more), found

    gradients, found = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state.trained), micro)
    return state.updated(training.optimizer, gradients, num_steps), together(found)


@functools.partial(jax.jit, static_argnames=("model", "micro_batch"))
def evaluate_texts(params: Any, batch: TokenBatch, *, model: Transformer, micro_batch: int) -> TextLoss:
    """What a model makes of a batch; nothing changes."""
    micro = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, micro_batch, x.shape[1]), batch)
    return together(jax.lax.map(lambda rows: text_loss(model, params, rows), micro))


def together(parts: TextLoss) -> TextLoss:
    """One of several, whose fields are stacked."""
    return TextLoss(
        sum_nll=parts.sum_nll.sum(), num_tokens=parts.num_tokens.sum(), balance=parts.balance.mean(), shares=parts.shares.mean(axis=0)
    )
