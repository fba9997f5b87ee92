"""Static sizes and choices: frozen, hashable dataclasses that check themselves.

Everything here is a compile-time constant for JAX. What changes from call to call (lengths, temperatures, keys) is an array instead; see
`specjax.state` and `specjax.sampling`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.verification.rejection_sampling import RejectionSampling
from specjax.verification.rule import VerificationRule

ROPE_TYPES = ("default", "llama3")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_positive_int(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        is_int = isinstance(value, int) and not isinstance(value, bool)
        _require(is_int and value > 0, f"{type(owner).__name__}.{name} must be a positive int, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (half-split layout).

    Attributes:
        theta: Base of the geometric series of wavelengths.
        rope_type: `"default"` or `"llama3"` (the frequency-dependent stretching that Llama 3.1 introduced).
        factor: `llama3`: how far long wavelengths are stretched.
        low_freq_factor: `llama3`: wavelengths above `original_max_position_embeddings / low_freq_factor` are fully stretched.
        high_freq_factor: `llama3`: wavelengths below `original_max_position_embeddings / high_freq_factor` stay.
        original_max_position_embeddings: `llama3`: context length, in tokens, before stretching.

    Raises:
        ValueError: Unknown `rope_type`, or a factor outside its range.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        _require(self.rope_type in ROPE_TYPES, f"RopeConfig.rope_type must be one of {ROPE_TYPES}, got {self.rope_type!r}")
        _require(self.theta > 0, f"RopeConfig.theta must be positive, got {self.theta!r}")
        if self.rope_type == "llama3":
            _require(self.factor >= 1, f"RopeConfig.factor must be at least 1, got {self.factor!r}")
            _require(
                0 < self.low_freq_factor < self.high_freq_factor,
                f"RopeConfig needs 0 < low_freq_factor < high_freq_factor, got {self.low_freq_factor!r} and {self.high_freq_factor!r}",
            )
            _require_positive_int(self, "original_max_position_embeddings")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of one decoder. Families (Llama 3, Qwen2, Qwen3) differ in these fields only, never in code.

    Attributes:
        vocab_size: V, rows of the embedding.
        hidden_size: D.
        intermediate_size: F, width of the SwiGLU feed-forward network.
        num_layers: L.
        num_heads: N, query heads.
        num_kv_heads: K, key/value heads; divides N.
        head_dim: H, apart from `hidden_size / num_heads`; even, for the rotary embedding.
        max_position_embeddings: The context window in tokens: prompt plus output may not exceed it.
        rope: Rotary embedding.
        rms_norm_eps: Epsilon of every RMSNorm.
        tie_word_embeddings: The LM head is the embedding itself.
        qkv_bias: Biases on the query, key and value projections (Qwen2).
        qk_norm: RMSNorm over each head of query and key, before the rotary embedding (Qwen3).

    Raises:
        ValueError: A size that is not a positive int, an odd `head_dim`, or `num_heads` not a multiple of `num_kv_heads`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig = RopeConfig()
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        _require_positive_int(
            self,
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        )
        _require(self.head_dim % 2 == 0, f"ModelConfig.head_dim must be even for the rotary embedding, got {self.head_dim}")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"ModelConfig.num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}",
        )


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
        cache_capacity: Key/value slots to allocate; `None` takes what this call needs. Larger values leave room to continue.
        cache_sharding: A `jax.sharding.NamedSharding` for the `[B,K,S,H]` cache arrays; `None` leaves placement to XLA.
        pad_token_id: Fills the output beyond a row's length.

    Raises:
        ValueError: A negative `max_new_tokens`, `num_speculative_tokens` below 1, a non-positive chunk or capacity.
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

    def __post_init__(self) -> None:
        value = self.max_new_tokens
        _require(
            isinstance(value, int) and not isinstance(value, bool) and value >= 0,
            f"GenerateConfig.max_new_tokens must be an int of at least 0, got {value!r}",
        )
        _require_positive_int(self, "num_speculative_tokens", "prefill_chunk_size")
        if self.cache_capacity is not None:
            _require_positive_int(self, "cache_capacity")
        _require(
            isinstance(self.pad_token_id, int) and self.pad_token_id >= 0,
            f"GenerateConfig.pad_token_id must be an int of at least 0, got {self.pad_token_id!r}",
        )
