"""`specjax convert`, `describe`, `distill`, `export`, `generate`, `tokenize` and `train`."""

from __future__ import annotations

import typer

from specjax.checkpoints.convert import convert_command
from specjax.checkpoints.export import export_command
from specjax.commands.describe import describe_command
from specjax.commands.distill import distill_command
from specjax.commands.generate import generate_command
from specjax.commands.tokenize_files import tokenize_command
from specjax.commands.train import train_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, help="Speculative decoding in JAX.")
app.command("convert")(convert_command)
app.command("describe")(describe_command)
app.command("distill")(distill_command)
app.command("export")(export_command)
app.command("generate")(generate_command)
app.command("tokenize")(tokenize_command)
app.command("train")(train_command)

if __name__ == "__main__":
    app()
