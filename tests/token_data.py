"""Small token files for a tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specjax.checkpoints.store import abstract_checkpoint
from specjax.training.token_files import TokenSequence, tokenizer_fingerprint
from specjax.training.token_writer import writing_token_files


def write_token_files(path: Path, target: Path, *, num_sequences: int = 8, length: int = 14, ids: tuple[int, int] = (1, 250)) -> Path:
    """Random sequences of ids from the one up to the other; the loss counts from the fourth token on."""
    tokenizer = abstract_checkpoint(target).tokenizer()
    rng = np.random.default_rng(0)
    with writing_token_files(
        path, vocab_size=len(tokenizer), tokenizer=tokenizer_fingerprint(tokenizer), made={"kind": "text"}, force=False, resume=False
    ) as writer:
        sequences = [TokenSequence(tokens=rng.integers(*ids, length), loss_mask=np.arange(length) >= 3) for _ in range(num_sequences)]
        writer.extend(sequences, position=num_sequences)
    return path
