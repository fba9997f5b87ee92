"""Drafters with several heads to choose from: of a published shape with random weights, or from checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.draft_heads import CUT_FROM_FULL, FULL, OF_SCREENED, GivenToken, describe, label, named_head, random_head
from experiments.experiment import ExperimentError
from experiments.models import load_model
from experiments.presets import PRESETS, random_params
from specjax import Kernels, ModelConfig, RopeConfig, Transformer
from specjax.drafting.draft_model_network import DraftModelConfig, DraftModelNetwork
from specjax.drafting.drafter import Drafter
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config, default_feature_layers
from specjax.drafting.eagle3_drafter import Eagle3Drafter, eagle3_params
from specjax.drafting.heads import DraftHead, FullHead, ScreenedHead, TrimmedHead
from specjax.drafting.heads.draft_head import DRAFT_HEAD
from specjax.drafting.heads.from_full_head import frequent_tokens, trimmed_from
from specjax.training.target_batch import TargetArrays

EAGLE3, DRAFT_MODEL = "eagle3", "draft_model"
Network = Eagle3 | DraftModelNetwork

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
        trained: Networks and params of those that a checkpoint brought, or that were made from one, by the same names.
        metadata: What those checkpoints remember, by the same names.
    """

    network: Network
    params: Mapping[str, Any]
    heads: dict[str, tuple[DraftHead, Mapping[str, jax.Array]]]
    trained: dict[str, tuple[Network, Mapping[str, Any]]]
    metadata: dict[str, Mapping[str, Any]]

    @property
    def family(self) -> str:
        """Which kind of drafter it is."""
        return EAGLE3 if isinstance(self.network, Eagle3) else DRAFT_MODEL


def random_candidates(preset: str, heads: Sequence[str], *, dtype: str, implementation: str) -> Candidates:
    """An EAGLE-3 drafter of the shape published for a target, with random weights, and heads by name.

    Matrices of one name and shape are one array.

    Raises:
        ExperimentError: No shape is known for that target, or a head that is not known or does not fit.
    """
    number = jnp.dtype(dtype)
    options: dict[str, Any] = dict(dtype=number, param_dtype=number, kernels=Kernels.of(implementation))
    network = Eagle3(eagle3_config(preset, GivenToken(vocab_size=1)), **options)
    made: dict = {}
    chosen = {name: named_head(name, **sizes_of(network)) for name in dict.fromkeys((FULL, *heads))}
    if any(head.shared for head in chosen.values()):
        raise ExperimentError(f"heads must have arrays of their own, got {', '.join(heads)}: the target's costs what the full one costs")
    return Candidates(
        network=network,
        params=random_params(network, jax.random.key(0)),
        heads={name: (head, random_head(head, **sizes_of(network), dtype=number, made=made)) for name, head in chosen.items()},
        trained={},
        metadata={},
    )


def load_families(paths: Sequence[str], *, dtype: str, implementation: str, cache_dir: str | None) -> dict[str, Candidates]:
    """Checkpoints of drafters: of each family those that differ in their heads alone.

    A family is "eagle3", or "draft_model": draft models as they are, and with a replaced head. Of these the full head is always there: each
    has it beside the other one. Of EAGLE-3 drafters a screened head brings it too: it holds a full head, and what is trained beside that
    does not pull at the drafter. Without any its weights are random, for timing.

    Raises:
        ExperimentError: Another kind of model, a head that is the target's own, two heads of one kind, or drafters of a family that differ
            elsewhere.
    """
    families: dict[str, Candidates] = {}
    loaded: dict[str, list[tuple[str, Network, Mapping[str, Any], Mapping[str, Any]]]] = {}
    for path in paths:
        found = load_model(path, dtype=dtype, implementation=implementation, cache_dir=cache_dir)
        network: Any = found.model
        if isinstance(network, Transformer):
            network = _as_it_is(network)
        if not isinstance(network, Eagle3 | DraftModelNetwork):
            raise ExperimentError(f"{path}: expected an EAGLE-3 drafter or a draft model, got a {type(network).__name__}")
        if isinstance(network, Eagle3) and network.config.head.shared:
            raise ExperimentError(f"{path}: its head is the target's own, and cannot be timed on another drafter")
        metadata = {} if found.checkpoint is None else found.checkpoint.metadata
        family = EAGLE3 if isinstance(network, Eagle3) else DRAFT_MODEL
        loaded.setdefault(family, []).append((path, network, found.params, metadata))
    for family, members in loaded.items():
        families[family] = _candidates(members, jnp.dtype(dtype))
    return families


def load_candidates(paths: Sequence[str], *, dtype: str, implementation: str, cache_dir: str | None) -> Candidates:
    """Those of `load_families`, which have to be one family.

    Raises:
        ExperimentError: As `load_families`, or there are two.
    """
    families = load_families(paths, dtype=dtype, implementation=implementation, cache_dir=cache_dir)
    if len(families) > 1:
        raise ExperimentError(f"the drafters must be of one kind, got {' and '.join(families)}: compare one kind at a time")
    return next(iter(families.values()))


def with_cut_heads(candidates: Candidates, names: Sequence[str], counts: Any, always: Sequence[int]) -> Candidates:
    """Beside the others, trimmed heads that are rows of the full one: FR-Spec, arXiv:2502.14856, which trains nothing.

    Args:
        candidates: Drafters, one of them with a trained full head.
        names: `trimmed:TOKENS`.
        counts: `[V]`, how often each token occurs.
        always: Tokens to keep however rare they are.

    Raises:
        ExperimentError: Another head, or one that does not fit.
    """
    network, params = candidates.trained[FULL]
    matrix = full_matrix(network, params)
    heads, trained, metadata = dict(candidates.heads), dict(candidates.trained), dict(candidates.metadata)
    full_record = metadata[FULL].get("training", {})
    variant = next(iter(full_record.get("variants", [])), {}) | {"init": CUT_FROM_FULL}
    for name in dict.fromkeys(names):
        head = named_head(name, **sizes_of(network))
        if not isinstance(head, TrimmedHead):
            raise ExperimentError(f"derive makes trimmed:TOKENS, which are rows of the full head, got {name!r}")
        try:
            fitted = trimmed_from(matrix, frequent_tokens(counts, head.num_tokens, always))
        except ValueError as error:
            raise ExperimentError(f"derive={name}: {error}") from None
        key = f"{label(describe(head, sizes_of(network)['vocab_size']))}, cut"
        heads[key] = head, fitted.params
        trained[key] = headed(network, params, head, fitted.params)
        metadata[key] = dict(metadata[FULL]) | {"training": full_record | {"variants": [variant]}}
    return dataclasses.replace(candidates, heads=heads, trained=trained, metadata=metadata)


def full_matrix(network: Network, params: Mapping[str, Any]) -> jax.Array:
    """`[V,D]` of a drafter with the full head."""
    if network.config.head.shared:
        return TargetArrays.of(network.config.decoder, params).lm_head
    return params[DRAFT_HEAD]["lm_head"]


def sizes_of(network: Network) -> dict[str, int]:
    """D and V of what the head of a network reads and scores."""
    decoder = network.config.decoder
    return {"hidden_size": decoder.hidden_size, "vocab_size": decoder.vocab_size}


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


def headed(
    network: Network, params: Mapping[str, Any], head: DraftHead, head_params: Mapping[str, jax.Array]
) -> tuple[Network, dict[str, Any]]:
    """A network, and its params, with another head; the arrays of its own are left out."""
    params = {name: value for name, value in params.items() if name != DRAFT_HEAD} | ({DRAFT_HEAD: head_params} if head_params else {})
    return network.clone(config=dataclasses.replace(network.config, head=head)), params


def ready(
    network: Network, params: Mapping[str, Any], target: ModelConfig, target_params: Mapping[str, Any]
) -> tuple[Drafter, dict[str, Any]]:
    """The drafter that a network is for a target, and its params.

    Args:
        network: The network.
        params: Its params.
        target: The target's shape.
        target_params: The target's params, of which the embedding may be needed.
    """
    if isinstance(network, DraftModelNetwork):
        return network.drafter, dict(params)
    drafter = Eagle3Drafter.for_target(network, target)
    return drafter, eagle3_params(drafter.model, params, target, target_params)


def with_head(
    network: Network,
    params: Mapping[str, Any],
    head: DraftHead,
    head_params: Mapping[str, jax.Array],
    target: ModelConfig,
    target_params: Mapping[str, Any],
) -> tuple[Drafter, dict[str, Any]]:
    """`ready` of `headed`."""
    return ready(*headed(network, params, head, head_params), target, target_params)


def feature_shape(network: Network, target: ModelConfig) -> tuple[int, Any] | None:
    """Width and dtype of the target's features that a drafter reads; `None` if it reads none."""
    return (network.config.num_features * target.hidden_size, jnp.dtype(network.dtype)) if isinstance(network, Eagle3) else None


def _as_it_is(model: Transformer) -> DraftModelNetwork:
    """A draft model with its own LM head."""
    return DraftModelNetwork(
        DraftModelConfig(decoder=model.config, head=FullHead(shared=True)),
        dtype=model.dtype,
        param_dtype=model.param_dtype,
        kernels=model.kernels,
    )


def _candidates(members: Sequence[tuple[str, Network, Mapping[str, Any], Mapping[str, Any]]], dtype: Any) -> Candidates:
    """Of one family: paths, networks, params, metadata."""
    trained, metadata, bodies = {}, {}, []
    for path, network, params, remembered in members:
        bodies.append(dataclasses.replace(network.config, head=FullHead()))
        if bodies[-1] != bodies[0]:
            raise ExperimentError(f"{path}: apart from its head it has another configuration than {members[0][0]}")
        name = label(describe(network.config.head, sizes_of(network)["vocab_size"]))
        if name in trained:
            raise ExperimentError(f"{path}: a second drafter with the head {name}")
        trained[name], metadata[name] = (network, params), remembered
    _, network, params, _ = members[0]
    if FULL not in trained and isinstance(network, DraftModelNetwork):
        trained[FULL], metadata[FULL] = headed(network, params, FullHead(shared=True), {}), {}
    whole = [name for name, (network, _) in trained.items() if isinstance(network.config.head, ScreenedHead)]
    if FULL not in trained and whole:
        network, params = trained[whole[0]]
        trained[FULL] = headed(network, params, FullHead(), {"lm_head": params[DRAFT_HEAD]["lm_head"]})
        record = metadata[whole[0]].get("training", {})
        variant = next(iter(record.get("variants", [])), {}) | {"init": OF_SCREENED}
        metadata[FULL] = dict(metadata[whole[0]]) | {"training": record | {"variants": [variant]}}
    heads = {name: (network.config.head, params.get(DRAFT_HEAD, {})) for name, (network, params) in trained.items()}
    if FULL not in heads:
        heads[FULL] = FullHead(), random_head(FullHead(), **sizes_of(network), dtype=dtype, made={})
    ordered = {FULL: heads.pop(FULL)} | heads
    return Candidates(network=network, params=params, heads=ordered, trained=trained, metadata=metadata)
