"""EAGLE-3 drafters with several heads to choose from: of a published shape with random weights, or from checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.draft_heads import FULL, GivenToken, describe, label, named_head, random_head
from experiments.experiment import ExperimentError
from experiments.models import load_model
from experiments.presets import PRESETS, random_params
from specjax import ModelConfig, RopeConfig
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config, default_feature_layers
from specjax.drafting.eagle3_drafter import Eagle3Drafter, eagle3_params
from specjax.drafting.heads import DraftHead, FullHead
from specjax.drafting.heads.draft_head import DRAFT_HEAD

# What published drafters of these targets have in their one layer: FFN width, query heads, key/value heads, head size.
_EAGLE3_LAYERS = {
    "llama31_8b": (14336, 32, 8, 128),
    "gpt_oss_20b": (17280, 64, 8, 64),
    "qwen3_30b_a3b": (12288, 32, 4, 128),
    "tiny": (48, 4, 2, 8),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """A drafter without its head, and heads to put on it.

    Attributes:
        network: The drafter; which head its config has does not count.
        params: Its params.
        heads: Heads and their arrays by name, "full" first: it is what the others are measured against.
        trained: Networks and params of those that a checkpoint brought, by the same names.
        metadata: What those checkpoints remember, by the same names.
    """

    network: Eagle3
    params: Mapping[str, Any]
    heads: dict[str, tuple[DraftHead, Mapping[str, jax.Array]]]
    trained: dict[str, tuple[Eagle3, Mapping[str, Any]]]
    metadata: dict[str, Mapping[str, Any]]


def random_candidates(preset: str, heads: Sequence[str], *, dtype: str, implementation: str) -> Candidates:
    """The shape published for a target, with random weights, and heads by name; matrices of one name and shape are one array.

    Raises:
        ExperimentError: No shape is known for that target, or a head that is not known or does not fit.
    """
    number = jnp.dtype(dtype)
    network = Eagle3(
        eagle3_config(preset, GivenToken(vocab_size=1)), dtype=number, param_dtype=number, attention_implementation=implementation
    )
    decoder, made = network.config.decoder, {}
    sizes: dict[str, Any] = {"hidden_size": decoder.hidden_size, "vocab_size": decoder.vocab_size}
    chosen = {name: named_head(name, **sizes) for name in dict.fromkeys((FULL, *heads))}
    if any(head.shared for head in chosen.values()):
        raise ExperimentError(f"heads must have arrays of their own, got {', '.join(heads)}: the target's costs what the full one costs")
    return Candidates(
        network=network,
        params=random_params(network, jax.random.key(0)),
        heads={name: (head, random_head(head, **sizes, dtype=number, made=made)) for name, head in chosen.items()},
        trained={},
        metadata={},
    )


def load_candidates(paths: Sequence[str], *, dtype: str, implementation: str, cache_dir: str | None) -> Candidates:
    """Checkpoints that differ in their heads alone, and a full head with random weights unless one of them has one.

    Raises:
        ExperimentError: Not an EAGLE-3 drafter, a head that is the target's own, two of one kind, or drafters that differ elsewhere.
    """
    trained: dict[str, tuple[Eagle3, Mapping[str, Any]]] = {}
    bodies, metadata = [], {}
    for path in paths:
        loaded = load_model(path, dtype=dtype, implementation=implementation, cache_dir=cache_dir)
        network: Any = loaded.model
        if not isinstance(network, Eagle3):
            raise ExperimentError(f"{path}: expected an EAGLE-3 drafter, got a {type(network).__name__}")
        head = network.config.head
        if head.shared:
            raise ExperimentError(f"{path}: its head is the target's own, and cannot be timed on another drafter")
        bodies.append(dataclasses.replace(network.config, head=FullHead()))
        if bodies[-1] != bodies[0]:
            raise ExperimentError(f"{path}: apart from its head it has another configuration than {paths[0]}")
        name = label(describe(head, network.config.decoder.vocab_size))
        if name in trained:
            raise ExperimentError(f"{path}: a second drafter with the head {name}")
        trained[name] = network, loaded.params
        metadata[name] = {} if loaded.checkpoint is None else loaded.checkpoint.metadata
    network, params = next(iter(trained.values()))
    heads: dict[str, tuple[DraftHead, Mapping[str, jax.Array]]] = {
        name: (network.config.head, params[DRAFT_HEAD]) for name, (network, params) in trained.items()
    }
    if FULL not in heads:
        decoder = network.config.decoder
        sizes: dict[str, Any] = {"hidden_size": decoder.hidden_size, "vocab_size": decoder.vocab_size}
        heads[FULL] = FullHead(), random_head(FullHead(), **sizes, dtype=jnp.dtype(dtype), made={})
    ordered = {FULL: heads.pop(FULL)} | heads
    return Candidates(network=network, params=params, heads=ordered, trained=trained, metadata=metadata)


def eagle3_config(name: str, head: DraftHead) -> Eagle3Config:
    """The published shape of an EAGLE-3 drafter for a preset, with this head.

    Raises:
        ExperimentError: None is known for that preset.
    """
    if name not in _EAGLE3_LAYERS:
        raise ExperimentError(f"the shape of an EAGLE-3 drafter is known for {', '.join(_EAGLE3_LAYERS)}, not for {name!r}")
    target = PRESETS[name]()
    intermediate_size, num_heads, num_kv_heads, head_dim = _EAGLE3_LAYERS[name]
    decoder = ModelConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rope=RopeConfig(),  # the frequencies cost the same, whatever they are
    )
    layers = default_feature_layers(target.num_layers)
    return Eagle3Config(decoder=decoder, target_hidden_size=target.hidden_size, head=head, feature_layers=layers)


def with_head(
    network: Eagle3,
    params: Mapping[str, Any],
    head: DraftHead,
    head_params: Mapping[str, jax.Array],
    target: ModelConfig,
    target_params: Mapping[str, Any],
) -> tuple[Eagle3Drafter, dict[str, Any]]:
    """A drafter, and its params, that is this network with another head.

    Args:
        network: An EAGLE-3 network.
        params: Its params; the arrays of its own head are left out.
        head: The head, not a shared one.
        head_params: Its arrays.
        target: The target's shape.
        target_params: The target's params, of which the embedding may be needed.
    """
    drafter = Eagle3Drafter.for_target(network.clone(config=dataclasses.replace(network.config, head=head)), target)
    params = {name: value for name, value in params.items() if name != DRAFT_HEAD} | ({DRAFT_HEAD: head_params} if head_params else {})
    return drafter, eagle3_params(drafter.model, params, target, target_params)
