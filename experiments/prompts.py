"""Prompt sets: `NAME.jsonl` in a folder, one `{"turns": [...]}` a line, of which the first turn is the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from experiments.experiment import ExperimentError

T = TypeVar("T")


def load_prompts(data_dir: str | Path, name: str, number: int | None = None) -> list[str]:
    """The first turns of a set, or `number` of them spread evenly over it.

    Raises:
        ExperimentError: No such file, or a line without turns.
    """
    path = Path(data_dir).expanduser() / f"{name}.jsonl"
    if not path.is_file():
        raise ExperimentError(f"there is no prompt set {name}.jsonl in data_dir {Path(data_dir)}")
    lines = spread([line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()], number)
    prompts = []
    for line in lines:
        turns = json.loads(line).get("turns")
        if not turns:
            raise ExperimentError(f"{path.name}: a line has no turns: {line[:80]}")
        prompts.append(turns[0])
    return prompts


def spread(items: list[T], count: int | None) -> list[T]:
    """So many of them, spread evenly over all; all where there are no more."""
    return items if count is None or count >= len(items) else [items[index * len(items) // count] for index in range(count)]


def encode(tokenizer: Any, prompts: list[str], *, chat_template: bool) -> list[list[int]]:
    """Token ids of user messages, the assistant's header behind them; without a template, of the bare text.

    Raises:
        ExperimentError: A template is asked for and the tokenizer has none.
    """
    if not chat_template:
        return [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    if not tokenizer.chat_template:
        raise ExperimentError("the tokenizer has no chat template: pass chat_template=false for bare text")
    texts = (
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    )
    return [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
