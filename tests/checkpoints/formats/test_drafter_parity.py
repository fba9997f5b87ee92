"""Published drafters against plain PyTorch versions written from their papers, in float32."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Transformer
from specjax.checkpoints.formats import hugging_face
from specjax.checkpoints.formats.drafters import open_drafter
from specjax.checkpoints.source import check_source, read_params
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import default_feature_layers
from specjax.drafting.heads import TrimmedHead
from specjax.drafting.hydra import Hydra
from specjax.drafting.medusa import Medusa
from tests.checkpoints.published_drafters import (
    DRAFT_VOCAB_SIZE,
    KEPT_IDS,
    VOCAB_SIZE,
    WIDTH,
    eagle3_tensors,
    official_config,
    random_tensor,
    speculators_config,
    write_drafter,
)

torch = pytest.importorskip("torch")
F = torch.nn.functional

NUM_TOKENS = 12
# Both sides sum in float32 in another order; the logits are of order 1.
TOLERANCE = 1e-4


class TorchEagle3:
    """The drafter's forward pass over a whole sequence, without a cache, from the tensors of the official file."""

    def __init__(self, tensors: dict[str, np.ndarray], *, flags: tuple[str, ...] = (), theta: float = 10000.0) -> None:
        names = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
        self.weights = {name: torch.from_numpy(np.asarray(value)) for name, value in names.items()}
        self.flags, self.theta = flags, theta

    def norm(self, x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weights[f"{name}.weight"]

    def linear(self, x: Any, name: str) -> Any:
        return F.linear(x, self.weights[f"{name}.weight"])

    def fuse(self, features: Any) -> Any:
        if "norm_before_fc" in self.flags:
            features = self.norm(features, "input_norm")
        if "fc_norm" in self.flags:
            parts = features.chunk(3, dim=-1)
            features = torch.cat([self.norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)], dim=-1)
        return self.linear(features, "fc")

    def rotated(self, x: Any, positions: Any) -> Any:
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.view_as_complex(torch.stack([x[..., :half], x[..., half:]], -1).double()) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.cat([turned.real, turned.imag], -1).float()

    def attention(self, x: Any, layer: str) -> Any:
        positions = torch.arange(x.shape[0], dtype=torch.float64)
        q, k, v = (self.linear(x, f"{layer}.self_attn.{name}_proj") for name in ("q", "k", "v"))
        head_dim = q.shape[-1] // 4
        q, k, v = (y.view(len(x), -1, head_dim).transpose(0, 1) for y in (q, k, v))
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        scores = q @ k.transpose(1, 2) / head_dim**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        return self.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{layer}.self_attn.o_proj")

    def mlp(self, h: Any, layer: str) -> Any:
        x = self.norm(h, f"{layer}.post_attention_layernorm")
        inner = F.silu(self.linear(x, f"{layer}.mlp.gate_proj")) * self.linear(x, f"{layer}.mlp.up_proj")
        return h + self.linear(inner, f"{layer}.mlp.down_proj")

    def __call__(self, embeddings: Any, g: Any) -> tuple[Any, Any]:
        """`[T,D]` each → logits `[T,Vd]` and what is fed back."""
        n = self.norm(g, "midlayer.hidden_norm")
        x = torch.cat([self.norm(embeddings, "midlayer.input_layernorm"), n], dim=-1)
        h = (n if "norm_before_residual" in self.flags else g) + self.attention(x, "midlayer")
        h, index = self.mlp(h, "midlayer"), 1
        while f"layers.{index}.input_layernorm.weight" in self.weights:
            layer, index = f"layers.{index}", index + 1
            h = self.mlp(h + self.attention(self.norm(h, f"{layer}.input_layernorm"), layer), layer)
        y = self.norm(h, "norm")
        if "lm_head.up.weight" in self.weights:
            logits = y @ (self.weights["lm_head.up.weight"] @ self.weights["lm_head.down.weight"]).T
        else:
            logits = self.linear(y, "lm_head")
        return logits, (y if "norm_output" in self.flags else h)


def save_torch(folder: Path, raw: dict[str, Any], tensors: dict[str, np.ndarray], file: str = "pytorch_model.bin") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    torch.save({name: torch.from_numpy(np.ascontiguousarray(tensor)) for name, tensor in tensors.items()}, folder / file)
    return folder


def opened(folder: Path, **options: Any) -> tuple[Any, dict]:
    source = open_drafter(folder, **options)
    assert source is not None
    check_source(source)
    return source.config, read_params(source, "float32")


def assert_equals_torch(folder: Path, tensors: dict[str, np.ndarray], *, flags: tuple[str, ...] = (), theta: float = 10000.0) -> None:
    """A pass over known features, then two recursive steps over what the drafter itself fed back and drafted."""
    config, params = opened(folder)
    model, reference = Eagle3(config, dtype=jnp.float32, param_dtype=jnp.float32), TorchEagle3(tensors, flags=flags, theta=theta)
    rng = np.random.default_rng(1)
    features = rng.normal(size=(NUM_TOKENS, reference.weights["fc.weight"].shape[1])).astype(np.float32)
    table = tensors.get("embed_tokens.weight", rng.normal(size=(VOCAB_SIZE, WIDTH)).astype(np.float32))
    tokens = rng.integers(VOCAB_SIZE, size=NUM_TOKENS).tolist()

    states = reference.fuse(torch.from_numpy(features))  # grows by what is fed back
    g = model.apply({"params": params}, features[None], method="fuse")
    cache, inputs = model.init_cache(batch_size=1, capacity=NUM_TOKENS + 2), tokens
    for _ in range(3):
        output, logits, drafts = drafter_pass(model, params, jnp.asarray([inputs]), jnp.asarray(table), g, cache)
        expected, fed_back = reference(torch.from_numpy(table[tokens]), states)
        assert expected.std() > 0.3
        np.testing.assert_allclose(np.asarray(logits)[0], expected[-len(inputs) :].numpy(), rtol=0, atol=TOLERANCE)
        token = int(drafts[0, -1])
        assert token == (KEPT_IDS[expected[-1].argmax()] if "d2t" in tensors else expected[-1].argmax())
        tokens, states = [*tokens, token], torch.cat([states, fed_back[-1:]])
        inputs, g, cache = [token], output.next_state[:, -1:], output.cache


@functools.partial(jax.jit, static_argnames="model")
def drafter_pass(model: Eagle3, params: dict, tokens: Any, target_embedding: Any, g: Any, cache: Any) -> tuple[Any, Any, Any]:
    """The output, logits `[B,T,Vd]`, the greedy drafts `[B,T]`."""
    variables = {"params": params}
    output = model.apply(variables, model.apply(variables, tokens, target_embedding, method="embed"), g, cache)
    scores = model.apply(variables, output.hidden, method="scores")
    return output, scores.logits, scores.tokens(jnp.argmax(scores.logits, axis=-1))


@pytest.mark.parametrize("file", ["bin", "safetensors"])
@pytest.mark.parametrize("layout", ["official", "speculators"])
def test_eagle3_logits_equal_those_of_the_paper_in_every_layout(tmp_path: Path, layout: str, file: str) -> None:
    tensors = eagle3_tensors(first_layer="midlayer" if layout == "official" else "layers.0", embedding=layout == "speculators")
    raw = official_config() if layout == "official" else speculators_config()
    (save_torch if file == "bin" else write_drafter)(tmp_path, raw, tensors)
    assert_equals_torch(tmp_path, tensors)


@pytest.mark.parametrize("flags", [("fc_norm", "norm_output"), ("norm_before_fc", "norm_before_residual"), ("norm_before_residual",)])
def test_eagle3_flags_compute_what_they_say(tmp_path: Path, flags: tuple[str, ...]) -> None:
    tensors = eagle3_tensors(num_layers=2, first_layer="layers.0")
    extra = {"fc_norm": {f"fc_norm.{index}.weight": (WIDTH,) for index in range(3)}, "norm_before_fc": {"input_norm.weight": (3 * WIDTH,)}}
    for flag in flags:
        for index, (name, shape) in enumerate(extra.get(flag, {}).items()):
            tensors[name] = random_tensor(name, shape, seed=50 + index)
    raw = official_config(num_hidden_layers=2, rope_parameters=dict(rope_type="default", rope_theta=500.0), **dict.fromkeys(flags, True))
    assert_equals_torch(write_drafter(tmp_path, raw, tensors), tensors, flags=flags, theta=500.0)


def test_a_low_rank_head_equals_the_dense_one_that_its_factors_make(tmp_path: Path) -> None:
    tensors = eagle3_tensors(rank=8)
    raw = official_config(draft_vocab_size=VOCAB_SIZE, lm_head_rank_divisor=4)
    assert_equals_torch(write_drafter(tmp_path, raw, tensors), tensors)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("layout", ["official", "safetensors", "vllm"])
def test_medusa_logits_equal_those_of_the_paper(tmp_path: Path, layout: str, num_layers: int) -> None:
    hidden = np.random.default_rng(2).normal(size=(3, WIDTH)).astype(np.float32)
    tensors, expected = {}, []
    for head in range(3):
        x = torch.from_numpy(hidden)
        for block in range(num_layers):
            name = f"{head}.{block}.linear"
            tensors[f"{name}.weight"] = random_tensor("w", (WIDTH, WIDTH), seed=10 * head + block)
            tensors[f"{name}.bias"] = random_tensor("b", (WIDTH,), seed=100 + 10 * head + block)
            x = x + F.silu(F.linear(x, *(torch.from_numpy(tensors[f"{name}.{kind}"]) for kind in ("weight", "bias"))))
        tensors[f"{head}.{num_layers}.weight"] = random_tensor("w", (VOCAB_SIZE, WIDTH), seed=200 + head)
        expected.append(F.linear(x, torch.from_numpy(tensors[f"{head}.{num_layers}.weight"])).numpy())
    # The official file may hold more heads than its config.json declares.
    raw: dict[str, Any] = dict(base_model_name_or_path="target", medusa_num_heads=2, medusa_num_layers=num_layers)
    if layout == "official":
        save_torch(tmp_path, raw, tensors, "medusa_lm_head.pt")
    elif layout == "safetensors":
        write_drafter(tmp_path, raw, tensors, file="medusa_lm_head.safetensors")
    else:
        raw = dict(model_type="medusa", num_heads=2, num_hidden_layers=num_layers, vocab_size=VOCAB_SIZE, medusa_fc_bias=True)
        renamed = {}
        for name, tensor in tensors.items():
            head, index, *rest = name.split(".")
            renamed[f"blocks.{head}.layers.{index}.{rest[-1]}" if len(rest) == 2 else f"lm_heads.{head}.weight"] = tensor
        write_drafter(tmp_path, raw, renamed)
    config, params = opened(tmp_path)
    scores = Medusa(config, dtype=jnp.float32, param_dtype=jnp.float32).apply({"params": params}, hidden)
    assert len(scores) == 2
    for ours, theirs in zip(scores, expected, strict=False):
        np.testing.assert_allclose(np.asarray(ours.logits), theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("grounded", [True, False])
def test_hydra_logits_equal_those_of_the_paper(tmp_path: Path, grounded: bool) -> None:
    rng = np.random.default_rng(3)
    hidden, embeddings = rng.normal(size=(2, WIDTH)).astype(np.float32), rng.normal(size=(2, 3, WIDTH)).astype(np.float32)
    tensors: dict[str, np.ndarray] = {"input_embed_fn.weight": random_tensor("embed", (VOCAB_SIZE, WIDTH), seed=9)}
    expected = []

    def linear(name: str, x: Any, width: int) -> Any:
        tensors[f"{name}.weight"] = random_tensor("w", (width, x.shape[-1]), seed=len(tensors))
        tensors[f"{name}.bias"] = random_tensor("b", (width,), seed=len(tensors))
        return F.linear(x, torch.from_numpy(tensors[f"{name}.weight"]), torch.from_numpy(tensors[f"{name}.bias"]))

    for head in range(3):
        x = torch.from_numpy(np.concatenate([hidden, embeddings[:, : head + 1].reshape(2, -1)], axis=1) if grounded else hidden)
        for block in range(2):
            name = f"hydra_mlp.{head}.{block}"
            residual = linear(f"{name}.res_connection", x, WIDTH) if grounded and block == 0 else x
            x = residual + F.silu(linear(f"{name}.linear", x, WIDTH))
        expected.append(linear(f"hydra_lm_head.{head}", x, VOCAB_SIZE).numpy())
    raw = dict(hydra_head_arch="mlp", hydra_num_heads=3, hydra_num_layers=2, grounded_heads=grounded, hidden_state_offset=0)
    config, params = opened(save_torch(tmp_path, raw, tensors, "hydra_lm_head.pt"))
    model = Hydra(config, dtype=jnp.float32, param_dtype=jnp.float32)
    for head in range(3):
        scores = model.apply({"params": params}, hidden, embeddings[:, : head + 1])
        np.testing.assert_allclose(np.asarray(scores.logits), expected[head], rtol=0, atol=TOLERANCE)


def test_a_draft_vocabulary_is_as_large_as_the_head_in_the_file(tmp_path: Path) -> None:
    config, params = opened(write_drafter(tmp_path, official_config(draft_vocab_size=...), eagle3_tensors()))
    assert config.head == TrimmedHead(num_tokens=DRAFT_VOCAB_SIZE)
    np.testing.assert_array_equal(params["draft_head"]["token_ids"], KEPT_IDS)


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [
        (6, (0, 3, 6)),
        (6, (1, 3, 5)),
        (6, None),
        (4, None),
        pytest.param(3, None, marks=pytest.mark.full),
        pytest.param(2, None, marks=pytest.mark.full),
        (1, None),
    ],
)
def test_features_equal_the_hidden_states_of_transformers(tmp_path: Path, num_layers: int, layers: tuple[int, ...] | None) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB_SIZE, hidden_size=WIDTH, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    original = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=num_layers, initializer_range=0.2)).eval()
    original.save_pretrained(tmp_path)
    source = hugging_face.open_source(tmp_path)
    layers = default_feature_layers(num_layers) if layers is None else layers
    tokens = np.random.default_rng(0).integers(VOCAB_SIZE, size=(2, NUM_TOKENS))
    last = []
    original.model.layers[-1].register_forward_hook(lambda module, inputs, output: last.append(output))
    with torch.no_grad():
        states = list(original(torch.from_numpy(tokens), output_hidden_states=True).hidden_states)
    states[num_layers] = last[0]  # transformers' own comes after the final norm
    model = Transformer(source.config, dtype=jnp.float32, param_dtype=jnp.float32)
    cache = model.init_cache(batch_size=2, capacity=NUM_TOKENS)
    forward = jax.jit(model.apply, static_argnames="feature_layers")
    output = forward({"params": read_params(source, "float32")}, jnp.asarray(tokens), cache, feature_layers=layers)
    expected = torch.cat([states[index] for index in layers], dim=-1).numpy()
    np.testing.assert_allclose(np.asarray(output.features), expected, rtol=0, atol=TOLERANCE)
