"""Finds out whether a folder holds a drafter, and of which format: EAGLE-3, Medusa, Hydra."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.checkpoints.formats import eagle3_format, hydra_format, medusa_format
from specjax.checkpoints.formats.fields import optional_list, read_json
from specjax.checkpoints.formats.tensor_files import open_file, open_weight_files
from specjax.checkpoints.source import WeightSource
from specjax.model_config import ModelConfig

HEAD_FILES = (*medusa_format.FILES, *hydra_format.FILES)
"""Files that only drafters have."""

_ALGORITHMS = ("eagle3", "medusa")
# In the names of their classes.
_NAMES = ("eagle", "medusa", "hydra")


def open_drafter(
    folder: str | Path,
    *,
    name: str | None = None,
    target: ModelConfig | None = None,
    feature_layers: Sequence[int] | None = None,
    draft_ids: str | None = None,
) -> WeightSource | None:
    """Opens a drafter. Its weights may be in safetensors or in PyTorch's format, which is read without running what is pickled in it.

    Which states of the target an EAGLE-3 drafter reads: `eagle_aux_hidden_state_layer_ids` at the top level of config.json are boundaries
    (boundary i is the input of layer i: speculators, vLLM). Those in `eagle_config` may instead name layers whose output is meant
    (SpecForge, Model-Optimizer); what equals the default `(2, L//2, L-3)` in one of the two ways, or contains L, is read in that way,
    otherwise a first id of 1 means outputs, and anything else is refused until `feature_layers` says. Without ids it is
    `default_feature_layers` of the target.

    Args:
        folder: config.json and the weights.
        name: What to call it; the folder's own name if `None`.
        target: The target's shape. If it is given, the drafter is checked against it and its `feature_layers` are settled; otherwise they
            stay `None` where config.json has none, until `Eagle3Config.for_target`.
        feature_layers: EAGLE-3: boundaries of the target to read, in the place of what config.json says.
        draft_ids: EAGLE-3: how to read `d2t`, `"offsets"` or `"absolute"`; `None` finds out, or refuses where both are possible.

    Returns:
        The drafter, for `check_source` and `stream_params`; `None` if the folder holds something else, such as a plain language model.

    Raises:
        ValueError: A drafter that is not supported; the message names the field or tensor.

    Example:
        >>> source = open_drafter("EAGLE3-LLaMA3.1-Instruct-8B", target=target.config)
        >>> check_source(source)
        >>> params = read_params(source, "bfloat16")
    """
    folder = Path(folder)
    name = folder.resolve().name if name is None else name
    if not (folder / "config.json").is_file():
        return None
    raw = read_json(folder / "config.json", name)
    try:
        return _open(folder, name, raw, target=target, feature_layers=feature_layers, draft_ids=draft_ids)
    except ValueError as error:
        raise error if str(error).startswith(f"{name}: ") else ValueError(f"{name}: {error}") from error


def may_be_drafter(raw: Mapping[str, Any], tensor_names: Iterable[str]) -> bool:
    """Whether a folder may hold a drafter, by what there is without its weights. `open_drafter` finds out whether it does.

    Args:
        raw: The contents of config.json.
        tensor_names: Names in the weight files, as far as they are known.
    """
    classes = " ".join([*(optional_list(raw, "architectures", str) or []), str(raw.get("model_type"))]).lower()
    said = raw.get("speculators_model_type") is not None or any(name in classes for name in _NAMES)
    return said or medusa_format.detects(raw) or hydra_format.detects(raw) or eagle3_format.detects(raw, tuple(tensor_names))


def _open(
    folder: Path,
    name: str,
    raw: dict[str, Any],
    *,
    target: ModelConfig | None,
    feature_layers: Sequence[int] | None,
    draft_ids: str | None,
) -> WeightSource | None:
    algorithm = raw.get("speculators_model_type")
    if algorithm is not None and algorithm not in _ALGORITHMS:
        raise ValueError(f"speculators_model_type {algorithm!r} is not supported; supported: {', '.join(_ALGORITHMS)}")
    for reader in (medusa_format, hydra_format):
        own = next((folder / file for file in reader.FILES if (folder / file).is_file()), None)
        if own is not None:
            return reader.open_source(folder, name, raw, open_file(own, name), target=target)
        if reader.detects(raw):
            files = open_weight_files(folder, name)
            if files is None:
                raise ValueError(f"needs {', '.join(reader.FILES)} or model.safetensors, and has none of them")
            return reader.open_source(folder, name, raw, files, target=target)
    files = open_weight_files(folder, name)
    if files is None or not eagle3_format.detects(raw, tuple(files.tensors)):
        return None
    return eagle3_format.open_source(folder, name, raw, files, target=target, feature_layers=feature_layers, draft_ids=draft_ids)
