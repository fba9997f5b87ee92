"""Params of a drafter that is a network on its target: the network's own, and beside them the target's arrays that it reads, not copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specjax.model_config import ModelConfig

NETWORK = "network"
# The target's arrays: its embedding `[V,D]`, its LM head `[V,D]`, the scale of its final norm `[D]`.
TARGET_EMBEDDING, TARGET_HEAD, TARGET_NORM = "target_embedding", "target_head", "target_norm"
# The same in words.
TARGET_ARRAYS: Mapping[str, str] = {TARGET_EMBEDDING: "embedding", TARGET_HEAD: "LM head", TARGET_NORM: "final norm"}


def with_target_arrays(params: Mapping[str, Any], names: Iterable[str], target: ModelConfig, target_params: Mapping[str, Any]) -> dict:
    """The drafter's params.

    Args:
        params: The network's own.
        names: Which of the target's arrays it reads.
        target: The target's shape.
        target_params: The target's params.
    """
    lm_head = "embedding" if target.tie_word_embeddings else "lm_head"
    paths = {TARGET_EMBEDDING: ("embedding",), TARGET_HEAD: (lm_head,), TARGET_NORM: ("final_norm", "scale")}
    drafter_params: dict[str, Any] = {NETWORK: params}
    for name in names:
        found: Any = target_params
        for part in paths[name]:
            found = found[part]
        drafter_params[name] = found
    return drafter_params


def check_target_arrays(params: Any, names: Iterable[str], target: ModelConfig, *, made_with: str) -> None:
    """Refuses params that lack the network or one of the target's arrays, or hold that of another target.

    Args:
        params: What was given.
        names: Which of the target's arrays there have to be.
        target: The target's shape.
        made_with: The function that makes such params.

    Raises:
        ValueError: As said.
    """
    names = tuple(names)
    if not isinstance(params, Mapping) or any(name not in params for name in (NETWORK, *names)):
        found = ", ".join(params) if isinstance(params, Mapping) else type(params).__name__
        raise ValueError(f"drafter_params must have {', '.join((NETWORK, *names))}, got {found}: make them with {made_with}")
    width = target.hidden_size
    for name in names:
        expected = (width,) if name == TARGET_NORM else (target.vocab_size, width)
        if params[name].shape != expected:
            raise ValueError(
                f"drafter_params.{name} should have the target's shape {list(expected)}, got {list(params[name].shape)}: "
                f"make them with {made_with}"
            )
