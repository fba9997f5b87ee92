"""Sizes that a program is compiled for: buckets for what varies from call to call, and the cache slots that a call needs."""

from __future__ import annotations

from specjax.generate_config import GenerateConfig
from specjax.sparsity.sparsity_config import SparsityConfig

# Capacities are rounded up to a multiple of this, and of the power of two that is a 64th to a 32nd of them.
_STEP, _STEPS = 64, 32


def bucket(size: int, smallest: int = 16) -> int:
    """The bucket that `size` falls into.

    Powers of two and the halves between them (16, 24, 32, 48, 64, 96, …): at most a third of a bucket is padding, and a range of sizes
    compiles a handful of programs.
    """
    power = smallest
    while power < size:
        if power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power


def slots_needed(*, start: int, num_columns: int, num_new: int, draft_length: int, chunk_size: int, refresh_rows: int = 0) -> int:
    """Cache slots that a call writes in a row, at most.

    Args:
        start: Slots that an earlier call filled.
        num_columns: Width of the tokens that the prefill takes in.
        num_new: Most new tokens.
        draft_length: G, or as many tokens as may wait for a dense pass (`GenerateConfig.max_unsettled`).
        chunk_size: The prefill's; its last chunk is written whole.
        refresh_rows: Rows of a refreshing step (`SparsityConfig.refresh_rows`).
    """
    padded = whole_chunks(num_columns, chunk_size)
    # + 1: the pending token stands before the draft.
    return max(start + max(padded, num_columns + num_new + draft_length + 1), refresh_rows)


def rounded_capacity(slots: int, block_size: int = 1) -> int:
    """At least as many slots: a multiple of a large power of two, at most 1/32 more of a large cache, and then whole blocks.

    Calls of about the same length then share a program. And XLA seems to divide its products over slots among a GPU's multiprocessors by
    powers of two: in one run attention over 131,968 slots, 1,031 times 128, took about 1.6 times as long as over 131,072 in another.

    Args:
        slots: That are needed.
        block_size: Slots a block.
    """
    step = max(_STEP, 1 << max(slots // _STEPS, 1).bit_length() - 1)
    return _multiple(_multiple(slots, step), block_size)


def whole_chunks(num_columns: int, chunk_size: int) -> int:
    """Slots that a prefill of `num_columns` columns writes, a chunk of at most `chunk_size` at a time."""
    chunk_size = min(chunk_size, num_columns)
    return _multiple(num_columns, chunk_size)


def choose_capacity(config: GenerateConfig, *, needed: int, present: int, start: int | None) -> int:
    """How many slots to allocate: whole blocks where attention is sparse.

    Args:
        config: Its `cache_capacity`, if given, is taken, rounded up to whole blocks.
        needed: Slots that the call needs; a lower bound where `start` is traced.
        present: Slots of the cache that an earlier call left; 0 without one.
        start: Slots that it filled; `None` if that is traced, and so may be anything up to `present`.

    Raises:
        ValueError: `cache_capacity` is too small.
    """
    if config.cache_capacity is None:
        needed += present if start is None else 0
        return whole_blocks(present if present >= needed else rounded_capacity(needed), config.sparsity)
    if needed > max(config.cache_capacity, present):
        earlier = f" after {start} earlier tokens" if start else ""
        raise ValueError(
            f"GenerateConfig.cache_capacity = {config.cache_capacity} slots are too few: this call needs {needed}{earlier}, "
            "for its prompt, new tokens and one draft"
        )
    return whole_blocks(max(config.cache_capacity, present), config.sparsity)


def whole_blocks(slots: int, sparsity: SparsityConfig) -> int:
    """Slots, rounded up to what sparse attention needs."""
    return _multiple(slots, 1 if sparsity.attention is None else sparsity.attention.block_size)


def _multiple(size: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `size`."""
    return -(-size // step) * step
