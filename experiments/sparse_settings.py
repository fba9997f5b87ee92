"""Sparse verifications by words of the command line: attention, channels, experts and all of them, from mild to harsh, and controls.

A control keeps as many blocks of the cache as the attention that it stands beside, and chooses them without looking: the latest ones
("window"), or by lot ("random").
"""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.experiment import ExperimentError
from specjax import ModelConfig, Reuse, SparseAttention, SparsityConfig
from specjax.verification.calibration import MLPSamples
from specjax.verification.sparse_ffn import SparseFFN
from specjax.verification.sparse_moe import SparseMoE

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
        ffn: Shares of channels that feed-forward networks keep. In a dense model the rows of a pass share them; in a mixture of experts
            each token has its own, by thresholds that are first found on texts.
        moe: Most experts that a token skips, by thresholds that are found likewise.
        hybrid: Several at once: share of attention, share of channels and skipped experts, joined with `+`; `-` is dense. `0.25+0.6+-`.
        block_size: Tokens a block.
        dense_below: Contexts of up to so many tokens are read whole.
        anchors: Layers that choose, where layers reuse; none given are the first three and every fourth.
    """

    attention: tuple[float, ...] = (0.5, 0.25, 0.1)
    reuse: tuple[str, ...] = ("none", "tokens", "layers", "both")
    controls: tuple[str, ...] = CONTROLS
    ffn: tuple[float, ...] = ()
    moe: tuple[int, ...] = ()
    hybrid: tuple[str, ...] = ()
    block_size: int = 64
    dense_below: int = 2048
    anchors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, known in (("reuse", tuple(REUSES)), ("controls", CONTROLS)):
            unknown = [word for word in getattr(self, name) if word not in known]
            if unknown:
                raise ExperimentError(f"{name} must be some of {', '.join(known)}, got {', '.join(unknown)}")

    def needs_samples(self, model: ModelConfig) -> bool:
        """Whether thresholds have to be found on texts."""
        hybrids = [_parts(word) for word in self.hybrid]
        skips = bool(self.moe) or any(part[2] is not None for part in hybrids)
        return skips or (model.moe is not None and (bool(self.ffn) or any(part[1] is not None for part in hybrids)))


@dataclasses.dataclass(frozen=True)
class NamedSparsity:
    """A sparse verification, and what rows say of it.

    Attributes:
        method: attention, window, random, ffn, moe or hybrid.
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
        ExperimentError: A share or number that does not fit the model.
    """
    try:
        found = [_attention(words, model, keep, reuse) for keep in words.attention for reuse in words.reuse]
        found += [_control(words, keep, control) for keep in words.attention for control in words.controls]
        found += [NamedSparsity("ffn", f"{keep:g}", "", SparsityConfig(ffn=_ffn(model, keep, samples))) for keep in words.ffn]
        found += [NamedSparsity("moe", f"{most}", "", SparsityConfig(moe=_moe(most, samples))) for most in words.moe]
        found += [_hybrid(words, model, word, samples) for word in words.hybrid]
        for named in found:
            named.sparsity.check(model)
    except ValueError as error:
        raise ExperimentError(str(error)) from None
    return found


def default_anchors(model: ModelConfig, sparsity: SparsityConfig) -> tuple[int, ...]:
    """Of the layers with sparse attention the first three, whose choices are known to differ most, and then every fourth."""
    layers = sparsity.attention_layers(model)
    return layers[:3] + layers[3::4]


def _blocks(words: SparseWords, keep: float, **changes: Any) -> SparseAttention:
    return SparseAttention(block_size=words.block_size, keep=keep, dense_below=words.dense_below, **changes)


def _attention(words: SparseWords, model: ModelConfig, keep: float, reuse: str) -> NamedSparsity:
    sparsity = SparsityConfig(attention=_blocks(words, keep, rows="first" if reuse in ("tokens", "both") else "each"))
    if reuse in ("layers", "both"):
        sparsity = dataclasses.replace(sparsity, reuse=Reuse(anchors=words.anchors or default_anchors(model, sparsity)))
    return NamedSparsity("attention", f"{keep:g}", REUSES[reuse], sparsity)


def _control(words: SparseWords, keep: float, control: str) -> NamedSparsity:
    return NamedSparsity(control, f"{keep:g}", REUSES["tokens"], SparsityConfig(attention=_blocks(words, keep, score=control)))


def _ffn(model: ModelConfig, keep: float, samples: MLPSamples | None) -> SparseFFN:
    if model.moe is None:
        return SparseFFN(keep=keep)
    return SparseFFN(select="threshold", per="token", keep=keep, tau=tuple(map(float, _required(samples).tau(keep))))


def _moe(most: int, samples: MLPSamples | None) -> SparseMoE:
    beta = _required(samples).beta()
    return SparseMoE(max_skipped=most, beta=tuple(tuple(map(float, layer)) for layer in beta))


def _hybrid(words: SparseWords, model: ModelConfig, word: str, samples: MLPSamples | None) -> NamedSparsity:
    keep, channels, skipped = _parts(word)
    sparsity = SparsityConfig(
        attention=None if keep is None else _blocks(words, keep),
        ffn=None if channels is None else _ffn(model, channels, samples),
        moe=None if skipped is None else _moe(int(skipped), samples),
    )
    return NamedSparsity("hybrid", word, "" if keep is None else REUSES["tokens"], sparsity)


def _parts(word: str) -> list[float | None]:
    parts = word.split("+")
    try:
        values = [None if part == "-" else float(part) for part in parts]
    except ValueError:
        values = []
    if len(values) != 3 or (values[2] is not None and values[2] != int(values[2])):
        raise ExperimentError(f"hybrid must be three numbers or - joined with +, as in 0.25+0.6+- or 0.25+-+3, got {word!r}")
    return values


def _required(samples: MLPSamples | None) -> MLPSamples:
    if samples is None:
        raise ExperimentError("thresholds of experts and of their channels are found on texts: give calibration_text=FILE")
    return samples
