"""Decoding a set of prompts, batch by batch, through one compiled program, and timing it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models import Model
from specjax import GenerateConfig, SamplingParams, SparsityConfig, Statistics, speculative_generate
from specjax.drafting.drafter import Drafter
from specjax.models.kv_cache import KVCache
from specjax.state import Continuation


@dataclasses.dataclass(frozen=True)
class Call:
    """What one batch took.

    Attributes:
        seconds: Wall time.
        tokens: Delivered tokens of each prompt.
        steps: Steps that each prompt took behind its first token; the batch took as many as its slowest prompt.
        accepted: Draft tokens that were accepted in them.
    """

    seconds: float
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What came out for a set of prompts.

    Attributes:
        tokens: The delivered tokens of each prompt.
        seconds: Wall time over all batches, prefill included, compilation excluded.
        statistics: Acceptance counts over all prompts.
        calls: Batch by batch.
    """

    tokens: list[list[int]]
    seconds: float
    statistics: Statistics
    calls: tuple[Call, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens delivered."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_s(self) -> float:
        """Delivered tokens over wall time."""
        return self.num_tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """Prompts that have been taken in densely, once for all decoders that go on from there. Holds the caches of all of them.

    Attributes:
        first: Each prompt's first new token.
        batches: Where each batch of prompts can be continued; rows beyond the last prompt hold a token that means nothing.
    """

    first: list[int]
    batches: list[Continuation]

    @classmethod
    def of(
        cls,
        target: Model,
        drafter: Drafter | None,
        drafter_params: dict | None,
        prompts: Sequence[Sequence[int]],
        *,
        config: GenerateConfig,
        batch: int,
        width: int,
    ) -> Prefilled:
        """Takes them in.

        Args:
            target: The target model.
            drafter: The drafter that will go on, or `None`.
            drafter_params: Its params.
            prompts: Token ids.
            config: Of the calls that will go on, with the `cache_capacity` of all of them.
            batch: Prompts at a time.
            width: Columns that every prompt is padded to.
        """
        static = dataclasses.replace(config, max_new_tokens=1, sparsity=SparsityConfig())
        first, batches = [], []
        for index in range(0, len(prompts), batch):
            rows = prompts[index : index + batch]
            padded, lengths = _padded(rows, batch=batch, width=width)
            call = (target.model, target.params, drafter, drafter_params, padded)
            output = speculative_generate(*call, prompt_lengths=lengths, config=static, ignore_eos=True)
            first += np.asarray(output.tokens)[: len(rows), 0].tolist()
            batches.append(output.continuation)
        return cls(first, batches)

    def cache(self, index: int) -> KVCache:
        """One prompt's cache of the target, `[1,...]`."""
        batch = self.batches[0].context.length.shape[0]
        row = index % batch
        return jax.tree.map(lambda x: x[row : row + 1], self.batches[index // batch].target_cache)


class Decoder:
    """Calls `speculative_generate` with batches of one shape, so that all of them are one program.

    Attributes:
        compile_s: Time of the first call, which compiles and runs a few steps.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None,
        drafter_params: dict | None,
        *,
        config: GenerateConfig,
        batch: int,
        width: int,
        eos_token_ids: Sequence[int],
        temperature: float = 0.0,
        seed: int = 0,
        prefilled: Prefilled | None = None,
    ) -> None:
        """Compiles.

        Args:
            target: The target model.
            drafter: `None` decodes plainly.
            drafter_params: Its params.
            config: Static choices.
            batch: B.
            width: Columns that every prompt is padded to.
            eos_token_ids: What ends a row.
            temperature: Where `config.do_sample`.
            seed: Likewise.
            prefilled: The prompts that it will be called with, to go on from: each one's first token is there, the next one comes of a
                dense pass too, and no prefill is in its times.
        """
        self._target, self._drafter, self._drafter_params = target, drafter, drafter_params
        self._config, self._batch, self._width = config, batch, width
        self._eos, self._temperature, self._rng = list(eos_token_ids), temperature, jax.random.key(seed)
        self._prefilled = prefilled
        begin = time.perf_counter()
        self._call([[0]], limit=min(config.max_new_tokens, 2 * (config.num_speculative_tokens + 1)), index=0)
        self.compile_s = time.perf_counter() - begin

    def __call__(self, prompts: Sequence[Sequence[int]], *, repeats: int = 1, ignore_eos: bool = False) -> Decoded:
        """Decodes the prompts `repeats` times; of each batch the median time counts.

        Args:
            prompts: Token ids.
            repeats: How often.
            ignore_eos: Every prompt is decoded up to its limit, by the same program.
        """
        tokens, calls, statistics = [], [], None
        for index in range(0, len(prompts), self._batch):
            rows = prompts[index : index + self._batch]
            output, times = None, []
            for _ in range(repeats):
                begin = time.perf_counter()
                output = self._call(rows, limit=self._config.max_new_tokens, index=index, ignore_eos=ignore_eos)
                times.append(time.perf_counter() - begin)
            assert output is not None, f"{repeats=} must be at least 1"
            delivered, lengths = np.asarray(output.tokens), np.asarray(output.lengths)
            first = [[] for _ in rows] if self._prefilled is None else [[token] for token in self._prefilled.first[index:][: self._batch]]
            tokens += [first[row] + delivered[row, : lengths[row]].tolist() for row in range(len(rows))]
            counts = np.asarray(output.statistics.accepted_counts)[: len(rows)]
            of_rows = (lengths[: len(rows)], counts.sum(axis=1), counts @ np.arange(counts.shape[1]))
            calls.append(Call(float(np.median(times)), *(tuple(one.tolist()) for one in of_rows)))
            statistics = output.statistics if statistics is None else statistics + output.statistics
        assert statistics is not None, "no prompts"
        return Decoded(tokens, sum(call.seconds for call in calls), statistics, tuple(calls))

    def prefill_seconds(self, prompts: Sequence[Sequence[int]], *, repeats: int = 1) -> float:
        """What the same prompts take up to their first tokens, which is part of `Decoded.seconds`; nothing where they were prefilled."""
        return sum(self.prefill_seconds_by_call(prompts, repeats=repeats))

    def prefill_seconds_by_call(self, prompts: Sequence[Sequence[int]], *, repeats: int = 1) -> list[float]:
        """Likewise, batch by batch."""
        seconds = []
        if self._prefilled is not None:
            return [0.0] * -(-len(prompts) // self._batch)
        for index in range(0, len(prompts), self._batch):
            times = []
            for _ in range(repeats):
                begin = time.perf_counter()
                self._call(prompts[index : index + self._batch], limit=1, index=index)
                times.append(time.perf_counter() - begin)
            seconds.append(float(np.median(times)))
        return seconds

    def _call(self, rows, *, limit, index, ignore_eos=False):
        if self._prefilled is not None:
            return self._go_on(len(rows), limit=limit, index=index, ignore_eos=ignore_eos)
        padded, lengths = _padded(rows, batch=self._batch, width=self._width)
        limits = np.zeros((self._batch,), np.int32)
        limits[: len(rows)] = limit  # rows beyond the last prompt have a limit of 0: finished from the start
        sampling = SamplingParams(temperature=float(self._temperature)) if self._config.do_sample else None
        rng = jax.random.fold_in(self._rng, index) if self._config.do_sample else None
        output = speculative_generate(
            self._target.model,
            self._target.params,
            self._drafter,
            self._drafter_params,
            padded,
            prompt_lengths=lengths,
            config=self._config,
            sampling=sampling,
            eos_token_ids=self._eos,
            ignore_eos=ignore_eos,
            max_new_tokens=limits,
            rng=rng,
        )
        # The continuation holds the caches: dropped here, so that the next call has their memory.
        return jax.block_until_ready(dataclasses.replace(output, continuation=None))

    def _go_on(self, num_rows, *, limit, index, ignore_eos):
        """From where the batch of the prompt `index` was left; rows that began with an EOS have ended, unless these are ignored."""
        assert self._prefilled is not None
        static = dataclasses.replace(self._config, max_new_tokens=self._config.max_new_tokens - 1)
        limits = np.zeros((self._batch,), np.int32)
        for row, token in enumerate(self._prefilled.first[index : index + num_rows]):
            limits[row] = 0 if token in self._eos and not ignore_eos else limit - 1
        output = speculative_generate(
            self._target.model,
            self._target.params,
            self._drafter,
            self._drafter_params,
            np.zeros((self._batch, 1), np.int32),
            prompt_lengths=np.zeros((self._batch,), np.int32),
            config=static,
            eos_token_ids=self._eos,
            ignore_eos=ignore_eos,
            max_new_tokens=limits,
            continue_from=self._prefilled.batches[index // self._batch],
        )
        return jax.block_until_ready(dataclasses.replace(output, continuation=None))


def _padded(prompts: Sequence[Sequence[int]], *, batch: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """`[B,P]` tokens and `[B]` lengths, rows beyond the last prompt of one token."""
    tokens, lengths = np.zeros((batch, width), np.int32), np.ones((batch,), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    return tokens, lengths


def first_divergence(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first position at which two outputs differ; `None` if they are the same."""
    if list(ours) == list(theirs):
        return None
    same = (a == b for a, b in zip(ours, theirs, strict=False))
    return next((position for position, equal in enumerate(same) if not equal), min(len(ours), len(theirs)))


class LogitGap:
    """How far apart the target, in float32, puts two candidates for the next token: near-ties are what reduced precision flips."""

    def __init__(self, target: Model, capacity: int) -> None:
        """Compiles on first use.

        Args:
            target: The target; its weights stay as they are and are cast layer by layer.
            capacity: Longest text.
        """
        model = target.model.clone(dtype=jnp.float32)
        self._capacity = capacity

        @jax.jit
        def gap(params, tokens, last, ours, theirs):
            output = model.apply({"params": params}, tokens, model.init_cache(batch_size=1, capacity=capacity))
            logits = model.apply({"params": params}, output.hidden[:, last], method="logits")[0]
            return jnp.abs(logits[ours] - logits[theirs])

        self._gap, self._params = gap, target.params

    def __call__(self, text: Sequence[int], ours: int, theirs: int) -> float:
        """|logit(ours) - logit(theirs)| after `text`."""
        tokens = np.zeros((1, self._capacity), np.int32)
        tokens[0, : len(text)] = text
        return float(self._gap(self._params, tokens, np.int32(len(text) - 1), np.int32(ours), np.int32(theirs)))
