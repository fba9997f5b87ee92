"""Logits of converted models against the original implementations, at every position, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Transformer
from specjax.checkpoints import hugging_face
from specjax.checkpoints.convert import convert
from specjax.checkpoints.store import load_checkpoint
from specjax.checkpoints.weights import check_source, read_params
from specjax.models.rope import inverse_frequencies

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

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


def llama3_rope(factor: float) -> dict[str, Any]:
    # The original context is shorter than the text: all three ranges of wavelengths occur, and positions beyond it.
    return dict(
        rope_theta=10000.0,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )


MODELS = {
    "llama": ("Llama", dict(head_dim=16)),
    "llama, tied, head size of its own": ("Llama", dict(head_dim=32, tie_word_embeddings=True)),
    "llama, every head its own key": ("Llama", dict(head_dim=16, num_key_value_heads=4)),
    "llama 3.1, factor 8": ("Llama", dict(head_dim=32, rope_parameters=llama3_rope(8.0))),
    "llama 3.2, factor 32": ("Llama", dict(head_dim=32, rope_parameters=llama3_rope(32.0), tie_word_embeddings=True)),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=32)),
    "qwen3, tied": ("Qwen3", dict(head_dim=32, tie_word_embeddings=True, rope_parameters=dict(rope_theta=1e6, rope_type="default"))),
}


def saved_model(folder: Path, family: str, options: dict[str, Any]) -> Any:
    """A random model of the real class, also saved to the folder. Norms and biases are random too: ones and zeros would hide a mix-up."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def logits_of(model: Transformer, params: dict, tokens: np.ndarray) -> np.ndarray:
    cache = model.init_cache(batch_size=tokens.shape[0], capacity=tokens.shape[1])
    output = jax.jit(model.apply)({"params": params}, jnp.asarray(tokens, jnp.int32), cache)
    return np.asarray(model.apply({"params": params}, output.hidden, method="logits"))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers_at_every_position(tmp_path: Path, name: str) -> None:
    original = saved_model(tmp_path, *MODELS[name])
    tokens = np.random.default_rng(0).integers(SIZES["vocab_size"], size=(2, NUM_TOKENS))
    with torch.no_grad():
        expected = original(torch.from_numpy(tokens)).logits.numpy()
    assert expected.std() > 0.3
    source = hugging_face.open_source(tmp_path)
    check_source(source)
    model = Transformer(source.config, dtype=jnp.float32, param_dtype=jnp.float32)
    np.testing.assert_allclose(logits_of(model, read_params(source, "float32"), tokens), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_inverse_frequencies_equal_those_of_transformers(factor: float) -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    parameters = llama3_rope(factor) | dict(rope_theta=500000.0, original_max_position_embeddings=8192)
    config = transformers.LlamaConfig(**SIZES | dict(head_dim=128, rope_parameters=parameters))
    expected, _ = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    raw = config.to_dict() | dict(architectures=["LlamaForCausalLM"])
    np.testing.assert_allclose(inverse_frequencies(hugging_face.rope_config(raw), 128), expected.numpy(), rtol=1e-6)


def test_convert_reports_the_difference_to_transformers(tmp_path: Path) -> None:
    saved_model(tmp_path / "source", *MODELS["qwen2, tied"])
    for dtype in ("float32", "bfloat16"):
        done = convert(tmp_path / "source", tmp_path / dtype, dtype=dtype, check=True, progress=False)
        assert done.max_logit_difference is not None
        assert done.max_logit_difference < TOLERANCE
        assert not done.check_skipped


def test_a_conversion_that_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_model(tmp_path / "source", *MODELS["qwen3"])
    convert(tmp_path / "source", tmp_path / "out", dtype="float32", check=True, progress=False)
    before = load_checkpoint(tmp_path / "out")

    def swapped(source: Any, dtype: str, on_bytes: Any) -> dict:
        params = read_params(source, dtype, on_bytes)
        params["layer_0"]["mlp"]["gate_up"] = params["layer_0"]["mlp"]["gate_up"][:, ::-1]
        return params

    monkeypatch.setattr("specjax.checkpoints.convert.read_params", swapped)
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
