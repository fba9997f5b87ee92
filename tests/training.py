"""Texts in memory, and a small target whose greedy texts a drafter can learn by heart."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import Transformer
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads import DraftHead
from specjax.drafting.heads.draft_head import DRAFT_HEAD
from specjax.training.target_batch import TargetBatch
from tests.helpers import param_shapes, random_model, random_prompts, tiny_config

VOCAB, WIDTH, PROMPT_LENGTH, TEXT_LENGTH, NUM_TEXTS = 32, 32, 4, 12, 64


@dataclasses.dataclass
class Batch:
    """What a data iterator yields."""

    tokens: np.ndarray
    loss_mask: np.ndarray


class MemoryTexts:
    """Batches of the next rows, over and over."""

    def __init__(self, tokens: np.ndarray, loss_mask: np.ndarray, *, batch_size: int | None = None, num_batches: int = 1 << 30) -> None:
        self.tokens, self.loss_mask, self.num_batches = tokens, loss_mask, num_batches
        self.batch_size, self.position = batch_size or len(tokens), 0

    def __next__(self) -> Batch:
        if self.position >= self.num_batches:
            raise StopIteration
        rows = (self.position * self.batch_size + np.arange(self.batch_size)) % len(self.tokens)
        self.position += 1
        return Batch(self.tokens[rows], self.loss_mask[rows])

    def get_state(self) -> dict[str, Any]:
        return {"position": self.position, "fingerprint": str(int(self.tokens.sum()))}

    def set_state(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@functools.cache
def sure_target() -> tuple[Transformer, dict]:
    """Two layers, 32 tokens, and probabilities near 0 and 1, so that its greedy texts are nearly all that it says."""
    model, params = random_model(tiny_config(vocab_size=VOCAB), seed=1)
    return model, params | {"lm_head": 5 * params["lm_head"]}


@functools.cache
def greedy_texts() -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """Prompts, and prompts with the target's continuations `[64,16]` and where the loss counts."""
    prompts = random_prompts((PROMPT_LENGTH,) * NUM_TEXTS, seed=7, vocab_size=VOCAB)
    target, params = sure_target()

    @jax.jit
    def next_tokens(tokens: jax.Array) -> jax.Array:
        cache = target.init_cache(batch_size=NUM_TEXTS, capacity=TEXT_LENGTH)
        hidden = target.apply({"params": params}, tokens, cache).hidden
        return jnp.argmax(target.apply({"params": params}, hidden, method="logits"), axis=-1)

    tokens = np.zeros((NUM_TEXTS, TEXT_LENGTH), np.int32)
    tokens[:, :PROMPT_LENGTH] = prompts
    for length in range(PROMPT_LENGTH, TEXT_LENGTH):
        tokens[:, length] = next_tokens(tokens)[:, length - 1]
    return prompts, tokens, np.broadcast_to(np.arange(TEXT_LENGTH) >= PROMPT_LENGTH, tokens.shape)


def eagle3_network(head: DraftHead, *, dtype: Any = jnp.float32, **changes: Any) -> Eagle3:
    """For the sure target, one layer wider inside than it."""
    decoder = tiny_config(num_layers=1, intermediate_size=128, vocab_size=VOCAB)
    config = Eagle3Config(decoder=decoder, target_hidden_size=WIDTH, head=head, **changes).for_target(sure_target()[0].config)
    return Eagle3(config, dtype=dtype, param_dtype=jnp.float32)


def initial_params(model: Any, seed: int = 0) -> dict:
    """Such as `init_params` makes, without the time that it takes to compile."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.ndim == 1:
            ids = np.arange(leaf.shape[0])
            return jnp.asarray(ids if leaf.dtype == jnp.int32 else ids * 0 + (path[-1].key == "scale"), leaf.dtype)
        spread = leaf.shape[-1] ** -0.5 if DRAFT_HEAD in [part.key for part in path] else 0.02
        return jnp.asarray(rng.normal(0, spread, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, param_shapes(model))


def random_batch(*, batch_size: int = 2, num_tokens: int = 9, feature_layers: tuple[int, ...] = ()) -> TargetBatch:
    """What no target made."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(batch_size, num_tokens, len(feature_layers) * WIDTH))
    return TargetBatch(
        tokens=jnp.asarray(rng.integers(VOCAB, size=(batch_size, num_tokens)), jnp.int32),
        loss_mask=jnp.asarray(rng.random((batch_size, num_tokens)) < 0.8),
        hidden=jnp.asarray(rng.normal(size=(batch_size, num_tokens, WIDTH)), jnp.float32),
        features=jnp.asarray(features, jnp.float32) if feature_layers else None,
        feature_layers=feature_layers,
    )


def perturbed(params: Any, seed: int = 0) -> Any:
    """Larger than at initialisation, and no zeros."""
    rng = np.random.default_rng(seed)

    def move(leaf: jax.Array) -> jax.Array:
        return leaf if leaf.dtype == jnp.int32 else leaf + jnp.asarray(0.2 * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(move, params)
