"""`specjax describe`: what is in a checkpoint of any format, and whether it would convert. Of the weights next to nothing is read.

Of a hub id they are downloaded all the same, where its configuration is supported.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from specjax.checkpoints.arrays import stored_arrays
from specjax.checkpoints.convert import (
    DraftIdsOption,
    FeatureLayersOption,
    TargetOption,
    TieEmbeddingsOption,
    layer_numbers,
    one_line_errors,
)
from specjax.checkpoints.formats.any_source import open_any_source
from specjax.checkpoints.kinds import abstract_params, build_model, config_to_dict, head_kind, kind_of
from specjax.checkpoints.manifest import is_checkpoint, read_manifest, read_transformer_config
from specjax.checkpoints.source import STORED_DTYPES, compare
from specjax.checkpoints.store import PARAMS_FOLDER, file_sizes
from specjax.commands.memory_plan import num_bytes, plan_memory

_MAX_SHOWN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What is there.

    Attributes:
        name: What the model calls itself.
        format: `"specjax, format 3"`, or the format of the files.
        kind: `"transformer"`, or the kind of drafter.
        architecture: What the source calls it; empty if it is not known.
        quantisation: How the weights were stored in the source.
        config: Our configuration.
        num_parameters: How many numbers it holds, as it is used.
        stored: Bytes in the files by dtype.
        params_bytes: Weights in memory, in `dtype`.
        cache_bytes: Keys and values at `batch_size` and `context`, in `dtype`.
        dtype: Of the two lines above.
        batch_size: B.
        context: Tokens a row.
        missing: What the configuration needs and is not there.
        left_over: What is there and fits nowhere.
        wrong: Tensors of another shape or dtype, and files of another size, a sentence each.
        files_checked: Whether the files are known to be all there, in their sizes; not of a checkpoint that was written before it noted
            them.
    """

    name: str
    format: str
    kind: str
    architecture: str
    quantisation: str
    config: Any
    num_parameters: int
    stored: dict[str, int]
    params_bytes: int
    cache_bytes: int
    dtype: str
    batch_size: int
    context: int
    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    wrong: tuple[str, ...]
    files_checked: bool

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing, left over or wrong, as far as was checked."""
        return not (self.missing or self.left_over or self.wrong)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {"config": config_to_dict(self.config), "is_whole": self.is_whole}


def describe(
    path: str | Path,
    *,
    batch_size: int = 1,
    context: int | None = None,
    dtype: str = "bfloat16",
    tie_embeddings: bool | None = None,
    target: str | Path | None = None,
    feature_layers: Sequence[int] | None = None,
    draft_ids: str | None = None,
) -> Description:
    """Describes a checkpoint, or what `convert` takes: a Hugging Face folder or hub id, a GGUF file or a drafter.

    Args:
        path: What to describe.
        batch_size: B, for the memory of the cache.
        context: Tokens a row, likewise; `None` is the model's whole window.
        dtype: `"bfloat16"` or `"float32"`, for the memory of weights and cache.
        tie_embeddings: As in `convert`, and so are the next three.
        target: Drafters: the checkpoint of its target.
        feature_layers: EAGLE-3 drafters.
        draft_ids: EAGLE-3 drafters.

    Raises:
        ValueError: Nothing that is supported, a number below 1, or an option that does not apply to what is there.
    """
    if dtype not in STORED_DTYPES:
        raise ValueError(f"dtype must be one of {sorted(STORED_DTYPES)}, got {dtype!r}")
    if batch_size < 1 or (context is not None and context < 1):
        raise ValueError(f"batch_size and context must be at least 1, got {batch_size} and {context}")
    reading = {"tie_embeddings": tie_embeddings, "target": target, "feature_layers": feature_layers, "draft_ids": draft_ids}
    found = _of_checkpoint(Path(path), reading) if is_checkpoint(path) else _of_source(path, reading)
    model = build_model(found["config"], STORED_DTYPES[dtype])
    decoder = getattr(model.config, "decoder", model.config)
    window = getattr(decoder, "max_position_embeddings", 0)
    plan = plan_memory([model], batch_size=batch_size, capacity=context or window)
    return Description(
        kind=kind_of(model.config),
        num_parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(model.config, STORED_DTYPES[dtype]))),
        params_bytes=plan.params_bytes,
        cache_bytes=plan.cache_bytes,
        dtype=dtype,
        batch_size=batch_size,
        context=context or window,
        **found,
    )


def _of_checkpoint(path: Path, reading: Mapping[str, Any]) -> dict[str, Any]:
    unused = [option for option, value in reading.items() if value is not None]
    if unused:
        raise ValueError(f"{path} is a specjax checkpoint, in which everything is settled: {', '.join(unused)} does not apply to it")
    manifest = read_manifest(path)
    noted, there = manifest.files or {}, file_sizes(path / PARAMS_FOLDER)
    stored = stored_arrays(path / PARAMS_FOLDER)
    expected = _flat(abstract_params(manifest.config, STORED_DTYPES[manifest.dtype]))
    sizes: Counter[str] = Counter()
    for leaf in stored.values():
        sizes[str(leaf.dtype)] += num_bytes(leaf)
    wrong = [
        f"parameter {name} should have shape {leaf.shape} and dtype {leaf.dtype}, got {stored[name].shape} and {stored[name].dtype}"
        for name, leaf in expected.items()
        if name in stored and (stored[name].shape, stored[name].dtype) != (leaf.shape, leaf.dtype)
    ]
    wrong += [
        f"file {PARAMS_FOLDER}/{file} should have {size} bytes, got {there[file]}: is the copy whole?"
        for file, size in noted.items()
        if there.get(file, size) != size
    ]
    lost = [f"file {PARAMS_FOLDER}/{file}" for file in noted if file not in there]
    return {
        "name": manifest.metadata.get("source") or path.resolve().name,
        "format": f"specjax, format {manifest.format_version}",
        "architecture": manifest.metadata.get("architecture", ""),
        "quantisation": manifest.metadata.get("quantisation", "none"),
        "config": manifest.config,
        "stored": dict(sizes),
        "missing": (*(name for name in expected if name not in stored), *lost),
        "left_over": tuple(name for name in stored if name not in expected),
        "wrong": tuple(wrong),
        "files_checked": manifest.files is not None,
    }


def _of_source(path: str | Path, reading: Mapping[str, Any]) -> dict[str, Any]:
    target = None if reading["target"] is None else read_transformer_config(reading["target"])
    source = open_any_source(path, **{**reading, "target": target})
    found = compare(source)
    sizes: Counter[str] = Counter()
    for tensor in source.tensors.values():
        sizes[tensor.dtype if source.format != "gguf" else source.quantisation] += tensor.num_bytes
    return {
        "name": source.name,
        "format": source.format,
        "architecture": source.architecture,
        "quantisation": source.quantisation,
        "config": source.config,
        "stored": dict(sizes),
        "missing": tuple(dict.fromkeys(name for names in found.unfilled.values() for name in names)),
        "left_over": found.unmapped,
        "wrong": found.wrong,
        "files_checked": True,  # whoever opens them compares their sizes with what they say of themselves
    }


def _flat(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
    return {".".join(str(key.key) for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def describe_command(
    path: Annotated[
        str,
        typer.Argument(
            help="A checkpoint, a Hugging Face folder or hub id (the weights are downloaded if its configuration is supported), "
            "a .gguf file, or a drafter as published, or one that comes with specjax."
        ),
    ],
    batch: Annotated[int, typer.Option(help="Sequences in a batch, for the memory of the cache.")] = 1,
    context: Annotated[int | None, typer.Option(help="Tokens a sequence, likewise. Default: the whole window.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32, for the memory of weights and cache.")] = "bfloat16",
    tie_embeddings: TieEmbeddingsOption = None,
    target: TargetOption = None,
    feature_layers: FeatureLayersOption = None,
    draft_ids: DraftIdsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Says what is in a checkpoint of any format, and whether it is whole; exit status 1 if it is not."""
    jax.config.update("jax_platforms", "cpu")
    with one_line_errors():
        found = describe(
            path,
            batch_size=batch,
            context=context,
            dtype=dtype,
            tie_embeddings=tie_embeddings,
            target=target,
            feature_layers=layer_numbers(feature_layers),
            draft_ids=draft_ids,
        )
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        _print(found)
    raise typer.Exit(0 if found.is_whole else 1)


def _print(found: Description) -> None:
    table = Table(show_header=False, box=None)
    table.add_row("name", found.name)
    table.add_row("format", found.format)
    table.add_row("kind", found.kind + (f" ({found.architecture})" if found.architecture else ""))
    table.add_row("stored as", ", ".join(f"{dtype} {decimal(size)}" for dtype, size in sorted(found.stored.items())))
    table.add_row("quantisation", found.quantisation)
    table.add_row("parameters", f"{found.num_parameters:,}")
    table.add_row("memory, weights", f"{decimal(found.params_bytes)} in {found.dtype}")
    if found.context:
        table.add_row("memory, cache", f"{decimal(found.cache_bytes)} in {found.dtype}, {found.batch_size} × {found.context:,} tokens")
    for name, value in _settings(found.config):
        table.add_row(name, value)
    console = Console(highlight=False, markup=False, soft_wrap=True)  # names may hold brackets
    console.print(table)
    for title, names in (("missing", found.missing), ("left over", found.left_over), ("wrong", found.wrong)):
        for name in names:
            console.print(f"{title}: {name}")
    unchecked = "" if found.files_checked else ", but weights not checked: this checkpoint does not say how large its files are"
    console.print(f"whole{unchecked}" if found.is_whole else "NOT whole", style="bold")


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a configuration that are not at their default, those of nested ones behind a dot."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default:
            continue
        if field.name == "head":
            yield prefix + field.name, head_kind(value)
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{prefix}{field.name}.")
        elif isinstance(value, tuple) and len(value) > _MAX_SHOWN:
            yield prefix + field.name, f"{', '.join(map(str, value[:_MAX_SHOWN]))}, … ({len(value)} entries)"
        else:
            yield prefix + field.name, str(value)
