"""From Hugging Face tensors to the parameter tree of `Transformer`: one table, used by every reader of such models."""

from __future__ import annotations

import numpy as np

from specjax.checkpoints.formats.mxfp4 import BLOCK_SIZE, PACKED_BYTES, dequantise
from specjax.checkpoints.formats.parameters import gate_up, grouped_qkv, plain, row_chunks, stacked, transposed
from specjax.checkpoints.source import Parameter, Read
from specjax.model_config import ModelConfig

EXPERT_LAYOUTS = ("separate", "mixtral", "fused", "gpt_oss", "gpt_oss_mxfp4")


def transformer_table(cfg: ModelConfig, *, expert_layout: str = "separate") -> dict[str, Parameter]:
    """What each parameter is made of.

    Args:
        cfg: The model's shape.
        expert_layout: How experts are stored. `"separate"`: `mlp.experts.3.gate_proj.weight`, the router `mlp.gate`; `"mixtral"`: the same
            as `block_sparse_moe.experts.3.w1` (gate), `w3` (up), `w2` (down), the router `block_sparse_moe.gate`; `"fused"`:
            `mlp.experts.gate_up_proj` `[E,2F,D]` and `down_proj` `[E,D,F]`, the router `mlp.gate`; `"gpt_oss"`: `[E,D,2F]` with gate and up
            interleaved, `[E,F,D]`, biases, the router `mlp.router`; `"gpt_oss_mxfp4"`: the same in 4-bit blocks.
    """
    width, head_dim = cfg.hidden_size, cfg.head_dim
    heads = {"num_heads": cfg.num_heads, "num_kv_heads": cfg.num_kv_heads, "head_dim": head_dim, "width": width}
    table = {
        "embedding": plain("model.embed_tokens.weight", (cfg.vocab_size, width)),
        "final_norm.scale": plain("model.norm.weight", (width,)),
    }
    if not cfg.tie_word_embeddings:
        table["lm_head"] = plain("lm_head.weight", (cfg.vocab_size, width))
    for index in range(cfg.num_layers):
        ours, theirs = f"layer_{index}", f"model.layers.{index}"
        attention = f"{theirs}.self_attn"
        table[f"{ours}.attention_norm.scale"] = plain(f"{theirs}.input_layernorm.weight", (width,))
        table[f"{ours}.attention.qkv"] = grouped_qkv(attention, "weight", **heads)
        if cfg.qkv_bias:
            table[f"{ours}.attention.qkv_bias"] = grouped_qkv(attention, "bias", **heads)
        if cfg.qk_norm is not None:
            sizes = (cfg.num_heads, cfg.num_kv_heads) if cfg.qk_norm == "projection" else (1, 1)
            table[f"{ours}.attention.query_norm.scale"] = plain(f"{attention}.q_norm.weight", (sizes[0] * head_dim,))
            table[f"{ours}.attention.key_norm.scale"] = plain(f"{attention}.k_norm.weight", (sizes[1] * head_dim,))
        if cfg.attention_sinks:
            table[f"{ours}.attention.sinks"] = plain(f"{attention}.sinks", (cfg.num_heads,))
        table[f"{ours}.attention.output"] = transposed(f"{attention}.o_proj.weight", (width, cfg.num_heads * head_dim))
        if cfg.output_bias:
            table[f"{ours}.attention.output_bias"] = plain(f"{attention}.o_proj.bias", (width,))
        table[f"{ours}.mlp_norm.scale"] = plain(f"{theirs}.post_attention_layernorm.weight", (width,))
        mlp = _experts(cfg, theirs, expert_layout) if cfg.has_experts(index) else _dense(cfg, theirs)
        table |= {f"{ours}.mlp.{name}": parameter for name, parameter in mlp.items()}
    return table


def source_tensors(cfg: ModelConfig, *, expert_layout: str = "separate") -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this shape has, under its Hugging Face name, with its shape."""
    table = transformer_table(cfg, expert_layout=expert_layout)
    return {name: shape for parameter in table.values() for name, shape in parameter.tensors.items()}


def _dense(cfg: ModelConfig, layer: str) -> dict[str, Parameter]:
    width, ffn, mlp = cfg.hidden_size, cfg.intermediate_size, f"{layer}.mlp"
    table = {"gate_up": gate_up(mlp, ffn=ffn, width=width), "down": transposed(f"{mlp}.down_proj.weight", (width, ffn))}
    if cfg.mlp_bias:
        table["gate_up_bias"] = stacked({f"{mlp}.gate_proj.bias": (ffn,), f"{mlp}.up_proj.bias": (ffn,)})
        table["down_bias"] = plain(f"{mlp}.down_proj.bias", (width,))
    return table


def _experts(cfg: ModelConfig, layer: str, layout: str) -> dict[str, Parameter]:
    moe, width = cfg.moe, cfg.hidden_size
    assert moe is not None
    block = f"{layer}.{'block_sparse_moe' if layout == 'mixtral' else 'mlp'}"
    router = f"{block}.{'router' if layout.startswith('gpt_oss') else 'gate'}"
    table = {"router": transposed(f"{router}.weight", (moe.num_experts, width))}
    if moe.router_bias:
        table["router_bias"] = plain(f"{router}.bias", (moe.num_experts,))
    experts, sizes = f"{block}.experts", (moe.num_experts, moe.intermediate_size, width)
    build = {
        "separate": lambda: _separate(experts, sizes, ("gate_proj", "up_proj", "down_proj")),
        "mixtral": lambda: _separate(experts, sizes, ("w1", "w3", "w2")),
        "fused": lambda: _fused(experts, sizes),
        "gpt_oss": lambda: _gpt_oss(experts, sizes),
        "gpt_oss_mxfp4": lambda: _gpt_oss_mxfp4(experts, sizes),
    }[layout]
    return table | build()


def _separate(experts: str, sizes: tuple[int, int, int], names: tuple[str, str, str]) -> dict[str, Parameter]:
    num_experts, ffn, width = sizes
    gate, up, down = names

    def fill_gate_up(out: np.ndarray, read: Read) -> None:
        for expert in range(num_experts):
            for half, name in enumerate((gate, up)):
                out[expert, :, half] = read(f"{experts}.{expert}.{name}.weight").T

    def fill_down(out: np.ndarray, read: Read) -> None:
        for expert in range(num_experts):
            out[expert] = read(f"{experts}.{expert}.{down}.weight").T

    both = {f"{experts}.{expert}.{name}.weight": (ffn, width) for expert in range(num_experts) for name in (gate, up)}
    one = {f"{experts}.{expert}.{down}.weight": (width, ffn) for expert in range(num_experts)}
    return {
        "expert_gate_up": Parameter(tensors=both, fill=fill_gate_up),
        "expert_down": Parameter(tensors=one, fill=fill_down),
    }


def _fused(experts: str, sizes: tuple[int, int, int]) -> dict[str, Parameter]:
    num_experts, ffn, width = sizes
    gate_up_name, down_name = f"{experts}.gate_up_proj", f"{experts}.down_proj"

    def fill_gate_up(out: np.ndarray, read: Read) -> None:
        for expert in range(num_experts):
            stored = read(gate_up_name, slice(expert, expert + 1))[0]  # [2F,D]
            out[expert, :, 0], out[expert, :, 1] = stored[:ffn].T, stored[ffn:].T

    def fill_down(out: np.ndarray, read: Read) -> None:
        for expert in range(num_experts):
            out[expert] = read(down_name, slice(expert, expert + 1))[0].T

    return {
        "expert_gate_up": Parameter(tensors={gate_up_name: (num_experts, 2 * ffn, width)}, fill=fill_gate_up),
        "expert_down": Parameter(tensors={down_name: (num_experts, width, ffn)}, fill=fill_down),
    }


def _gpt_oss_biases(experts: str, sizes: tuple[int, int, int]) -> dict[str, Parameter]:
    num_experts, ffn, width = sizes
    name = f"{experts}.gate_up_proj_bias"

    def fill(out: np.ndarray, read: Read) -> None:
        stored = read(name)
        out[:, 0], out[:, 1] = stored[:, ::2], stored[:, 1::2]

    return {
        "expert_gate_up_bias": Parameter(tensors={name: (num_experts, 2 * ffn)}, fill=fill),
        "expert_down_bias": plain(f"{experts}.down_proj_bias", (num_experts, width)),
    }


def _gpt_oss(experts: str, sizes: tuple[int, int, int]) -> dict[str, Parameter]:
    num_experts, ffn, width = sizes
    name = f"{experts}.gate_up_proj"

    def fill(out: np.ndarray, read: Read) -> None:
        for rows in row_chunks(out.shape, itemsize=out.itemsize):
            stored = read(name, rows)
            out[rows, :, 0], out[rows, :, 1] = stored[..., ::2], stored[..., 1::2]

    return {
        "expert_gate_up": Parameter(tensors={name: (num_experts, width, 2 * ffn)}, fill=fill),
        "expert_down": plain(f"{experts}.down_proj", (num_experts, ffn, width)),
    } | _gpt_oss_biases(experts, sizes)


def _gpt_oss_mxfp4(experts: str, sizes: tuple[int, int, int]) -> dict[str, Parameter]:
    """Blocks `[E, out, in/32, 16]` of two 4-bit values a byte, scales `[E, out, in/32]`."""
    num_experts, ffn, width = sizes

    def packed(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        if columns % BLOCK_SIZE:
            raise ValueError(f"MXFP4 weights need sizes that are multiples of {BLOCK_SIZE}, got {columns}")
        blocks = columns // BLOCK_SIZE
        return {f"{name}_blocks": (num_experts, rows, blocks, PACKED_BYTES), f"{name}_scales": (num_experts, rows, blocks)}

    def expert_of(name: str, expert: int, read: Read) -> np.ndarray:
        one = slice(expert, expert + 1)
        return dequantise(read(f"{name}_blocks", one)[0], read(f"{name}_scales", one)[0])  # [out, in]

    def fill_gate_up(out: np.ndarray, read: Read) -> None:
        for expert in range(num_experts):
            stored = expert_of(f"{experts}.gate_up_proj", expert, read)
            out[expert, :, 0], out[expert, :, 1] = stored[::2].T, stored[1::2].T

    def fill_down(out: np.ndarray, read: Read) -> None:
        for expert in range(num_experts):
            out[expert] = expert_of(f"{experts}.down_proj", expert, read).T

    raw = frozenset({"U8"})
    return {
        "expert_gate_up": Parameter(tensors=packed(f"{experts}.gate_up_proj", 2 * ffn, width), fill=fill_gate_up, accepts=raw),
        "expert_down": Parameter(tensors=packed(f"{experts}.down_proj", width, ffn), fill=fill_down, accepts=raw),
    } | _gpt_oss_biases(experts, sizes)
