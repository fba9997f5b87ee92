"""How many cache slots are allocated for those that a call needs."""

from __future__ import annotations

import math

import pytest

from specjax.capacity import rounded_capacity


@pytest.mark.parametrize(
    ("needed", "block_size", "capacity"),
    [
        (0, 1, 0),
        (1, 1, 64),
        (64, 1, 64),
        (2100, 1, 2112),
        (16385, 1, 16896),
        (131072, 1, 131072),
        (131968, 1, 135168),
        (500, 48, 528),
        (4096, 100, 4100),
    ],
)
def test_capacities_are_multiples_of_powers_of_two_and_of_blocks(needed: int, block_size: int, capacity: int) -> None:
    assert rounded_capacity(needed, block_size) == capacity


def test_little_of_a_large_cache_is_padding_and_its_slots_divide_by_a_large_power_of_two() -> None:
    for needed in range(2048, 300_000, 997):
        capacity = rounded_capacity(needed, 16)
        assert needed <= capacity < needed * (1 + 1 / 32)
        assert math.gcd(capacity, 1 << 30) * 64 > needed
