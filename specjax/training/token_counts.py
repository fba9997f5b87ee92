"""How often each token is one to predict: what a trimmed draft vocabulary is chosen by. FR-Spec, arXiv:2502.14856."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.training.token_files import TokenFiles


def count_tokens(files: TokenFiles, vocab_size: int) -> np.ndarray:
    """Counts the tokens of token files where the loss counts.

    Example:
        >>> counts = count_tokens(TokenFiles("data/sampled"), target.config.vocab_size)
        >>> token_ids = np.sort(np.argsort(-counts, kind="stable")[:32768])
        >>> share_outside(counts, token_ids)

    Args:
        files: What to count in.
        vocab_size: V, at least that of the files: a model's may be larger than its tokenizer's.

    Returns:
        `[V]` int64.

    Raises:
        ValueError: `vocab_size` is smaller than the files', or a file holds an id outside its vocabulary.
    """
    if vocab_size < files.manifest.vocab_size:
        raise ValueError(f"vocab_size must be at least that of {files.name}, {files.manifest.vocab_size}, got {vocab_size}")
    counts = np.zeros(vocab_size, np.int64)
    for number, shard in enumerate(files.shards()):
        found = np.bincount(shard.tokens[shard.loss_mask], minlength=vocab_size)
        if len(found) > vocab_size:
            raise ValueError(f"{files.name}, shard {number}: ids should be below {vocab_size}, got {len(found) - 1}")
        counts += found
    return counts


def share_outside(counts: Any, token_ids: Sequence[int] | np.ndarray) -> float:
    """How much of the counted tokens a draft vocabulary leaves out: the drafter can propose none of these.

    Args:
        counts: `[V]`, of `count_tokens`.
        token_ids: `[Vd]` ids of the draft vocabulary; repeated ones count once.

    Returns:
        From 0 to 1.

    Raises:
        ValueError: Nothing was counted, or an id is outside the vocabulary.
    """
    counts, ids = np.asarray(counts), np.asarray(token_ids)
    if counts.sum() == 0:
        raise ValueError("share_outside needs counts of at least one token, got none")
    if ids.size and (not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= len(counts)):
        raise ValueError(f"draft token ids must be ints from 0 to {len(counts) - 1}, got {ids.dtype} from {ids.min()} to {ids.max()}")
    outside = np.ones(len(counts), bool)
    outside[ids.astype(np.int64)] = False
    return float(counts[outside].sum() / counts.sum())
