"""What the commands that make token files share: a progress bar that counts tokens, where the ids come from, and a summary."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from specjax.checkpoints.store import Checkpoint
from specjax.training.token_manifest import TokenManifest


@contextlib.contextmanager
def token_progress(description: str, *, total: int | None, shown: bool) -> Iterator[Callable[[int, int], float]]:
    """Shows a bar on stderr, with tokens and tokens a second.

    Args:
        description: What is going on.
        total: When it is done, in any unit; `None` if that is not known.
        shown: Whether to show it.

    Yields:
        `update(completed, num_tokens)`: what is done so far, and tokens since the last update; returns tokens a second. Those are counted
        from the first update on, which holds compilations, as soon as there is a second one.
    """
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[tokens]}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(description, total=total, tokens="")
        start = time.perf_counter()
        first_end, first_tokens, all_tokens = start, None, 0

        def update(completed: int, num_tokens: int) -> float:
            nonlocal first_end, first_tokens, all_tokens
            now, all_tokens = time.perf_counter(), all_tokens + num_tokens
            if first_tokens is None:
                first_end, first_tokens = now, num_tokens
            later = all_tokens - first_tokens
            rate = later / (now - first_end) if later else all_tokens / (now - start)
            bar.update(task, completed=completed, tokens=f"{all_tokens:,} tokens, {rate:,.0f} tokens/s")
            return rate

        yield update


def tokenizer_and_ends(checkpoint: Checkpoint) -> tuple[Any, tuple[int, ...]]:
    """The tokenizer of a target, and the ids that end a turn."""
    tokenizer = checkpoint.tokenizer()
    ends = checkpoint.eos_token_ids()
    return tokenizer, ends or (() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))


def origin(target: str | Path, checkpoint: Checkpoint) -> dict[str, str]:
    """What token files remember of a target: its name, and a digest that another checkpoint of that name does not have."""
    digest = hashlib.sha256(json.dumps(checkpoint.metadata, sort_keys=True).encode()).hexdigest()[:16]
    return {"target": checkpoint.metadata.get("source") or Path(target).resolve().name, "target_digest": digest}


def summary(destination: Path, manifest: TokenManifest) -> str:
    """What token files hold, in a line."""
    dropped = ", ".join(f"{reason} {number:,}" for reason, number in sorted(manifest.dropped.items()))
    return (
        f"{destination}: {manifest.num_sequences:,} sequences, {manifest.num_tokens:,} tokens, the loss counts on "
        f"{manifest.num_loss_tokens:,}; dropped: {dropped or 'none'}"
    )
