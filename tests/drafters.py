"""Random drafters for a target, the state that a fresh prefill gives them, and how well what they emit fits the target's exact law."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import (
    GenerateConfig,
    HydraDrafter,
    MedusaDrafter,
    RejectionSampling,
    SamplingParams,
    hydra_params,
    medusa_params,
    speculative_generate,
)
from specjax.checkpoints.kinds import build_model
from specjax.checkpoints.store import read_model, save_checkpoint
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.eagle3_drafter import Eagle3Drafter, eagle3_params
from specjax.drafting.heads import FullHead, TrimmedHead
from specjax.drafting.heads.draft_head import DRAFT_HEAD
from specjax.drafting.hydra import Hydra, HydraConfig
from specjax.drafting.medusa import Medusa, MedusaConfig
from specjax.state import Commit, Context, Draft, PrefillChunk
from tests.helpers import ReplayDrafter, chi_square_p_value, numpy_filtered_probs, numpy_forward, param_shapes, random_model, tiny_config

# Boundaries of a target of two layers.
LAYERS = (0, 1, 2)

SMALL_VOCAB, NUM_EMITTED, NUM_ROWS = 5, 3, 4096
PROMPT = (3, 1, 4, 1)
REJECTION = RejectionSampling()


def random_params(shapes: Any, *, vocab_size: int, seed: int = 0) -> dict:
    """Weights that keep activations at twice their size; token ids ascend, and are not the first ones."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == jnp.int32:
            return jnp.asarray(np.sort(rng.permutation(vocab_size)[: leaf.shape[0]]), jnp.int32)
        if leaf.ndim == 1:
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), jnp.float32)
        fan_in = leaf.shape[-1] if DRAFT_HEAD in [part.key for part in path] else leaf.shape[0]
        return jnp.asarray(rng.normal(0, 2 * fan_in**-0.5, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def eagle3(target: Any, target_params: dict, *, seed: int = 0, **changes: Any) -> tuple[Eagle3Drafter, dict]:
    """A random network for a target; as wide as it, so that embedding and head can be shared."""
    cfg = target.config
    sizes = dict(hidden_size=cfg.hidden_size, vocab_size=cfg.vocab_size, num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads)
    decoder = tiny_config(num_layers=1, intermediate_size=24, head_dim=cfg.head_dim, **sizes)
    config = Eagle3Config(**dict(decoder=decoder, target_hidden_size=cfg.hidden_size, feature_layers=LAYERS) | changes)
    model = Eagle3(config, dtype=jnp.float32, param_dtype=jnp.float32)
    params = random_params(param_shapes(model), vocab_size=cfg.vocab_size, seed=seed)
    return Eagle3Drafter(model), eagle3_params(model, params, cfg, target_params)


def medusa(target: Any, target_params: dict, *, seed: int = 0, **changes: Any) -> tuple[MedusaDrafter, dict]:
    """Three random heads for a target."""
    return _heads((Medusa, MedusaConfig, MedusaDrafter, medusa_params), target, target_params, seed, changes)


def hydra(target: Any, target_params: dict, *, seed: int = 0, **changes: Any) -> tuple[HydraDrafter, dict]:
    """Three random heads for a target."""
    return _heads((Hydra, HydraConfig, HydraDrafter, hydra_params), target, target_params, seed, changes)


def _heads(kind: tuple, target: Any, target_params: dict, seed: int, changes: dict[str, Any]) -> Any:
    network, config, drafter, make_params = kind
    cfg = target.config
    config = config(**dict(hidden_size=cfg.hidden_size, vocab_size=cfg.vocab_size, num_draft_heads=3, num_layers=2) | changes)
    model = network(config, dtype=jnp.float32, param_dtype=jnp.float32)
    params = random_params(param_shapes(model), vocab_size=cfg.vocab_size, seed=seed)
    return drafter.for_target(model, cfg), make_params(model, params, cfg, target_params)


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Proposes what a `ReplayDrafter` does, while `drafter` drafts, writes its state and commits as ever.

    Params: `drafter`, and `recorded` as those of the `ReplayDrafter`.
    """

    drafter: Any

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The drafter's."""
        return self.drafter.feature_layers

    def check(self, params: Any, **arguments: Any) -> None:
        """The drafter's."""
        self.drafter.check(params["drafter"], **arguments)

    def init(self, params: Any, **arguments: Any) -> Any:
        """The drafter's."""
        return self.drafter.init(params["drafter"], **arguments)

    def grow(self, params: Any, state: Any, context: Context, **arguments: Any) -> Any:
        """The drafter's."""
        return self.drafter.grow(params["drafter"], state, context, **arguments)

    def prefill(self, params: Any, state: Any, chunk: PrefillChunk) -> Any:
        """The drafter's."""
        return self.drafter.prefill(params["drafter"], state, chunk)

    def propose(self, params: Any, state: Any, context: Context, **arguments: Any) -> tuple[Draft, Any]:
        """The drafter's state, and the recording's draft."""
        _, state = self.drafter.propose(params["drafter"], state, context, **arguments)
        draft, _ = ReplayDrafter(random_flips=True).propose(params["recorded"], None, context, **arguments)
        return draft, state

    def commit(self, params: Any, state: Any, commit: Commit) -> Any:
        """The drafter's."""
        return self.drafter.commit(params["drafter"], state, commit)


def fresh_state(target: Any, target_params: dict, drafter: Any, params: dict, texts: list[list[int]]) -> Any:
    """The drafter's state after one prefill of all but the last token of each text, which is committed."""
    lengths = jnp.asarray([len(text) for text in texts], jnp.int32)
    tokens = jnp.asarray([text + [0] * (int(lengths.max()) + 1 - len(text)) for text in texts], jnp.int32)
    return _fresh_state(target, drafter, target_params, params, tokens, lengths)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fresh_state(target: Any, drafter: Any, target_params: dict, params: dict, tokens: jax.Array, lengths: jax.Array) -> Any:
    batch_size, width = tokens.shape
    features = all_features(target, target_params, tokens, drafter.feature_layers)
    state = drafter.init(params, batch_size=batch_size, capacity=width)
    start = jnp.zeros((batch_size,), jnp.int32)
    state = drafter.prefill(params, state, PrefillChunk(tokens[:, :-1], tokens[:, 1:], start, features[:, :-1]))
    last = jnp.take_along_axis(features, (lengths - 2)[:, None, None], axis=1)
    commit = Commit(context=Context(tokens=tokens, length=lengths), num_committed=jnp.ones_like(lengths), features=last)
    return drafter.commit(params, state, commit)


@functools.partial(jax.jit, static_argnums=(0, 3))
def all_features(target: Any, target_params: dict, tokens: jax.Array, layers: tuple[int, ...]) -> jax.Array:
    """The target's residual stream at these boundaries, over whole texts `[B,T]`."""
    cache = target.init_cache(batch_size=tokens.shape[0], capacity=tokens.shape[1])
    return target.apply({"params": target_params}, tokens, cache, feature_layers=layers).features


def write_drafter(path: Path, target: Path, kind: str) -> Path:
    """The checkpoint of random heads for a target's checkpoint: "eagle3", "medusa" or "hydra"."""
    sizes = {name: getattr(read_model(target).config, name) for name in ("hidden_size", "vocab_size")}
    decoder = tiny_config(num_layers=1, **sizes)
    config = {
        "eagle3": Eagle3Config(
            decoder=decoder, target_hidden_size=decoder.hidden_size, head=TrimmedHead(num_tokens=16), feature_layers=(0, 1)
        ),
        "medusa": MedusaConfig(**sizes, num_draft_heads=2, head=FullHead(shared=True)),
        "hydra": HydraConfig(**sizes, num_draft_heads=2),
    }[kind]
    params = random_params(param_shapes(build_model(config, jnp.float32)), vocab_size=sizes["vocab_size"])
    save_checkpoint(path, config, params, {"source": path.name, "quantisation": "none"})
    return path


@functools.cache
def small_target(seed: int = 0) -> tuple[Any, dict]:
    """A target of five tokens."""
    sizes = dict(vocab_size=SMALL_VOCAB, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4)
    model, params = random_model(tiny_config(**sizes), seed=seed)
    return model, params | {"lm_head": params["lm_head"] * 0.5}


@functools.cache
def small_law(setting: tuple[float, int, float]) -> np.ndarray:
    """Probabilities `[V,V,V]` of what the small target emits after `PROMPT`, by enumeration."""
    target, target_params = small_target()
    law = np.ones((SMALL_VOCAB,) * NUM_EMITTED)
    for length in range(NUM_EMITTED):
        for prefix in itertools.product(range(SMALL_VOCAB), repeat=length):
            probs = numpy_filtered_probs(numpy_forward(target.config, target_params, [*PROMPT, *prefix])[-1], *setting)
            law[prefix] *= probs.reshape(-1, *[1] * (NUM_EMITTED - length - 1))
    return law


def emitted_p_value(
    drafter: Any, params: Any, *, setting: tuple[float, int, float] = (1.0, 0, 1.0), rule: Any = REJECTION
) -> tuple[float, float]:
    """The p-value of what the small target emits with this drafter, and the share of drafts that were accepted."""
    target, target_params = small_target()
    output = speculative_generate(
        target,
        target_params,
        drafter,
        params,
        np.tile(np.int32(PROMPT), (NUM_ROWS, 1)),
        config=GenerateConfig(max_new_tokens=NUM_EMITTED, num_speculative_tokens=2, do_sample=True, verification=rule),
        sampling=SamplingParams(*setting),
        rng=jax.random.key(5),
    )
    counts = np.zeros((SMALL_VOCAB,) * NUM_EMITTED)
    np.add.at(counts, tuple(np.asarray(output.tokens).T), 1)
    return chi_square_p_value(counts, small_law(setting)), float(output.statistics.draft_acceptance_rate)
