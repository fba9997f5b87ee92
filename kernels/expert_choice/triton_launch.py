"""The choice of experts in one launch, a program a row: XLA takes one each for the softmax, a sort, what is cut from it, and the division.

Reads a row's scores once and keeps them in registers; aims at a launch's own time. float32, up to 1024 experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.triton_call import power_of_two, triton_call

MAX_EXPERTS = 1024


def serves(shape: tuple[int, ...]) -> bool:
    """Whether the kernel is for scores `[M,E]` of such a shape."""
    return shape[1] <= MAX_EXPERTS


def expert_choice_triton(scores: jax.Array, *, choices: int, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """See `specjax.kernels.expert_choice.expert_choice`.

    Raises:
        ValueError: Another dtype, or no device or package to run it.
    """
    num_rows, num_experts = scores.shape
    if scores.dtype != jnp.float32:
        raise ValueError(f"expert_choice: implementation 'triton' needs float32 scores, got {scores.dtype}")
    weights, experts = triton_call(
        "expert_choice",
        "choose_experts",
        scores,
        out_shapes=[jax.ShapeDtypeStruct((num_rows, choices), dtype) for dtype in (jnp.float32, jnp.int32)],
        grid=(num_rows,),
        constants=dict(
            NUM_EXPERTS=num_experts,
            CHOICES=choices,
            NORMALISES=normalise,
            BLOCK_E=max(16, power_of_two(num_experts)),
            BLOCK_C=power_of_two(choices),
        ),
        num_warps=1 if num_experts <= 256 else 4,
        num_stages=1,
    )
    return weights, experts
