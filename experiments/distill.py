"""How fast does a target write its drafters' training data, and how much of it would a trimmed draft vocabulary miss?

Command: python -m experiments.run distill target=TARGET out=FOLDER num_tokens=10000000 --record
Hardware: one H200 or several
Time: 2 minutes on an H200 for five million tokens and a target of 135M parameters
Result: none on record yet

Dialogues are sampled from the target itself, the user's turns too, as `specjax distill` does. `tokens_per_s` counts what the target wrote,
dropped dialogues included, without the first batch, which compiles. `share_outside` has, for each size of a trimmed vocabulary, the part of
the last tenth of the text that it could never draft, its tokens being the most frequent ones of the other nine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.experiment import ExperimentError, local_field, path_field
from experiments.models import stored_as
from specjax.checkpoints.store import abstract_checkpoint
from specjax.commands.distill import distill
from specjax.drafting.heads.from_full_head import frequent_tokens
from specjax.training.sample_dialogues import DialogueConfig
from specjax.training.token_counts import share_outside
from specjax.training.token_files import TokenFiles

_HELD_OUT = 10  # one in so many sequences, the last ones


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        target: A checkpoint's path.
        out: Folder for the token files.
        num_tokens: Stop with the dialogue that reaches so many.
        batch_size: Dialogues at a time.
        max_user_tokens: Longest turn of a user that is kept.
        max_answer_tokens: Where answers are cut.
        temperatures: Of answers; dialogues take them in turn.
        user_top_p: Of users' turns.
        vocabularies: Sizes of trimmed vocabularies.
        seed: Of all that is sampled.
        dtype: Of the target's parameters.
    """

    target: str = path_field("")
    out: str | None = local_field()
    num_tokens: int = 1_000_000
    batch_size: int = 256
    max_user_tokens: int = 128
    max_answer_tokens: int = 384
    temperatures: tuple[float, ...] = (0.0, 0.5, 1.0)
    user_top_p: float = 1.0
    vocabularies: tuple[int, ...] = (8192, 16384, 32768, 65536)
    seed: int = 1
    dtype: str = "bfloat16"


def run(config: Config) -> Iterator[dict]:
    """One row."""
    if not config.target or config.out is None:
        raise ExperimentError("distill needs target=PATH and out=FOLDER")
    out = Path(config.out).expanduser()
    try:
        settings = DialogueConfig(
            batch_size=config.batch_size,
            max_user_tokens=config.max_user_tokens,
            max_answer_tokens=config.max_answer_tokens,
            temperatures=config.temperatures,
            user_top_p=config.user_top_p,
            seed=config.seed,
        )
        done = distill(config.target, out, settings, num_tokens=config.num_tokens, dtype=jnp.dtype(config.dtype))
    except (ValueError, OSError) as error:
        raise ExperimentError(str(error)) from error
    target = abstract_checkpoint(config.target)
    manifest = done.manifest
    yield {
        "target": target.metadata.get("source") or Path(config.target).resolve().name,
        "weights": stored_as(target.metadata, config.dtype),
        "implementation": "auto",
        "synthetic": False,
        "devices": len(jax.devices()),
        "batch": config.batch_size,
        "tokens_per_s": done.tokens_per_second,
        "sequences": manifest.num_sequences,
        "tokens": manifest.num_tokens,
        "loss_tokens": manifest.num_loss_tokens,
        "dropped": manifest.dropped,
        "share_outside": shares_outside(TokenFiles(out), target.model.config.vocab_size, config.vocabularies),
    }


def shares_outside(files: TokenFiles, vocab_size: int, sizes: tuple[int, ...]) -> dict[str, float | None]:
    """By size of the vocabulary, what part of held-out text lies outside it; `None` for sizes that trim nothing.

    Args:
        files: Token files.
        vocab_size: V.
        sizes: Numbers of tokens.
    """
    seen, held_out = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    first_held_out = len(files) - max(len(files) // _HELD_OUT, 1)
    for index in range(len(files)):
        sequence = files[index]
        counts = seen if index < first_held_out else held_out
        counts += np.bincount(sequence.tokens[sequence.loss_mask], minlength=vocab_size)
    return {str(size): None if size >= vocab_size else share_outside(held_out, frequent_tokens(seen, size)) for size in sizes}


def show(row: dict) -> str:
    """The row on a line."""
    shares = ", ".join(f"{size} tokens {share:.4f}" for size, share in row["share_outside"].items() if share is not None)
    return (
        f"{row['target']}: {row['tokens']:,} tokens in {row['sequences']:,} dialogues, {row['tokens_per_s']:,.0f} tokens/s written on "
        f"{row['devices']} devices; outside a vocabulary of {shares or 'none'}"
    )


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    shares = {f"outside {size}": share for size, share in row["share_outside"].items() if share is not None}
    return {"target": row["target"], "devices": row["devices"], "tokens/s": row["tokens_per_s"], "tokens": row["tokens"], **shares}
