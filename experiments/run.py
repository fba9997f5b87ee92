"""`python -m experiments.run` lists the experiments; `python -m experiments.run NAME key=value …` runs one and writes its JSON."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from experiments.experiment import ExperimentError, changed, declarations, load, parse_config, portable
from experiments.record import REPOSITORY, Record, collect, git_sha

RESULTS = REPOSITORY / "experiments" / "results"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    name: Annotated[str | None, typer.Argument(help="The experiment; none lists them.", show_default=False)] = None,
    settings: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE…", help="Its settings.", show_default=False)] = None,
    record: Annotated[bool, typer.Option("--record", help="Write to experiments/results, the numbers that the README shows.")] = False,
    save_as: Annotated[str | None, typer.Option("--save-as", help="The JSON's name, where it is not the experiment's.")] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Keep the rows that the JSON has, or an interrupted run left, and add these.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for the JSON without --record.")] = REPOSITORY / "runs",
    sha: Annotated[str | None, typer.Option("--git-sha", help="The commit, for a checkout without .git.")] = None,
) -> None:
    """Lists the experiments, or runs one."""
    if name is None:
        show_list()
        return
    try:
        experiment = load(name)
        config = parse_config(experiment.config_type, settings or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    commit = sha or git_sha()
    if record and commit is None:
        raise typer.BadParameter("a recorded result needs its commit: this is no git checkout, give --git-sha SHA")
    options = ["--record"] * record + [f"--save-as {save_as}"] * (save_as is not None) + ["--append"] * append
    description = Record(
        experiment=name,
        question=experiment.declaration.question,
        command=" ".join(["python -m experiments.run", name, *changed(config), *options]),
        git_sha=commit or "unknown",
        config=portable(config),
    )
    path, rows = (RESULTS if record else out) / f"{save_as or name}.json", 0
    try:
        earlier = description.earlier(path) if append else None
        with _terminated_as_interrupted(), contextlib.closing(collect(description, experiment.run(config), path, earlier)) as found:
            for row in found:
                print(experiment.show(row), flush=True)
                rows += 1
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print(f"interrupted after {rows} rows" + f", which are in {path}.partial" * (rows > 0), file=sys.stderr, flush=True)
        os._exit(130)  # what compiles in other threads cannot be stopped, and Python would wait for it
    print(f"wrote {path}")


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM interrupts, like Ctrl-C: processes that an experiment started in sessions of their own are ended, and none stays on a GPU."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # where no signal can be handled
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def show_list() -> None:
    """Prints what there is, from the modules' own docstrings."""
    table = Table("experiment", "question", "hardware", "time", show_lines=True)
    for declaration in declarations():
        table.add_row(declaration.name, declaration.question, declaration.hardware, declaration.time)
    Console().print(table)


if __name__ == "__main__":
    app()
