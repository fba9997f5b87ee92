"""Tiny models, drafters that know the answer, and independent NumPy versions of what the library computes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from specjax import GenerateConfig, GenerateOutput, ModelConfig, SamplingParams, Transformer, generate, speculative_generate
from specjax.state import Commit, Context, Draft, PrefillChunk

VOCAB_SIZE = 64
WINDOW = 512

# The sizes of most tests, shared so that they share compiled programs: five prompts of very different lengths, 24 new tokens.
PROMPT_LENGTHS = (5, 17, 1, 33, 8)
NUM_TOKENS = 24

# A fixed-seed test with this threshold fails by bad luck once in ten thousand choices of the seed, and at once on a wrong distribution.
MIN_P_VALUE = 1e-4

# float32 passes over different numbers of rows sum in another order: a few ulp of values of order 1, a thousandth of a percent.
FLOAT32_TOLERANCE = 1e-5


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, grouped queries, 64 tokens."""
    sizes = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=WINDOW,
    )
    return ModelConfig(**(sizes | changes))


def random_model(config: ModelConfig, *, seed: int = 0, dtype: Any = jnp.float32) -> tuple[Transformer, dict]:
    """A model and parameters whose greedy text is lively: weights far larger than at initialisation, layers that outweigh the embedding."""
    model = Transformer(config, dtype=dtype, param_dtype=dtype)
    return model, jax.tree.map(jnp.array, _random_params(model, seed))


@functools.cache
def param_shapes(model: Any) -> dict:
    """What `init_params` of a network makes, traced once for all tests."""
    return jax.eval_shape(model.init_params, jax.random.key(0))


@functools.cache
def _random_params(model: Transformer, seed: int) -> dict:
    rng = np.random.default_rng(seed)

    def draw(path: tuple, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        name = path[-1].key
        if name == "scale":
            values = rng.uniform(0.5, 1.5, shape.shape)
        else:
            matrix = shape.shape[1:] if name.startswith("expert_") else shape.shape
            fan_in = {"embedding": 1, "lm_head": shape.shape[-1] / 4}.get(name, 16 if name.endswith("bias") else matrix[0] / 4)
            values = rng.normal(0, fan_in**-0.5, shape.shape)
        return values.astype(shape.dtype)

    return jax.tree_util.tree_map_with_path(draw, param_shapes(model))


@functools.cache
def tiny_target() -> tuple[Transformer, dict]:
    """The target of most tests, in float32."""
    return random_model(tiny_config(), seed=1)


@functools.cache
def tiny_draft_model() -> tuple[Transformer, dict]:
    """A one-layer draft model that shares the target's embedding and head, so that some of its drafts are accepted."""
    _, target_params = tiny_target()
    model = Transformer(tiny_config(num_layers=1), dtype=jnp.float32, param_dtype=jnp.float32)
    return model, {name: target_params[name] for name in ("embedding", "lm_head", "final_norm", "layer_0")}


def random_prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Prompts of random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


@dataclasses.dataclass(frozen=True)
class ReplayDrafter:
    """Knows the answer: replays a recorded continuation, right up to draft position `flip_at`, then wrong (shifted by one token).

    `flip_at=None` takes a position a row from the params; 0 is the drafter that is always wrong, G the one that is always right. The params
    are those of `recorded`. The state counts the tokens that it was told about.
    """

    flip_at: int | None = None
    random_flips: bool = False
    feature_layers = ()

    def check(self, params: Any, *, target: ModelConfig, max_length: int | None) -> None:
        """Fits every target."""

    def init(self, params: Any, *, batch_size: int, capacity: int, context_limit: Any = None) -> jax.Array:
        """Nothing was committed yet."""
        return jnp.zeros((batch_size,), jnp.int32)

    def grow(self, params: Any, state: jax.Array, context: Context, *, capacity: int) -> jax.Array:
        """The count goes on."""
        return state

    def prefill(self, params: Any, state: jax.Array, chunk: PrefillChunk) -> jax.Array:
        """Prompts are known already."""
        return state

    def propose(
        self,
        params: Any,
        state: jax.Array,
        context: Context,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams | None,
        row_keys: jax.Array,
    ) -> tuple[Draft, jax.Array]:
        """A point mass at the recorded tokens."""
        slots = jnp.arange(num_speculative_tokens)
        done = (context.length - params["prompt_lengths"])[:, None]
        recorded = params["tokens"]
        tokens = jnp.take_along_axis(recorded, jnp.minimum(done + slots, recorded.shape[1] - 1), axis=1)
        if self.random_flips:
            flip_at = jax.vmap(lambda key: jax.random.randint(key, (), 0, num_speculative_tokens + 1))(row_keys)
        else:
            flip_at = params["flip_at"] if self.flip_at is None else jnp.full_like(context.length, self.flip_at)
        tokens = jnp.where(slots >= flip_at[:, None], (tokens + 1) % VOCAB_SIZE, tokens)
        num_drafted = jnp.clip(recorded.shape[1] - done[:, 0], 0, num_speculative_tokens)
        return Draft(tokens=tokens, num_drafted=jnp.minimum(num_drafted, params["max_drafted"]), probs=None), state

    def commit(self, params: Any, state: jax.Array, commit: Commit) -> jax.Array:
        """Counts."""
        return state + commit.num_committed


def recorded(continuation: Any, prompt_lengths: Any, *, flip_at: Any = 1000, max_drafted: Any = 1000) -> dict:
    """Params of a `ReplayDrafter`: the continuation `[B,M]`, prompt lengths `[B]`, and flip position and longest draft, scalar or `[B]`."""
    lengths = jnp.asarray(prompt_lengths, jnp.int32)
    return {
        "tokens": jnp.asarray(continuation, jnp.int32),
        "prompt_lengths": lengths,
        "flip_at": jnp.broadcast_to(jnp.asarray(flip_at, jnp.int32), lengths.shape),
        "max_drafted": jnp.broadcast_to(jnp.asarray(max_drafted, jnp.int32), lengths.shape),
    }


@dataclasses.dataclass(frozen=True)
class FixedDrafter(ReplayDrafter):
    """Always drafts the tokens `params["tokens"]` `[G]`."""

    def propose(
        self,
        params: Any,
        state: jax.Array,
        context: Context,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams | None,
        row_keys: jax.Array,
    ) -> tuple[Draft, jax.Array]:
        """A point mass at the fixed tokens."""
        batch_size = context.length.shape[0]
        tokens = jnp.broadcast_to(params["tokens"], (batch_size, num_speculative_tokens))
        return Draft(tokens=tokens, num_drafted=jnp.full((batch_size,), num_speculative_tokens, jnp.int32), probs=None), state


def greedy_text(prompts: list[list[int]], num_tokens: int = NUM_TOKENS, *, model: Any = None) -> np.ndarray:
    """What plain greedy decoding of the tiny target emits, `[B,num_tokens]`."""
    target, params = tiny_target() if model is None else model
    return np.asarray(generate(target, params, prompts, config=GenerateConfig(max_new_tokens=num_tokens)).tokens)


def replay(flip_at: Any = 1000, *, prompts: list[list[int]] | None = None, target_params: Any = None, **arguments: Any) -> GenerateOutput:
    """Speculative greedy decoding of the shared prompts, 4 drafts a step, by a drafter that knows the answer. Always the same program."""
    prompts = random_prompts() if prompts is None else prompts
    target, params = tiny_target()
    drafter_params = recorded(greedy_text(prompts), [len(prompt) for prompt in prompts], flip_at=flip_at)
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, num_speculative_tokens=4)
    params = params if target_params is None else target_params
    return speculative_generate(target, params, ReplayDrafter(), drafter_params, prompts, config=config, **arguments)


def plain(*, prompts: list[list[int]] | None = None, target_params: Any = None, **arguments: Any) -> GenerateOutput:
    """Plain greedy decoding of the shared prompts. Always the same program."""
    target, params = tiny_target()
    params = params if target_params is None else target_params
    return generate(
        target, params, random_prompts() if prompts is None else prompts, config=GenerateConfig(max_new_tokens=NUM_TOKENS), **arguments
    )


def numpy_log_softmax(logits: np.ndarray) -> np.ndarray:
    """log softmax over the last axis in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def numpy_filtered_probs(logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Temperature, top-k, top-p of one row `[V]`, token by token."""
    if temperature < 1e-5:
        return np.eye(len(logits))[np.argmax(logits)]
    order = np.argsort(-logits, kind="stable")
    kept = order[:top_k] if top_k else order
    probs = np.exp(numpy_log_softmax(logits[kept] / temperature))
    result, mass = np.zeros(len(logits)), 0.0
    for token, prob in zip(kept, probs, strict=True):
        if mass >= top_p:
            break
        result[token], mass = prob, mass + prob
    return result / result.sum()


def numpy_forward(config: ModelConfig, params: dict, tokens: list[int]) -> np.ndarray:
    """Logits `[T,V]` of one sequence without a cache: the decoder from its papers, head by head, in float64."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    num_tokens, group = len(tokens), config.num_heads // config.num_kv_heads

    def rms_norm(x: np.ndarray, weights: dict) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.rms_norm_eps) * weights["scale"]

    def rotate(x: np.ndarray) -> np.ndarray:
        half = config.head_dim // 2
        angles = np.arange(num_tokens)[:, None] * config.rope.theta ** (-np.arange(half) / half)
        pairs = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], axis=1)

    x = params["embedding"][tokens]
    for index in range(config.num_layers):
        layer = params[f"layer_{index}"]
        attention, normed = layer["attention"], rms_norm(x, layer["attention_norm"])
        mixed = []
        for head in range(config.num_heads):
            kv_head = head // group
            projected = []
            for slot in (head % group, group, group + 1):
                y = normed @ attention["qkv"][:, kv_head, slot]
                projected.append(y + attention["qkv_bias"][kv_head, slot] if config.qkv_bias else y)
            query, key, value = projected
            if config.qk_norm:
                query, key = rms_norm(query, attention["query_norm"]), rms_norm(key, attention["key_norm"])
            scores = rotate(query) @ rotate(key).T / np.sqrt(config.head_dim)
            scores[np.triu_indices(num_tokens, 1)] = -np.inf
            mixed.append(np.exp(numpy_log_softmax(scores)) @ value)
        x = x + np.concatenate(mixed, axis=1) @ attention["output"]
        normed = rms_norm(x, layer["mlp_norm"])
        gate, up = normed @ layer["mlp"]["gate_up"][:, 0], normed @ layer["mlp"]["gate_up"][:, 1]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down"]
    return rms_norm(x, params["final_norm"]) @ params["embedding" if config.tie_word_embeddings else "lm_head"].T


def chi_square_p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value of the counts under the probabilities (same shape). Cells that expect fewer than 5 are pooled; impossible ones give 0."""
    counts, probs = np.asarray(counts, np.float64).ravel(), np.asarray(probs, np.float64).ravel()
    expected = counts.sum() * probs / probs.sum()
    if counts[expected < 1e-3 * 1e-3].sum() > 0:
        return 0.0
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
        counts, expected = counts[expected > 0], expected[expected > 0]
    return float(stats.chisquare(counts, expected).pvalue)
