"""Reading what XLA compiled."""

from __future__ import annotations

import re


def instructions_in_loops(text: str) -> list[str]:
    """The instructions of every computation that a while body reaches."""
    computations: dict[str, list[str]] = {}
    current = ""
    for line in text.splitlines():
        start = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if start and not line.startswith(" "):
            current = start.group(1)
            computations[current] = []
        elif current and line.startswith(" "):
            computations[current].append(line.strip())
    pending = [name for lines in computations.values() for line in lines for name in re.findall(r"body=%?([\w.\-]+)", line)]
    reached: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            for line in computations[name]:
                pending += re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", line)
    return [line for name in reached for line in computations[name]]
