"""What a training of drafters is told: what differs between the drafters, and what they share."""

from __future__ import annotations

import dataclasses
import math

from specjax.checks import require_seed
from specjax.training.distillation import LossPositions
from specjax.training.losses import DraftLoss
from specjax.training.new_drafters import INITS
from specjax.training.optimizer import OptimizerConfig

EAGLE3, DRAFT_MODEL = "eagle3", "draft_model"
# A draft model is not made anew: it is a finished one whose head is trained.
DRAFTERS = (EAGLE3, "medusa", "hydra", DRAFT_MODEL)
# Of a head that is made anew, where nothing else is asked for.
DEFAULT_INIT = INITS[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """What one of several drafters that are trained side by side has of its own.

    Attributes:
        head: Name of its draft LM head, see `named_head`.
        init: How the head begins, one of `INITS`; `None` is `DEFAULT_INIT`, but for a head that a finished drafter has already: that one is
            gone on with.
        loss: What is lowered.

    Raises:
        ValueError: An unknown init.
    """

    head: str = "low_rank:8"
    init: str | None = None
    loss: DraftLoss = DraftLoss()

    def __post_init__(self) -> None:
        if self.init is not None and self.init not in INITS:
            raise ValueError(f"init must be one of {', '.join(INITS)}, got {self.init!r}")

    @property
    def name(self) -> str:
        """Of its checkpoint's folder: the head's, and what is not the default."""
        parts = [self.head.replace(":", "_")]
        parts += [self.init] if self.init not in (None, DEFAULT_INIT) else []
        parts += [self.loss.kind] if self.loss.kind != DraftLoss.kind else []
        return "-".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What to train, and how.

    Attributes:
        drafter: One of `DRAFTERS`.
        variants: A drafter each, all trained side by side.
        num_steps: Training steps; `None` follows from `max_seconds` or `num_epochs`.
        max_seconds: Time for them, see `TrainConfig`.
        num_epochs: How often the data comes, where `num_steps` and `max_seconds` are `None`; `None` is then once.
        batch_size: B, sequences a training step.
        sequence_length: T; `None` is that of the longest sequence, up to 1,024.
        packed: Rows of several sequences each, see `DataConfig`; T is then 1,024 if it is `None`.
        chain: Steps of the draft chain that EAGLE-3 is trained through; how many heads Medusa and Hydra get.
        optimizer: How parameters follow.
        positions: Where the loss is taken.
        fc_norm: EAGLE-3: see `new_eagle3`; `None` is what the finished drafter has, or true for a new one.
        norm_output: EAGLE-3: likewise.
        head_only: EAGLE-3: train nothing but the draft head of a finished drafter. Of a draft model it is never more.
        seed: Of the random parts of the parameters, and the order of the data.
        report_every: Training steps between reports.
        checkpoint_every: Training steps between checkpoints of the run; `None` makes none.
        compile_threads: Drafters whose steps are compiled at a time.

    Raises:
        ValueError: An unknown drafter, no variant or two of one name, a number outside its range, or settings that exclude each other.
    """

    drafter: str = DRAFTERS[0]
    variants: tuple[Variant, ...] = (Variant(),)
    num_steps: int | None = None
    max_seconds: float | None = None
    num_epochs: int | None = None
    batch_size: int = 64
    sequence_length: int | None = None
    packed: bool = False
    chain: int = 5
    optimizer: OptimizerConfig = OptimizerConfig()
    positions: LossPositions = LossPositions()
    fc_norm: bool | None = None
    norm_output: bool | None = None
    head_only: bool = False
    seed: int = 0
    report_every: int = 20
    checkpoint_every: int | None = 1000
    compile_threads: int = 8

    def __post_init__(self) -> None:
        if self.drafter not in DRAFTERS:
            raise ValueError(f"drafter must be one of {', '.join(DRAFTERS)}, got {self.drafter!r}")
        names = [variant.name for variant in self.variants]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"there must be drafters to train, of different names, got {', '.join(names) or 'none'}")
        require_seed("seed", self.seed)
        for name in ("batch_size", "chain", "report_every", "compile_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_steps", "num_epochs", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.max_seconds is not None and not 0 < self.max_seconds < math.inf:
            raise ValueError(f"max_seconds must be above 0, got {self.max_seconds}")
        if self.num_epochs is not None and not (self.num_steps is None and self.max_seconds is None):
            raise ValueError(
                f"num_epochs is for a run without num_steps and max_seconds, got {self.num_epochs} with "
                f"num_steps {self.num_steps} and max_seconds {self.max_seconds}"
            )
        for name in ("fc_norm", "norm_output"):
            if getattr(self, name) is not None and self.drafter != EAGLE3:
                raise ValueError(f"{name} is for {EAGLE3}, got {getattr(self, name)} for {self.drafter}")
        if self.sequence_length is not None and self.sequence_length < 2:
            raise ValueError(f"sequence_length must be at least 2, got {self.sequence_length}")
