"""Draft LM heads by name, as they are given on command lines."""

from __future__ import annotations

from specjax.drafting.heads.draft_head import DraftHead
from specjax.drafting.heads.full import FullHead
from specjax.drafting.heads.low_rank import LowRankHead
from specjax.drafting.heads.screened import ScreenedHead
from specjax.drafting.heads.trimmed import TrimmedHead

HEAD_NAMES = "full, shared, low_rank:DIVISOR, trimmed:TOKENS or screened:DIVISOR:CANDIDATES"


def named_head(name: str, *, hidden_size: int, vocab_size: int) -> DraftHead:
    """The head of a name; ranks are the drafter's width over a divisor.

    Example:
        >>> named_head("low_rank:8", hidden_size=4096, vocab_size=128256)  # LowRankHead(rank=512)

    Args:
        name: One of `HEAD_NAMES`.
        hidden_size: D, the drafter's width.
        vocab_size: V, the target's vocabulary.

    Raises:
        ValueError: No such head, or one that does not fit these sizes.
    """
    kind, *texts = name.split(":")
    try:
        numbers = [int(text) for text in texts]
        match kind, numbers:
            case "full", []:
                head = FullHead()
            case "shared", []:
                head = FullHead(shared=True)
            case "low_rank", [divisor]:
                head = LowRankHead.divided(hidden_size, divisor)
            case "trimmed", [num_tokens]:
                head = TrimmedHead(num_tokens=num_tokens)
            case "screened", [divisor, num_candidates]:
                head = ScreenedHead(rank=LowRankHead.divided(hidden_size, divisor).rank, num_candidates=num_candidates)
            case _:
                raise ValueError(f"expected {HEAD_NAMES}")
        head.check_sizes(hidden_size=hidden_size, vocab_size=vocab_size)
    except ValueError as error:
        raise ValueError(f"draft head {name!r}: {error}") from None
    return head
