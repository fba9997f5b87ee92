"""How many programs run in one call: one, however many steps it takes."""

from __future__ import annotations

import jax
import numpy as np

from experiments.models import Model
from experiments.timing import count_executions
from specjax import GenerateConfig, PromptLookup, speculative_generate


def executions_row(target: Model, *, batch: int, num_speculative_tokens: int, implementation: str) -> dict:
    """Counts what runs in one call whose limit fills its bucket.

    Args:
        target: What is called.
        batch: Prompts.
        num_speculative_tokens: G.
        implementation: Of the kernels, for the row.
    """
    static = GenerateConfig(max_new_tokens=16, num_speculative_tokens=num_speculative_tokens)

    def call():
        prompt = np.ones((batch, 16), np.int32)
        return speculative_generate(target.model, target.params, PromptLookup(), None, prompt, config=static, ignore_eos=True)

    output = jax.block_until_ready(call())
    return {
        "mode": "executions",
        "model": target.name,
        "weights": target.weights,
        "implementation": implementation,
        "synthetic": False,
        "batch": batch,
        "steps": int(output.statistics.num_steps),
        "executions": count_executions(call),
    }
