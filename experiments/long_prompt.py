"""Does a 32 K prompt of a 1.5B model fit a machine of 24 GB, and how long does it take?

Command: python -m experiments.run long_prompt --record
Hardware: one H200 (its memory is measured, not needed: the program must stay below `limit_bytes`)
Time: 1 minute on an H200
Result: see "Long prompts" in the README, made from results/long_prompt.json

One call of `speculative_generate` with a random prompt: chunked prefill, then a few steps. Memory is the allocator's
peak of the whole process, where the device keeps one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import jax
import numpy as np

from experiments.experiment import path_field
from experiments.models import load_model
from specjax import GenerateConfig, PromptLookup, speculative_generate


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        model: A preset's name or a checkpoint's path.
        prompt_tokens: Length of the prompt.
        new_tokens: Tokens generated after it.
        prefill_chunk_size: Prompt tokens a prefill pass.
        dtype: Compute dtype, and that of random weights.
        implementation: Of the kernels; see `Kernels.of`.
        limit_bytes: The machine that it should fit.
        repeats: Timed calls, after one that compiles.
        cache_dir: Where converted checkpoints are kept; `none` is the user's cache folder.
    """

    model: str = path_field("qwen25_15b")
    prompt_tokens: int = 32000
    new_tokens: int = 64
    prefill_chunk_size: int = 512
    dtype: str = "bfloat16"
    implementation: str = "auto"
    limit_bytes: float = 24e9
    repeats: int = 3
    cache_dir: str | None = path_field()


def run(config: Config) -> Iterator[dict]:
    """One row."""
    options = {"dtype": config.dtype, "implementation": config.implementation, "cache_dir": config.cache_dir}
    target = load_model(config.model, rng=jax.random.key(0), **options)
    prompt = np.random.default_rng(0).integers(0, target.model.config.vocab_size, (1, config.prompt_tokens))

    def seconds(new_tokens: int) -> float:
        static = GenerateConfig(max_new_tokens=config.new_tokens, prefill_chunk_size=config.prefill_chunk_size)
        begin = time.perf_counter()
        output = speculative_generate(
            target.model, target.params, PromptLookup(), None, prompt, config=static, max_new_tokens=new_tokens, ignore_eos=True
        )
        jax.block_until_ready(output)
        return time.perf_counter() - begin

    seconds(1)
    prefill = [seconds(1) for _ in range(config.repeats)]
    whole = [seconds(config.new_tokens) for _ in range(config.repeats)]
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    yield {
        "model": target.name,
        "weights": target.weights,
        "implementation": config.implementation,
        "synthetic": False,
        "dtype": config.dtype,
        "prompt_tokens": config.prompt_tokens,
        "prefill_chunk_size": config.prefill_chunk_size,
        "prefill_s": float(np.median(prefill)),
        "whole_s": float(np.median(whole)),
        "prefill_tokens_per_s": config.prompt_tokens / float(np.median(prefill)),
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(target.params)),
        "peak_bytes": peak,
        "limit_bytes": config.limit_bytes,
        "fits": None if peak is None else peak < config.limit_bytes,
    }


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    gigabytes = None if row["peak_bytes"] is None else row["peak_bytes"] / 1e9
    return {
        "model": row["model"],
        "prompt": row["prompt_tokens"],
        "chunk": row["prefill_chunk_size"],
        "prefill, s": row["prefill_s"],
        "prompt tokens/s": row["prefill_tokens_per_s"],
        "peak memory, GB": gigabytes,
        f"below {row['limit_bytes'] / 1e9:.0f} GB": row["fits"],
    }


def show(row: dict) -> str:
    """A row on one line."""
    return "  ".join(f"{key} {value}" for key, value in columns(row).items())
