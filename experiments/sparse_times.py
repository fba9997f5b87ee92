"""Records the times of sparse verification at the 8B shape, which need no weights: `python -m experiments.sparse_times`.

Runs `sparse_latency` (a verification, sparse beside dense) and `five_ways` with the preset as its target (whole steps of the real loop, and
cycles of two levels), and writes `sparse_latency.json` and `five_ways_8b.json`. Words are settings of both where both have them;
`five_ways.batches=1` is one of that experiment alone.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from experiments import run
from experiments.experiment import load

# Settings by experiment and name of its JSON; later words win.
PARTS = {
    ("sparse_latency", "sparse_latency"): {"model": "llama31_8b"},
    ("five_ways", "five_ways_8b"): {"target": "llama31_8b", "drafter": "eagle3", "batches": "1,8", "contexts": "32768,131072"},
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    settings: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE…", help="Settings of both.", show_default=False)] = None,
    record: Annotated[bool, typer.Option("--record", help="Write to experiments/results.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for the JSON without --record.")] = run.REPOSITORY / "runs",
    sha: Annotated[str | None, typer.Option("--git-sha", help="The commit, for a checkout without .git.")] = None,
) -> None:
    """Runs both."""
    given = dict(word.split("=", 1) for word in settings or [])
    unknown, plans = set(given), {}
    for (name, save_as), defaults in PARTS.items():
        fields = {field.name for field in dataclasses.fields(load(name).config_type)}
        alone = {key.removeprefix(f"{name}."): value for key, value in given.items() if key.startswith(f"{name}.")}
        plan = {key: value for key, value in (defaults | given | alone).items() if key in fields}
        plans[name, save_as] = plan
        unknown -= {*plan, *(f"{name}.{key}" for key in plan)}
    if unknown:
        raise typer.BadParameter(f"neither experiment has a setting {', '.join(sorted(unknown))}")
    for (name, save_as), plan in plans.items():
        print(f"== {name}", flush=True)
        run.main(name, [f"{key}={value}" for key, value in plan.items()], record=record, save_as=save_as, out=out, sha=sha)


if __name__ == "__main__":
    app()
