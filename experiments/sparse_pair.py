"""A target and its drafter under settings of sparse verification: programs that decode, and agreement along texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.acceptance import end_of_text
from experiments.decoding import Decoder, Prefilled
from experiments.models import LoadedDrafter, Model
from experiments.sparse_settings import DENSE, laid_out_for
from experiments.speeds import Timed, timed_prompts
from specjax import GenerateConfig, SparsityConfig
from specjax.capacity import bucket, rounded_capacity, whole_chunks
from specjax.models.kv_cache import KVCache
from specjax.sparsity.agreement import Agreement, measure_agreement

# Columns that a call without a prompt still takes in, and slots beside them.
PADDING = 64
# A prompt and what follows it.
Text = tuple[Sequence[int], Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """What decodes, and how.

    Attributes:
        target: With a tokenizer.
        drafter: `None` decodes plainly.
        num_speculative_tokens: G.
        batch: Prompts decoded together.
        repeats: Timed runs a batch.
        timed_batches: Batches that are timed, the first ones.
        resamples: Of the bootstrap.
        compile_threads: Programs to compile at a time; each runs once when it is compiled, with caches of its own.
        implementation: Of the kernels, for the rows.
        block_size: Of sparse attention: caches are whole blocks.
        share_prefill: The prompts' caches are kept, and every setting goes on from them.
        longest: Tokens of a prompt and its answer that caches have room for at least.
        new_tokens: Limit a prompt.
        made: The target's weights in another layout, once they are needed.
    """

    target: Model
    drafter: LoadedDrafter | None
    num_speculative_tokens: int
    batch: int
    repeats: int
    timed_batches: int
    resamples: int
    compile_threads: int
    implementation: str
    block_size: int = 64
    share_prefill: bool = True
    longest: int = 0
    new_tokens: int = 128
    made: dict[str, Model] = dataclasses.field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of a verification."""
        return 1 if self.drafter is None else self.num_speculative_tokens + 1

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return end_of_text(self.target)

    def prefilled(self, prompts: Sequence[Sequence[int]], *, width: int, longest: int) -> Prefilled | None:
        """The prompts taken in once for all settings, with room for what follows them; `None` where that is not wished."""
        if not self.share_prefill:
            return None
        # Behind a prompt stand what follows it, a draft or a step's rows, and the padding of the next call's few columns.
        static = self._static(DENSE)
        room = max(longest + 2 * self.num_speculative_tokens, whole_chunks(width, static.prefill_chunk_size)) + PADDING
        static = dataclasses.replace(static, cache_capacity=rounded_capacity(room, self.block_size))
        drafter, params = (None, None) if self.drafter is None else (self.drafter.drafter, self.drafter.params)
        return Prefilled.of(self.target, drafter, params, prompts, config=static, batch=self.batch, width=width)

    def _static(self, sparsity: SparsityConfig) -> GenerateConfig:
        return GenerateConfig(max_new_tokens=self.new_tokens, num_speculative_tokens=self.num_speculative_tokens, sparsity=sparsity)

    def decoder(self, width: int, sparsity: SparsityConfig = DENSE, *, plain: bool = False, prefilled: Prefilled | None = None) -> Decoder:
        """Compiles a program."""
        drafter, static = None if plain else self.drafter, self._static(sparsity)
        if prefilled is not None:
            static = dataclasses.replace(static, cache_capacity=prefilled.batches[0].target_cache.capacity)
        return Decoder(
            laid_out_for(self.target, sparsity, self.made),
            None if drafter is None else drafter.drafter,
            None if drafter is None else drafter.params,
            config=static,
            batch=self.batch,
            width=width,
            eos_token_ids=self.ends,
            prefilled=prefilled,
        )

    def timed_prompts(self, prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Those of the batches that are timed."""
        return timed_prompts(prompts, batch=self.batch, batches=self.timed_batches)

    def timed(self, decoder: Decoder, prompts: Sequence[Sequence[int]], prefill_seconds: float) -> Timed:
        """Times a decoder, in which no row ends at an EOS: it runs the program that its answers came of.

        Args:
            decoder: From `decoder`.
            prompts: All of them, of which some batches are timed.
            prefill_seconds: What these take up to their first tokens.
        """
        return Timed(decoder(self.timed_prompts(prompts), repeats=self.repeats, ignore_eos=True), prefill_seconds)

    def agreement(
        self,
        sparsity: SparsityConfig,
        texts: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        longest: int,
        caches: Sequence[KVCache] = (),
    ) -> Agreement:
        """The sparse target beside the dense one along answers.

        Args:
            sparsity: What is left out.
            texts: Prompts and answers, together; as many of one bucket of `longest`, in tokens, run one program.
            longest: Tokens of the longest text there is.
            caches: That took the prompts in; none, where that is to be done here.
        """
        padded = np.zeros((len(texts), bucket(longest)), np.int32)
        for row, (prompt, answer) in enumerate(texts):
            padded[row, : len(prompt) + len(answer)] = [*prompt, *answer]
        cache = None
        if caches:  # a copy of one is not needed
            cache = caches[0] if len(caches) == 1 else jax.tree.map(lambda *rows: jnp.concatenate(rows), *caches)
        starts, lengths = ([len(prompt) for prompt, _ in texts], [len(prompt) + len(answer) for prompt, answer in texts])
        sizes: dict[str, Any] = dict(num_context=starts, num_rows=self.num_rows, lengths=lengths, cache=cache)
        return measure_agreement(self.target.model, self.target.params, padded, sparsity=sparsity, **sizes)
