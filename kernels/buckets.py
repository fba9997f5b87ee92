"""Which measurement stands for which shapes: the key of a shape in the table of choices, and what its neighbours there say of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from specjax.kernels.shapes import (
    AttentionShape,
    ExpertShape,
    GatheredShape,
    LinearShape,
    LowRankShape,
    RotaryShape,
    SelectionShape,
    Shape,
)
from specjax.kernels.triton_call import power_of_two

Bucket = tuple[tuple[str, int | None], ...]
# Their kernels take up to 64 rows, which they pad.
_OF_FEW_ROWS = AttentionShape | LowRankShape | LinearShape | RotaryShape | ExpertShape | GatheredShape
# Sizes that vary with the context.
_OF_A_CACHE = ("slots", "kept_slots", "blocks", "chosen")
# Sizes along which a kernel that wins on both sides wins between them: more of the same memory is read.
_BETWEEN = ("slots", "kept_slots", "batch")


def bucket(shape: Shape) -> Bucket:
    """The key of a shape in the table, so that a measurement stands for its neighbours: sizes rounded up to a power of two.

    Rows, where they are few, are of four classes. Slots and blocks of a cache, and how many are kept, go to the nearest power instead: a
    call's cache is somewhat larger than its context, and its attention costs what that of the measured context does. Matrices have half
    steps between the powers. Rotation costs about the same for any number of heads.
    """
    sizes = dataclasses.asdict(shape)
    if isinstance(shape, RotaryShape):
        del sizes["kv_heads"], sizes["group"]
    return tuple((name, _rounded(shape, name, size)) for name, size in sorted(sizes.items()))


def between(table: Mapping[Bucket, str], own: Bucket) -> str:
    """What the nearest measurements below and above a shape agree on, in slots or in batch, all else equal.

    Args:
        table: The fastest implementations, of one device, operation and dtype.
        own: The key of a shape that is not in it.

    Returns:
        `"reference"` unless both prefer the kernel; `"triton@..."` where both cut its work alike.
    """
    for axis in _BETWEEN:
        size, others = dict(own).get(axis), _without(own, axis)
        if size is None:
            continue
        line = [(dict(key)[axis] or 0, choice) for key, choice in table.items() if _without(key, axis) == others]
        below, above = [entry for entry in line if entry[0] < size], [entry for entry in line if entry[0] > size]
        if below and above:
            ends = {max(below)[1], min(above)[1]}
            if "reference" not in ends:
                return ends.pop() if len(ends) == 1 else "triton"
    return "reference"


def _without(key: Bucket, axis: str) -> Bucket:
    return tuple(entry for entry in key if entry[0] != axis)


def _rounded(shape: Shape, name: str, size: int | None) -> int | None:
    if size is None or isinstance(size, bool):
        return size
    if name == "rows" and isinstance(shape, _OF_FEW_ROWS):
        return _rows_class(size)
    if name in ("inner", "columns"):
        return _half_step(size)
    if name in _OF_A_CACHE and isinstance(shape, AttentionShape | SelectionShape):
        return _nearest_power(size)
    return power_of_two(size)


def _nearest_power(size: int) -> int:
    """The power of two that is the fewest times larger or smaller."""
    above = power_of_two(size)
    return above // 2 if 2 * size * size < above * above else above


def _rows_class(rows: int) -> int:
    """One row apart, since XLA has other ways for it; 2 to 8, 9 to 16, and what is padded further."""
    return next((most for most in (1, 8, 16) if rows <= most), 64)


def _half_step(size: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16 ... that is no smaller."""
    above = power_of_two(size)
    return above * 3 // 4 if above >= 4 and size <= above * 3 // 4 else above
