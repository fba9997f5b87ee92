"""Saves and restores a model: an Orbax tree, `specjax.json` beside it, and the tokenizer's files.

```
checkpoint/
├── specjax.json     format version, kind of model, its configuration, dtype, where it came from, sizes of the files in params/
├── params/          Orbax
└── tokenizer/       what AutoTokenizer reads, and generation_config.json
```
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from specjax.atomic import atomic_folder
from specjax.checkpoints.arrays import read_arrays, write_arrays
from specjax.checkpoints.kinds import abstract_params, build_model, kind_of
from specjax.checkpoints.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from specjax.checkpoints.source import STORED_DTYPES

TOKENIZER_FOLDER = "tokenizer"
PARAMS_FOLDER = "params"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A restored model, or its shapes.

    Attributes:
        model: The module, a `Transformer` or a drafter's; its `dtype` and `param_dtype` are those of `params`.
        params: What `model.apply` takes under `"params"`; of an `abstract_checkpoint` a `jax.ShapeDtypeStruct` in each place.
        metadata: Where the weights came from: `source`, `source_format`, `quantisation`, `source_sha256`, `dtype` as stored.
        tokenizer_path: Folder of the tokenizer's files; `None` if it has none.
    """

    model: Any
    params: dict
    metadata: dict[str, Any]
    tokenizer_path: Path | None

    def tokenizer(self) -> Any:
        """The `transformers` tokenizer, read from `tokenizer_path`.

        Raises:
            ValueError: The checkpoint has none.
        """
        if self.tokenizer_path is None:
            raise ValueError(f"the checkpoint made from {self.metadata.get('source', 'an unnamed source')} holds no tokenizer")
        # Imported here: a second of import time that a caller with token ids has no use for.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.tokenizer_path)

    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text: those of generation_config.json, or of config.json, or none."""
        if self.tokenizer_path is not None:
            for file in ("generation_config.json", "config.json"):
                path = self.tokenizer_path / file
                found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
                if found is not None:
                    return tuple(found) if isinstance(found, list) else (found,)
        return ()


def save_checkpoint(
    path: str | Path,
    config: Any,
    params: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    tokenizer_dir: str | Path | None = None,
    *,
    force: bool = False,
) -> None:
    """Saves a model, whole or not at all.

    Args:
        path: The folder to create.
        config: The model's configuration: a `ModelConfig`, or that of a drafter.
        params: Its parameters, JAX or NumPy arrays, the floating-point ones of one dtype; they may be sharded.
        metadata: What else to remember, JSON values; no absolute paths.
        tokenizer_dir: A folder of tokenizer files to copy in.
        force: Replace a checkpoint that exists.

    Raises:
        FileExistsError: `path` exists and `force` is false, or it is something else than a checkpoint.
        PermissionError: `path` cannot be written.
        ValueError: `params` do not fit `config`.
        OSError: The disk is full, or fails.
    """
    dtype = _common_dtype(params)
    _check_tree(params, abstract_params(config, STORED_DTYPES[dtype]))
    leaves = traverse_util.flatten_dict(dict(params), sep=".")
    with atomic_folder(path, force=force, marker=MANIFEST) as folder:
        if tokenizer_dir is not None:
            shutil.copytree(tokenizer_dir, folder / TOKENIZER_FOLDER)
        write_checkpoint(folder, config, dtype, leaves.items(), lambda: metadata or {})


def write_checkpoint(
    folder: Path, config: Any, dtype: str, leaves: Iterable[tuple[str, Any]], metadata: Callable[[], Mapping[str, Any]]
) -> None:
    """Fills an empty folder, leaf by leaf.

    Args:
        folder: Where.
        config: The model's configuration.
        dtype: Name of the dtype of its floating-point parameters.
        leaves: Paths joined with dots, and arrays; each is let go before the next is asked for.
        metadata: Called when all leaves are written: what else to remember.
    """
    write_arrays(folder / PARAMS_FOLDER, abstract_params(config, STORED_DTYPES[dtype]), leaves)
    files = file_sizes(folder / PARAMS_FOLDER)
    write_manifest(folder, Manifest(kind=kind_of(config), config=config, dtype=dtype, metadata=dict(metadata()), files=files))


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file in a folder and those below it, by its path from there."""
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def load_checkpoint(path: str | Path, *, dtype: Any = None, shardings: Any = None) -> Checkpoint:
    """Restores a model, onto whatever devices there are now.

    Args:
        path: A folder that `save_checkpoint` or `specjax convert` made.
        dtype: Compute dtype of the model and dtype of its parameters, which are cast as they are read; `None` keeps the stored one.
        shardings: Where the parameters go: one `jax.sharding.Sharding`, or a tree of them that matches the parameters or a prefix of them.
            `None` puts them on the default device. `abstract_checkpoint` gives the shapes from which to choose.

    Returns:
        The model and its parameters.

    Raises:
        ValueError: No checkpoint, one of a newer format, a damaged one, or an unsupported `dtype`.

    Example:
        >>> checkpoint = load_checkpoint("models/target", dtype=jnp.float32)
        >>> generate(checkpoint.model, checkpoint.params, prompt_tokens, config=GenerateConfig(max_new_tokens=32))
    """
    path = Path(path).absolute()
    abstract = abstract_checkpoint(path, dtype=dtype)
    shardings = _default_sharding() if shardings is None else shardings
    placed = jax.tree.map(lambda sharding, subtree: jax.tree.map(lambda leaf: _placed(leaf, sharding), subtree), shardings, abstract.params)
    try:
        params = read_arrays(path / PARAMS_FOLDER, placed)
    except ValueError as error:
        raise ValueError(f"{error}. Is the copy whole?") from error
    return dataclasses.replace(abstract, params=params)


def abstract_checkpoint(path: str | Path, *, dtype: Any = None) -> Checkpoint:
    """What `load_checkpoint` would return, without reading any weights: for its tokenizer, to choose shardings by, or to plan memory.

    Args:
        path: A checkpoint.
        dtype: As in `load_checkpoint`.

    Returns:
        The model, and the shapes and dtypes of its parameters.

    Raises:
        ValueError: No checkpoint, one of a newer format, or an unsupported `dtype`.

    Example:
        >>> abstract = abstract_checkpoint("models/target")
        >>> shardings = param_shardings(abstract.params, abstract.model.config, mesh)
        >>> checkpoint = load_checkpoint("models/target", shardings=shardings)
    """
    path = Path(path).absolute()
    manifest = read_manifest(path)
    stored = np.dtype(STORED_DTYPES[manifest.dtype] if dtype is None else dtype)
    if stored not in STORED_DTYPES.values():
        raise ValueError(f"dtype must be one of {sorted(STORED_DTYPES)}, got {stored}")
    tokenizer = path / TOKENIZER_FOLDER
    return Checkpoint(
        model=build_model(manifest.config, stored),
        params=abstract_params(manifest.config, stored),
        metadata={**manifest.metadata, "dtype": manifest.dtype},
        tokenizer_path=tokenizer if tokenizer.is_dir() else None,
    )


def read_model(path: str | Path, *, dtype: Any = None) -> Any:
    """The module of `abstract_checkpoint`."""
    return abstract_checkpoint(path, dtype=dtype).model


def _placed(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    # Raises where a dimension does not divide among the devices: better now than as a failure to read.
    sharding.shard_shape(leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _default_sharding() -> jax.sharding.Sharding:
    """Where JAX puts a new array: the first device, or what `jax.default_device` says."""
    return jnp.zeros(()).sharding


def _common_dtype(params: Mapping[str, Any]) -> str:
    found = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params) if not jnp.issubdtype(leaf.dtype, jnp.integer)})
    if len(found) != 1 or found[0] not in STORED_DTYPES:
        raise ValueError(f"parameters must all have one dtype out of {sorted(STORED_DTYPES)}, got {', '.join(found)}")
    return found[0]


def _check_tree(params: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    wanted = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(expected)}
    wrong = sorted(key for key in shapes.keys() | wanted.keys() if shapes.get(key) != wanted.get(key))
    if wrong:
        raise ValueError(f"params{wrong[0]} should have shape {wanted.get(wrong[0])} by the configuration, got {shapes.get(wrong[0])}")
