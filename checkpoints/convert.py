"""Converts a Hugging Face model or a GGUF file to an Orbax checkpoint: `python -m specjax.checkpoints.convert SOURCE DESTINATION`.

Whatever can be wrong with the source or the destination is found before anything is written; the destination appears whole or not at all.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from specjax.checkpoints import hugging_face, store
from specjax.checkpoints.atomic import atomic_folder, check_destination
from specjax.checkpoints.weights import STORED_DTYPES, WeightSource, check_source, read_params


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str = "bfloat16",
    force: bool = False,
    tie_embeddings: bool | None = None,
    progress: bool = True,
) -> None:
    """Converts a model."""
    if dtype not in STORED_DTYPES:
        raise ValueError(f"dtype must be one of {sorted(STORED_DTYPES)}, got {dtype!r}")
    check_destination(destination, force=force)
    found = hugging_face.open_source(source, tie_embeddings=tie_embeddings)
    check_source(found)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task(f"Reading {found.name}", total=sum(found.num_bytes.values()))
        params = read_params(found, dtype, lambda count: bar.update(task, advance=count))
    with atomic_folder(destination, force=force) as folder:
        found.write_tokenizer(folder / "tokenizer")
        store.write_checkpoint(folder, found.config, params, _metadata(found))


def _metadata(source: WeightSource) -> dict[str, object]:
    digests = {}
    for path in source.files:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return {"source": source.name, "source_format": source.format, "quantisation": source.quantisation, "source_sha256": digests}
