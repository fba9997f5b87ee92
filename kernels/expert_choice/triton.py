"""Triton kernel that turns a router's scores into probabilities and takes the largest of them, one after another.

Imported only where it runs: this module needs triton.
"""
# What stands below is Triton's language, which only looks like Python.
# pyright: reportMissingImports=false, reportOperatorIssue=false, reportOptionalOperand=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl


@triton.jit
def choose_experts(
    scores,  # [M,E] float32
    weights,  # [M,C] float32
    experts,  # [M,C] int32
    NUM_EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    NORMALISES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One row."""
    row, expert, choice = tl.program_id(0), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    is_expert = expert < NUM_EXPERTS
    score = tl.load(scores + row * NUM_EXPERTS + expert, mask=is_expert, other=float("-inf"))
    probs = tl.where(is_expert, tl.exp(score - tl.max(score, axis=0)), 0.0)
    probs = probs / tl.sum(probs, axis=0)
    # Integers in the order of what is not negative, with a NaN before all; -1 is taken already, or not there.
    order = tl.where(probs != probs, 2147483647, probs.to(tl.int32, bitcast=True))
    order = tl.where(is_expert, order, -1)
    chosen = tl.zeros([BLOCK_C], tl.int32)
    taken = tl.zeros([BLOCK_C], tl.float32)
    for index in range(CHOICES):
        best = tl.min(tl.where(order == tl.max(order, axis=0), expert, BLOCK_E), axis=0)
        chosen = tl.where(choice == index, best, chosen)
        taken = tl.where(choice == index, tl.sum(tl.where(expert == best, probs, 0.0), axis=0), taken)
        order = tl.where(expert == best, -1, order)
    if NORMALISES:
        taken = taken / tl.sum(taken, axis=0)
    tl.store(weights + row * CHOICES + choice, taken, mask=choice < CHOICES)
    tl.store(experts + row * CHOICES + choice, chosen, mask=choice < CHOICES)
