"""What the settings of a training leave open, settled: by the drafter that it begins with, if there is one, and by the token files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.store import Checkpoint
from specjax.commands.finished_drafter import goes_on_with
from specjax.drafting.heads import DraftHead
from specjax.training.data import DataConfig, TokenBatches
from specjax.training.settings import DEFAULT_INIT, EAGLE3, TrainSettings, Variant
from specjax.training.token_files import TokenFiles

# Lengths of sequences that are chosen: multiples of the one, up to the other.
_LENGTH_STEP, _LONGEST = 64, 1024


def settings_with_drafter(settings: TrainSettings, heads: Mapping[str, DraftHead], finished: Checkpoint | None) -> TrainSettings:
    """The settings with `init`, `fc_norm`, `norm_output` and `num_epochs` as they will be used.

    Args:
        settings: The settings.
        heads: By the variants' names.
        finished: The drafter that is begun with, perhaps without weights; `None` if they are new.

    Raises:
        ValueError: The finished drafter has it otherwise: another flag, or a head that there is nothing to begin of.
    """
    changes: dict[str, Any] = {"variants": tuple(_with_init(variant, heads[variant.name], finished) for variant in settings.variants)}
    for name in ("fc_norm", "norm_output") if settings.drafter == EAGLE3 else ():
        asked, own = getattr(settings, name), True if finished is None else getattr(finished.model.config, name)
        if finished is not None and asked not in (None, own):
            raise ValueError(f"{name} of the finished drafter is {own}, and stays so, got {asked}")
        changes[name] = own if asked is None else asked
    if settings.num_steps is None and settings.max_seconds is None:
        changes["num_epochs"] = settings.num_epochs or 1
    return dataclasses.replace(settings, **changes)


def with_sequence_length(settings: TrainSettings, files: TokenFiles) -> TrainSettings:
    """The settings with a length of sequences: their own, or what the longest of the files needs."""
    if settings.sequence_length is not None:
        return settings
    if settings.packed:
        return dataclasses.replace(settings, sequence_length=_LONGEST)
    longest = -(-int(files.lengths.max()) // _LENGTH_STEP) * _LENGTH_STEP
    return dataclasses.replace(settings, sequence_length=min(longest, _LONGEST))


def data_config(settings: TrainSettings) -> DataConfig:
    """Batches as these settings have them."""
    assert settings.sequence_length is not None, "see with_sequence_length"
    names = ("batch_size", "sequence_length", "packed", "seed")
    return DataConfig(**{name: getattr(settings, name) for name in names})


def num_steps_of(settings: TrainSettings, batches: TokenBatches) -> int | None:
    """Training steps of settled settings; `None` where there is a time and no number."""
    if settings.num_epochs is None:
        return settings.num_steps
    return max(settings.num_epochs * batches.num_rows // settings.batch_size, 1)


def _with_init(variant: Variant, head: DraftHead, finished: Checkpoint | None) -> Variant:
    if finished is None or not goes_on_with(finished, head):
        return dataclasses.replace(variant, init=variant.init or DEFAULT_INIT)
    if variant.init is not None:
        raise ValueError(
            f"init is for a head that is made anew, got {variant.init!r} for {variant.head}: the finished drafter has that head already, "
            "which is gone on with"
        )
    return variant
