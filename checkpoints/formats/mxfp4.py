"""MXFP4: blocks of 32 four-bit floats with a shared power-of-two scale (OCP Microscaling Formats v1.0), as GPT-OSS is published."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BLOCK_SIZE = 32
# Two values a byte, the lower half first.
PACKED_BYTES = BLOCK_SIZE // 2

_SCALE_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # sign, two exponent bits, one mantissa bit
_VALUES = np.array([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)], np.float32)
# Both values of every byte, so that a byte is one look-up.
_PAIRS = np.stack([_VALUES[np.arange(256) & 0x0F], _VALUES[np.arange(256) >> 4]], axis=1)


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """`value * 2^(scale - 127)`, exactly: a bfloat16 has exponents and mantissa bits to spare, but for results below its smallest number.

    Args:
        blocks: `[..., C, 16]` uint8.
        scales: `[..., C]` uint8.

    Returns:
        `[..., C * 32]` bfloat16.
    """
    pairs = _PAIRS[blocks]  # [..., C, 16, 2]
    with np.errstate(over="ignore"):  # the largest scales overflow to infinity, in transformers too
        scaled = np.ldexp(pairs, (scales.astype(np.int32) - _SCALE_BIAS)[..., None, None])
    return scaled.reshape(*blocks.shape[:-2], -1).astype(ml_dtypes.bfloat16)
