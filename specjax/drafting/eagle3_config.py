"""Shape of an EAGLE-3 drafter, and which of the target's features it reads. arXiv:2503.01840."""

from __future__ import annotations

import dataclasses
import itertools

from specjax.checks import is_int, require
from specjax.drafting.heads import DraftHead, FullHead
from specjax.drafting.heads.draft_head import require_head
from specjax.model_config import ModelConfig

_DEFAULT_NUM_FEATURES = 3


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """The boundaries that a drafter reads where nothing says otherwise: `(2, L//2, L-3)`, distinct on shallow targets too.

    Below L = 7 two of those coincide or lie outside 0 ... L. Then each is raised to lie above the one before it, and what would pass L is
    pushed down from there: `(2, 3, 4)` for L = 4, 5 and 6, `(1, 2, 3)` for 3, `(0, 1, 2)` for 2. A target of one layer has the two
    boundaries `(0, 1)`.

    Args:
        num_layers: L, layers of the target.

    Returns:
        Boundaries in ascending order; see `Transformer.__call__`.
    """
    low = 2
    middle = max(num_layers // 2, low + 1)
    high = min(max(num_layers - 3, middle + 1), num_layers)
    middle = min(middle, high - 1)
    low = min(low, middle - 1)
    return tuple(boundary for boundary in (low, middle, high) if boundary >= 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Shape of an EAGLE-3 drafter.

    Attributes:
        decoder: Its layers: `hidden_size` is D, `vocab_size` is V, that of the target; the rotary embedding is the drafter's own.
        target_hidden_size: Width of the target's features.
        head: Its LM head; a shared one is the target's, which is then as wide as the drafter.
        feature_layers: Boundaries of the target whose features are fused, in ascending order; `None` are `default_feature_layers` of the
            target's depth, which have to be three.
        own_embedding: The drafter has an embedding; otherwise it uses the target's, which is then as wide as it is.
        fc_norm: The features of each boundary are normed before `fc`, each with its own scale.
        norm_before_fc: The features of all boundaries are normed together before `fc`.
        norm_before_residual: The residual branch of layer 0 starts from the normed `g`, not from `g`.
        norm_output: The next `g` is `norm(h)`, not `h`.

    Raises:
        ValueError: A size that is not a positive int, or settings that exclude each other.
    """

    decoder: ModelConfig
    target_hidden_size: int
    head: DraftHead = FullHead()
    feature_layers: tuple[int, ...] | None = None
    own_embedding: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        decoder, width = self.decoder, self.decoder.hidden_size
        value = self.target_hidden_size
        require(
            is_int(value, 1),
            f"Eagle3Config.target_hidden_size must be a positive int, got {value!r}",
        )
        layers = self.feature_layers
        if layers is not None:
            boundaries = isinstance(layers, tuple) and len(layers) > 0 and min(layers) >= 0
            require(
                boundaries and all(a < b for a, b in itertools.pairwise(layers)),
                f"Eagle3Config.feature_layers must be a tuple of ascending boundaries from 0 on, got {layers!r}",
            )
        require(decoder.moe is None, "Eagle3Config.decoder.moe must be None: a drafter's layers are dense")
        require(
            not decoder.tie_word_embeddings,
            "Eagle3Config.decoder.tie_word_embeddings must be False: own_embedding and head say what there is",
        )
        require_head("Eagle3Config.head", self.head, hidden_size=width, vocab_size=decoder.vocab_size)
        require(
            (self.own_embedding and not self.head.shared) or self.target_hidden_size == width,
            "Eagle3Config: without an embedding and an LM head of its own a drafter must be as wide as its target; its hidden_size is "
            f"{width}, target_hidden_size is {self.target_hidden_size}",
        )
        require(
            not (self.fc_norm and self.norm_before_fc),
            "Eagle3Config.fc_norm and norm_before_fc exclude each other: published implementations disagree on what both would mean",
        )

    @property
    def num_features(self) -> int:
        """C, boundaries whose features are fused."""
        return _DEFAULT_NUM_FEATURES if self.feature_layers is None else len(self.feature_layers)

    def for_target(self, target: ModelConfig) -> Eagle3Config:
        """The same drafter with its `feature_layers` settled.

        Args:
            target: The target's shape.

        Raises:
            ValueError: The drafter does not fit the target.
        """
        require(
            self.decoder.vocab_size == target.vocab_size,
            f"the drafter was made for a vocabulary of {self.decoder.vocab_size} tokens, the target has {target.vocab_size}",
        )
        require(
            self.target_hidden_size == target.hidden_size,
            f"the drafter was made for a target of width {self.target_hidden_size}, this one has {target.hidden_size}",
        )
        layers = default_feature_layers(target.num_layers) if self.feature_layers is None else self.feature_layers
        require(
            len(layers) == self.num_features,
            f"the drafter fuses features of {self.num_features} boundaries, a target of {target.num_layers} layers has only {len(layers)}",
        )
        require(
            layers[-1] <= target.num_layers,
            f"feature_layers must be boundaries from 0 to the target's {target.num_layers}, got {layers}",
        )
        return dataclasses.replace(self, feature_layers=layers)
