"""What an experiment is: a module with a docstring that declares it, a frozen dataclass `Config` and `run(config)`.

The docstring's first line is the question. `Command:`, `Hardware:`, `Time:` and `Result:` follow, each on lines of its own; what the list
of experiments shows is read from there. `run` returns or yields rows: dicts that each say `implementation`, `weights` and `synthetic`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DECLARED = ("Command", "Hardware", "Time", "Result")
# What every row carries.
ROW_KEYS = ("implementation", "weights", "synthetic")


class ExperimentError(ValueError):
    """Settings or surroundings that an experiment cannot work with; shown without a traceback."""


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What a module's docstring says about its experiment.

    Attributes:
        name: The module's name.
        question: What it answers.
        command: The command behind its recorded result.
        hardware: What it wants to run on.
        time: How long that takes.
        result: What came out.
    """

    name: str
    question: str
    command: str
    hardware: str
    time: str
    result: str


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An experiment, ready to run.

    Attributes:
        declaration: What its docstring says.
        config_type: Its `Config`.
        run: From a config to rows.
        show: From a row to what the terminal shows; a module may define its own.
    """

    declaration: Declaration
    config_type: type
    run: Callable[[Any], Iterable[dict]]
    show: Callable[[dict], str]


def path_field(default: str | tuple[str, ...] | None = None) -> Any:
    """A `Config` field that holds a path, or several: records keep its last part only, since folders differ from machine to machine."""
    return dataclasses.field(default=default, metadata={"path": True})


def local_field() -> Any:
    """A `Config` field that says where this machine keeps something; records leave it out."""
    return dataclasses.field(default=None, metadata={"local": True})


def declarations() -> list[Declaration]:
    """The experiments in this folder, read from their docstrings without importing them."""
    found = (_declaration(path) for path in sorted(FOLDER.glob("*.py")))
    return [declaration for declaration in found if declaration is not None]


def load(name: str) -> Experiment:
    """Imports an experiment.

    Raises:
        ExperimentError: There is none of that name.
    """
    by_name = {declaration.name: declaration for declaration in declarations()}
    if name not in by_name:
        raise ExperimentError(f"no experiment is named {name!r}; there are {', '.join(by_name)}")
    module = importlib.import_module(f"experiments.{name}")
    return Experiment(by_name[name], module.Config, module.run, getattr(module, "show", summary))


def summary(row: dict) -> str:
    """A row on one line: its short values."""
    short = {key: value for key, value in row.items() if not isinstance(value, list | dict) and value is not None}
    return "  ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in short.items())


def parse_config(config_type: type, assignments: Sequence[str]) -> Any:
    """Builds a config from `key=value` words.

    Tuples are comma-separated, `none` is `None`, bools are `true` and `false`.

    Raises:
        ExperimentError: A word without `=`, an unknown or repeated key, or a value of another type; names what was expected and what came.
    """
    hints = typing.get_type_hints(config_type)
    values: dict[str, Any] = {}
    for word in assignments:
        key, equals, text = word.partition("=")
        if not equals:
            raise ExperimentError(f"expected key=value, got {word!r}; known keys: {_known_keys(config_type)}")
        if key not in hints:
            raise ExperimentError(f"unknown key {key!r}; known keys: {_known_keys(config_type)}")
        if key in values:
            raise ExperimentError(f"key {key!r} is given twice")
        try:
            values[key] = _parse(hints[key], text)
        except ValueError:
            raise ExperimentError(f"{key} must be {_type_name(hints[key])}, got {text!r}") from None
    return config_type(**values)


def portable(config: Any) -> dict[str, Any]:
    """A config as JSON values, with paths cut to their last part and local fields left out."""
    values = {}
    for field in dataclasses.fields(config):
        if field.metadata.get("local"):
            continue
        value = getattr(config, field.name)
        if field.metadata.get("path") and value:
            value = tuple(Path(path).name for path in value) if isinstance(value, tuple) else Path(value).name
        values[field.name] = list(value) if isinstance(value, tuple) else value
    return values


def changed(config: Any) -> list[str]:
    """The `key=value` words, paths cut, that make this config from the defaults."""
    values, defaults = portable(config), portable(type(config)())
    return [f"{key}={_word(value)}" for key, value in values.items() if value != defaults[key]]


def _word(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _declaration(path: Path) -> Declaration | None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    sections: dict[str, str] = {}
    current = None
    for line in (docstring or "").splitlines():
        label, colon, rest = line.partition(":")
        if colon and label in DECLARED:
            current = label
            sections[label] = rest.strip()
        elif not line.strip():
            current = None
        elif current:
            sections[current] = f"{sections[current]} {line.strip()}".strip()
    if not sections or docstring is None:
        return None
    missing = [label for label in DECLARED if label not in sections]
    if missing:
        raise ValueError(f"{path.name}: the docstring declares {', '.join(sections)} but not {', '.join(missing)}")
    return Declaration(path.stem, docstring.splitlines()[0], *(sections[label] for label in DECLARED))


def _known_keys(config_type: type) -> str:
    hints = typing.get_type_hints(config_type)
    return ", ".join(f"{field.name} ({_type_name(hints[field.name])})" for field in dataclasses.fields(config_type))


def _type_name(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_type_name(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a comma-separated list of {_type_name(typing.get_args(hint)[0])}"
    if hint is bool:
        return "true or false"
    return "none" if hint is types.NoneType else str(hint.__name__)


def _parse(hint: Any, text: str) -> Any:
    if isinstance(hint, types.UnionType):
        if text.lower() == "none":
            return None
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return tuple(_parse(typing.get_args(hint)[0], part.strip()) for part in text.split(",") if part.strip())
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    return hint(text)
