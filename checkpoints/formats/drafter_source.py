"""What the readers of drafters have in common: a `WeightSource` of the files that were opened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoints.formats.tensor_files import TensorFiles
from specjax.checkpoints.source import Parameter, StoredTensor, WeightSource


def drafter_source(
    folder: Path,
    name: str,
    files: TensorFiles,
    *,
    config: Any,
    architecture: str = "",
    tensors: Mapping[str, StoredTensor],
    parameters: Mapping[str, Parameter],
    ignored: frozenset[str],
) -> WeightSource:
    """A `WeightSource` of what was opened; the tensors under the names that `parameters` uses."""
    return WeightSource(
        name=name,
        architecture=architecture,
        format=files.format,
        location=folder,
        config=config,
        quantisation="none",
        tensors=tensors,
        parameters=parameters,
        ignored=ignored,
        files=files.files,
        write_tokenizer=lambda destination: False,  # a drafter works with its target's
    )
