"""Tiny models as other programs write them: Hugging Face folders and GGUF files, with random weights, without PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specjax import ModelConfig
from specjax.checkpoints.formats.families import model_config
from specjax.checkpoints.formats.transformer_weights import source_tensors

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
VOCAB_SIZE = 320
CHAT_TEMPLATE = "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}"


def raw_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config.json: grouped queries, a head size that is not `hidden_size / num_attention_heads`."""
    config = dict(
        architectures=[ARCHITECTURES[family]],
        model_type=family,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        hidden_act="silu",
        tie_word_embeddings=False,
    )
    if family != "qwen2":
        config["head_dim"] = 32
    if "architectures" in changes and "model_type" not in changes:
        del config["model_type"]  # that of another family
    return {name: value for name, value in (config | changes).items() if value is not ...}


def random_tensors(raw: Mapping[str, Any], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Every tensor of the model, by its Hugging Face name."""
    rng = np.random.default_rng(0)
    config = model_config(raw)
    return {
        name: (rng.normal(size=shape) * 0.1 + (1.0 if "norm" in name else 0.0)).astype(dtype)
        for name, shape in source_tensors(config).items()
    }


def write_folder(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, num_shards: int = 1) -> Path:
    """config.json and the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{index % num_shards + 1:05}-of-{num_shards:05}.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """256 bytes, some merges, and unused names up to `VOCAB_SIZE`, of which the last three are the special tokens."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("1", "2"), ("12", "3")]
    tokens += ["".join(merge) for merge in merges]
    tokens += [f"[PAD{index}]" for index in range(len(tokens), VOCAB_SIZE - 3)] + ["<|start|>", "<|end|>", "<tool>"]
    return tokens, merges


def write_tokenizer(folder: Path, *, extra_token: str = "<tool>", with_merges: bool = True) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    tokens, merges = vocabulary()
    vocab = {token: index for index, token in enumerate(tokens) if not token.startswith("[PAD")}
    vocab[extra_token] = vocab.pop("<tool>")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges if with_merges else []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<|start|>", "<|end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|start|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCAB_SIZE - 2, 3]}))


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """How llama.cpp's converter stores the query and key rows of a llama: row i of the first half, then row i of the second."""
    rows = np.arange(weight.shape[0]).reshape(num_heads, 2, -1)
    return weight[rows.transpose(0, 2, 1).reshape(-1)]


GGUF_MODULES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        index, _, part = module.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{GGUF_MODULES[part]}.{kind}"
    return f"{GGUF_MODULES[module]}.{kind}"


def write_gguf(
    path: Path,
    family: str,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    quantisation: str = "F32",
    quantisation_of: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    leave_out: tuple[str, ...] = (),
) -> Path:
    """A GGUF file: vectors in float32, matrices in `quantisation` (`quantisation_of` says otherwise for single ones)."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    if "epsilon" not in leave_out:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens, merges = vocabulary()
    types = [5 if token.startswith("[PAD") else 3 if token.startswith("<|") else 4 if token == "<tool>" else 1 for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(VOCAB_SIZE - 3)
    writer.add_eos_token_id(VOCAB_SIZE - 2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}[type(value)]
        add(key, value)
    for name, tensor in tensors.items():
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleaved(tensor, config.num_heads if "q_proj" in name else config.num_kv_heads)
        kind = gguf.GGMLQuantizationType[(quantisation_of or {}).get(name, quantisation) if tensor.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quantize(tensor, kind), raw_dtype=kind)
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def after_quantisation(tensors: Mapping[str, np.ndarray], quantisation: str) -> dict[str, np.ndarray]:
    """What can be read back: blocks lie within rows, so the order of rows does not matter."""
    kind = gguf.GGMLQuantizationType[quantisation]
    return {
        name: gguf.dequantize(gguf.quantize(tensor, kind), kind).reshape(tensor.shape) if tensor.ndim == 2 else tensor
        for name, tensor in tensors.items()
    }
