"""The JSON that an experiment leaves: where it ran, how, and its rows. Written atomically, and after every row."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.experiment import ROW_KEYS, ExperimentError

REPOSITORY = Path(__file__).parent.parent
# Files that a run itself rewrites do not make a tree dirty.
_REWRITTEN = (":!experiments/results", ":!README.md")


@dataclasses.dataclass(frozen=True)
class Record:
    """Everything about a run but its rows.

    Attributes:
        experiment: The module's name.
        question: What it answers.
        command: What repeats it.
        git_sha: The commit, with `-dirty` where the tree had changes.
        config: All settings.
    """

    experiment: str
    question: str
    command: str
    git_sha: str
    config: dict[str, Any]

    def as_json(self, rows: list[dict], earlier: dict[str, Any] | None = None) -> dict[str, Any]:
        """The whole JSON; or an earlier run's, with these rows behind its own and under `appended` what they come from."""
        description = {**dataclasses.asdict(self), "versions": versions(), "device": device()}
        if earlier is None:
            return {**description, "rows": rows}
        part = {
            "first_row": len(earlier["rows"]),
            **{key: description[key] for key in ("command", "git_sha", "config", "versions", "device")},
        }
        if earlier.get("interrupted"):  # its last run was, to which these rows do not belong
            part["earlier_interrupted"] = True
        kept = {key: value for key, value in earlier.items() if key != "interrupted"}
        return kept | {"appended": [*earlier.get("appended", []), part], "rows": [*earlier["rows"], *rows]}

    def earlier(self, path: Path) -> dict[str, Any] | None:
        """What stands in a file of this experiment, to append to: a run's result, or else what an interrupted one left.

        Returns:
            The JSON; `None` if there is neither.

        Raises:
            ExperimentError: It is another experiment's, or holds this command's rows already.
        """
        if not path.exists():
            path = partial_path(path)
        if not path.exists():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["experiment"] != self.experiment:
            raise ExperimentError(
                f"{path.name} holds rows of {found['experiment']}, to which those of {self.experiment} cannot be appended"
            )
        if self.command.removesuffix(" --append") in _commands(found):
            raise ExperimentError(f"{path.name} already holds the rows of this command: {self.command}")
        return found


def git_sha(repository: Path = REPOSITORY) -> str | None:
    """The checked-out commit, with `-dirty` where tracked files differ or new ones stand; `None` outside a git checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        sha = git("rev-parse", "HEAD")
        dirty = git("status", "--porcelain", "--", ".", *_REWRITTEN)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{sha}-dirty" if dirty else sha


def versions() -> dict[str, str]:
    """Versions of everything that decides what is compiled."""

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "checkout" if package == "specjax" else "absent"

    packages = {package: version(package) for package in ("jax", "jaxlib", "flax", "numpy", "specjax")}
    return {"python": platform.python_version(), **packages, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}


def device() -> dict[str, Any]:
    """The devices that JAX computes on."""
    first = jax.devices()[0]
    memory = (first.memory_stats() or {}).get("bytes_limit")
    return {"kind": first.device_kind, "count": jax.device_count(), "platform": first.platform, "memory_bytes": memory}


def check_row(row: dict) -> dict:
    """The row, JSON-ready.

    Raises:
        ValueError: A key is missing that every row carries.
    """
    missing = [key for key in ROW_KEYS if key not in row]
    if missing:
        raise ValueError(f"a row lacks {', '.join(missing)}: {row}")
    return {key: _plain(value) for key, value in row.items()}


def collect(record: Record, rows: Iterable[dict], path: Path, earlier: dict[str, Any] | None = None) -> Generator[dict]:
    """Passes rows on and keeps what is there so far in `PATH.partial`; the last row replaces `path`, so a run that fails destroys nothing.

    What stands in `PATH.partial` says `"interrupted": true`, and the report repeats it, should it be kept as a result. Rows of another
    command that stand there already are kept too, under another name.

    Args:
        record: The run.
        rows: What the experiment yields.
        path: Where the JSON shall stand.
        earlier: From `record.earlier`, what the rows shall be appended to.
    """
    partial = partial_path(path)
    done: list[dict] = []
    for row in rows:
        done.append(check_row(row))
        whole = record.as_json(done, earlier)
        if len(done) == 1:
            _set_aside(partial, whole, earlier)
        write_json(partial, whole | {"interrupted": True})
        yield done[-1]
    write_json(path, record.as_json(done, earlier))
    if done:  # else it is not of this run
        partial.unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    """Where the rows of a run stand until it ends."""
    return path.with_suffix(".json.partial")


def _set_aside(partial: Path, whole: dict[str, Any], earlier: dict[str, Any] | None) -> None:
    """Renames what an interrupted run left, unless these runs' rows are appended to it, or take its place."""
    if not partial.exists():
        return
    found = json.loads(partial.read_text(encoding="utf-8"))
    if found == earlier or _commands(found) == _commands(whole):
        return
    stem = partial.name.removesuffix(".json.partial")
    names = (partial.with_name(f"{stem}.{number}.json.partial") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    partial.rename(aside)
    print(f"{partial.name} held {len(found['rows'])} rows of an interrupted run: they are now in {aside}", file=sys.stderr, flush=True)


def _commands(result: dict[str, Any]) -> list[str]:
    """Of all runs whose rows stand in a JSON."""
    return [run["command"].removesuffix(" --append") for run in (result, *result.get("appended", []))]


def write_json(path: Path, value: Any) -> None:
    """Writes `value` so that `path` holds the old or the new file, never a part. Not-a-number is refused."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return np.asarray(value).tolist()
    return value
