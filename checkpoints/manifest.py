"""`specjax.json`: what a checkpoint says of itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.atomic import replaced_folder
from specjax.checkpoints.kinds import config_from_dict, config_to_dict
from specjax.checkpoints.source import STORED_DTYPES
from specjax.model_config import ModelConfig

FORMAT_VERSION = 3
MANIFEST = "specjax.json"
# Formats before it have the same parameters for a language model, and others for a drafter.
_FIRST_WITH_DRAFT_HEADS = 3


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        kind: `"transformer"`, or the kind of drafter.
        config: The model's configuration.
        dtype: Name of the dtype of its floating-point parameters.
        metadata: Where the weights came from.
        format_version: Of the checkpoint.
        files: Bytes of each file of the parameters, by its path below their folder; `None` of a checkpoint that was written before they
            were noted.
    """

    kind: str
    config: Any
    dtype: str
    metadata: dict[str, Any]
    format_version: int = FORMAT_VERSION
    files: Mapping[str, int] | None = None


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder looks like one of ours."""
    return (Path(path) / MANIFEST).is_file()


def read_transformer_config(path: str | Path) -> ModelConfig:
    """The shape of a saved target or draft model.

    Raises:
        ValueError: As `read_manifest`; or the checkpoint is a drafter's.
    """
    manifest = read_manifest(path)
    if not isinstance(manifest.config, ModelConfig):
        raise ValueError(f"{path} is the checkpoint of a drafter ({manifest.kind}), not of a language model")
    return manifest.config


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `specjax.json` into a checkpoint's folder."""
    values = {
        "format_version": manifest.format_version,
        "kind": manifest.kind,
        "config": config_to_dict(manifest.config),
        "dtype": manifest.dtype,
        "metadata": manifest.metadata,
    }
    # Earlier versions take no notice of it: the format is the same.
    if manifest.files is not None:
        values["files"] = dict(manifest.files)
    (folder / MANIFEST).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_manifest(path: str | Path) -> Manifest:
    """Reads `specjax.json`, of this format or, for a language model, an earlier one.

    Raises:
        ValueError: No checkpoint, one of a newer format, a drafter's of an earlier one, or a damaged one.
    """
    path = Path(path).absolute()
    file = path / MANIFEST
    if not file.is_file():
        hint = "convert it first: specjax convert SOURCE DESTINATION" if (path / "config.json").is_file() else "there is no " + MANIFEST
        if replaced_folder(path).is_dir():
            hint += f"; a replacement was interrupted, and what was here lies in {replaced_folder(path).name}: the next run puts it back"
        raise ValueError(f"{path} is not a specjax checkpoint; {hint}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from error
    version = values.get("format_version") if isinstance(values, dict) else None
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(f"{path} has checkpoint format {version!r}, this version of specjax reads up to {FORMAT_VERSION}: upgrade specjax")
    if isinstance(version, bool) or version < 1:
        raise ValueError(f"{file} is damaged: it names the format {version!r}")
    values = _from_version_1(values) if version == 1 else values
    if version < _FIRST_WITH_DRAFT_HEADS and values.get("kind", "transformer") != "transformer":
        raise ValueError(
            f"{path} has checkpoint format {version}, in which drafters kept their LM heads in another way: convert the published drafter "
            "again, specjax convert SOURCE DESTINATION"
        )
    absent = [field for field in ("kind", "config", "dtype", "metadata") if field not in values]
    kinds = {"kind": str, "config": dict, "dtype": str, "metadata": dict, "files": dict}
    odd = [field for field, kind in kinds.items() if field in values and not isinstance(values[field], kind)]
    if absent or odd or values["dtype"] not in STORED_DTYPES:
        wrong = f"lacks {', '.join(absent)}" if absent else f"names the dtype {values['dtype']!r}"
        wrong = f"has {odd[0]} = {values[odd[0]]!r:.80}" if odd and not absent else wrong
        raise ValueError(f"{file} is damaged: it {wrong}")
    return Manifest(
        kind=values["kind"],
        config=config_from_dict(values["config"], values["kind"]),
        dtype=values["dtype"],
        metadata=values["metadata"],
        format_version=version,
        files=values.get("files"),
    )


def _from_version_1(values: dict[str, Any]) -> dict[str, Any]:
    """Format 1 held transformers only, and `qk_norm` was a bool."""
    config = values.get("model_config")
    config = dict(config) if isinstance(config, dict) else {}
    if isinstance(config.get("qk_norm"), bool):
        config["qk_norm"] = "head" if config["qk_norm"] else None
    return {**values, "kind": "transformer", "config": config}
