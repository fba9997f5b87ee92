"""Draft LM heads: from a drafter's hidden state to scores of the target's tokens. Each is usable by each drafter."""

from specjax.drafting.heads.draft_head import DraftHead, HeadScores
from specjax.drafting.heads.full import FullHead
from specjax.drafting.heads.low_rank import LowRankHead
from specjax.drafting.heads.screened import ScreenedHead
from specjax.drafting.heads.trimmed import TrimmedHead

__all__ = ["DraftHead", "FullHead", "HeadScores", "LowRankHead", "ScreenedHead", "TrimmedHead"]
