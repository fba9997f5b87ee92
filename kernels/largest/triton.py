"""Triton kernel that finds the k-th largest of a row two bits at a time, by counting, and writes down where those above it stand.

Imported only where it runs: this module needs triton.
"""
# What stands below is Triton's language, which only looks like Python.
# pyright: reportMissingImports=false, reportOperatorIssue=false, reportOptionalOperand=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl


@triton.jit
def choose_largest(
    values,  # [M,V] float32
    columns,  # [M,k] int32
    SIZE: tl.constexpr,  # V
    CHOSEN: tl.constexpr,  # k, below V
    BLOCK_V: tl.constexpr,
):
    """One row."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK_V)
    is_there = column < SIZE
    value = tl.load(values + row * SIZE + column, mask=is_there, other=0.0)
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    # Integers in the order of the values: a NaN comes before all, what is not there after all.
    ordered = tl.where(value != value, 2147483647, bits ^ ((bits >> 31) & 2147483647))
    number = tl.where(is_there, ordered.to(tl.int64) + 2147483648, -1)
    least = tl.full([], 0, tl.int64)  # the greatest number that at least CHOSEN reach: the CHOSEN-th largest
    one = tl.full([], 1, tl.int64)
    for step in range(16):
        unit = one << (30 - 2 * step)
        # Three counts in one sum, of 20 bits each.
        reached = (number >= least + unit).to(tl.int64)
        reached += (number >= least + 2 * unit).to(tl.int64) << 20
        reached += (number >= least + 3 * unit).to(tl.int64) << 40
        counts = tl.sum(reached, axis=0)
        digit = ((counts & 1048575) >= CHOSEN).to(tl.int64)
        digit += (((counts >> 20) & 1048575) >= CHOSEN).to(tl.int64)
        digit += ((counts >> 40) >= CHOSEN).to(tl.int64)
        least += digit * unit
    above, level = number > least, number == least
    places_left = CHOSEN - tl.sum(above.to(tl.int32), axis=0)
    is_chosen = above | (level & (tl.cumsum(level.to(tl.int32), axis=0) <= places_left))
    place = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    tl.store(columns + row * CHOSEN + place, column, mask=is_chosen)
