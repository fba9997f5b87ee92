"""Opens a model or a drafter of any supported format: a GGUF file, a Hugging Face folder or hub id, a drafter as published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specjax.checkpoints.formats import gguf_file, hugging_face
from specjax.checkpoints.formats.drafters import open_drafter
from specjax.checkpoints.pretrained_drafters import pretrained_drafters
from specjax.checkpoints.source import WeightSource
from specjax.model_config import ModelConfig


def open_any_source(
    source: str | Path,
    *,
    tie_embeddings: bool | None = None,
    target: ModelConfig | None = None,
    feature_layers: Sequence[int] | None = None,
    draft_ids: str | None = None,
) -> WeightSource:
    """Finds out what is there, and opens it. Of the weights no more is read than that takes; those of a hub id are downloaded.

    Args:
        source: A folder or hub id, a `.gguf` file, or one of `pretrained_drafters()` by its name.
        tie_embeddings: Target models: whether the embedding is the LM head too; `None` goes by the source.
        target: Drafters: the target's shape. See `open_drafter`.
        feature_layers: EAGLE-3 drafters. See `open_drafter`.
        draft_ids: EAGLE-3 drafters. See `open_drafter`.

    Raises:
        ValueError: Nothing that is supported, or a damaged file; or an option that does not apply to what is there.
    """
    if str(source).endswith(".gguf"):
        return _plain(gguf_file.open_source(source, tie_embeddings=tie_embeddings), target, feature_layers, draft_ids)
    if not Path(source).exists():
        source = pretrained_drafters().get(str(source), source)
    folder, name = hugging_face.locate(source, tie_embeddings=tie_embeddings)
    drafter = open_drafter(folder, name=name, target=target, feature_layers=feature_layers, draft_ids=draft_ids)
    if drafter is None:
        return _plain(hugging_face.open_folder(folder, name, tie_embeddings=tie_embeddings), target, feature_layers, draft_ids)
    if tie_embeddings is not None:
        raise ValueError(f"{name} is a drafter: tie_embeddings does not apply to it")
    return drafter


def _plain(found: WeightSource, target: ModelConfig | None, feature_layers: Sequence[int] | None, draft_ids: str | None) -> WeightSource:
    given = {"target": target, "feature_layers": feature_layers, "draft_ids": draft_ids}
    unused = [option for option, value in given.items() if value is not None]
    if unused:
        raise ValueError(f"{found.name} is a language model and no drafter: {', '.join(unused)} does not apply to it")
    return found
