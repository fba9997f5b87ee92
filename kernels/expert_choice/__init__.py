"""The experts that each row chooses, and their weights: a softmax over the router's scores and the k largest. arXiv:2401.04088."""

from __future__ import annotations

import functools

import jax

from specjax.kernels.expert_choice.reference import expert_choice_reference
from specjax.kernels.expert_choice.triton_launch import expert_choice_triton, serves
from specjax.kernels.measured import check_implementation, dispatch
from specjax.kernels.shapes import ChoiceShape

IMPLEMENTATIONS = ("auto", "reference", "triton")


def expert_choice(scores: jax.Array, *, choices: int, normalise: bool, implementation: str = "auto") -> tuple[jax.Array, jax.Array]:
    """`weights, experts = top_k(softmax(scores))`, from the heaviest down; of equal ones the first expert.

    Args:
        scores: `[M,E]` float32.
        choices: C, at most E; static.
        normalise: The weights of a row sum to one; static.
        implementation: `"auto"`, `"reference"` or `"triton"`, one launch for up to 1024 experts (more are the reference's).

    Returns:
        Weights `[M,C]` float32, and experts `[M,C]` int32.

    Raises:
        ValueError: Scores of another shape, more choices than experts, an unknown implementation, or one that cannot run here.
    """
    check_implementation("expert_choice", implementation, IMPLEMENTATIONS)
    if scores.ndim != 2 or not 1 <= choices <= scores.shape[1]:
        raise ValueError(f"expert_choice: expected scores [M,E] and from 1 to E choices, got {scores.shape} and {choices}")
    options = dict(choices=choices, normalise=normalise)
    reference, triton = (functools.partial(function, **options) for function in (expert_choice_reference, expert_choice_triton))
    if not serves(scores.shape):
        return reference(scores)
    shape = ChoiceShape(rows=scores.shape[0], experts=scores.shape[1], choices=choices)
    return dispatch(implementation, shape, scores.dtype, triton=triton, reference=reference, arrays=(scores,))
