"""Converts a model or a drafter to an Orbax checkpoint: `python -m specjax.checkpoints.convert SOURCE DESTINATION`.

Whatever can be wrong with the source or the destination is found before anything is written; the destination appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from specjax.atomic import atomic_folder, check_destination, check_keeps
from specjax.checkpoints.formats.any_source import open_any_source
from specjax.checkpoints.kinds import abstract_params, kind_of
from specjax.checkpoints.logit_check import check_logits, reason_to_skip, require_reference
from specjax.checkpoints.manifest import MANIFEST, read_transformer_config
from specjax.checkpoints.source import STORED_DTYPES, WeightSource, check_source, stream_params
from specjax.checkpoints.store import TOKENIZER_FOLDER, write_checkpoint

# In the text of JAX's error: XLA's status, which has no class of its own.
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"

# How a source is read: options of every command that opens one.
TieEmbeddingsOption = Annotated[
    bool | None,
    typer.Option("--tie-embeddings/--no-tie-embeddings", help="Whether the embedding is the LM head too. Default: as the source says."),
]
TargetOption = Annotated[Path | None, typer.Option(help="Drafters: the checkpoint of the target that it was made for.")]
FeatureLayersOption = Annotated[
    str | None, typer.Option(help="EAGLE-3: boundaries of the target to read, such as 2,16,29. Default: as the source says.")
]
DraftIdsOption = Annotated[
    str | None, typer.Option(help="EAGLE-3: offsets or absolute, how to read the map of a pruned vocabulary. Default: found out.")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """What `convert` did.

    Attributes:
        destination: The checkpoint.
        kind: `"transformer"`, or the kind of drafter.
        num_parameters: How many numbers it holds.
        quantisation: How the source's weights were stored; `"none"` if they were not quantised.
        has_tokenizer: Whether the source had one.
        max_logit_difference: Largest difference to transformers' logits; `None` if the check did not run.
        check_skipped: Why it did not; empty if it did.
    """

    destination: Path
    kind: str
    num_parameters: int
    quantisation: str
    has_tokenizer: bool
    max_logit_difference: float | None
    check_skipped: str


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str = "bfloat16",
    force: bool = False,
    tie_embeddings: bool | None = None,
    target: str | Path | None = None,
    feature_layers: Sequence[int] | None = None,
    draft_ids: str | None = None,
    check: bool | None = None,
    progress: bool = True,
) -> Conversion:
    """Converts a model or a drafter, parameter by parameter: memory is bounded by the largest, whatever the model's size.

    Args:
        source: A Hugging Face folder or hub id, a `.gguf` file, or one of `pretrained_drafters()` by its name.
        destination: The checkpoint folder to create.
        dtype: `"bfloat16"` or `"float32"`, for every parameter.
        force: Replace a checkpoint that exists.
        tie_embeddings: Whether the embedding is the LM head too; `None` goes by the source.
        target: Drafters: the checkpoint of its target, to check that they fit and to settle which of its layers the drafter reads.
        feature_layers: EAGLE-3 drafters: boundaries of the target to read, in the place of what config.json says.
        draft_ids: EAGLE-3 drafters: `"offsets"` or `"absolute"`, how to read the map of a pruned vocabulary; `None` finds out.
        check: Compare logits with transformers before the checkpoint takes its place; `None` does so where PyTorch is installed and the
            model is small enough.
        progress: Show a progress bar on stderr.

    Returns:
        What was done.

    Raises:
        ValueError: An unsupported, damaged or incomplete source, or a check that failed or cannot run.
        OSError: The destination exists, holds the source, or cannot be written.

    Example:
        >>> convert("Qwen/Qwen2.5-0.5B-Instruct", "models/draft")
    """
    if dtype not in STORED_DTYPES:
        raise ValueError(f"dtype must be one of {sorted(STORED_DTYPES)}, got {dtype!r}")
    destination = Path(destination)
    check_destination(destination, force=force, marker=MANIFEST)
    target_config = None if target is None else read_transformer_config(target)
    found = open_any_source(source, tie_embeddings=tie_embeddings, target=target_config, feature_layers=feature_layers, draft_ids=draft_ids)
    check_keeps(destination, found.location, *found.files, *(() if target is None else (target,)))
    check_source(found)
    if check:
        require_reference(found)
    leaves = jax.tree.leaves(abstract_params(found.config, STORED_DTYPES[dtype]))
    num_parameters = sum(math.prod(leaf.shape) for leaf in leaves)
    skipped = {None: reason_to_skip(found, num_parameters), True: "", False: "not asked for"}[check]
    with atomic_folder(destination, force=force, marker=MANIFEST) as folder, _progress(shown=progress) as bar:
        has_tokenizer = found.write_tokenizer(folder / TOKENIZER_FOLDER)
        converting = bar.add_task("Converting", total=num_source_bytes(found))
        params = stream_params(found, dtype, lambda count: bar.update(converting, advance=count))
        write_checkpoint(folder, found.config, dtype, params, lambda: _metadata(found, bar))
        difference = None if skipped else check_logits(folder, found, dtype)
    return Conversion(
        destination=destination,
        kind=kind_of(found.config),
        num_parameters=num_parameters,
        quantisation=found.quantisation,
        has_tokenizer=has_tokenizer,
        max_logit_difference=difference,
        check_skipped=skipped,
    )


def _progress(*, shown: bool) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), disable=not shown)


def num_source_bytes(source: WeightSource) -> int:
    """Of what is read: a file may hold more than a model needs."""
    needed = {name for parameter in source.parameters.values() for name in parameter.tensors}
    return sum(source.tensors[name].num_bytes for name in needed)


def _metadata(source: WeightSource, bar: Progress) -> dict[str, Any]:
    """What to remember about where the weights came from."""
    hashing = bar.add_task("Hashing", total=sum(path.stat().st_size for path in source.files))
    digests = {}
    for path in source.files:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        bar.update(hashing, advance=path.stat().st_size)
    return {
        "source": source.name,
        "source_format": source.format,
        "architecture": source.architecture,
        "quantisation": source.quantisation,
        "source_sha256": digests,
    }


def convert_command(
    source: Annotated[str, typer.Argument(help="A Hugging Face folder or hub id, a .gguf file, or a drafter that comes with specjax.")],
    destination: Annotated[Path, typer.Argument(help="The checkpoint folder to create.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that exists.")] = False,
    tie_embeddings: TieEmbeddingsOption = None,
    target: TargetOption = None,
    feature_layers: FeatureLayersOption = None,
    draft_ids: DraftIdsOption = None,
    check: Annotated[
        bool | None,
        typer.Option(
            "--check/--no-check", help="Compare logits with transformers. Default: where PyTorch is installed, up to 1e9 parameters."
        ),
    ] = None,
) -> None:
    """Converts a model or a drafter (Hugging Face, GGUF, EAGLE-3, Medusa, Hydra) to a specjax checkpoint."""
    # Conversion is the host's work: it must not take an accelerator's memory.
    jax.config.update("jax_platforms", "cpu")
    with one_line_errors():
        done = convert(
            source,
            destination,
            dtype=dtype,
            force=force,
            tie_embeddings=tie_embeddings,
            target=target,
            feature_layers=layer_numbers(feature_layers),
            draft_ids=draft_ids,
            check=check,
        )
    what = "" if done.kind == "transformer" else f"{done.kind} drafter, "
    typer.echo(f"{done.destination}: {what}{done.num_parameters:,} parameters in {dtype}, source quantisation: {done.quantisation}")
    if done.kind == "transformer" and not done.has_tokenizer:
        typer.echo("The source has no tokenizer: token ids only.")
    if done.max_logit_difference is None:
        typer.echo(f"Logits not compared with transformers: {done.check_skipped}.")
    else:
        typer.echo(f"Logits agree with transformers: largest difference {done.max_logit_difference:.2g}.")


def layer_numbers(text: str | None) -> tuple[int, ...] | None:
    """The value of a `FeatureLayersOption`.

    Raises:
        ValueError: It is not numbers with commas between them.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--feature-layers should be numbers such as 2,16,29, got {text!r}") from error


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """For commands: an error that the user can act on is one line on stderr and exit status 1; a warning is one line.

    Such are wrong input, a training that diverged, and a device without enough memory.
    """

    def show(message: Warning | str, category: type[Warning], *args: Any) -> None:
        typer.echo(f"warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        try:
            yield
        except (ValueError, OSError, FloatingPointError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except jax.errors.JaxRuntimeError as error:
            if _OUT_OF_MEMORY not in str(error):
                raise
            typer.echo(f"error: out of memory on the device: {str(error).splitlines()[0]}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(convert_command)

if __name__ == "__main__":
    app()
