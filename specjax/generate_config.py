"""What a call is, in static choices: a frozen, hashable dataclass that checks itself.

What changes from call to call (lengths, temperatures, keys) is an array instead; see `specjax.state` and `specjax.sampling`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from specjax.checks import is_int, require, require_positive_ints
from specjax.sparsity.sparsity_config import SparsityConfig
from specjax.verification.rejection_sampling import RejectionSampling
from specjax.verification.rule import VerificationRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """The static half of a `generate` or `speculative_generate` call; another value compiles another program.

    Attributes:
        max_new_tokens: Most tokens that a row may receive. A smaller limit a row is an array argument of the call and recompiles nothing.
        num_speculative_tokens: G, tokens drafted in a step; at least 1. Plain `generate` ignores it.
        do_sample: `False` takes the arg-max and ignores `SamplingParams`; `True` samples (rows of temperature 0 are still greedy).
        verification: The rule that keeps or rejects draft tokens. Lossless by default.
        return_log_probs: Also return log p(token) of the emitted tokens under the target's unscaled softmax.
        prefill_chunk_size: Prompt tokens that one prefill pass processes; bounds the memory of attention scores.
        cache_capacity: Key/value slots to allocate; `None` takes what this call needs. Larger values leave room to continue. Under
            `dynamic` and `longrope` rotary embeddings it is also the length that the frequencies are chosen for, and so changes the text.
        cache_sharding: A `jax.sharding.NamedSharding` for the `[B,K,S,H]` cache arrays; `None` leaves placement to XLA.
        pad_token_id: Fills the output beyond a row's length.
        sparsity: What the target's passes leave out after the prefill. Nothing by default; lossy otherwise, unless its `lossless` is set.

    Raises:
        ValueError: A negative `max_new_tokens`, `num_speculative_tokens` below 1, a non-positive chunk or capacity; with lossless sparsity
            a lossy rule, or, where tokens are sampled, a selection that sees later draft rows.
    """

    max_new_tokens: int
    num_speculative_tokens: int = 5
    do_sample: bool = False
    verification: VerificationRule = RejectionSampling()
    return_log_probs: bool = False
    prefill_chunk_size: int = 512
    cache_capacity: int | None = None
    cache_sharding: Any = None
    pad_token_id: int = 0
    sparsity: SparsityConfig = SparsityConfig()

    def __post_init__(self) -> None:
        value = self.max_new_tokens
        require(
            is_int(value, 0),
            f"GenerateConfig.max_new_tokens must be an int of at least 0, got {value!r}",
        )
        require_positive_ints(self, "num_speculative_tokens", "prefill_chunk_size")
        if self.cache_capacity is not None:
            require_positive_ints(self, "cache_capacity")
        require(
            isinstance(self.pad_token_id, int) and self.pad_token_id >= 0,
            f"GenerateConfig.pad_token_id must be an int of at least 0, got {self.pad_token_id!r}",
        )
        for name in ("do_sample", "return_log_probs"):
            require(
                isinstance(getattr(self, name), bool | np.bool_),
                f"GenerateConfig.{name} must be True or False, got {getattr(self, name)!r}",
            )
        require(
            callable(self.verification) and not isinstance(self.verification, type) and hasattr(self.verification, "lossless"),
            f"GenerateConfig.verification must be a verification rule such as RejectionSampling(), got {self.verification!r}",
        )
        require(isinstance(self.sparsity, SparsityConfig), f"GenerateConfig.sparsity must be a SparsityConfig, got {self.sparsity!r}")
        self.sparsity.check_lossless(self.verification, do_sample=self.do_sample)

    def max_unsettled(self, draft_length: int) -> int:
        """Most tokens behind the pending one that a pass of the target may be over: a draft, or all that waits for a dense check.

        Args:
            draft_length: G, 0 for plain decoding.
        """
        lossless = self.sparsity.lossless
        return draft_length if lossless is None else lossless.max_provisional(draft_length)
