"""The five ways to decode that are compared: with or without a drafter, over all of the cache or a part, checked densely or not."""

from __future__ import annotations

import dataclasses

from specjax import Lossless, SparsityConfig


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        name: What rows call it.
        drafts: A drafter proposes tokens.
        sparse: Passes leave something out.
        checked: Dense passes check what sparse ones commit.
    """

    name: str
    drafts: bool
    sparse: bool
    checked: bool = False

    @property
    def lossless(self) -> bool:
        """Whether the output is the dense target's."""
        return not self.sparse or self.checked


PLAIN = Way("autoregressive, dense", drafts=False, sparse=False)
PLAIN_SPARSE = Way("autoregressive, sparse", drafts=False, sparse=True)
DENSE_VERIFICATION = Way("dense verification", drafts=True, sparse=False)
SPARSE_VERIFICATION = Way("sparse verification", drafts=True, sparse=True)
TWO_LEVELS = Way("two levels", drafts=True, sparse=True, checked=True)
WAYS = (PLAIN, PLAIN_SPARSE, DENSE_VERIFICATION, SPARSE_VERIFICATION, TWO_LEVELS)


def two_levels(sparsity: SparsityConfig, lossless: Lossless) -> SparsityConfig:
    """The sparsity of a way that is checked: its checks are refreshes too, and take their place."""
    return dataclasses.replace(sparsity, refresh_every=0, lossless=lossless)
