"""Logits of converted models against the original implementations, at every position, in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Transformer
from specjax.checkpoints.convert import convert
from specjax.checkpoints.formats import hugging_face
from specjax.checkpoints.formats.mxfp4 import dequantise
from specjax.checkpoints.formats.rope_settings import rope_config
from specjax.checkpoints.source import check_source, read_params, stream_params
from specjax.checkpoints.store import load_checkpoint
from specjax.models.rope import inverse_frequencies, rotary_angles

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("safetensors.torch")

NUM_TOKENS = 96
# Both sides sum in float32 in another order; the logits are of order 1.
TOLERANCE = 1e-4

SIZES = dict(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    initializer_range=0.15,
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, num_local_experts=8)
# Shorter than the text, so that positions beyond it occur.
ORIGINAL = 32


def llama3_rope(factor: float) -> dict[str, Any]:
    # All three ranges of wavelengths occur.
    return dict(
        rope_theta=10000.0,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=ORIGINAL,
    )


def yarn_rope(**changes: Any) -> dict[str, Any]:
    return dict(rope_theta=10000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL) | changes


def longrope(**changes: Any) -> dict[str, Any]:
    factors = dict(short_factor=[1.0 + 0.1 * i for i in range(8)], long_factor=[2.0 + i for i in range(8)])
    return dict(rope_theta=10000.0, rope_type="longrope", original_max_position_embeddings=ORIGINAL) | factors | changes


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(head_dim=16)),
    "llama, tied, head size of its own": ("Llama", dict(head_dim=32, tie_word_embeddings=True)),
    "llama, every head its own key": ("Llama", dict(head_dim=16, num_key_value_heads=4)),
    "llama, biases everywhere": ("Llama", dict(head_dim=16, attention_bias=True, mlp_bias=True)),
    "llama 3.1, factor 8": ("Llama", dict(head_dim=32, rope_parameters=llama3_rope(8.0))),
    "llama 3.2, factor 32": ("Llama", dict(head_dim=32, rope_parameters=llama3_rope(32.0), tie_word_embeddings=True)),
    "llama, linear": ("Llama", dict(head_dim=16, rope_parameters=dict(rope_theta=1e4, rope_type="linear", factor=4.0))),
    "llama, dynamic": (
        "Llama",
        dict(head_dim=16, max_position_embeddings=ORIGINAL, rope_parameters=dict(rope_theta=1e4, rope_type="dynamic", factor=4.0)),
    ),
    "llama, yarn": ("Llama", dict(head_dim=16, rope_parameters=yarn_rope())),
    "llama, yarn, not truncated, attention factor": (
        "Llama",
        dict(head_dim=16, rope_parameters=yarn_rope(truncate=False, attention_factor=0.8)),
    ),
    "llama, yarn, two mscales": ("Llama", dict(head_dim=16, rope_parameters=yarn_rope(mscale=0.9, mscale_all_dim=0.4, beta_fast=16.0))),
    "llama, longrope beyond the original length": ("Llama", dict(head_dim=16, rope_parameters=longrope())),
    "llama, longrope within the original length": (
        "Llama",
        dict(head_dim=16, rope_parameters=longrope(original_max_position_embeddings=128, factor=2.0)),
    ),
    "mistral, sliding window": ("Mistral", dict(head_dim=16, sliding_window=12)),
    "mistral, no window": ("Mistral", dict(head_dim=16, sliding_window=None)),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2, late layers windowed": ("Qwen2", dict(use_sliding_window=True, sliding_window=12, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=32)),
    "qwen3, tied": ("Qwen3", dict(head_dim=32, tie_word_embeddings=True, rope_parameters=dict(rope_theta=1e6, rope_type="default"))),
    "qwen3, attention bias": ("Qwen3", dict(head_dim=32, attention_bias=True)),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | dict(head_dim=32, moe_intermediate_size=48, norm_topk_prob=True)),
    "qwen3_moe, shares not normalised": ("Qwen3Moe", EXPERTS | dict(head_dim=32, moe_intermediate_size=48, norm_topk_prob=False)),
    "qwen3_moe, some layers dense": (
        "Qwen3Moe",
        EXPERTS | dict(head_dim=32, moe_intermediate_size=48, norm_topk_prob=True, mlp_only_layers=[0], decoder_sparse_step=1),
    ),
    "qwen3_moe, every second layer": ("Qwen3Moe", EXPERTS | dict(head_dim=32, moe_intermediate_size=48, decoder_sparse_step=2)),
    "mixtral": ("Mixtral", EXPERTS | dict(head_dim=16, sliding_window=None)),
    "mixtral, sliding window": ("Mixtral", EXPERTS | dict(head_dim=16, sliding_window=12)),
    "olmoe": ("Olmoe", EXPERTS | dict(clip_qkv=None)),
    "olmoe, normalised, clipped": ("Olmoe", EXPERTS | dict(clip_qkv=0.5, norm_topk_prob=True, num_key_value_heads=4)),
    "gpt_oss": (
        "GptOss",
        EXPERTS
        | dict(
            head_dim=16, sliding_window=12, num_hidden_layers=4, rope_parameters=yarn_rope(rope_theta=150000.0, factor=32.0, truncate=False)
        ),
    ),
}


def saved_model(folder: Path, family: str, options: dict[str, Any]) -> Any:
    """A random model of the real class, also saved to the folder. Norms and biases are random too: ones and zeros would hide a mix-up."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | options, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Experts' biases have two axes, and more than one value of `sinks` to be told apart.
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def logits_of(model: Transformer, params: dict, tokens: np.ndarray) -> np.ndarray:
    cache = model.init_cache(batch_size=tokens.shape[0], capacity=tokens.shape[1])
    output = jax.jit(model.apply)({"params": params}, jnp.asarray(tokens, jnp.int32), cache)
    return np.asarray(model.apply({"params": params}, output.hidden, method="logits"))


# Those that differ from another in one setting alone, which another family shows too.
MORE = (
    "llama, tied, head size of its own",
    "llama 3.1, factor 8",
    "llama, yarn, not truncated, attention factor",
    "llama, longrope within the original length",
    "mistral, no window",
    "qwen2, tied",
    "qwen3, tied",
    "qwen3_moe, shares not normalised",
    "qwen3_moe, every second layer",
    "mixtral, sliding window",
    "olmoe",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name in MORE else ()) for name in MODELS])
def test_logits_equal_those_of_transformers_at_every_position(tmp_path: Path, name: str) -> None:
    original = saved_model(tmp_path, *MODELS[name])
    tokens = np.random.default_rng(0).integers(SIZES["vocab_size"], size=(2, NUM_TOKENS))
    with torch.no_grad():
        expected = original(torch.from_numpy(tokens)).logits.numpy()
    assert expected.std() > 0.3
    source = hugging_face.open_source(tmp_path)
    check_source(source)
    model = Transformer(source.config, dtype=jnp.float32, param_dtype=jnp.float32)
    assert NUM_TOKENS > ORIGINAL
    np.testing.assert_allclose(logits_of(model, read_params(source, "float32"), tokens), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
def test_experts_stored_in_one_tensor_are_read_too(tmp_path: Path, name: str) -> None:
    original = saved_model(tmp_path, *MODELS[name])
    separate = read_params(hugging_face.open_source(tmp_path), "float32")
    # As the model holds them in memory, and as some versions of transformers write them.
    fused = {key: tensor.contiguous() for key, tensor in original.state_dict().items()}
    assert "model.layers.1.mlp.experts.gate_up_proj" in fused
    safetensors.torch.save_file(fused, tmp_path / "model.safetensors")
    source = hugging_face.open_source(tmp_path)
    check_source(source)
    jax.tree.map(np.testing.assert_array_equal, read_params(source, "float32"), separate)


def test_a_model_in_pytorchs_format_is_the_same_in_shards_too(tmp_path: Path) -> None:
    original = saved_model(tmp_path / "safetensors", *MODELS["qwen2"])
    expected = read_params(hugging_face.open_source(tmp_path / "safetensors"), "float32")
    config = (tmp_path / "safetensors" / "config.json").read_text()
    tensors = original.state_dict()
    halves = dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])
    for name, files in (("whole", {"pytorch_model.bin": tensors}), ("shards", {"a.bin": halves[0], "b.bin": halves[1]})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        for file, held in files.items():
            torch.save(held, tmp_path / name / file)
        if name == "shards":
            weight_map = {tensor: file for file, held in files.items() for tensor in held}
            (tmp_path / name / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        source = hugging_face.open_source(tmp_path / name)
        check_source(source)
        assert source.format == "torch"
        jax.tree.map(np.testing.assert_array_equal, read_params(source, "float32"), expected)
    (tmp_path / "shards" / "b.bin").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin\.index\.json names files that are not there: b\.bin"):
        hugging_face.open_source(tmp_path / "shards")


def test_mxfp4_blocks_are_dequantised_bit_for_bit_as_by_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.default_rng(0)
    blocks = rng.integers(256, size=(2, 128, 16, 16), dtype=np.uint8)
    scales = np.arange(blocks.size // 16, dtype=np.int64).reshape(blocks.shape[:-1]).astype(np.uint8)
    assert len(np.unique(scales)) == 256
    expected = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales)).transpose(1, 2).contiguous()
    ours = dequantise(blocks, scales)
    np.testing.assert_array_equal(ours.view(np.int16), expected.view(torch.int16).numpy())


@pytest.mark.full
def test_gpt_oss_in_mxfp4_blocks_gives_the_logits_of_the_dequantised_model(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    family, options = MODELS["gpt_oss"]
    original = saved_model(tmp_path, family, options)
    tensors, rng = original.state_dict(), np.random.default_rng(0)
    for index in range(options["num_hidden_layers"]):
        for name, rows, columns in (("gate_up_proj", 2 * 96, 64), ("down_proj", 64, 96)):
            key = f"model.layers.{index}.mlp.experts.{name}"
            blocks = torch.from_numpy(rng.integers(256, size=(8, rows, columns // 32, 16), dtype=np.uint8))
            scales = torch.from_numpy(rng.integers(122, 125, size=(8, rows, columns // 32), dtype=np.uint8))
            tensors[key].copy_(mxfp4.convert_moe_packed_tensors(blocks, scales))
            del tensors[key]
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    safetensors.torch.save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "mxfp4"}}))
    tokens = np.random.default_rng(0).integers(SIZES["vocab_size"], size=(2, NUM_TOKENS))
    with torch.no_grad():
        expected = original(torch.from_numpy(tokens)).logits.numpy()
    source = hugging_face.open_source(tmp_path)
    check_source(source)
    assert source.quantisation == "MXFP4"
    # transformers' own reading of the file, as `specjax convert` compares with it.
    done = convert(tmp_path, tmp_path.with_name("converted"), dtype="bfloat16", check=True, progress=False)
    assert done.max_logit_difference is not None
    model = Transformer(source.config, dtype=jnp.float32, param_dtype=jnp.float32)
    np.testing.assert_allclose(logits_of(model, read_params(source, "float32"), tokens), expected, rtol=0, atol=TOLERANCE)


ROPES: dict[str, dict[str, Any]] = {
    "linear": dict(rope_type="linear", factor=4.0),
    "llama3, factor 8": llama3_rope(8.0) | dict(original_max_position_embeddings=8192),
    "llama3, factor 32": llama3_rope(32.0) | dict(original_max_position_embeddings=8192),
    "yarn": yarn_rope(original_max_position_embeddings=4096),
    "yarn, not truncated": yarn_rope(original_max_position_embeddings=4096, truncate=False, factor=32.0),
    "yarn, attention factor": yarn_rope(original_max_position_embeddings=4096, attention_factor=0.9),
    "yarn, mscale": yarn_rope(original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.5),
    "yarn, one mscale": yarn_rope(original_max_position_embeddings=4096, mscale=0.7),
    "yarn, empty range": yarn_rope(original_max_position_embeddings=4096, beta_fast=1.0, beta_slow=1.0, truncate=False),
}


@pytest.mark.parametrize("name", ROPES)
def test_inverse_frequencies_equal_those_of_transformers(name: str) -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    parameters = ROPES[name] | dict(rope_theta=500000.0)
    config = transformers.LlamaConfig(**SIZES | dict(head_dim=128, max_position_embeddings=131072, rope_parameters=parameters))
    expected, attention_factor = rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    rope = rope_config(config.to_dict() | dict(architectures=["LlamaForCausalLM"]))
    # Theirs are float32 throughout, ours are rounded once.
    np.testing.assert_allclose(inverse_frequencies(rope, 128), expected.numpy(), rtol=2e-6)
    cos, _ = rotary_angles(rope, 128, jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(cos, attention_factor, rtol=1e-6)


@pytest.mark.parametrize("length", [100, 4096, 4097, 8192, 30000])
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_inverse_frequencies_that_depend_on_the_length_equal_those_of_transformers(rope_type: str, length: int) -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    rng = np.random.default_rng(0)
    factors = dict(short_factor=rng.uniform(1, 2, 64).tolist(), long_factor=rng.uniform(2, 40, 64).tolist())
    parameters = dict(rope_type=rope_type, rope_theta=10000.0)
    parameters |= dict(factor=8.0) if rope_type == "dynamic" else dict(original_max_position_embeddings=4096, **factors)
    window = 4096 if rope_type == "dynamic" else 131072
    config = transformers.LlamaConfig(**SIZES | dict(head_dim=128, max_position_embeddings=window, rope_parameters=parameters))
    expected, attention_factor = rope_utils.ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=length)
    rope = rope_config(config.to_dict())
    ours = inverse_frequencies(rope, 128, jnp.array([length, 10], jnp.int32))
    np.testing.assert_allclose(ours[0], expected.numpy(), rtol=2e-6)  # float32 powers on both sides
    short, _ = rope_utils.ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=10)
    np.testing.assert_allclose(ours[1], short.numpy(), rtol=2e-6)  # each row by its own length
    assert (rope.attention_factor if rope_type == "longrope" else 1.0) == pytest.approx(attention_factor)


def test_convert_reports_the_difference_to_transformers(tmp_path: Path) -> None:
    saved_model(tmp_path / "source", *MODELS["qwen2, tied"])
    for dtype in ("float32", "bfloat16"):
        done = convert(tmp_path / "source", tmp_path / dtype, dtype=dtype, check=True, progress=False)
        assert done.max_logit_difference is not None
        assert done.max_logit_difference < TOLERANCE
        assert not done.check_skipped


@pytest.mark.full
def test_a_conversion_that_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_model(tmp_path / "source", *MODELS["qwen3"])
    convert(tmp_path / "source", tmp_path / "out", dtype="float32", check=True, progress=False)
    before = load_checkpoint(tmp_path / "out")

    def swapped(source: Any, dtype: str, on_bytes: Any) -> Iterator[tuple[str, np.ndarray]]:
        for path, leaf in stream_params(source, dtype, on_bytes):
            yield path, leaf[:, ::-1] if path == "layer_0.mlp.gate_up" else leaf

    monkeypatch.setattr("specjax.checkpoints.convert.stream_params", swapped)
    with pytest.raises(ValueError, match=r"logits differ from transformers' by .*; rounding explains"):
        convert(tmp_path / "source", tmp_path / "out", dtype="float32", force=True, progress=False)
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path / "out").params, before.params)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out", "source"]


def test_logits_of_bfloat16_weights_equal_those_of_transformers(tmp_path: Path) -> None:
    saved_model(tmp_path / "float32", *MODELS["llama 3.1, factor 8"])
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    original.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", check=False, progress=False)
    stored = load_checkpoint(tmp_path / "out")
    assert stored.params["embedding"].dtype == jnp.bfloat16
    embedding = original.get_input_embeddings().weight.detach().float().numpy()
    np.testing.assert_array_equal(np.asarray(stored.params["embedding"], np.float32), embedding)
    widened = load_checkpoint(tmp_path / "out", dtype=jnp.float32)
    tokens = np.arange(NUM_TOKENS)[None] % SIZES["vocab_size"]
    with torch.no_grad():
        expected = original.eval().float()(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(widened.model, widened.params, tokens), expected, rtol=0, atol=TOLERANCE)
