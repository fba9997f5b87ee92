"""Compares a conversion's logits with those of the original implementation in transformers, in float32, on the CPU."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.source import WeightSource
from specjax.checkpoints.store import load_checkpoint
from specjax.model_config import ModelConfig

# Share of the largest logit. Two float32 implementations differ by about 1e-5 of it; a wrong layout, frequency or missing bias by about 1.
TOLERANCE = 1e-3
# Both models are held in float32: beyond this number of parameters (8 GB for the two) the check runs only when asked for.
MAX_PARAMETERS = 1_000_000_000
_NUM_TOKENS = 48


class LogitMismatchError(ValueError):
    """The converted model does not compute what the original does."""


def reason_to_skip(source: WeightSource, num_parameters: int) -> str:
    """Why the check does not run unless asked for; empty if it does."""
    if not isinstance(source.config, ModelConfig):
        return "transformers has no implementation of this drafter"
    missing = _missing_packages(source)
    if missing:
        return f"{' and '.join(missing)} not installed"
    if num_parameters > MAX_PARAMETERS:
        return f"{num_parameters / 1e9:.1f} billion parameters; --check runs it all the same"
    return ""


def require_reference(source: WeightSource) -> None:
    """Refuses what `check_logits` has nothing to compare with.

    Raises:
        ValueError: A drafter, or a package that transformers needs for this is not installed.
    """
    if not isinstance(source.config, ModelConfig):
        raise ValueError(f"{source.name}: {reason_to_skip(source, 0)}: pass --no-check (check=False)")
    missing = _missing_packages(source)
    if missing:
        raise ValueError(f"the logit check needs {' and '.join(missing)}: install, or pass --no-check (check=False)")


def check_logits(folder: str | Path, source: WeightSource, dtype: str) -> float:
    """Runs both models over the same tokens.

    Args:
        folder: The converted checkpoint.
        source: What it was made from, and `require_reference` accepts.
        dtype: The dtype that it is stored in: the original's weights are rounded to it too.

    Returns:
        The largest absolute difference of any logit at any position.

    Raises:
        LogitMismatchError: It exceeds `TOLERANCE` times the largest logit.
    """
    config = source.config
    num_tokens = min(_NUM_TOKENS, config.max_position_embeddings)
    # Spread over the vocabulary; 7919 is a prime.
    tokens = (np.arange(num_tokens, dtype=np.int64)[None] * 7919 + 1) % config.vocab_size
    expected = _transformers_logits(source, dtype, tokens)
    actual = _our_logits(folder, tokens)
    difference = float(np.abs(actual - expected).max())
    allowed = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    if not difference <= allowed:
        raise LogitMismatchError(
            f"{source.name}: the converted model's logits differ from transformers' by {difference:.3g}; rounding explains {allowed:.3g}"
        )
    return difference


@contextlib.contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without transformers' progress bars and its remarks about the tied copies."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _missing_packages(source: WeightSource) -> list[str]:
    # transformers reads GGUF files with accelerate's help only.
    needed = ("torch", "accelerate") if source.format == "gguf" else ("torch",)
    return [package for package in needed if importlib.util.find_spec(package) is None]


def _our_logits(folder: str | Path, tokens: np.ndarray) -> np.ndarray:
    cpu = jax.local_devices(backend="cpu")[0]
    checkpoint = load_checkpoint(folder, dtype=jnp.float32, shardings=jax.sharding.SingleDeviceSharding(cpu))
    model, variables = checkpoint.model, {"params": checkpoint.params}
    with jax.default_device(cpu):
        cache = model.init_cache(batch_size=1, capacity=tokens.shape[1])
        output = jax.jit(model.apply)(variables, jnp.asarray(tokens, jnp.int32), cache)
        return np.asarray(model.apply(variables, output.hidden, method="logits"))


def _transformers_logits(source: WeightSource, dtype: str, tokens: np.ndarray) -> np.ndarray:
    import torch
    import transformers

    rounded_to = getattr(torch, dtype)
    found: dict[str, Any] = {"pretrained_model_name_or_path": source.location}
    options: dict[str, Any] = {"dtype": torch.float32}
    if source.format == "gguf":
        found = {"pretrained_model_name_or_path": source.location.parent, "gguf_file": source.location.name}
        if hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if source.quantisation == "MXFP4":
        options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    # Without the argument transformers would ask on the terminal whether to run a folder's own code.
    config = transformers.AutoConfig.from_pretrained(**found, trust_remote_code=False)
    config.tie_word_embeddings = source.config.tie_word_embeddings
    with _quiet(transformers.utils.logging):
        model = transformers.AutoModelForCausalLM.from_pretrained(**found, **options, config=config, trust_remote_code=False).eval()
    if source.config.tie_word_embeddings:
        # Where a file holds two copies of a tied matrix, which of them counts is our rule, not something to compare.
        embedding = torch.from_numpy(source.read("model.embed_tokens.weight").astype(np.float32))
        model.model.embed_tokens.weight = model.lm_head.weight = torch.nn.Parameter(embedding)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(rounded_to))
        return model(torch.from_numpy(tokens)).logits.numpy()
