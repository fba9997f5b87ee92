"""What a pass of the target costs by its parts: multiplications and bytes that a perfect program would need, dense or sparse.

Counted are the matrix products, two operations a multiplication and addition, and what they must bring from memory: each weight that any
token needs once, and the keys and values that count. Left out, as everywhere where such counts are compared: norms, rotary embeddings,
softmax, biases, routing's top-k, activations. arXiv:2512.21911 reports such operations; where rows are few, time goes with the bytes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.model_config import ModelConfig, MoEConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """What a sparse pass keeps, means over layers and tokens; by default all.

    Attributes:
        keys: Share of the keys and values of the earlier context, in layers without a window.
        channels: Share of the channels of a feed-forward network or an expert that a token computes.
        channels_read: Share that any token of the pass computes, which is what is read; `None` is `channels`: all tokens share a choice.
        experts_per_token: `None` is the model's number.
        distinct_experts: Experts that the pass reads in a layer; `None` expects those of tokens that choose evenly and apart.

    Raises:
        ValueError: A share outside [0, 1], fewer channels read than computed, or a negative number of experts.
    """

    keys: float = 1.0
    channels: float = 1.0
    channels_read: float | None = None
    experts_per_token: float | None = None
    distinct_experts: float | None = None

    def __post_init__(self) -> None:
        for name in ("keys", "channels", "channels_read"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"Kept.{name} must be a share from 0 to 1, got {value!r}")
        if self.channels_read is not None and self.channels_read < self.channels:
            raise ValueError(f"Kept.channels_read must be at least channels = {self.channels}, got {self.channels_read}")
        for name in ("experts_per_token", "distinct_experts"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"Kept.{name} must not be negative, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes moved. Two add up with `+`."""

    flops: float = 0.0
    moved_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Both."""
        return Work(self.flops + other.flops, self.moved_bytes + other.moved_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassWork:
    """A pass by its parts.

    Attributes:
        attention_projections: Query, key, value and output.
        attention: Scores and mixing: operations on keys and values, which are read, and those of the new rows, written and read.
        feed_forward: Networks of layers without experts.
        router: Of mixtures of experts.
        experts: The experts themselves.
        lm_head: The vocabulary's scores of every new row.
    """

    attention_projections: Work
    attention: Work
    feed_forward: Work
    router: Work
    experts: Work
    lm_head: Work

    @property
    def total(self) -> Work:
        """All parts."""
        return sum(self.parts().values(), Work())

    def parts(self) -> dict[str, Work]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def pass_work(
    config: ModelConfig,
    *,
    batch_size: float,
    num_tokens: float,
    context: float,
    kept: Kept = Kept(),
    weight_bytes: int = 2,
    cache_bytes: int = 2,
) -> PassWork:
    """Counts one pass.

    Args:
        config: The target's shape.
        batch_size: B; this and the next two may be means over passes.
        num_tokens: T, new positions a row; G + 1 in a verification.
        context: Tokens before them in each row.
        kept: What is not left out.
        weight_bytes: A weight's; bfloat16 has 2.
        cache_bytes: A key's or value's number.

    Returns:
        The counts.

    Raises:
        ValueError: A size that is not positive, or a negative context.

    Example:
        >>> dense = pass_work(config, batch_size=1, num_tokens=6, context=32768)
        >>> sparse = pass_work(config, batch_size=1, num_tokens=6, context=32768, kept=Kept(keys=0.2))
        >>> 1 - sparse.total.moved_bytes / dense.total.moved_bytes  # of Llama-3.1-8B in bfloat16: 0.18
    """
    for name, value, least in (("batch_size", batch_size, 1), ("num_tokens", num_tokens, 1), ("context", context, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    width, tokens = config.hidden_size, batch_size * num_tokens

    def weights(count: float) -> Work:
        """A product of all tokens with that many weights."""
        return Work(2.0 * tokens * count, count * weight_bytes)

    heads = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    projections, attention, feed_forward, router, experts = (Work() for _ in range(5))
    for layer in range(config.num_layers):
        projections += weights(width * heads)
        attention += _attention(config, layer, batch_size, num_tokens, context, kept, cache_bytes)
        if config.has_experts(layer):
            moe = config.moe
            assert moe is not None
            router += weights(width * moe.num_experts)
            experts += _experts(width, moe, tokens, kept, weight_bytes)
        else:
            feed_forward += _gated(width, config.intermediate_size, tokens, 1.0, kept, weight_bytes)
    return PassWork(
        attention_projections=projections,
        attention=attention,
        feed_forward=feed_forward,
        router=router,
        experts=experts,
        lm_head=weights(config.vocab_size * width),
    )


def expected_distinct_experts(num_experts: int, experts_per_token: float, num_tokens: Any) -> Any:
    """Experts that tokens use between them if each chooses its own evenly and apart: `E (1 - (1 - k/E)^M)`.

    Real tokens of one text choose more alike than this. A number, or for an array of them an array.
    """
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** num_tokens)


def _attention(config: ModelConfig, layer: int, batch_size: float, num_tokens: float, context: float, kept: Kept, cache_bytes: int) -> Work:
    window = config.window(layer)
    if window is None:
        earlier = kept.keys * context
        pairs = num_tokens * earlier + num_tokens * (num_tokens + 1) / 2
        positions = earlier + num_tokens
    else:
        whole = min(max(window - context, 0), num_tokens)  # rows that see everything before them
        pairs = whole * context + whole * (whole + 1) / 2 + (num_tokens - whole) * window
        positions = min(context, window - 1) + num_tokens  # the first row sees window - 1 earlier ones
    flops = 4.0 * batch_size * pairs * config.num_heads * config.head_dim
    moved = 2.0 * batch_size * (positions + num_tokens) * config.num_kv_heads * config.head_dim * cache_bytes
    return Work(flops, moved)


def _gated(width: int, channels: int, tokens: float, networks: float, kept: Kept, weight_bytes: int) -> Work:
    """Tokens through gated networks, of which so many are read: the gate whole, up and down of the channels kept."""
    read = kept.channels if kept.channels_read is None else kept.channels_read
    size = float(width * channels)
    return Work(2.0 * tokens * size * (1 + 2 * kept.channels), networks * size * (1 + 2 * read) * weight_bytes)


def _experts(width: int, moe: MoEConfig, tokens: float, kept: Kept, weight_bytes: int) -> Work:
    each = moe.num_experts_per_token if kept.experts_per_token is None else kept.experts_per_token
    expected = expected_distinct_experts(moe.num_experts, each, tokens)
    distinct = expected if kept.distinct_experts is None else kept.distinct_experts
    return _gated(width, moe.intermediate_size, tokens * each, distinct, kept, weight_bytes)
