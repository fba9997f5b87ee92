"""Saves and restores a model: an Orbax tree, `specjax.json` beside it, and the tokenizer's files.

```
checkpoint/
├── specjax.json     format version, the model's shape, dtype, where it came from
├── params/          Orbax
└── tokenizer/       what AutoTokenizer reads, and generation_config.json
```
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from specjax.checkpoints.atomic import atomic_folder
from specjax.checkpoints.weights import STORED_DTYPES, abstract_params
from specjax.config import ModelConfig, RopeConfig
from specjax.models.transformer import Transformer

FORMAT_VERSION = 1
_MANIFEST = "specjax.json"
_PARAMS = "params"
TOKENIZER_FOLDER = "tokenizer"
# Characters of Orbax's message, which goes on with source locations.
_LONGEST_REASON = 200


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A restored model.

    Attributes:
        model: The module; its `dtype` and `param_dtype` are those of `params`.
        params: What `model.apply` takes under `"params"`.
        metadata: Where the weights came from: `source`, `source_format`, `quantisation`, `source_sha256`, `dtype` as stored.
        tokenizer_path: Folder of the tokenizer's files; `None` if it has none.
    """

    model: Transformer
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
    config: ModelConfig,
    params: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    tokenizer_dir: str | Path | None = None,
    *,
    force: bool = False,
) -> None:
    """Saves a model, whole or not at all.

    Args:
        path: The folder to create.
        config: The model's shape.
        params: Its parameters, JAX or NumPy arrays of one dtype; they may be sharded.
        metadata: What else to remember, JSON values; no absolute paths.
        tokenizer_dir: A folder of tokenizer files to copy in.
        force: Replace a checkpoint that exists.

    Raises:
        FileExistsError: `path` exists and `force` is false.
        PermissionError: `path` cannot be written.
        ValueError: `params` do not fit `config`.
    """
    with atomic_folder(path, force=force) as folder:
        if tokenizer_dir is not None:
            shutil.copytree(tokenizer_dir, folder / TOKENIZER_FOLDER)
        write_checkpoint(folder, config, params, metadata or {})


def write_checkpoint(folder: Path, config: ModelConfig, params: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """The part of `save_checkpoint` that fills the folder, in place."""
    dtype = _common_dtype(params)
    _check_tree(params, abstract_params(config, STORED_DTYPES[dtype]))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute() / _PARAMS, params)
    manifest = {"format_version": FORMAT_VERSION, "model_config": config_to_dict(config), "dtype": dtype, "metadata": dict(metadata)}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def load_checkpoint(path: str | Path, *, dtype: Any = None, shardings: Any = None) -> Checkpoint:
    """Restores a model, onto whatever devices there are now.

    Args:
        path: A folder that `save_checkpoint` or `specjax convert` made.
        dtype: Compute dtype of the model and dtype of its parameters, which are cast as they are read; `None` keeps the stored one.
        shardings: Where the parameters go: one `jax.sharding.Sharding`, or a tree of them that matches the parameters or a prefix of them.
            `None` puts them on the default device.

    Returns:
        The model and its parameters.

    Raises:
        ValueError: No checkpoint, one of a newer format, a damaged one, or an unsupported `dtype`.

    Example:
        >>> checkpoint = load_checkpoint("models/target", dtype=jnp.float32)
        >>> generate(checkpoint.model, checkpoint.params, prompt_tokens, config=GenerateConfig(max_new_tokens=32))
    """
    path = Path(path).absolute()
    model = read_model(path, dtype=dtype)
    manifest = _read_manifest(path)
    shardings = _default_sharding() if shardings is None else shardings
    abstract = jax.tree.map(
        lambda sharding, subtree: jax.tree.map(lambda leaf: _placed(leaf, sharding), subtree),
        shardings,
        abstract_params(model.config, model.param_dtype),
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore(path / _PARAMS, abstract)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:_LONGEST_REASON]
        raise ValueError(f"{path}: the parameters cannot be read; is the copy whole? ({reason})") from error
    tokenizer = path / TOKENIZER_FOLDER
    return Checkpoint(
        model=model,
        params=params,
        metadata={**manifest["metadata"], "dtype": manifest["dtype"]},
        tokenizer_path=tokenizer if tokenizer.is_dir() else None,
    )


def read_model(path: str | Path, *, dtype: Any = None) -> Transformer:
    """The module of a saved model, without its weights (to build shardings, or to plan memory).

    Args:
        path: A checkpoint.
        dtype: As in `load_checkpoint`.

    Raises:
        ValueError: No checkpoint, one of a newer format, or an unsupported `dtype`.
    """
    manifest = _read_manifest(Path(path).absolute())
    stored = np.dtype(STORED_DTYPES[manifest["dtype"]] if dtype is None else dtype)
    if stored not in STORED_DTYPES.values():
        raise ValueError(f"dtype must be one of {sorted(STORED_DTYPES)}, got {stored}")
    return Transformer(config_from_dict(manifest["model_config"]), dtype=stored, param_dtype=stored)


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """JSON values for a configuration."""
    return dataclasses.asdict(config)


def config_from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """The inverse of `config_to_dict`.

    Raises:
        ValueError: Fields that this version does not know, or that are missing.
    """
    try:
        return ModelConfig(**{**values, "rope": RopeConfig(**values["rope"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"the saved model configuration does not fit this version of specjax: {error}") from error


def _placed(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    # Raises where a dimension does not divide among the devices: better now than as a failure to read.
    sharding.shard_shape(leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _default_sharding() -> jax.sharding.Sharding:
    """Where JAX puts a new array: the first device, or what `jax.default_device` says."""
    return jnp.zeros(()).sharding


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / _MANIFEST
    if not file.is_file():
        hint = "convert it first: specjax convert SOURCE DESTINATION" if (path / "config.json").is_file() else "there is no " + _MANIFEST
        raise ValueError(f"{path} is not a specjax checkpoint; {hint}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from error
    version = manifest.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(f"{path} has checkpoint format {version!r}, this version of specjax reads up to {FORMAT_VERSION}: upgrade specjax")
    return manifest


def _common_dtype(params: Mapping[str, Any]) -> str:
    found = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params)})
    if len(found) != 1 or found[0] not in STORED_DTYPES:
        raise ValueError(f"parameters must all have one dtype out of {sorted(STORED_DTYPES)}, got {', '.join(found)}")
    return found[0]


def _check_tree(params: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    wanted = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(expected)}
    wrong = sorted(key for key in shapes.keys() | wanted.keys() if shapes.get(key) != wanted.get(key))
    if wrong:
        raise ValueError(f"params{wrong[0]} should have shape {wanted.get(wrong[0])} by the configuration, got {shapes.get(wrong[0])}")
