"""A finished drafter that a training begins with: its body stays, or is trained on, under another draft head.

An EAGLE-3 drafter, or a draft model with the target's tokenizer, whose LM head SlimSpec replaces as well. arXiv:2605.10453.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.kinds import kind_of
from specjax.checkpoints.store import Checkpoint, abstract_checkpoint
from specjax.checkpoints.tokenizer_check import check_same_tokenizer
from specjax.drafting.draft_model_network import DraftModelConfig, DraftModelNetwork
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.heads import DraftHead, FullHead, ScreenedHead
from specjax.drafting.heads.draft_head import DRAFT_HEAD
from specjax.model_config import ModelConfig
from specjax.models.transformer import Transformer
from specjax.training.hidden_covariance import draft_state_covariance
from specjax.training.new_drafters import HeadStart
from specjax.training.settings import DRAFT_MODEL, EAGLE3, TrainSettings
from specjax.training.target_batch import TargetArrays
from specjax.training.tasks import DraftModelTask, Eagle3Task, HeadOnly
from specjax.training.tasks.task import TrainingTask


def open_finished(path: str | Path, settings: TrainSettings, target: Checkpoint, *, dtype: Any) -> Checkpoint:
    """A drafter's checkpoint without its weights, checked against what is to be trained.

    Args:
        path: The checkpoint.
        settings: Its `drafter` says which kind there has to be.
        target: The target's checkpoint, perhaps without weights.
        dtype: Compute dtype.

    Raises:
        ValueError: Another kind, or a drafter that does not fit the target: its tokenizer, its vocabulary or its sizes.
    """
    finished = abstract_checkpoint(path, dtype=dtype)
    model, config = finished.model, target.model.config
    kinds = {EAGLE3: (Eagle3,), DRAFT_MODEL: (Transformer, DraftModelNetwork)}
    if settings.drafter not in kinds:
        raise ValueError(f"a training of {settings.drafter} cannot begin with a finished drafter, only one of {' or '.join(kinds)}")
    if not isinstance(model, kinds[settings.drafter]):
        found = kind_of(model.config)
        raise ValueError(f"{path}: to train {settings.drafter}, expected a checkpoint of that to begin with, got one of kind {found!r}")
    if isinstance(model, Eagle3):
        model.config.for_target(config)
    else:
        decoder = _decoder(model)
        if decoder.vocab_size != config.vocab_size:
            raise ValueError(
                f"{path}: the draft model has a vocabulary of {decoder.vocab_size} tokens, the target one of {config.vocab_size}: "
                "they must be the same"
            )
        check_same_tokenizer(target, finished)
    return finished


def hidden_size_of(model: Any) -> int:
    """D, the width of what a finished drafter's head reads."""
    return _decoder(model).hidden_size


def network_with_head(model: Any, head: DraftHead, target: ModelConfig) -> Any:
    """The network of a finished drafter with another head; parameters that are trained are float32.

    Args:
        model: The finished drafter's module.
        head: The head.
        target: The target's shape.
    """
    if isinstance(model, Eagle3):
        config = dataclasses.replace(model.config.for_target(target), head=head)
        return model.clone(config=config, param_dtype=jnp.float32)
    return DraftModelNetwork(DraftModelConfig(decoder=_decoder(model), head=head), dtype=model.dtype, param_dtype=model.param_dtype)


def goes_on_with(finished: Checkpoint, head: DraftHead) -> bool:
    """Whether this is the finished drafter's own head, whose arrays are gone on with."""
    return getattr(finished.model.config, "head", None) == head


def task_of(network: Any, settings: TrainSettings) -> TrainingTask:
    """How a network from `network_with_head` is trained."""
    if isinstance(network, DraftModelNetwork):
        return HeadOnly(DraftModelTask(network.drafter))
    task = Eagle3Task(network, num_steps=settings.chain)
    return HeadOnly(task) if settings.head_only else task


def full_head_of(model: Any, params: Mapping[str, Any], arrays: TargetArrays) -> jax.Array | None:
    """`[V,D]`, the full LM head of a finished drafter, from which others can be made; `None` if it has none.

    Args:
        model: Its module.
        params: Its params.
        arrays: The target's, which it may share.
    """
    if not isinstance(model, Eagle3):
        return TargetArrays.of(_decoder(model), params).lm_head
    head = model.config.head
    if not isinstance(head, FullHead | ScreenedHead) or getattr(head, "bias", False):
        return None
    return arrays.lm_head if head.shared else params[DRAFT_HEAD]["lm_head"]


def states_covariance(
    finished: Checkpoint, settings: TrainSettings, target: Checkpoint, batches: Iterable[Any], *, feature_layers: tuple[int, ...]
) -> Any:
    """The mean of `h h^T` over what the finished drafter's own head reads, see `draft_state_covariance`."""
    model, config = finished.model, target.model.config
    head = model.config.head if isinstance(model, Eagle3) else FullHead(shared=True)
    task = task_of(network_with_head(model, head, config), settings)
    return draft_state_covariance(task, finished.params, target.model, target.params, batches, feature_layers=feature_layers)


def params_with_head(finished: Checkpoint, head: DraftHead, start: HeadStart | None, rng: jax.Array) -> dict:
    """The params that a training begins with.

    Args:
        finished: The finished drafter.
        head: Its new head; if it is the one that it has, its arrays are gone on with.
        start: What another head is made from; `None` if none is made, or there is no full head to make it from.
        rng: For what is random.

    Raises:
        ValueError: A head that is neither the drafter's own nor can be made.
    """
    body = {name: leaf for name, leaf in finished.params.items() if name != DRAFT_HEAD}
    if goes_on_with(finished, head):
        arrays = finished.params.get(DRAFT_HEAD, {})
    elif start is None:
        own = getattr(finished.model.config, "head", None)
        raise ValueError(f"{head} cannot be made from the drafter's {own}: begin with a drafter that has the full head")
    else:
        arrays = start.params(head, rng)
    return body | ({DRAFT_HEAD: arrays} if arrays else {})


def _decoder(model: Any) -> ModelConfig:
    return getattr(model.config, "decoder", model.config)
