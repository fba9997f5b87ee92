"""The map from a drafter's pruned vocabulary to the target's. Published files write it in two ways, and none says in which."""

from __future__ import annotations

import numpy as np

READINGS = ("offsets", "absolute")


def target_ids(d2t: np.ndarray, vocab_size: int, *, kept: np.ndarray | None = None, reading: str | None = None) -> np.ndarray:
    """Absolute token ids of the target for the rows of the drafter's LM head.

    `"offsets"` (EAGLE-3): row j stands for token `j + d2t[j]`. `"absolute"` (token maps of FR-Spec): for token `d2t[j]`. A reading is
    possible if all its tokens exist and no two rows share one. With `kept` it must also name exactly those tokens.

    Args:
        d2t: `[Vd]` integers.
        vocab_size: V.
        kept: `[V]` bool, the tokens that the drafter knows (`t2d`); `None` if the file does not say.
        reading: One of `READINGS`; `None` takes the only possible one.

    Returns:
        `[Vd]` int32.

    Raises:
        ValueError: No reading is possible, or both are and differ.

    Example:
        >>> target_ids(np.array([0, 0, 5]), 10)  # as absolute ids, two rows would share token 0
        array([0, 1, 7], dtype=int32)
    """
    if reading not in (None, *READINGS):
        raise ValueError(f"draft_ids must be one of {READINGS}, got {reading!r}")
    if kept is not None and kept.shape != (vocab_size,):
        raise ValueError(f"t2d should have shape ({vocab_size},) by the configuration, got {kept.shape}")
    d2t = d2t.astype(np.int64)
    readings = {"offsets": np.arange(len(d2t)) + d2t, "absolute": d2t}
    faults = {name: _fault(ids, vocab_size, kept) for name, ids in readings.items()}
    if reading is None:
        possible = [name for name in READINGS if not faults[name]]
        if len(possible) == 2 and not np.array_equal(*readings.values()):
            raise ValueError(
                "d2t can be read as offsets and as absolute token ids: pass draft_ids='offsets' (EAGLE-3's own convention) or "
                "draft_ids='absolute'"
            )
        reading = possible[0] if possible else None
    if reading is None or faults[reading]:
        tried = READINGS if reading is None else (reading,)
        raise ValueError("d2t is no map into the target's vocabulary: " + "; ".join(f"as {name}, {faults[name]}" for name in tried))
    return readings[reading].astype(np.int32)


def _fault(ids: np.ndarray, vocab_size: int, kept: np.ndarray | None) -> str:
    """Why these cannot be the drafter's tokens; empty if they can."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        return f"token {outside[0]} lies outside the {vocab_size} of the vocabulary"
    if len(np.unique(ids)) < len(ids):
        return "two rows stand for the same token"
    if kept is not None and not np.array_equal(np.sort(ids), np.flatnonzero(kept)):
        return "the tokens are not those of t2d"
    return ""
