"""Sparse verifications by words of the command line: attention, channels, experts and all of them, from mild to harsh, and controls.

A control keeps as many blocks of the cache as the attention that it stands beside, and chooses them without looking: the latest ones
("window"), or by lot ("random").
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.experiment import ExperimentError, path_field
from experiments.models import Model
from specjax import ModelConfig, Reuse, SparseAttention, SparsityConfig
from specjax.models.projections import split_gate_up
from specjax.sparsity.calibrated_for import CalibratedFor
from specjax.sparsity.calibration import MLPSamples
from specjax.sparsity.sparse_ffn import SparseFFN
from specjax.sparsity.sparse_moe import SparseMoE

DENSE = SparsityConfig()
CONTROLS = ("window", "random")
# What rows say of a reuse: which draft tokens, and which layers, share a choice of blocks.
REUSES = {"none": "none", "tokens": "draft tokens", "layers": "layers", "both": "draft tokens and layers"}


@dataclasses.dataclass(frozen=True)
class SparseWords:
    """Settings that experiments of sparse verification share.

    Attributes:
        attention: Shares of the context beyond `dense_below` that attention keeps, mild to harsh.
        reuse: For each of those: "none" (each draft token reads its own choice in each layer), "tokens" (all read the pending token's),
            "layers" (layers read what the anchor before them chose), "both".
        controls: At the same shares: "window", "random".
        compare_at: Shares at which reuses beyond the last, and controls, are measured too; none given are all. The others have that reuse.
        ffn: Shares of channels that feed-forward networks keep. In a dense model the rows of a pass share them; in a mixture of experts
            each token has its own, by thresholds that are first found on texts.
        moe: Most experts that a token skips, by thresholds that are found likewise.
        hybrid: Several at once: share of attention, share of channels and skipped experts, joined with `+`; `-` is dense. `0.25+0.6+-`.
        block_size: Tokens a block.
        dense_below: Contexts of up to so many tokens are read whole.
        budget: Of attention, "head" or "layer": who shares the blocks that are kept. Not of controls and calibrated settings.
        anchors: Layers that choose, where layers reuse; none given are those of `calibration`, or else the first three and every fourth.
        refresh_every: Every so many steps one is dense, and replaces what sparse ones wrote; 0 is never. Not of calibrated settings.
        calibration: The JSON of the experiment `calibrate`, for anchors, for thresholds, and for `agreements`.
        agreements: Settings out of it: the cheapest that agrees with dense passes as often as this.
    """

    attention: tuple[float, ...] = (0.5, 0.25, 0.1)
    reuse: tuple[str, ...] = ("none", "tokens", "layers", "both")
    controls: tuple[str, ...] = CONTROLS
    compare_at: tuple[float, ...] = ()
    ffn: tuple[float, ...] = ()
    moe: tuple[int, ...] = ()
    hybrid: tuple[str, ...] = ()
    block_size: int = 64
    dense_below: int = 2048
    budget: str = "head"
    anchors: tuple[int, ...] = ()
    refresh_every: int = 0
    calibration: str | None = path_field()
    agreements: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, known in (("reuse", tuple(REUSES)), ("controls", CONTROLS)):
            unknown = [word for word in getattr(self, name) if word not in known]
            if unknown:
                raise ExperimentError(f"{name} must be some of {', '.join(known)}, got {', '.join(unknown)}")

        if set(self.compare_at) - set(self.attention):
            raise ExperimentError(f"compare_at must be some of attention={self.attention}, got {self.compare_at}")
        if self.agreements and self.calibration is None:
            raise ExperimentError("agreements are those of a calibration: give calibration=FILE")

    def needs_samples(self, model: ModelConfig) -> bool:
        """Whether thresholds have to be found on texts: where they are read, and no calibration has them."""
        if self.calibration is not None:
            return False
        hybrids = [_parts(word) for word in self.hybrid]
        skips = bool(self.moe) or any(part[2] is not None for part in hybrids)
        return skips or (model.moe is not None and (bool(self.ffn) or any(part[1] is not None for part in hybrids)))


@dataclasses.dataclass(frozen=True)
class NamedSparsity:
    """A sparse verification, and what rows say of it.

    Attributes:
        method: attention, window, random, ffn, moe, hybrid or calibrated.
        setting: The word that it was made from.
        reuse: Of a choice of blocks; empty where there is none.
        sparsity: What it leaves out.
    """

    method: str
    setting: str
    reuse: str
    sparsity: SparsityConfig

    @property
    def name(self) -> str:
        """On one line."""
        return " ".join(filter(None, [self.method, self.setting, f"(reuse: {self.reuse})" if self.reuse else ""]))


def named_settings(words: SparseWords, model: ModelConfig, samples: MLPSamples | None = None) -> list[NamedSparsity]:
    """All that the words ask for, method by method and each from its first word on.

    Args:
        words: The words.
        model: The target's shape.
        samples: What its networks do on texts; `None` where `words.needs_samples` is false.

    Raises:
        ExperimentError: A share or number that does not fit the model, or a calibration that has not what is asked for.
    """
    try:
        known = None if words.calibration is None else Calibration(words.calibration)
        if known is not None and known.calibrated_for is not None:
            known.calibrated_for.check(model)
        makes = _Maker(words, model, known or samples, known.anchors if known is not None and not words.anchors else words.anchors)
        compared = words.compare_at or words.attention
        found = [makes.attention(keep, reuse) for keep in words.attention for reuse in words.reuse[0 if keep in compared else -1 :]]
        found += [makes.control(keep, control) for keep in words.attention if keep in compared for control in words.controls]
        found += [NamedSparsity("ffn", f"{keep:g}", "", SparsityConfig(ffn=makes.channels(keep))) for keep in words.ffn]
        found += [NamedSparsity("moe", f"{most}", "", SparsityConfig(moe=makes.experts(most))) for most in words.moe]
        found += [makes.hybrid(word) for word in words.hybrid]
        if words.refresh_every:
            refreshed = [dataclasses.replace(named.sparsity, refresh_every=words.refresh_every) for named in found]
            found = [dataclasses.replace(named, sparsity=sparsity) for named, sparsity in zip(found, refreshed, strict=True)]
        found += [_calibrated(words, agreement) for agreement in words.agreements]
        for named in found:
            named.sparsity.check(model)
    except ValueError as error:
        raise ExperimentError(str(error)) from None
    return found


def block_size_of(settings: Sequence[NamedSparsity]) -> int:
    """Tokens that are whole blocks of every setting: caches that all of them share are multiples of it. Calibrated ones bring their own."""
    return math.lcm(*(named.sparsity.attention.block_size for named in settings if named.sparsity.attention is not None))


def check_weights(settings: Sequence[NamedSparsity], words: SparseWords, target: Model) -> None:
    """Settings out of a calibration are of this target's weights, as far as both sides know where those came from.

    Raises:
        ExperimentError: They are of others.
    """
    if target.checkpoint is None:
        return
    known = [] if words.calibration is None else [Calibration(words.calibration).calibrated_for]
    try:
        for made_for in [*known, *(named.sparsity.calibrated_for for named in settings)]:
            if made_for is not None:
                made_for.check_source(target.checkpoint.metadata)
    except ValueError as error:
        raise ExperimentError(str(error)) from None


def laid_out_for(target: Model, sparsity: SparsityConfig, made: dict[str, Model]) -> Model:
    """The target with its weights in the layout that saves most: where rows of a dense network's channels are gathered, `split_gate_up`'s.

    Args:
        target: The target.
        sparsity: What is left out.
        made: Where the other layout is kept from call to call: half of a network's weights are copied for it.
    """
    if sparsity.ffn is None or sparsity.ffn.select != "top_k" or target.model.config.moe is not None:
        return target
    if target.name not in made:
        made[target.name] = dataclasses.replace(target, params=split_gate_up(target.params))
    return made[target.name]


def default_anchors(model: ModelConfig, sparsity: SparsityConfig) -> tuple[int, ...]:
    """Of the layers with sparse attention the first three, whose choices are known to differ most, and then every fourth."""
    layers = sparsity.attention_layers(model)
    return layers[:3] + layers[3::4]


class Calibration:
    """Anchors and thresholds out of the JSON that the experiment `calibrate` wrote.

    Args:
        path: Where it is.

    Attributes:
        anchors: Layers that choose; empty if it looked for none.
        calibrated_for: The model that it was made on; `None` if it does not say.

    Raises:
        ExperimentError: No such file, or none of `calibrate`.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            rows = {row["kind"]: row for row in json.loads(Path(path).expanduser().read_text(encoding="utf-8"))["rows"]}
            self.anchors: tuple[int, ...] = tuple(rows.get("selection", {}).get("anchors", ()))
            made_for = rows.get("thresholds", {}).get("calibrated_for")
            made_for = made_for and made_for | {"source_sha256": tuple(made_for["source_sha256"])}
            self.calibrated_for = None if made_for is None else CalibratedFor(**made_for)
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ExperimentError(f"calibration={path} is none: {error}") from None
        self._thresholds: dict[str, Any] = rows.get("thresholds", {})

    def tau(self, keep: float) -> list[float]:
        """A threshold a layer, for a share of channels that it was asked for."""
        known = {float(share): values for share, values in self._thresholds.get("tau", {}).items()}
        if keep not in known:
            raise ExperimentError(
                f"the calibration has thresholds for shares of channels {', '.join(map(str, known)) or 'none'}, not {keep}"
            )
        return known[keep]

    def beta(self) -> list[list[float]]:
        """The thresholds of experts, a layer."""
        if self._thresholds.get("beta") is None:
            raise ExperimentError("the calibration has no thresholds of experts")
        return self._thresholds["beta"]


@dataclasses.dataclass(frozen=True)
class _Maker:
    words: SparseWords
    model: ModelConfig
    thresholds: MLPSamples | Calibration | None
    anchors: tuple[int, ...]

    def blocks(self, keep: float, **changes: Any) -> SparseAttention:
        return SparseAttention(block_size=self.words.block_size, keep=keep, dense_below=self.words.dense_below, **changes)

    def attention(self, keep: float, reuse: str) -> NamedSparsity:
        rows = "first" if reuse in ("tokens", "both") else "each"
        sparsity = SparsityConfig(attention=self.blocks(keep, rows=rows, budget=self.words.budget))
        if reuse in ("layers", "both"):
            sparsity = dataclasses.replace(sparsity, reuse=Reuse(anchors=self.anchors or default_anchors(self.model, sparsity)))
        return NamedSparsity("attention", f"{keep:g}{self.whose}", REUSES[reuse], sparsity)

    @property
    def whose(self) -> str:
        """What a share of attention is of, where heads do not each have it."""
        return "" if self.words.budget == "head" else " of a layer"

    def control(self, keep: float, control: str) -> NamedSparsity:
        return NamedSparsity(control, f"{keep:g}", REUSES["tokens"], SparsityConfig(attention=self.blocks(keep, score=control)))

    def channels(self, keep: float) -> SparseFFN:
        if self.model.moe is None:
            return SparseFFN(keep=keep)
        return SparseFFN(select="threshold", per="token", keep=keep, tau=tuple(map(float, self.known().tau(keep))))

    def experts(self, most: int) -> SparseMoE:
        return SparseMoE(max_skipped=most, beta=tuple(tuple(map(float, layer)) for layer in self.known().beta()))

    def hybrid(self, word: str) -> NamedSparsity:
        keep, channels, skipped = _parts(word)
        sparsity = SparsityConfig(
            attention=None if keep is None else self.blocks(keep, budget=self.words.budget),
            ffn=None if channels is None else self.channels(channels),
            moe=None if skipped is None else self.experts(int(skipped)),
        )
        if keep is None:
            return NamedSparsity("hybrid", word, "", sparsity)
        return NamedSparsity("hybrid", word.replace("+", f"{self.whose}+", 1), REUSES["tokens"], sparsity)

    def known(self) -> MLPSamples | Calibration:
        if self.thresholds is None:
            raise ExperimentError("thresholds of experts and of their channels are those of a calibration: give calibration=FILE")
        return self.thresholds


def _calibrated(words: SparseWords, agreement: float) -> NamedSparsity:
    assert words.calibration is not None
    sparsity = SparsityConfig.from_calibration(words.calibration, agreement=agreement)
    reuse = "" if sparsity.attention is None else REUSES["tokens" if sparsity.reuse.anchors is None else "both"]
    return NamedSparsity("calibrated", f"agreement {agreement:g}", reuse, sparsity)


def _parts(word: str) -> list[float | None]:
    parts = word.split("+")
    try:
        values = [None if part == "-" else float(part) for part in parts]
    except ValueError:
        values = []
    if len(values) != 3 or (values[2] is not None and values[2] != int(values[2])):
        raise ExperimentError(f"hybrid must be three numbers or - joined with +, as in 0.25+0.6+- or 0.25+-+3, got {word!r}")
    return values
