"""What a model is, in static sizes and choices: frozen, hashable dataclasses that check themselves.

Everything here is a compile-time constant for JAX. What changes from call to call (lengths, temperatures, keys) is an array instead; see
`specjax.state` and `specjax.sampling`.
"""

from __future__ import annotations

import dataclasses

from specjax.checks import is_int, require, require_positive_ints

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# Types whose frequencies depend on how long a row's context may become.
LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")
ACTIVATIONS = ("silu", "clamped_swiglu")
QK_NORMS = ("head", "projection")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (half-split layout). Fields that `rope_type` does not name are not read.

    Attributes:
        theta: Base of the geometric series of wavelengths.
        rope_type: How the series is changed for contexts longer than it was trained on: `"default"` (not at all), `"linear"`, `"dynamic"`
            (NTK), `"llama3"`, `"yarn"` or `"longrope"`.
        factor: `linear`, `dynamic`, `llama3`, `yarn`: how far long wavelengths are stretched. `linear` stretches all.
        low_freq_factor: `llama3`: wavelengths above `original_max_position_embeddings / low_freq_factor` are fully stretched.
        high_freq_factor: `llama3`: wavelengths below `original_max_position_embeddings / high_freq_factor` stay.
        original_max_position_embeddings: All but `default` and `linear`: context length, in tokens, before stretching. `dynamic` and
            `longrope` change the frequencies of a row whose context may exceed it, all of its positions alike.
        beta_fast: `yarn`: wavelengths that turn more often than this within the original context stay.
        beta_slow: `yarn`: those that turn less often than this are fully stretched.
        truncate: `yarn`: round the two bounds outwards to whole dimensions.
        attention_factor: `yarn`, `longrope`: cosines and sines are multiplied by it, so scores by its square.
        short_factor: `longrope`: divisor of each of the H/2 frequencies within the original context.
        long_factor: `longrope`: the same beyond it.

    Raises:
        ValueError: Unknown `rope_type`, or a factor outside its range.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(self.rope_type in ROPE_TYPES, f"RopeConfig.rope_type must be one of {ROPE_TYPES}, got {self.rope_type!r}")
        require(self.theta > 0, f"RopeConfig.theta must be positive, got {self.theta!r}")
        for name in ("short_factor", "long_factor"):  # a list could not be hashed
            require(isinstance(getattr(self, name), tuple), f"RopeConfig.{name} must be a tuple, got {getattr(self, name)!r}")
        if self.rope_type in ("linear", "dynamic", "llama3", "yarn"):
            require(self.factor >= 1, f"RopeConfig.factor must be at least 1, got {self.factor!r}")
        if self.rope_type in ("dynamic", "llama3", "yarn", "longrope"):
            require_positive_ints(self, "original_max_position_embeddings")
        if self.rope_type == "llama3":
            require(
                0 < self.low_freq_factor < self.high_freq_factor,
                f"RopeConfig needs 0 < low_freq_factor < high_freq_factor, got {self.low_freq_factor!r} and {self.high_freq_factor!r}",
            )
        if self.rope_type == "yarn":
            require(
                0 < self.beta_slow <= self.beta_fast,
                f"RopeConfig needs 0 < beta_slow <= beta_fast, got {self.beta_slow!r} and {self.beta_fast!r}",
            )
        if self.rope_type in ("yarn", "longrope"):
            require(self.attention_factor > 0, f"RopeConfig.attention_factor must be positive, got {self.attention_factor!r}")
        if self.rope_type == "longrope":
            same_length = len(self.short_factor) == len(self.long_factor) > 0
            positive = all(factor > 0 for factor in self.short_factor + self.long_factor)
            require(
                same_length and positive,
                f"RopeConfig.short_factor and long_factor must hold head_dim / 2 positive numbers each, got {len(self.short_factor)} and "
                f"{len(self.long_factor)}" + ("" if positive else ", some of them not positive"),
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts in the place of the feed-forward network: each token takes its best few, none is ever dropped.

    Attributes:
        num_experts: E.
        num_experts_per_token: How many each token takes.
        intermediate_size: Width of one expert.
        normalise: The weights of the experts taken add up to 1; otherwise they are their shares of the softmax over all E.
        router_bias: The router's scores have a bias (GPT-OSS).
        dense_layers: Layers that keep a plain feed-forward network of `ModelConfig.intermediate_size`.

    Raises:
        ValueError: A size that is not a positive int, or more experts a token than there are.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalise: bool = True
    router_bias: bool = False
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_positive_ints(self, "num_experts", "num_experts_per_token", "intermediate_size")
        require(
            self.num_experts_per_token <= self.num_experts,
            f"MoEConfig.num_experts_per_token must be at most num_experts, got {self.num_experts_per_token} of {self.num_experts}",
        )
        layers = self.dense_layers
        require(
            isinstance(layers, tuple) and all(isinstance(index, int) and not isinstance(index, bool) for index in layers),
            f"MoEConfig.dense_layers must be a tuple of ints, got {layers!r}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of one decoder. Families (Llama, Mistral, Qwen, Mixtral, OLMoE, GPT-OSS) differ in these fields only, never in code.

    Attributes:
        vocab_size: V, rows of the embedding.
        hidden_size: D.
        intermediate_size: F, width of the feed-forward network.
        num_layers: L.
        num_heads: N, query heads.
        num_kv_heads: K, key/value heads; divides N.
        head_dim: H, apart from `hidden_size / num_heads`; even, for the rotary embedding.
        max_position_embeddings: The context window in tokens: prompt plus output may not exceed it.
        rope: Rotary embedding.
        rms_norm_eps: Epsilon of every RMSNorm.
        tie_word_embeddings: The LM head is the embedding itself.
        qkv_bias: Biases on the query, key and value projections (Qwen2, GPT-OSS).
        output_bias: A bias on the attention's output projection (GPT-OSS).
        qk_norm: RMSNorm of query and key before the rotary embedding: `"head"` over each head (Qwen3), `"projection"` over all heads
            together (OLMoE), or `None`.
        clip_qkv: Queries, keys and values are clipped to plus and minus this (OLMoE); `None` does not clip.
        layer_windows: For each layer the number of latest positions that it attends to, the token itself included, or `None` for all of
            them; `()` is `None` for every layer.
        attention_sinks: A learned score a query head that takes part in the softmax and has no value (GPT-OSS).
        activation: `"silu"`: `silu(gate) * up`. `"clamped_swiglu"`: GPT-OSS's, `(up + 1) * gate * sigmoid(swiglu_alpha * gate)` with
            `gate` clipped above and `up` on both sides at `swiglu_limit`.
        swiglu_alpha: See `activation`.
        swiglu_limit: See `activation`.
        mlp_bias: Biases on all projections of the feed-forward network, or of each expert.
        moe: Mixture of experts; `None` is a plain feed-forward network in every layer.

    Raises:
        ValueError: A size that is not a positive int, an odd `head_dim`, `num_heads` not a multiple of `num_kv_heads`, or a choice that
            does not exist.
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
    output_bias: bool = False
    qk_norm: str | None = None
    clip_qkv: float | None = None
    layer_windows: tuple[int | None, ...] = ()
    attention_sinks: bool = False
    activation: str = "silu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    mlp_bias: bool = False
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        require_positive_ints(
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
        require(self.head_dim % 2 == 0, f"ModelConfig.head_dim must be even for the rotary embedding, got {self.head_dim}")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"ModelConfig.num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}",
        )
        require(self.qk_norm in (None, *QK_NORMS), f"ModelConfig.qk_norm must be None or one of {QK_NORMS}, got {self.qk_norm!r}")
        require(self.activation in ACTIVATIONS, f"ModelConfig.activation must be one of {ACTIVATIONS}, got {self.activation!r}")
        require(
            self.clip_qkv is None or self.clip_qkv > 0, f"ModelConfig.clip_qkv must be None or a positive number, got {self.clip_qkv!r}"
        )
        require(self.swiglu_limit > 0, f"ModelConfig.swiglu_limit must be positive, got {self.swiglu_limit!r}")
        windows = self.layer_windows
        require(
            isinstance(windows, tuple) and len(windows) in (0, self.num_layers),
            f"ModelConfig.layer_windows must be () or a tuple of num_layers = {self.num_layers} entries, got {windows!r}",
        )
        require(
            all(window is None or is_int(window, 1) for window in windows),
            f"ModelConfig.layer_windows must hold positive ints or None, got {windows!r}",
        )
        if self.rope.rope_type == "longrope":
            require(
                len(self.rope.long_factor) == self.head_dim // 2,
                f"RopeConfig.long_factor must hold head_dim / 2 = {self.head_dim // 2} numbers, got {len(self.rope.long_factor)}",
            )
        if self.moe is not None:
            outside = [index for index in self.moe.dense_layers if not 0 <= index < self.num_layers]
            require(not outside, f"MoEConfig.dense_layers must be layers from 0 to {self.num_layers - 1}, got {outside}")

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; `None` if it sees everything."""
        return self.layer_windows[layer] if self.layer_windows else None

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers
