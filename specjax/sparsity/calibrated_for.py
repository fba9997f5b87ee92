"""The model that thresholds and anchors were found on: they say nothing of another one, and are refused there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specjax.checks import require

if TYPE_CHECKING:
    from specjax.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibratedFor:
    """A model's shape, as far as it decides what can be left out, and where its weights came from.

    Attributes:
        name: What the model was called.
        num_layers: L.
        hidden_size: D.
        intermediate_size: F; of a mixture, an expert's.
        num_heads: N.
        num_kv_heads: K.
        head_dim: H.
        num_experts: E; 0 without experts.
        num_experts_per_token: 0 without experts.
        source_sha256: Of the files that the weights were converted from, as conversion records them, in order; empty where that is not
            known.

    Raises:
        ValueError: Digests that are no tuple of strings.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int = 0
    num_experts_per_token: int = 0
    source_sha256: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        digests = self.source_sha256
        fits = isinstance(digests, tuple) and all(isinstance(digest, str) for digest in digests)
        require(fits, f"CalibratedFor.source_sha256 must be a tuple of strings, got {digests!r}")

    @classmethod
    def of(cls, model: ModelConfig, *, name: str, metadata: Mapping[str, Any] | None = None) -> CalibratedFor:
        """A model.

        Args:
            model: Its shape.
            name: Its name.
            metadata: What its checkpoint remembers.
        """
        return cls(name=name, source_sha256=_digests(metadata), **_shape(model))

    def check(self, model: ModelConfig) -> None:
        """Fits a shape.

        Raises:
            ValueError: Another one; says what was expected and what came.
        """
        got = _shape(model)
        expected = {name: getattr(self, name) for name in got}
        other = [name for name in got if got[name] != expected[name]]
        require(
            not other,
            f"this calibration is of {self.name!r}: expected {', '.join(f'{name} = {expected[name]}' for name in other)}, "
            f"got {', '.join(f'{name} = {got[name]}' for name in other)}",
        )

    def check_source(self, metadata: Mapping[str, Any]) -> None:
        """Fits where a model's weights came from; passes where either side does not know.

        Args:
            metadata: What the model's checkpoint remembers.

        Raises:
            ValueError: They came from other files.
        """
        ours, theirs = self.source_sha256, _digests(metadata)
        require(
            not ours or not theirs or ours == theirs,
            f"this calibration is of {self.name!r}: expected weights from files with SHA-256 {', '.join(ours)}, "
            f"got {metadata.get('source')!r} with {', '.join(theirs)}",
        )


def _shape(model: ModelConfig) -> dict[str, int]:
    moe = model.moe
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size if moe is None else moe.intermediate_size,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "num_experts": 0 if moe is None else moe.num_experts,
        "num_experts_per_token": 0 if moe is None else moe.num_experts_per_token,
    }


def _digests(metadata: Mapping[str, Any] | None) -> tuple[str, ...]:
    found = (metadata or {}).get("source_sha256") or {}
    return tuple(digest for _, digest in sorted(found.items()))
