"""Texts of one model, many at a time: calls of one batch size, and a random key for each text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.generate import generate
from specjax.generate_config import GenerateConfig
from specjax.models.transformer import Transformer
from specjax.sampling import MIN_TEMPERATURE, SamplingParams
from specjax.sharding import cache_sharding
from specjax.state import FinishReason


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """What the model wrote in a row.

    Attributes:
        tokens: Ids, an end token included.
        words: Ids without it.
        finish_reason: A `FinishReason`.
    """

    tokens: list[int]
    words: list[int]
    finish_reason: int

    @property
    def is_finite(self) -> bool:
        """Whether all logits were finite."""
        return self.finish_reason != FinishReason.NONFINITE_LOGITS


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextSampler:
    """One kind of call.

    Attributes:
        target: The model.
        params: Its params; with a mesh, on its devices.
        batch_size: B.
        max_new_tokens: The most that a row gets.
        temperatures: Rows take them in turn, as they are told; 0 is greedy.
        top_p: Of every row.
        end_token_ids: Any of them ends a text.
        seed: With its index, gives a text's random key.
        mesh: Devices to split the batch over, with axes `"data"` and `"model"`.
    """

    target: Transformer
    params: Any
    batch_size: int
    max_new_tokens: int
    temperatures: tuple[float, ...]
    top_p: float
    end_token_ids: tuple[int, ...]
    seed: int
    mesh: jax.sharding.Mesh | None

    def __call__(self, prompts: Sequence[Sequence[int] | None], indices: Sequence[int], turns: Sequence[int]) -> list[Text]:
        """Writes a text a row.

        Args:
            prompts: Up to B. An empty text comes of `None`.
            indices: Of the texts.
            turns: Which of the temperatures is whose, modulo their number.

        Returns:
            As many texts as prompts.
        """
        missing = self.batch_size - len(prompts)
        temperatures = [self.temperatures[turn % len(self.temperatures)] for turn in turns] + [0.0] * missing
        limits = [0 if prompt is None else self.max_new_tokens for prompt in prompts] + [0] * missing
        sharding = None
        if self.mesh is not None:
            sharding = cache_sharding(self.target.config, self.mesh, batch_size=self.batch_size)
        output = generate(
            self.target,
            self.params,
            [[0] if prompt is None else list(prompt) for prompt in prompts] + [[0]] * missing,
            config=GenerateConfig(
                max_new_tokens=self.max_new_tokens, do_sample=max(self.temperatures) >= MIN_TEMPERATURE, cache_sharding=sharding
            ),
            sampling=SamplingParams(temperature=jnp.array(temperatures, jnp.float32), top_p=None if self.top_p == 1 else self.top_p),
            eos_token_ids=self.end_token_ids,
            max_new_tokens=np.array(limits, np.int32),
            rng=_keys(np.uint32(self.seed), np.array([*indices, *[0] * missing], np.uint32)),
        )
        tokens, lengths, reasons = (np.asarray(array) for array in (output.tokens, output.lengths, output.finish_reason))
        rows = list(zip(tokens.tolist(), lengths.tolist(), reasons.tolist(), strict=True))[: len(prompts)]
        return [
            Text(tokens=row[:length], words=row[: length - (reason == FinishReason.EOS)], finish_reason=reason)
            for row, length, reason in rows
        ]


@jax.jit
def _keys(seed: jax.Array, indices: jax.Array) -> jax.Array:
    """A key an index, `[B]`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), indices)
