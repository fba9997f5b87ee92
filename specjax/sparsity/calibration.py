"""From what a target does on texts to the settings of sparse verification: thresholds of channels and experts, layers that select blocks.

arXiv:2512.21911 sets its thresholds of channels by hand; here they are a quantile of the activated gates, as in CATS
(arXiv:2404.08763). The thresholds of experts are medians, as there, or another quantile. Layers that select anew ("anchors") are found by
a greedy scan, which is our reading: the paper says that they are representative, by the Jaccard similarity of selections, and not how they
are found.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from specjax.sparsity.histogram import NUM_BINS, histogram, quantile, share_at_least
from specjax.sparsity.sparse_moe import RATIOS, skip_ratios

if TYPE_CHECKING:
    from specjax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPSamples:
    """Histograms of what the feed-forward networks and mixtures of experts of a target did on texts. Two add up with `+`.

    Attributes:
        gates: `[L,NUM_BINS]` int64, of `|act(x W_gate)|`: all channels of all tokens, in a mixture of experts those of the chosen ones.
        ratios: `[L,k-1,NUM_BINS]` int64, of what skipping 1 ... k - 1 experts is decided by; empty in layers without experts. `None` where
            the model has none, or takes one expert a token.
        ratio: Of which kind; see `SparseMoE`.
    """

    gates: np.ndarray
    ratios: np.ndarray | None
    ratio: str

    def __add__(self, other: MLPSamples) -> MLPSamples:
        """Both, of the same target and the same ratio."""
        if self.ratio != other.ratio:
            raise ValueError(f"MLPSamples of ratios {self.ratio!r} and {other.ratio!r} do not add")
        ratios = None if self.ratios is None or other.ratios is None else self.ratios + other.ratios
        return dataclasses.replace(self, gates=self.gates + other.gates, ratios=ratios)

    def tau(self, keep: float) -> np.ndarray:
        """Thresholds at which each layer keeps a share of its channels: the largest edge of a bin at which that is at least `keep`.

        Args:
            keep: Above 0 and at most 1.

        Returns:
            `[L]` float32.

        Raises:
            ValueError: Another share, or no samples.
        """
        if not 0 < keep <= 1:
            raise ValueError(f"keep must be above 0 and at most 1, got {keep!r}")
        return quantile(self.gates, 1 - keep)

    def kept(self, tau: np.ndarray) -> np.ndarray:
        """The share of channels that thresholds `[L]` keep in these samples, `[L]`; thresholds between edges count as the edge above."""
        return np.array([share_at_least(counts, value) for counts, value in zip(self.gates, tau, strict=True)])

    def beta(self, share: float = 0.5) -> np.ndarray:
        """Thresholds below which a share of the tokens' ratios lies; the paper's are medians.

        Args:
            share: From 0 to 1; the median is 0.5.

        Returns:
            `[L,k-1]` float32, beta_1 ... beta_(k-1); 0, which skips nothing, in layers without experts.

        Raises:
            ValueError: No layer has experts, or another share.
        """
        if self.ratios is None:
            raise ValueError("there are no thresholds of experts: the target takes no more than one expert a token, or has none")
        with_experts = self.ratios.any(axis=(1, 2))
        found = np.zeros(self.ratios.shape[:2], np.float32)
        found[with_experts] = quantile(self.ratios[with_experts], share)
        return found


def sample_mlp(
    target: Transformer, params: Any, batches: Iterable[tuple[jax.Array, jax.Array | None]], *, ratio: str = "share"
) -> MLPSamples:
    """One pass over texts, whose activations become histograms at once.

    Args:
        target: The target.
        params: Its params.
        batches: Of tokens `[B,T]` int32 and which of them count, `[B,T]` bool or `None` for all; at least one. A shape compiles a program.
        ratio: As in `SparseMoE`.

    Returns:
        The samples.

    Raises:
        ValueError: There is no batch, or another ratio.
    """
    if ratio not in RATIOS:
        raise ValueError(f"ratio must be one of {RATIOS}, got {ratio!r}")
    total = None
    for tokens, counted in batches:
        gates, ratios = jax.device_get(_sample_batch(params, tokens, counted, target=target, ratio=ratio))
        part = MLPSamples(
            gates=gates.astype(np.int64), ratios=None if ratios is None else ratios.astype(np.int64), ratio=ratio
        )  # int64: a few batches of a large model overflow int32
        total = part if total is None else total + part
    if total is None:
        raise ValueError("there is no batch to take samples of")
    return total


def selection_masks(block_ids: np.ndarray, num_chosen: np.ndarray, num_blocks: int) -> np.ndarray:
    """Selections as masks.

    Args:
        block_ids: `[..., n]` int, of which the first few of each row count.
        num_chosen: `[...]` int, how many.
        num_blocks: Blocks there are.

    Returns:
        `[..., num_blocks]` bool.
    """
    counted = np.arange(block_ids.shape[-1]) < np.asarray(num_chosen)[..., None]
    return ((block_ids[..., None] == np.arange(num_blocks)) & counted[..., None]).any(axis=-2)


def jaccard(selections: np.ndarray) -> np.ndarray:
    """How alike layers select: the blocks that two have in common over those that either has, mean over the samples.

    Args:
        selections: `[L, ..., blocks]` bool; between them samples and key/value heads, each compared with the same of another layer. Leave
            out blocks that are always kept: they would be alike by themselves.

    Returns:
        `[L,L]` float64. Two empty selections are alike.

    Raises:
        ValueError: No samples.
    """
    flat = np.asarray(selections, bool).reshape(selections.shape[0], -1, selections.shape[-1]).astype(np.float64)
    if flat.shape[1] == 0:
        raise ValueError(f"there are no selections to compare, of shape {selections.shape}")
    common = np.einsum("isb,jsb->ijs", flat, flat)
    sizes = flat.sum(axis=-1)
    either = sizes[:, None] + sizes[None] - common
    return np.where(either > 0, common / np.maximum(either, 1), 1.0).mean(axis=-1)


def choose_anchors(similarity: np.ndarray, theta: float) -> tuple[int, ...]:
    """Layers that select anew: the first, and each that is less like the anchor before it than theta.

    Args:
        similarity: `[L,L]`, from `jaccard`.
        theta: From 0 (the first layer alone) to 1 (every layer whose selection is not the anchor's).

    Returns:
        Ascending layers; each other layer takes the selection of the last one before it.

    Raises:
        ValueError: Something that is no square matrix, or a theta outside [0, 1].
    """
    if similarity.ndim != 2 or similarity.shape[0] != similarity.shape[1] or not similarity.size:
        raise ValueError(f"similarity must be [L,L], got {list(similarity.shape)}")
    if not 0 <= theta <= 1:
        raise ValueError(f"theta must be from 0 to 1, got {theta!r}")
    anchors = [0]
    for layer in range(1, similarity.shape[0]):
        if similarity[layer, anchors[-1]] < theta:
            anchors.append(layer)
    return tuple(anchors)


@functools.partial(jax.jit, static_argnames=("target", "ratio"))
def _sample_batch(
    params: Any, tokens: jax.Array, counted: jax.Array | None, *, target: Transformer, ratio: str
) -> tuple[jax.Array, jax.Array | None]:
    cfg = target.config
    cache = target.init_cache(batch_size=tokens.shape[0], capacity=tokens.shape[1])
    _, captured = target.apply({"params": params}, tokens, cache, counted=counted, mutable=["intermediates"])
    layers = [captured["intermediates"][f"layer_{index}"]["mlp"] for index in range(cfg.num_layers)]
    gates = jax.numpy.stack([layer["gates"][0] for layer in layers])
    if cfg.moe is None or cfg.moe.num_experts_per_token == 1:
        return gates, None
    most = cfg.moe.num_experts_per_token - 1

    def of_layer(layer: dict) -> jax.Array:
        if "routing" not in layer:
            return jax.numpy.zeros((most, NUM_BINS), jax.numpy.int32)
        ratios = skip_ratios(layer["routing"][0], most, ratio=ratio)
        return jax.numpy.stack([histogram(ratios[..., i], counted) for i in range(most)])

    return gates, jax.numpy.stack([of_layer(layer) for layer in layers])
