"""How fast prompts were decoded, and what a verification read and computed beside a dense one.

A batch goes on until its slowest row has ended: with rows that end at an EOS its tokens a second say how full it stayed, and not how fast
its steps are. So speeds are those of runs in which no row ends before its limit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.decoding import Decoded


@dataclasses.dataclass(frozen=True)
class Timed:
    """A timed run without EOS: every row writes as many tokens as it may.

    Attributes:
        decoded: What came out.
        prefill_seconds: What the same prompts take up to their first tokens, where that is part of `decoded.seconds`.
    """

    decoded: Decoded
    prefill_seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens behind each prompt's first, which the prefill brings."""
        return self.decoded.num_tokens - sum(bool(row) for row in self.decoded.tokens)

    @property
    def seconds(self) -> float:
        """Their time; not positive where it is lost in the noise of the prefill's."""
        return self.decoded.seconds - self.prefill_seconds

    @property
    def tokens_per_s(self) -> float | None:
        """Their speed; `None` if lost in noise."""
        return self.num_tokens / self.seconds if self.num_tokens > 0 and self.seconds > 0 else None

    @property
    def work(self) -> dict[str, float]:
        """Operations and bytes of the mean verification pass over a dense one's, by counting."""
        total = self.decoded.statistics.summary()["step_work"]["total"]
        return {"flops_ratio": total["flops"] / total["dense_flops"], "bytes_ratio": total["bytes"] / total["dense_bytes"]}

    def fields(self) -> dict[str, Any]:
        """What a row says of the run."""
        return {
            "tokens_per_s": self.tokens_per_s,
            "timed_tokens": self.num_tokens,
            "timed_seconds": self.seconds,
            "timed_mean_acceptance_length": float(self.decoded.statistics.mean_acceptance_length),
        }


def timed_prompts(prompts: Sequence[Sequence[int]], *, batch: int, batches: int) -> list[Sequence[int]]:
    """The prompts of the first so many batches that are full; all prompts where they fill none."""
    return list(prompts[: min(len(prompts) // batch, batches) * batch or len(prompts)])


def was_timed(row: Mapping[str, Any]) -> bool:
    """Whether a recorded row's speed and work are those of a run without EOS.

    Earlier rows are not: they compare batches that emptied unevenly, and the report shows neither of them.
    """
    return "timed_seconds" in row


def ratio(speed: float | None, other: float | None) -> float | None:
    """One speed over another; `None` where either was lost."""
    return None if speed is None or other is None else speed / other


def speed_of(row: Mapping[str, Any]) -> str:
    """A row's speed, where it could be measured."""
    if row["speedup_over_autoregressive"] is None:
        return "speed lost in the noise of the prefill's time"
    loses = "" if row["speedup_over_autoregressive"] >= 1 else " (loses)"
    return f"{row['tokens_per_s']:.1f} tokens/s: {row['speedup_over_autoregressive']:.2f} x{loses}"


def keep_ratio(summary: Mapping[str, Any]) -> float:
    """What sparse passes kept, as measured: of the cache where attention is sparse, else of experts or channels; 1 if there were none."""
    kept = (summary[name]["keep_ratio"] for name in ("sparse_attention", "sparse_moe", "sparse_ffn") if name in summary)
    return float(next(kept, 1.0))
