"""Long code prompts out of an installed library: some of its files, then a file of it up to some line, whose next line is asked for.

What is held out is that line; the other files are what its author had in sight, so some lines need them. The library is real, and at hand
wherever it is installed; a model may have seen it in training, which a comparison of two ways of decoding does not mind.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from experiments.experiment import ExperimentError

# Lines worth asking for: neither a bracket nor a whole paragraph. Files worth showing: neither a few imports nor a table of data.
_LINE_CHARACTERS, _FILE_LINES = (12, 100), (40, 2000)


@dataclasses.dataclass(frozen=True)
class CodePrompt:
    """One prompt.

    Attributes:
        text: Whole files and the beginning of one more, each under a comment with its path.
        next_line: The line that comes next.
    """

    text: str
    next_line: str


def long_code_prompts(library: str, *, count: int, tokens: int, num_tokens: Callable[[str], int], seed: int = 0) -> list[CodePrompt]:
    """Prompts of nine tenths of so many tokens, or more.

    Args:
        library: A folder of Python files, or an installed package's name.
        count: Prompts, each of another held-out file.
        tokens: The most that a prompt has.
        num_tokens: Of a text.
        seed: Which files and lines.

    Raises:
        ExperimentError: Neither a folder nor a package, or too few files.
    """
    folder = library_folder(library)
    files = {path.relative_to(folder.parent).as_posix(): lines for path in sorted(folder.rglob("*.py")) if (lines := _lines(path))}
    rng, sizes = np.random.default_rng(seed), dict[str, int]()
    names = rng.permutation(list(files)).tolist()

    def filled(name: str, held_out: CodePrompt) -> CodePrompt | None:
        """With other files before it; `None` where it does not fit, or they do not fill it."""
        text, room = held_out.text, tokens - num_tokens(held_out.text)
        for other in _neighbours(name, names):
            if room < tokens // 20:
                break
            shown = "\n".join([f"# {other}", *files[other], "", ""])
            sizes[other] = sizes.get(other) or num_tokens(shown)
            if sizes[other] <= room:
                text, room = shown + text, room - sizes[other]
        return dataclasses.replace(held_out, text=text) if 0 <= room < tokens // 10 else None

    prompts: list[CodePrompt] = []
    for name in names:
        held_out = _held_out(name, files[name], rng)
        prompt = None if held_out is None or len(prompts) == count else filled(name, held_out)
        prompts += [] if prompt is None else [prompt]
    if len(prompts) < count:
        raise ExperimentError(f"{library!r} has files for {len(prompts)} prompts of {tokens} tokens, {count} are wanted")
    return prompts


def library_folder(library: str) -> Path:
    """Where a library's Python files are.

    Raises:
        ExperimentError: It is neither a folder nor an installed package.
    """
    folder = Path(library).expanduser()
    if folder.is_dir():
        return folder
    found = importlib.util.find_spec(library) if library.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise ExperimentError(f"library must be a folder or an installed package with several files, got {library!r}")
    return Path(next(iter(found.submodule_search_locations)))


def _held_out(name: str, lines: Sequence[str], rng: np.random.Generator) -> CodePrompt | None:
    """A file up to a line behind its middle, where there is something to complete it by; `None` if none is worth asking for."""
    shortest, longest = _LINE_CHARACTERS
    asked = [at for at in range(len(lines) // 2, len(lines)) if shortest <= len(lines[at].strip()) <= longest]
    if not asked:
        return None
    at = int(rng.choice(asked))
    return CodePrompt("\n".join([f"# {name}", *lines[:at], ""]), lines[at])


def _neighbours(name: str, names: Sequence[str]) -> list[str]:
    """The other files, those in the nearest folders first; within one, in the order of `names`."""
    ours = Path(name).parent.parts

    def distance(other: str) -> int:
        theirs = Path(other).parent.parts
        shared = 0
        while shared < min(len(ours), len(theirs)) and ours[shared] == theirs[shared]:
            shared += 1
        return len(ours) + len(theirs) - 2 * shared

    return sorted((other for other in names if other != name), key=distance)


def _lines(path: Path) -> list[str]:
    """Of a file that is worth showing; none otherwise."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines if _FILE_LINES[0] <= len(lines) <= _FILE_LINES[1] else []
