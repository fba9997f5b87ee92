"""Writes an EAGLE-3 drafter back in the official layout, for other engines: `specjax export SOURCE DESTINATION`.

```
destination/
├── config.json          flat, as the official ones; the fields of EAGLE-3.1 and of the low-rank head where they are used
├── model.safetensors    midlayer.*, layers.1.* and on, fc, norm, lm_head (or lm_head.down and .up), d2t (offsets), t2d;
│                        or, where a limit is set, shards and their index
└── training.json        how it was trained, where the checkpoint remembers that; other engines do not read it
```

Reading it again gives the same configuration and the same parameters, bit by bit.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors looks up by name)
import numpy as np
import typer
from flax import traverse_util
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.numpy import save_file

from specjax.atomic import atomic_folder, check_destination, check_keeps
from specjax.checkpoints.convert import one_line_errors
from specjax.checkpoints.formats.drafters import open_drafter
from specjax.checkpoints.formats.eagle3_format import OFFICIAL_FIRST_LAYER
from specjax.checkpoints.formats.tensor_files import INDEX, SINGLE
from specjax.checkpoints.kinds import config_to_dict
from specjax.checkpoints.manifest import read_manifest
from specjax.checkpoints.source import check_source
from specjax.checkpoints.store import load_checkpoint
from specjax.drafting.draft_model_network import DraftModelConfig
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads import DraftHead, FullHead, LowRankHead, TrimmedHead
from specjax.model_config import ModelConfig, RopeConfig

_CONFIG, _TRAINING = "config.json", "training.json"


def export_drafter(checkpoint: str | Path, destination: str | Path, *, force: bool = False, max_shard_bytes: int | None = None) -> None:
    """Writes the drafter of a checkpoint in the official layout, whole or not at all.

    Args:
        checkpoint: A folder that `save_checkpoint` or `specjax convert` made, of an EAGLE-3 drafter.
        destination: The folder to create.
        force: Replace an export that exists.
        max_shard_bytes: Of a weights file: beyond that there are several, and an index; a tensor is never cut. `None` makes one file.

    Raises:
        FileExistsError: The destination exists and `force` is false, or it holds the checkpoint.
        OSError: The destination cannot be written.
        ValueError: No checkpoint, another kind of model, or something that the official layout cannot express, by name.

    Example:
        >>> export_drafter("models/drafter", "exported/drafter")
    """
    check_destination(destination, force=force, marker=_CONFIG)
    check_keeps(destination, checkpoint)
    manifest = read_manifest(Path(checkpoint).absolute())
    official_config(manifest.config, "float32")  # refuses before the weights are read
    cpu = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    params, training = load_checkpoint(checkpoint, shardings=cpu).params, manifest.metadata.get("training")
    export_params(manifest.config, params, destination, force=force, max_shard_bytes=max_shard_bytes, training=training)


def export_params(
    config: Eagle3Config,
    params: Mapping[str, Any],
    destination: str | Path,
    *,
    force: bool = False,
    max_shard_bytes: int | None = None,
    training: Mapping[str, Any] | None = None,
) -> None:
    """The same for a drafter that is in memory.

    Args:
        config: Its shape.
        params: Its parameters, JAX or NumPy arrays, the floating-point ones of one dtype.
        destination: The folder to create.
        force: Replace an export that exists.
        max_shard_bytes: As in `export_drafter`.
        training: How it was trained, JSON values, to be remembered beside the weights.

    Raises:
        FileExistsError: The destination exists and `force` is false.
        ValueError: Something that the official layout cannot express, by name.
    """
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    raw = official_config(config, str(params["fc"].dtype))
    with atomic_folder(destination, force=force, marker=_CONFIG) as folder:
        (folder / _CONFIG).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        if training is not None:
            (folder / _TRAINING).write_text(json.dumps(training, indent=1) + "\n", encoding="utf-8")
        try:
            _write_tensors(folder, official_tensors(config, params), max_shard_bytes)
        except SafetensorError as error:
            raise OSError(f"writing {destination} failed: {error}") from error
        _check_that_it_reads_back(folder, config)


def _write_tensors(folder: Path, tensors: Mapping[str, np.ndarray], max_shard_bytes: int | None) -> None:
    if max_shard_bytes is None:
        _write_file(tensors, folder / SINGLE)
        return
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for name, members in split.filename_to_tensors.items():
        _write_file({member: tensors[member] for member in members}, folder / name)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    save_file(dict(tensors), path, metadata={"format": "pt"})
    # safetensors lets nobody else read what it wrote; the other files here have what the user's umask says.
    path.chmod(path.with_name(_CONFIG).stat().st_mode)


def official_config(config: Any, dtype: str) -> dict[str, Any]:
    """The official config.json.

    Args:
        config: The drafter's shape.
        dtype: Name of the dtype of its weights.

    Raises:
        ValueError: Another kind of model, or something that this layout cannot express, by name.
    """
    if isinstance(config, DraftModelConfig):
        raise ValueError("only EAGLE-3 drafters can be exported: no published layout has a draft model with another LM head than its own")
    if not isinstance(config, Eagle3Config):
        raise ValueError(f"only EAGLE-3 drafters can be exported, got {type(config).__name__}")
    decoder = config.decoder
    _refuse_inexpressible(decoder)
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "vocab_size": decoder.vocab_size,
        **_head_fields(config.head, hidden_size=decoder.hidden_size, vocab_size=decoder.vocab_size),
        "max_position_embeddings": decoder.max_position_embeddings,
        "rms_norm_eps": decoder.rms_norm_eps,
        "attention_bias": decoder.qkv_bias,
        "mlp_bias": decoder.mlp_bias,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **_rope_fields(decoder.rope),
    }
    if config.target_hidden_size != decoder.hidden_size:
        raw["target_hidden_size"] = config.target_hidden_size
    if config.feature_layers is not None:
        raw["eagle_aux_hidden_state_layer_ids"] = list(config.feature_layers)
    flags = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
    return raw | {flag: True for flag in flags if getattr(config, flag)}


def official_tensors(config: Eagle3Config, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The weights under their official names, in their own dtype.

    Args:
        config: The drafter's shape.
        params: Its parameters.
    """
    leaves = {path: np.asarray(leaf) for path, leaf in traverse_util.flatten_dict(dict(params), sep=".").items()}
    tensors = {"fc.weight": leaves["fc"].T, "norm.weight": leaves["final_norm.scale"]}
    optional = {"embedding": "embed_tokens", "input_norm.scale": "input_norm", "draft_head.lm_head": "lm_head"}
    optional |= {"draft_head.down": "lm_head.down", "draft_head.up": "lm_head.up"}
    optional |= {f"fc_norm_{index}.scale": f"fc_norm.{index}" for index in range(config.num_features)}
    tensors |= {f"{theirs}.weight": leaves[ours] for ours, theirs in optional.items() if ours in leaves}
    for index in range(config.decoder.num_layers):
        prefix = f"layer_{index}."
        layer = {path.removeprefix(prefix): leaf for path, leaf in leaves.items() if path.startswith(prefix)}
        theirs = OFFICIAL_FIRST_LAYER if index == 0 else f"layers.{index}"
        tensors |= {f"{theirs}.{name}": tensor for name, tensor in _layer_tensors(layer).items()}
    if isinstance(config.head, TrimmedHead):
        ids = leaves["draft_head.token_ids"].astype(np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(config.decoder.vocab_size), ids)
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _layer_tensors(layer: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    qkv, gate_up = layer["attention.qkv"], layer["mlp.gate_up"]
    group = qkv.shape[2] - 2
    slots = {"q_proj": slice(0, group), "k_proj": slice(group, group + 1), "v_proj": slice(group + 1, group + 2)}
    tensors = {
        "self_attn.o_proj.weight": layer["attention.output"].T,
        "mlp.gate_proj.weight": gate_up[:, 0].T,
        "mlp.up_proj.weight": gate_up[:, 1].T,
        "mlp.down_proj.weight": layer["mlp.down"].T,
        "post_attention_layernorm.weight": layer["mlp_norm.scale"],
    }
    if "embedding_norm.scale" in layer:
        tensors["input_layernorm.weight"] = layer["embedding_norm.scale"]
        tensors["hidden_norm.weight"] = layer["attention_norm.scale"]
    else:
        tensors["input_layernorm.weight"] = layer["attention_norm.scale"]
    for name, slot in slots.items():
        tensors[f"self_attn.{name}.weight"] = qkv[:, :, slot].reshape(qkv.shape[0], -1).T
        if "attention.qkv_bias" in layer:
            tensors[f"self_attn.{name}.bias"] = layer["attention.qkv_bias"][:, slot].reshape(-1)
    if "attention.output_bias" in layer:
        tensors["self_attn.o_proj.bias"] = layer["attention.output_bias"]
    if "mlp.down_bias" in layer:
        gate_bias, up_bias = layer["mlp.gate_up_bias"]
        tensors |= {"mlp.gate_proj.bias": gate_bias, "mlp.up_proj.bias": up_bias, "mlp.down_proj.bias": layer["mlp.down_bias"]}
    return tensors


def _rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """Flat, as readers of every age understand it."""
    settings = {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor"),
        "longrope": ("original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
    }[rope.rope_type]
    if rope.rope_type == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling = {"rope_type": rope.rope_type, "type": rope.rope_type} | {name: getattr(rope, name) for name in settings}
    fields: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": scaling}
    # By the definition of this type, the window is the original one.
    return fields | ({"max_position_embeddings": rope.original_max_position_embeddings} if rope.rope_type == "dynamic" else {})


def _head_fields(head: DraftHead, *, hidden_size: int, vocab_size: int) -> dict[str, Any]:
    """What config.json says of the LM head; refuses one that it cannot describe."""
    if isinstance(head, LowRankHead):
        if hidden_size % head.rank or hidden_size == head.rank:
            raise ValueError(
                f"the official EAGLE-3 layout cannot express rank {head.rank} of a low-rank head: it has hidden_size ({hidden_size}) "
                "divided by an int of at least 2"
            )
        return {"draft_vocab_size": vocab_size, "lm_head_rank_divisor": hidden_size // head.rank}
    # Read again, a map of all tokens would be taken for none.
    if isinstance(head, TrimmedHead) and head.num_tokens < vocab_size:
        return {"draft_vocab_size": head.num_tokens}
    if isinstance(head, FullHead) and not head.bias:
        return {"draft_vocab_size": vocab_size}
    raise ValueError(f"the official EAGLE-3 layout cannot express head = {head!r} over {vocab_size} tokens")


def _refuse_inexpressible(decoder: ModelConfig) -> None:
    wanted = {"qk_norm": None, "clip_qkv": None, "attention_sinks": False, "activation": "silu", "output_bias": decoder.qkv_bias}
    for field, value in wanted.items():
        if getattr(decoder, field) != value:
            raise ValueError(f"the official EAGLE-3 layout cannot express {field} = {getattr(decoder, field)!r}")
    if any(window is not None for window in decoder.layer_windows):
        raise ValueError(f"the official EAGLE-3 layout cannot express layer_windows = {decoder.layer_windows!r}")


def _check_that_it_reads_back(folder: Path, config: Eagle3Config) -> None:
    """A promise of this module: what it wrote means the same when it is read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about layer ids that could be read in another way; these are ours
        source = open_drafter(folder, draft_ids="offsets")
    assert source is not None
    check_source(source)
    changed = _differences(config_to_dict(config), config_to_dict(source.config))
    if changed:
        raise ValueError(f"the official EAGLE-3 layout cannot express {', '.join(changed)}")


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any], path: str = "") -> list[str]:
    changed = []
    for field, value in wanted.items():
        if isinstance(value, Mapping):
            changed += _differences(value, found[field], f"{path}{field}.")
        elif value != found.get(field):
            changed.append(f"{path}{field} = {value!r}")
    return changed


def export_command(
    source: Annotated[Path, typer.Argument(help="A specjax checkpoint of an EAGLE-3 drafter.")],
    destination: Annotated[Path, typer.Argument(help="The folder to create.")],
    max_shard_mib: Annotated[int | None, typer.Option(help="Of a weights file; beyond that there are several. Default: one file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a destination that exists.")] = False,
) -> None:
    """Writes an EAGLE-3 drafter in the official layout (safetensors and config.json), for other engines."""
    # The host's work: it must not take an accelerator's memory.
    jax.config.update("jax_platforms", "cpu")
    with one_line_errors():
        limit = None if max_shard_mib is None else max_shard_mib << 20
        export_drafter(source, destination, force=force, max_shard_bytes=limit)
    typer.echo(f"{destination}: EAGLE-3 drafter in the official layout")
