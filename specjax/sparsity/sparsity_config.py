"""What a sparse verification leaves out: frozen, checked, hashable settings. Lossy wherever anything is left out. arXiv:2512.21911.

Nothing is sparse by default. Attention, feed-forward networks and mixtures of experts have settings of their own, in their own files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.checks import is_int, require
from specjax.sparsity.attention_sparsity import Reuse, SparseAttention
from specjax.sparsity.calibrated_for import CalibratedFor
from specjax.sparsity.sparse_ffn import SparseFFN
from specjax.sparsity.sparse_moe import SparseMoE
from specjax.two_level.lossless import Lossless

if TYPE_CHECKING:
    from specjax.model_config import ModelConfig
    from specjax.verification.rule import VerificationRule

# The fields that may be `None`.
_PARTS: dict[str, Any] = {
    "attention": SparseAttention,
    "ffn": SparseFFN,
    "moe": SparseMoE,
    "lossless": Lossless,
    "calibrated_for": CalibratedFor,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparsityConfig:
    """What the passes of decoding leave out; prefill is always dense.

    Lossy, unless it is empty (the default), everything is kept, or dense passes check what sparse ones commit (`lossless`).

    Example:
        >>> sparsity = SparsityConfig(attention=SparseAttention(keep=0.1, dense_below=4096), reuse=Reuse(anchors=(0, 1, 2, 8, 16)))
        >>> config = GenerateConfig(max_new_tokens=128, sparsity=sparsity)

    Attributes:
        attention: Sparse attention in the layers that see the whole context; those with a sliding window or with attention sinks stay
            dense. `None`: all are dense.
        ffn: Channels that the feed-forward networks leave out, and the experts' networks. `None`: none.
        moe: Experts that tokens do without. `None`: none.
        reuse: Which layers share a choice of blocks.
        refresh_every: Every so many steps one is dense: it also reads the tokens that the sparse steps since the last such step committed
            once more, and replaces their keys and values, which sparse passes only approximate, so that errors do not add up. 0 is never.
            Such a step is a dense pass over `refresh_every * (G + 1)` rows in the place of one over G + 1.
        lossless: Dense passes check what sparse passes commit, and the output is that of dense verification. `None`: nothing does.
        calibrated_for: The model that these settings were found on; with another they are refused. `None`: any.

    Raises:
        ValueError: A field of another type, anchors without sparse attention, refreshes or `lossless` where nothing is sparse, or both.
    """

    attention: SparseAttention | None = None
    ffn: SparseFFN | None = None
    moe: SparseMoE | None = None
    reuse: Reuse = Reuse()
    refresh_every: int = 0
    lossless: Lossless | None = None
    calibrated_for: CalibratedFor | None = None

    def __post_init__(self) -> None:
        for name, kind in _PARTS.items():
            value = getattr(self, name)
            fits = value is None or isinstance(value, kind)
            require(fits, f"SparsityConfig.{name} must be None or a {kind.__name__}, got {value!r}")
        reuse, every = self.reuse, self.refresh_every
        require(isinstance(reuse, Reuse), f"SparsityConfig.reuse must be a Reuse, got {reuse!r}")
        without = self.attention is None and reuse.anchors is not None
        require(not without, f"SparsityConfig.reuse needs SparsityConfig.attention, got anchors {reuse.anchors} and no sparse attention")
        is_count = is_int(every, 0)
        require(is_count, f"SparsityConfig.refresh_every must be an int of at least 0, got {every!r}")
        require(not (every and self.is_dense), f"SparsityConfig.refresh_every = {every} needs something sparse to refresh")
        checks = self.lossless is not None
        require(not (checks and self.is_dense), f"SparsityConfig.lossless needs something sparse to check, got {self.lossless!r}")
        require(
            not (checks and every), f"SparsityConfig.lossless refreshes at each of its checks: refresh_every must be 0 with it, got {every}"
        )
        unpriced = self.lossless is not None and self.lossless.adapt and self.lossless.step_cost is None and self.attention is None
        require(not unpriced, f"Lossless.adapt needs a measured step_cost where attention is dense, got {self.lossless!r}")

    @property
    def is_dense(self) -> bool:
        """Whether nothing is left out, whatever the length."""
        return self.attention is None and self.ffn is None and self.moe is None

    @property
    def sees_later_rows(self) -> bool:
        """Whether a row's distribution may depend on draft rows behind it: then no lossless check may rely on it."""
        parts = [part.sees_later_rows for part in (self.attention, self.ffn, self.moe) if part is not None]
        return any(parts)

    def attention_layers(self, model: ModelConfig) -> tuple[int, ...]:
        """The layers whose attention is sparse."""
        if self.attention is None or model.attention_sinks:
            return ()
        return tuple(layer for layer in range(model.num_layers) if model.window(layer) is None)

    def choosing_layers(self, model: ModelConfig) -> tuple[int, ...]:
        """The layers that choose blocks, for themselves and those behind them."""
        return tuple(layer for layer in self.attention_layers(model) if self.reuse.anchor(layer) == layer)

    def refresh_rows(self, draft_length: int) -> int:
        """Rows of a refreshing step: the tokens that the steps before it may have committed, the pending one, and the draft."""
        return self.refresh_every * (draft_length + 1)

    def check(self, model: ModelConfig) -> None:
        """Fits a model.

        Args:
            model: The target's shape.

        Raises:
            ValueError: Sparse attention where every layer has a window or sinks, an anchor that is no sparse layer, a first sparse layer
                that is no anchor, another model than the one that it was calibrated for, or what `SparseFFN.check` and
                `SparseMoE.check` refuse.
        """
        if self.calibrated_for is not None:
            self.calibrated_for.check(model)
        if self.ffn is not None:
            self.ffn.check(model)
        if self.moe is not None:
            self.moe.check(model)
        if self.attention is None:
            return
        layers, anchors = self.attention_layers(model), self.reuse.anchors
        require(
            bool(layers),
            f"SparsityConfig.attention: no layer of this model can be sparse: attention_sinks={model.attention_sinks}, "
            f"layer_windows={model.layer_windows}",
        )
        if anchors is None:
            return
        outside = [layer for layer in anchors if layer not in layers]
        require(not outside, f"Reuse.anchors must be layers with sparse attention, {layers}, got {outside}")
        require(anchors[0] == layers[0], f"Reuse.anchors must begin with the first sparse layer, {layers[0]}, got {anchors}")

    def check_lossless(self, verification: VerificationRule, *, do_sample: bool) -> None:
        """Fits a rule and a way of decoding, if it is to be lossless.

        Args:
            verification: The rule that sparse steps verify by.
            do_sample: Whether tokens are sampled.

        Raises:
            ValueError: With `lossless` a lossy rule, or, where tokens are sampled, a selection that sees later draft rows. (A synthetic
                rule that has a rate for the dense level too is for timing, and taken.)
        """
        if self.lossless is None:
            return
        made_up = getattr(verification, "dense_rate", None) is not None
        fits = verification.lossless or made_up
        require(fits, f"SparsityConfig.lossless needs a lossless GenerateConfig.verification, got {verification!r}")
        require(
            not (do_sample and self.sees_later_rows),
            "SparsityConfig.lossless with do_sample=True needs a selection that does not see later draft rows, since a token's sparse "
            f"distribution may not depend on what was drafted behind it; got {self}",
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dumps`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SparsityConfig:
        """The inverse of `to_json`; fields that are missing take their defaults.

        Args:
            values: What `json.loads` made of it.

        Raises:
            ValueError: An unknown field, or a value that does not fit.
        """
        fields = _known(cls, values)
        for name, kind in (_PARTS | {"reuse": Reuse}).items():
            if fields.get(name) is not None:
                fields[name] = kind(**_known(kind, fields[name]))
        return cls(**fields)

    @classmethod
    def from_calibration(cls, path: str | Path, *, agreement: float = 0.99) -> SparsityConfig:
        """The cheapest setting of a calibration that agrees with dense passes as often as is wished.

        Example:
            >>> sparsity = SparsityConfig.from_calibration("runs/calibrate.json", agreement=0.99)

        Args:
            path: The JSON that `python -m experiments.run calibrate` writes, from `~` on if you like. Cheapest is the setting whose step
                moves the fewest bytes.
            agreement: Least share of positions at which sparse and dense passes take the same token for the most likely, on the
                calibration's texts.

        Raises:
            ValueError: No such file, none of a calibration, or no setting that reaches the agreement.
        """
        rows = _calibrated(Path(path).expanduser())
        good = [row for row in rows if row["token_agreement"] >= agreement]
        if not good:
            best = max(rows, key=lambda row: row["token_agreement"])
            raise ValueError(
                f"{path}: none of {len(rows)} settings agrees with dense passes on a share of {agreement} of the tokens; "
                f"the best, {best['setting']!r}, does on {best['token_agreement']:.4f}"
            )
        return cls.from_json(min(good, key=lambda row: (row["bytes_ratio"], row["flops_ratio"], -row["token_agreement"]))["sparsity"])


def _calibrated(path: Path) -> list[dict[str, Any]]:
    """The rows of a calibration's file that hold a setting and what it does."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no calibration: {error}") from None
    numbers = {"token_agreement", "bytes_ratio", "flops_ratio"}
    rows = record.get("rows") if isinstance(record, dict) else None
    wanted = {"setting", "sparsity"} | numbers
    found = [row for row in rows if isinstance(row, dict) and wanted <= row.keys()] if isinstance(rows, list) else []
    require(bool(found), f"{path} is no calibration: it needs rows with {sorted(wanted)}")
    for row in found:
        wrong = {name: row[name] for name in sorted(numbers) if not isinstance(row[name], int | float)}
        require(not wrong, f"{path} is no calibration: of {row['setting']!r} these are to be numbers, got {wrong}")
    return found


def _known(kind: Any, values: Any) -> dict[str, Any]:
    """The fields, none of them unknown; lists as tuples."""
    require(isinstance(values, Mapping), f"{kind.__name__} must be an object of fields, got {values!r}")
    names = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(values) - set(names))
    require(not unknown, f"{kind.__name__} has no field {unknown}; it has {names}")
    return {name: _tuples(value) for name, value in values.items()}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
