"""Tiny checkpoints, and prompt sets and tasks to decode with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny-target")


@pytest.fixture(scope="session")
def drafter_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny-drafter", seed=1)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    for name in ("first", "second"):
        lines = (json.dumps({"question_id": n, "turns": [f"{name} {n} " + "ab" * n]}) for n in range(5))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums to work out, and a text."""
    folder = tmp_path_factory.mktemp("tasks")
    line = json.dumps({"question": "How much is one and two? " * 2, "answer": "#### 3"})
    (folder / "gsm8k_test.jsonl").write_text(f"{line}\n" * 3, encoding="utf-8")
    (folder / "book.txt").write_text("The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 10, encoding="utf-8")
    return folder
