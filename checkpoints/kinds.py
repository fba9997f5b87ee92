"""The kinds of model that a checkpoint may hold: a configuration class and a module for each, and how they become JSON.

A module of any kind has `config`, `dtype` and `param_dtype`, and `init_params(rng)` for a tree of parameters. A draft model is a
"transformer" like any other; "draft_model" is one whose LM head was replaced.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

import jax

from specjax.drafting.draft_model_network import DraftModelConfig, DraftModelNetwork
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads import DraftHead, FullHead, LowRankHead, ScreenedHead, TrimmedHead
from specjax.drafting.hydra import Hydra, HydraConfig
from specjax.drafting.medusa import Medusa, MedusaConfig
from specjax.model_config import ModelConfig
from specjax.models.transformer import Transformer

# Name in the manifest → configuration and module.
_KINDS: Mapping[str, tuple[type, type]] = {
    "transformer": (ModelConfig, Transformer),
    "draft_model": (DraftModelConfig, DraftModelNetwork),
    "eagle3": (Eagle3Config, Eagle3),
    "medusa": (MedusaConfig, Medusa),
    "hydra": (HydraConfig, Hydra),
}
# Name beside a draft head's sizes → its class.
_HEADS: Mapping[str, type] = {"full": FullHead, "low_rank": LowRankHead, "trimmed": TrimmedHead, "screened": ScreenedHead}


def kind_of(config: Any) -> str:
    """The kind of a configuration.

    Raises:
        ValueError: It is of no kind that is saved.
    """
    for kind, (config_class, _) in _KINDS.items():
        if type(config) is config_class:
            return kind
    raise ValueError(f"config must be one of {', '.join(cls.__name__ for cls, _ in _KINDS.values())}, got {type(config).__name__}")


def build_model(config: Any, dtype: Any) -> Any:
    """The module of a configuration, computing in `dtype` with parameters of it."""
    module = _KINDS[kind_of(config)][1]
    return module(config, dtype=dtype, param_dtype=dtype)


def abstract_params(config: Any, dtype: Any) -> dict:
    """Shapes and dtypes of the parameters, without their values."""
    return jax.eval_shape(build_model(config, dtype).init_params, jax.random.key(0))


def head_kind(head: DraftHead) -> str:
    """The kind of a draft head.

    Raises:
        ValueError: It is of no kind that is saved.
    """
    for kind, head_class in _HEADS.items():
        if type(head) is head_class:
            return kind
    raise ValueError(f"a draft head must be one of {', '.join(cls.__name__ for cls in _HEADS.values())}, got {type(head).__name__}")


def config_to_dict(config: Any) -> dict[str, Any]:
    """JSON values for a configuration; a draft head in it is `{"kind": ..., ...}`.

    Raises:
        ValueError: A draft head of no kind that is saved.
    """
    hints, values = typing.get_type_hints(type(config)), {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if hints[field.name] is DraftHead:
            value = {"kind": head_kind(value), **dataclasses.asdict(value)}
        elif dataclasses.is_dataclass(value):
            value = config_to_dict(value)
        values[field.name] = value
    return values


def config_from_dict(values: Mapping[str, Any], kind: str = "transformer") -> Any:
    """The inverse of `config_to_dict`.

    Raises:
        ValueError: A kind or fields that this version does not know, or fields that are missing.
    """
    if kind not in _KINDS:
        raise ValueError(f"this version of specjax knows checkpoints of kind {', '.join(_KINDS)}, not {kind!r}: upgrade specjax")
    try:
        return _dataclass_from(_KINDS[kind][0], values)
    except (TypeError, KeyError, StopIteration) as error:
        raise ValueError(f"the saved configuration does not fit this version of specjax: {error}") from error


def _dataclass_from(cls: Any, values: Mapping[str, Any]) -> Any:
    """Nested dataclasses from nested mappings, tuples from JSON's lists."""
    hints = typing.get_type_hints(cls)
    fields = {name: _value_from(hints.get(name), value) for name, value in values.items()}
    return cls(**fields)


def _value_from(hint: Any, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_value_from(None, item) for item in value)
    if hint is DraftHead:
        return _head_from(value)
    if isinstance(value, Mapping):
        choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        return _dataclass_from(next(choice for choice in choices if dataclasses.is_dataclass(choice)), value)
    return value


def _head_from(value: Any) -> Any:
    if not isinstance(value, Mapping) or "kind" not in value:
        raise ValueError(f"the saved configuration is damaged: its draft head is {value!r:.80}")
    if value["kind"] not in _HEADS:
        raise ValueError(f"this version of specjax knows draft heads of kind {', '.join(_HEADS)}, not {value['kind']!r}: upgrade specjax")
    return _dataclass_from(_HEADS[value["kind"]], {name: field for name, field in value.items() if name != "kind"})
