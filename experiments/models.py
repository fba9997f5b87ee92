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
from specjax import Transformer
from specjax.checkpoints.store import Checkpoint, load_checkpoint


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, ready to run.

    Attributes:
        name: The preset's name, or what the checkpoint was made from.
        model: The module.
        params: Its params.
        weights: "random", or "real" and how they were stored.
        checkpoint: The loaded `Checkpoint`, which has the tokenizer; `None` for a preset.
    """

    name: str
    model: Transformer
    params: dict
    weights: str
    checkpoint: Checkpoint | None = None


def load_model(name: str, *, dtype: str, implementation: str = "auto", cache_dir: str | None = None, rng: jax.Array | None = None) -> Model:
    """Loads or makes a model.

    Args:
        name: A preset's name, or a path: our checkpoint, a Hugging Face folder or a GGUF file.
        dtype: Compute dtype, and that of the weights.
        implementation: Attention implementation.
        cache_dir: Where conversions are kept; `None` is `default_cache_dir()`.
        rng: For a preset's weights.

    Raises:
        ExperimentError: Neither a preset nor a path that exists.
    """
    if name in PRESETS:
        number = jnp.dtype(dtype)
        model = Transformer(PRESETS[name](), dtype=number, param_dtype=number, attention_implementation=implementation)
        return Model(name, model, random_params(model, jax.random.key(0) if rng is None else rng), "random")
    path = Path(name).expanduser()
    if not path.exists():
        raise ExperimentError(f"{name!r} is neither a preset ({', '.join(PRESETS)}) nor a path that exists")
    checkpoint = load_checkpoint(converted(path, dtype=dtype, cache_dir=cache_dir), dtype=jnp.dtype(dtype))
    model = checkpoint.model.clone(attention_implementation=implementation)
    name = Path(checkpoint.metadata.get("source") or path.name).name.removesuffix(".gguf")
    return Model(name, model, checkpoint.params, stored_as(checkpoint.metadata, dtype), checkpoint)


def converted(path: Path, *, dtype: str, cache_dir: str | None) -> Path:
    """Our checkpoint for `path`: itself, or a conversion that is kept for the next time."""
    if not (path.is_file() or (path / "config.json").exists()):
        return path
    # Another file under the same name has another size or time.
    source = path if path.is_file() else path / "config.json"
    stamp = f"{path.resolve()} {source.stat().st_size} {source.stat().st_mtime_ns} {dtype}"
    destination = (Path(cache_dir).expanduser() if cache_dir else default_cache_dir()) / "converted"
    destination = destination / f"{path.stem}-{dtype}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    if not destination.exists():
        # Imported here: timing random weights needs none of the packages that read other formats.
        from specjax.checkpoints.convert import convert

        destination.parent.mkdir(parents=True, exist_ok=True)
        convert(path, destination, dtype=dtype, check=False)  # the converter's own tests do that
    return destination


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/specjax`, or `~/.cache/specjax`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specjax"


def stored_as(metadata: dict[str, Any], dtype: str) -> str:
    """The `weights` of a row: "real", and what they were stored as where that was not `dtype`."""
    quantisation = metadata.get("quantisation")
    return f"real, {dtype}" if quantisation in (None, "none") else f"real, {quantisation} dequantised to {dtype}"
