"""Models by name: a preset with random weights, or a path: our checkpoint, or a Hugging Face folder or GGUF file, converted once."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.experiment import ExperimentError
from experiments.presets import PRESETS, random_params
from specjax import DraftModel, Kernels, PromptLookup, Transformer
from specjax.checkpoints.pairing import drafter_for_target
from specjax.checkpoints.pretrained_drafters import pretrained_drafters
from specjax.checkpoints.store import Checkpoint, load_checkpoint
from specjax.drafting.drafter import Drafter

# What `load_drafter` calls the drafter without weights.
PROMPT_LOOKUP = "prompt_lookup"


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, ready to run.

    Attributes:
        name: The preset's name, or what the checkpoint was made from.
        model: The module.
        params: Its params.
        weights: "random"; "real" and how they were stored; or how long they were trained here.
        checkpoint: The loaded `Checkpoint`, which has the tokenizer; `None` for a preset.
        path: Where it was loaded from; `None` for a preset.
    """

    name: str
    model: Transformer
    params: dict
    weights: str
    checkpoint: Checkpoint | None = None
    path: Path | None = None


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter, ready to draft for one target.

    Attributes:
        name: "prompt_lookup", the preset's name, or what the checkpoint was made from.
        drafter: The drafter.
        params: Its params.
        weights: As in `Model`; `None` if it has none.
    """

    name: str
    drafter: Drafter
    params: Any
    weights: str | None


def load_drafter(name: str, target: Model, *, dtype: str, implementation: str = "auto", cache_dir: str | None = None) -> LoadedDrafter:
    """Loads a drafter of any kind.

    Args:
        name: "prompt_lookup", or what `load_model` takes: a draft model, or an EAGLE-3, Medusa or Hydra drafter, ours or as published.
        target: Its target.
        dtype: Compute dtype, and that of the weights.
        implementation: Of the kernels; see `Kernels.of`.
        cache_dir: Where conversions are kept; `None` is `default_cache_dir()`.

    Raises:
        ExperimentError: Neither a preset nor a path that exists, or a checkpoint for a target that is a preset.
        ValueError: A drafter that does not fit the target, or a draft model with another tokenizer.
    """
    if name == PROMPT_LOOKUP:
        return LoadedDrafter(name, PromptLookup(), None, None)
    loaded = load_model(name, dtype=dtype, implementation=implementation, cache_dir=cache_dir, target=target.path)
    if loaded.checkpoint is None:
        return LoadedDrafter(loaded.name, DraftModel(loaded.model), loaded.params, loaded.weights)
    if target.checkpoint is None:
        raise ExperimentError(f"a drafter's checkpoint needs the checkpoint of its target, {target.name!r} is a preset")
    ready = drafter_for_target(dataclasses.replace(loaded.checkpoint, model=loaded.model), target.checkpoint)
    return LoadedDrafter(loaded.name, ready.drafter, ready.params, loaded.weights)


def load_model(
    name: str,
    *,
    dtype: str,
    implementation: str = "auto",
    cache_dir: str | None = None,
    rng: jax.Array | None = None,
    target: Path | None = None,
) -> Model:
    """Loads or makes a model, or the network of a drafter.

    Args:
        name: A preset's name, that of a drafter that comes with specjax, or a path: our checkpoint, a Hugging Face folder or a GGUF file.
        dtype: Compute dtype, and that of the weights.
        implementation: Of the kernels; see `Kernels.of`.
        cache_dir: Where conversions are kept; `None` is `default_cache_dir()`.
        rng: For a preset's weights.
        target: The checkpoint of the target that a published drafter is for, which settles what its files may leave open.

    Raises:
        ExperimentError: Neither a preset nor a path that exists.
    """
    if name in PRESETS:
        number = jnp.dtype(dtype)
        model = Transformer(PRESETS[name](), dtype=number, param_dtype=number, kernels=Kernels.of(implementation))
        return Model(name, model, random_params(model, jax.random.key(0) if rng is None else rng), "random")
    path = Path(name).expanduser()
    if not path.exists():
        path = pretrained_drafters().get(name, path)
    if not path.exists():
        raise ExperimentError(f"{name!r} is neither a preset ({', '.join(PRESETS)}) nor a path that exists")
    path = converted(path, dtype=dtype, cache_dir=cache_dir, target=target)
    checkpoint = load_checkpoint(path, dtype=jnp.dtype(dtype))
    model = checkpoint.model.clone(kernels=Kernels.of(implementation))
    name = Path(checkpoint.metadata.get("source") or path.name).name.removesuffix(".gguf")
    return Model(name, model, checkpoint.params, stored_as(checkpoint.metadata, dtype), checkpoint, path)


def converted(path: Path, *, dtype: str, cache_dir: str | None, target: Path | None = None) -> Path:
    """Our checkpoint for `path`: itself, or a conversion that is kept for the next time; of a drafter, one for this target."""
    if not (path.is_file() or (path / "config.json").exists()):
        return path
    # Imported here: timing random weights needs none of the packages that read other formats.
    from specjax.checkpoints.convert import convert
    from specjax.checkpoints.formats.drafters import open_drafter
    from specjax.checkpoints.manifest import read_transformer_config

    target_config = None if target is None else read_transformer_config(target)
    if path.is_file() or open_drafter(path, target=target_config) is None:
        target = target_config = None  # a language model is converted on its own
    # Another file under the same name has another size or time.
    source = path if path.is_file() else path / "config.json"
    stamp = f"{path.resolve()} {source.stat().st_size} {source.stat().st_mtime_ns} {dtype}"
    stamp += "" if target_config is None else f" {target_config}"
    destination = (Path(cache_dir).expanduser() if cache_dir else default_cache_dir()) / "converted"
    destination = destination / f"{path.stem}-{dtype}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    if not destination.exists():
        destination.parent.mkdir(parents=True, exist_ok=True)
        convert(path, destination, dtype=dtype, target=target, check=False)  # the converter's own tests do that
    return destination


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/specjax`, or `~/.cache/specjax`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specjax"


def stored_as(metadata: dict[str, Any], dtype: str) -> str:
    """The `weights` of a row: "real", and what they were stored as where that was not `dtype`; or that an experiment trained them."""
    if metadata.get("training_steps") is not None:  # see `experiments.train_moe`
        return f"trained here for {metadata['training_steps']} steps, {dtype}"
    quantisation = metadata.get("quantisation")
    return f"real, {dtype}" if quantisation in (None, "none") else f"real, {quantisation} dequantised to {dtype}"
