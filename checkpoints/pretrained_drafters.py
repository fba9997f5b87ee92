"""Drafters that come with the package: trained by `specjax train`, exported by `specjax export`, each with the record of its training."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "pretrained"


def pretrained_drafters() -> dict[str, Path]:
    """The folders of all that there are, by name. `specjax convert NAME DESTINATION --target TARGET` makes a checkpoint of one.

    Example:
        >>> pretrained_drafters()["smollm2_135m_instruct_eagle3"]
    """
    return {path.parent.name: path.parent for path in sorted(_FOLDER.glob("*/config.json"))}
