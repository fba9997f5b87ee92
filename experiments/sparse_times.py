"""Records the times of sparse verification at the 8B shape, which need no weights: `python -m experiments.sparse_times`.

Runs `sparse_latency` (a verification, sparse beside dense) and `five_ways` with the preset as its target (whole steps of the real loop, and
cycles of two levels), and writes `sparse_latency.json` and `five_ways_8b.json`. Words are settings of both where both have them;
`five_ways.batches=1` is one of that experiment alone, and wins over `batches=8`. Those of both are read before either runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from experiments import run
from experiments.experiment import ExperimentError, load, parse_config

# Settings by experiment and name of its JSON, where words give no others.
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
    try:
        plans = _plans(settings or [])
    except ExperimentError as error:
        raise typer.BadParameter(str(error)) from None
    for (name, save_as), words in plans.items():
        print(f"== {name}", flush=True)
        run.main(name, words, record=record, save_as=save_as, out=out, sha=sha)


def _plans(words: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """The words of each experiment, after all have been read: the second one's are not to be refused when the first has run for long."""
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ExperimentError(f"expected key=value, got {word!r}")
        if key in given:
            raise ExperimentError(f"key {key!r} is given twice")
        given[key] = value
    unknown, plans = set(given), {}
    for (name, save_as), defaults in PARTS.items():
        config_type = load(name).config_type
        fields = {field.name for field in dataclasses.fields(config_type)}
        alone = {key.removeprefix(f"{name}."): value for key, value in given.items() if key.startswith(f"{name}.")}
        plan = {key: value for key, value in (defaults | given | alone).items() if key in fields}
        plans[name, save_as] = [f"{key}={value}" for key, value in plan.items()]
        unknown -= {*plan, *(f"{name}.{key}" for key in plan)}
        try:
            parse_config(config_type, plans[name, save_as])
        except ExperimentError as error:
            raise ExperimentError(f"{name}: {error}") from None
    if unknown:
        raise ExperimentError(f"neither experiment has a setting {', '.join(sorted(unknown))}")
    return plans


if __name__ == "__main__":
    app()
