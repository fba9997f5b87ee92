"""Programs compiled side by side, and what the terminal sees of it before an experiment has its first row.

Worker threads compile, the main thread waits: an interrupt reaches it at once, and what has not begun does not begin.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

K = TypeVar("K")


def say(text: str) -> None:
    """A line on standard error, with the time of day: a run that is killed tells where it was."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def compile_all(jobs: Mapping[K, tuple[str, Callable[[], Any]]], *, threads: int, first: int = 0) -> dict[K, Any]:
    """Runs jobs of which each compiles a program, in the order given, and says when one has ended.

    Args:
        jobs: By key, what it is called and what is to be done.
        threads: Jobs at a time.
        first: Jobs that run alone, before the others: the products that programs share XLA then tunes once, for all alike. Tuned at the
            same time, two programs may get other kernels for the same product.

    Returns:
        By the same keys, what they returned. Whatever a job raised is raised, without those that had not begun.
    """
    begin, pool, ready = time.perf_counter(), ThreadPoolExecutor(threads), {}
    items = list(jobs.items())
    try:
        for group in [*([item] for item in items[:first]), items[first:]]:
            pending = {pool.submit(job): (key, name) for key, (name, job) in group}
            for future in as_completed(pending):
                key, name = pending[future]
                ready[key] = future.result()
                say(f"{len(ready)} of {len(jobs)} ready after {time.perf_counter() - begin:.0f} s: {name}")
    finally:
        # Not `with`, which would wait for all of them after an interrupt.
        pool.shutdown(wait=False, cancel_futures=True)
    return {key: ready[key] for key in jobs}
