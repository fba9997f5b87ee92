"""Rewrites the README's tables from experiments/results/*.json: `python -m experiments.report`; `--check` only says whether they agree.

A table stands between `<!-- results:NAME -->` and `<!-- /results:NAME -->` and is made from `results/NAME.json`; between
`<!-- optional:NAME -->` and its other half stand the table and the figures of a result once there is one. An experiment's module may
say which rows to show (`table_rows(rows)`), which columns (`columns(row)`), and how to draw its rows: one figure (`plot(rows, axes)`, to
`results/NAME.svg`) or several (`plots(rows)`, by suffix a function of axes, to `results/NAME-SUFFIX.svg`; the empty suffix is `NAME.svg`).
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.experiment import ExperimentError
from experiments.record import REPOSITORY
from experiments.run import RESULTS

README = REPOSITORY / "README.md"
_BLOCK = re.compile(r"(<!-- (?P<kind>results|optional):(?P<name>[\w.-]+) -->\n).*?(<!-- /(?P=kind):(?P=name) -->)", re.DOTALL)
# Longer tables are folded: the figure and the words beside them are what most readers look for.
_LONGEST_OPEN = 12
_INTERRUPTED = " The run was interrupted: these are the rows that it finished."
_MARKER = re.compile(r"<!-- /?(?:results|optional):[\w.-]+ -->")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if the README and the JSON disagree.")] = False,
    plots: Annotated[bool, typer.Option(help="Draw the figures too.")] = True,
) -> None:
    """Brings the README's tables and the figures in line with the recorded results."""
    text = README.read_text(encoding="utf-8") if README.exists() else ""
    try:
        wanted = rewritten(text, RESULTS)
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if check:
        if wanted != text:
            print("README.md and experiments/results disagree: run python -m experiments.report", file=sys.stderr)
            raise typer.Exit(1)
        return
    if wanted != text:
        README.write_text(wanted, encoding="utf-8")
        print(f"rewrote {README.name}")
    if plots:
        for path in sorted(RESULTS.glob("*.json")):
            figures(path)


def rewritten(text: str, results: Path) -> str:
    """The README's text with every table made anew.

    Raises:
        ExperimentError: Markers that do not pair, or that name a result which is not there and is not optional.
    """

    def replace(match: re.Match) -> str:
        path = results / f"{match['name']}.json"
        if not path.is_file():
            if match["kind"] == "optional":
                return match[1] + match[4]
            raise ExperimentError(f"README.md shows results:{match['name']}, but experiments/results/{path.name} does not exist")
        result = json.loads(path.read_text(encoding="utf-8"))
        shown = markdown(result, path.name)
        if match["kind"] == "optional":
            shown = f"\n{shown}{_images(result, path)}"
        return match[1] + shown + match[4]

    unpaired = _MARKER.findall(_BLOCK.sub("", text))
    if unpaired:
        raise ExperimentError(f"README.md has a marker without its other half: {unpaired[0]}")
    return _BLOCK.sub(replace, text)


def markdown(result: dict, file_name: str) -> str:
    """A result's tables (one for each set of columns) and where they come from."""
    module = _module(result["experiment"])
    rows = module.table_rows(result["rows"]) if hasattr(module, "table_rows") else result["rows"]
    shown = [_columns(module, row) for row in rows]
    tables = [_table(list(rows)) for _, rows in itertools.groupby(shown, key=lambda row: tuple(row))]
    source = f"[`experiments/results/{file_name}`](experiments/results/{file_name})"
    part = "" if len(rows) == len(result["rows"]) else f" (here {len(rows)} of its {len(result['rows'])} rows)"
    appended = result.get("appended", [])
    ends = [*(later["first_row"] for later in appended), len(result["rows"])]
    # A run that was appended says whether the one before it was interrupted; of the last one the whole JSON does.
    interrupted = [*(later.get("earlier_interrupted") for later in appended), result.get("interrupted")]
    origin = (
        f"From {source}{part}: {_where(result, result['rows'][: ends[0]])}; `{result['command']}`.{_INTERRUPTED * bool(interrupted[0])}"
    )
    for later, end, left_off in zip(appended, ends[1:], interrupted[1:], strict=True):
        before = result["rows"][: later["first_row"]]
        above = len(module.table_rows(before) if hasattr(module, "table_rows") else before)
        where = _where(later, result["rows"][later["first_row"] : end])
        origin += f" Rows {above + 1} and on: {where}; `{later['command']}`.{_INTERRUPTED * bool(left_off)}"
    return "\n".join([*tables, origin, ""])


def _where(run: dict, rows: list[dict]) -> str:
    """On what a run was made, whose rows these are."""
    weights = ", ".join(dict.fromkeys(row["weights"] for row in rows))
    device = run["device"]
    count = f"{device['count']} × " if device["count"] > 1 else ""
    sha, dash, state = run["git_sha"].partition("-")  # "dirty", where the tree had changes
    return f"{count}{device['kind']}, JAX {run['versions']['jax']}, weights {weights}, commit {sha[:8]}{dash}{state}"


def _images(result: dict, path: Path) -> str:
    """Links to a result's figures."""
    names = {suffix: _figure_path(path, suffix).name for suffix in _figures(_module(result["experiment"]), result["rows"])}
    return "".join(
        f"\n![{result['question']}{f' ({suffix})' if suffix else ''}](experiments/results/{name})\n" for suffix, name in names.items()
    )


def figures(path: Path) -> list[Path]:
    """Draws a result beside its JSON, the same bytes for the same rows; nothing where its experiment draws nothing."""
    result = json.loads(path.read_text(encoding="utf-8"))
    wanted = _figures(_module(result["experiment"]), result["rows"])
    if not wanted:
        return []
    # Imported here: only drawing needs it.
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    drawn = []
    with mpl.rc_context({"svg.hashsalt": "specjax", "svg.fonttype": "none"}):
        for suffix, draw in wanted.items():
            canvas, axes = plt.subplots(figsize=(8, 4), layout="constrained")
            draw(axes)
            axes.set_title(result["question"], fontsize=9)
            drawn.append(_figure_path(path, suffix))
            canvas.savefig(drawn[-1], metadata={"Date": None, "Creator": None})
            plt.close(canvas)
    return drawn


def _figures(module: Any, rows: list[dict]) -> dict[str, Callable[[Any], None]]:
    if hasattr(module, "plots"):
        return module.plots(rows)
    return {"": lambda axes: module.plot(rows, axes)} if hasattr(module, "plot") else {}


def _figure_path(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.stem}-{suffix}.svg" if suffix else f"{path.stem}.svg")


def _module(experiment: str) -> Any:
    return importlib.import_module(f"experiments.{experiment}")


def _columns(module: Any, row: dict) -> dict[str, Any]:
    columns = getattr(module, "columns", None)
    if columns is not None:
        return columns(row)
    return {key: value for key, value in row.items() if not isinstance(value, list | dict)}


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    if len(rows) <= _LONGEST_OPEN:
        return table
    return f"<details>\n<summary>Table of {len(rows)} rows</summary>\n\n{table}\n</details>\n"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


if __name__ == "__main__":
    app()
