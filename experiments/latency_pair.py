"""A drafter whose steps are timed, ready for its target, with the bytes that proposing has to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.draft_heads import GivenToken, bytes_read
from experiments.drafters import EAGLE3, feature_shape, random_candidates, with_head
from experiments.experiment import ExperimentError
from experiments.models import PROMPT_LOOKUP, Model, load_model
from experiments.presets import kv_bytes, weight_bytes_per_pass
from specjax import DraftModel, PromptLookup, Transformer
from specjax.drafting.drafter import Drafter
from specjax.drafting.heads import DraftHead


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A drafter for a target.

    Attributes:
        name: What it was made from.
        weights: As in `Model`; `None` if it has none.
        drafter: It.
        params: Its params.
        floor_bytes: From batch and context: what proposing G tokens has to read.
        bodies: The same with given tokens in its head's place, and its params; `None` where there is no such thing.
        features: Width and dtype of the target's features that it reads, or `None`.
    """

    name: str
    weights: str | None
    drafter: Drafter
    params: Any
    floor_bytes: Callable[[int, int], float]
    bodies: tuple[Drafter, Any] | None = None
    features: tuple[int, Any] | None = None

    @classmethod
    def of(cls, preset: str, target: Model, name: str, *, passes: int, dtype: str, implementation: str, cache_dir: str | None) -> Pair:
        """Loads or makes it.

        Args:
            preset: The target's name.
            target: The target.
            name: A preset's name, a draft model's path, "prompt_lookup", or "eagle3:HEAD" for a preset.
            passes: G.
            dtype: Compute dtype, and that of random weights.
            implementation: Of the kernels; see `Kernels.of`.
            cache_dir: Where conversions are kept.

        Raises:
            ExperimentError: Neither a drafter's name nor a path that exists, a checkpoint of heads for a target, or no EAGLE-3 drafter is
                published for the target's shape.
        """
        kind, _, head = name.partition(":")
        if name == PROMPT_LOOKUP:
            return cls(name=name, weights=None, drafter=PromptLookup(), params=None, floor_bytes=lambda batch, context: 0.0)
        if kind == EAGLE3 and head:
            return cls._eagle3(preset, target, head, passes=passes, dtype=dtype, implementation=implementation)
        options: dict[str, Any] = dict(dtype=dtype, implementation=implementation, cache_dir=cache_dir, target=target.path)
        model = load_model(name, **options, rng=jax.random.key(2))
        if not isinstance(model.model, Transformer):
            kinds = f"a draft model, {PROMPT_LOOKUP!r} or '{EAGLE3}:HEAD'"
            raise ExperimentError(f"the pair's drafter must be {kinds}, got {model.name!r}: {type(model.model).__name__}")

        def floor_bytes(batch: int, context: int) -> float:
            shape, itemsize = model.model.config, jnp.dtype(dtype).itemsize
            weights = weight_bytes_per_pass(model.params, shape, num_tokens=batch)
            return passes * (weights + kv_bytes(shape, batch=batch, context=context, itemsize=itemsize))

        return cls(name=model.name, weights=model.weights, drafter=DraftModel(model.model), params=model.params, floor_bytes=floor_bytes)

    @classmethod
    def _eagle3(cls, preset: str, target: Model, name: str, *, passes: int, dtype: str, implementation: str) -> Pair:
        candidates = random_candidates(preset, (name,), dtype=dtype, implementation=implementation)
        network, shape = candidates.network, target.model.config

        def with_this(head: DraftHead, params: Any) -> tuple[Drafter, Any]:
            return with_head(network, candidates.params, head, params, shape, target.params)

        head, head_params = candidates.heads[name]
        drafter, params = with_this(head, head_params)
        body_bytes = {part: sum(leaf.nbytes for leaf in jax.tree.leaves(leaves)) for part, leaves in candidates.params.items()}
        fusion, decoder, itemsize = body_bytes.pop("fc"), network.config.decoder, jnp.dtype(dtype).itemsize

        def floor_bytes(batch: int, context: int) -> float:
            sizes = dict(hidden_size=decoder.hidden_size, vocab_size=shape.vocab_size)
            of_head = bytes_read(head, **sizes, itemsize=itemsize, batch=batch)
            cache = kv_bytes(decoder, batch=batch, context=context, itemsize=itemsize)
            return fusion + passes * (sum(body_bytes.values()) + cache + of_head)

        return cls(
            name=f"{EAGLE3}:{name}",
            weights="random",
            drafter=drafter,
            params=params,
            floor_bytes=floor_bytes,
            bodies=with_this(GivenToken(vocab_size=shape.vocab_size), {}),
            features=feature_shape(network, shape),
        )
