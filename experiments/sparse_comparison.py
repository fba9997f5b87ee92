"""One task decoded plainly, with dense verification and with sparse ones, and the rows that come of it."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.bootstrap import paired_interval
from experiments.compiling import compile_all, say
from experiments.decoding import Decoded, Decoder, Prefilled
from experiments.experiment import ExperimentError
from experiments.models import Model
from experiments.sparse_pair import Pair, Text
from experiments.sparse_settings import DENSE, NamedSparsity, laid_out_for
from experiments.speeds import Timed, keep_ratio, ratio
from experiments.tasks import Example, Task
from specjax import SparsityConfig
from specjax.capacity import bucket
from specjax.sparsity.agreement import Agreement
from specjax.sparsity.calibration import MLPSamples, sample_mlp

# The metric of what really follows a text.
NATS_PER_TOKEN = "nats_per_token"
# A text of so many tokens settles medians and quantiles to a percent or two.
_CALIBRATION_ROWS, _CALIBRATION_TOKENS = 16, 512
# Answers scored at a time: programs that are tested have ten seconds, and share the processors.
_SCORED_AT_A_TIME = min(8, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A task, and what plain decoding and dense verification make of it.

    Attributes:
        pair: What decodes.
        task: The task.
        prompts: Token ids.
        tokenizer: The target's.
        decoders: By setting, compiled.
        longest: Tokens that a prompt and what follows it may have.
        prefill_seconds: What the timed prompts take up to their first tokens.
        plain: Plain decoding, timed.
        timed: Dense verification, timed.
        dense: Its answers.
        scores: By metric, of these, a score an example.
        prefilled: The prompts, taken in; `None` where each setting does that.
    """

    pair: Pair
    task: Task
    prompts: list[list[int]]
    tokenizer: Any
    decoders: Mapping[NamedSparsity, Decoder]
    longest: int
    prefill_seconds: float
    plain: Timed
    timed: Timed
    dense: Decoded
    scores: dict[str, list[float]]
    prefilled: Prefilled | None

    @classmethod
    def build(cls, pair: Pair, task: Task, prompts: list[list[int]], tokenizer: Any, settings: Sequence[NamedSparsity]) -> Comparison:
        """Compiles all programs, and decodes plainly and with dense verification.

        Raises:
            ExperimentError: A prompt and what follows it exceed the target's window.
        """
        num_new = max(pair.new_tokens, *(len(follows(example, tokenizer)) for example in task.examples))
        check_window(pair.target, prompts, num_new)
        width = bucket(max(map(len, prompts)))
        longest = max(pair.longest, max(map(len, prompts)) + num_new)
        for named in settings:
            laid_out_for(pair.target, named.sparsity, pair.made)  # here, not by several threads at once
        taking_in = functools.partial(pair.prefilled, prompts, width=width, longest=longest)
        say(f"{task.name}: {len(prompts)} prompts of up to {max(map(len, prompts))} tokens, {len(settings)} sparse settings")
        prefilled = compile_all({"": ("prompts taken in", taking_in)}, threads=1)[""]
        one = [([0], [0, 0])] * texts_together(pair, task, prompts)
        caches = [] if prefilled is None else [prefilled.cache(0)] * len(one)
        # First one with all the products that programs share.
        jobs: dict[Any, tuple[str, Callable[[], Any]]] = {
            "dense": ("dense verification", functools.partial(pair.decoder, width, prefilled=prefilled))
        }
        if pair.drafter is not None:
            jobs["plain"] = "plain decoding", functools.partial(pair.decoder, width, plain=True, prefilled=prefilled)
        for named in settings:
            jobs[named] = named.name, functools.partial(pair.decoder, width, named.sparsity, prefilled=prefilled)
        for named in settings:
            along = functools.partial(pair.agreement, named.sparsity, one, longest=longest, caches=caches)
            jobs["agreement", named] = f"agreement of {named.name}", along
        ready: dict[Any, Any] = compile_all(jobs, threads=pair.compile_threads, first=1)
        say(f"{task.name}: decoding")
        dense = ready["dense"](prompts)
        prefill_seconds = ready["dense"].prefill_seconds(pair.timed_prompts(prompts), repeats=pair.repeats)
        timed = pair.timed(ready["dense"], prompts, prefill_seconds)
        return cls(
            pair=pair,
            task=task,
            prompts=prompts,
            tokenizer=tokenizer,
            decoders={named: ready[named] for named in settings},
            longest=longest,
            prefill_seconds=prefill_seconds,
            plain=pair.timed(ready["plain"], prompts, prefill_seconds) if "plain" in ready else timed,
            timed=timed,
            prefilled=prefilled,
            dense=dense,
            scores=score(task, dense, tokenizer),
        )

    def dense_rows(self) -> Iterator[dict]:
        """A row a metric for dense verification."""
        scores = self.scores or {NATS_PER_TOKEN: [text.dense_nll for text in self._agreements(DENSE)]}
        for metric, values in scores.items():
            mean = float(np.mean(values))
            measured = {"token_agreement": 1.0, "kl": 0.0, "keep_ratio": 1.0, "flops_ratio": 1.0, "bytes_ratio": 1.0}
            yield self._row("dense", "", "", metric, (mean, mean, (0.0, 0.0)), self.dense, self.timed, measured)

    def sparse_rows(self, named: NamedSparsity) -> Iterator[dict]:
        """A row a metric for a sparse setting."""
        decoded = self.decoders[named](self.prompts)
        timed = self.pair.timed(self.decoders[named], self.prompts, self.prefill_seconds)
        texts = self._agreements(named.sparsity)
        along = functools.reduce(operator.add, texts)
        kept = keep_ratio(decoded.statistics.summary())
        measured = {"token_agreement": along.token_agreement, "kl": along.mean_kl, "keep_ratio": kept, **timed.work}
        if self.scores:
            ours = score(self.task, decoded, self.tokenizer)
            pairs = {metric: (self.scores[metric], values) for metric, values in ours.items()}
        else:
            pairs = {NATS_PER_TOKEN: ([text.dense_nll for text in texts], [text.sparse_nll for text in texts])}
        for metric, (dense, sparse) in pairs.items():
            interval = paired_interval(dense, sparse, resamples=self.pair.resamples)
            scores = (float(np.mean(dense)), float(np.mean(sparse)), interval)
            yield self._row(named.method, named.setting, named.reuse, metric, scores, decoded, timed, measured)

    def _row(self, method, setting, reuse, metric, scores, decoded: Decoded, timed: Timed, measured: dict[str, float]) -> dict:
        dense_score, sparse_score, interval = scores
        pair = self.pair
        return {
            "target": pair.target.name,
            "drafter": "none" if pair.drafter is None else pair.drafter.name,
            "method": method,
            "setting": setting,
            "reuse": reuse,
            "dataset": self.task.name,
            "prompts": len(self.prompts),
            "context": float(np.mean([len(prompt) for prompt in self.prompts])),
            "metric": metric,
            "new_tokens": pair.new_tokens,
            "finished_dense": finished(self.dense, pair.ends),
            "finished_sparse": finished(decoded, pair.ends),
            "score_dense": dense_score,
            "score_sparse": sparse_score,
            "score_difference_interval": list(interval),
            "token_agreement": measured["token_agreement"],
            "kl": measured["kl"],
            "mean_acceptance_length_dense": float(self.dense.statistics.mean_acceptance_length),
            "mean_acceptance_length_sparse": float(decoded.statistics.mean_acceptance_length),
            "keep_ratio": measured["keep_ratio"],
            "flops_ratio": measured["flops_ratio"],
            "bytes_ratio": measured["bytes_ratio"],
            **timed.fields(),
            "speedup_over_autoregressive": ratio(timed.tokens_per_s, self.plain.tokens_per_s),
            "weights": pair.target.weights,
            "implementation": pair.implementation,
            "synthetic": False,
        }

    def _agreements(self, sparsity: SparsityConfig) -> list[Agreement]:
        """The sparse target beside the dense one, along each example's text: what dense verification wrote, or what really follows.

        One a batch; one an example where that is what is judged.
        """
        texts: list[Text] = []
        for prompt, example, answer in zip(self.prompts, self.task.examples, self.dense.tokens, strict=True):
            texts.append((prompt, follows(example, self.tokenizer) or answer or [0]))
        if all(len(answer) < 2 for _, answer in texts):  # the first comes out of the prefill, which is dense
            raise ExperimentError(f"{self.task.name}: no answer is longer than a token, there is nothing to compare along")
        together, agreements = texts_together(self.pair, self.task, self.prompts), []
        for at in range(0, len(texts), together):
            part = texts[at : at + together]
            if all(len(answer) < 2 for _, answer in part):
                continue
            indices = [*range(at, at + len(part)), *[0] * (together - len(part))]
            part += [([0], [0])] * (together - len(part))  # of which nothing counts: every batch runs one program
            caches = [] if self.prefilled is None else [self.prefilled.cache(index) for index in indices]
            agreements.append(self.pair.agreement(sparsity, part, longest=self.longest, caches=caches))
        return agreements


def texts_together(pair: Pair, task: Task, prompts: Sequence[Any]) -> int:
    """Texts that the sparse target reads beside the dense one in one program: a batch, or one where each has a score of its own."""
    return min(pair.batch, len(prompts)) if task.metrics else 1


def follows(example: Example, tokenizer: Any) -> list[int]:
    """The tokens that really follow an example; none where an answer is wanted."""
    return tokenizer(example.continuation, add_special_tokens=False)["input_ids"] if example.continuation else []


def check_window(target: Model, prompts: Sequence[Sequence[int]], num_new: int) -> None:
    """Whether prompts and what follows them fit a target.

    Raises:
        ExperimentError: They do not.
    """
    window, longest = target.model.config.max_position_embeddings, max(map(len, prompts))
    if longest + num_new > window:
        raise ExperimentError(
            f"a prompt of {longest} tokens and {num_new} that follow exceed the target's window of {window}: lower max_prompt_tokens"
        )


def finished(decoded: Decoded, ends: Collection[int]) -> float:
    """The share of answers that ended with an EOS, and not with the limit."""
    return float(np.mean([bool(answer) and answer[-1] in ends for answer in decoded.tokens]))


def score(task: Task, decoded: Decoded, tokenizer: Any) -> dict[str, list[float]]:
    """By metric, a score an example. Threads take examples side by side: programs that are tested run in processes of their own."""
    answers = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in decoded.tokens]
    with ThreadPoolExecutor(_SCORED_AT_A_TIME) as pool:
        return {
            metric: list(pool.map(lambda example, answer, metric=metric: example.scores[metric](answer), task.examples, answers))
            for metric in task.metrics
        }


def sample_texts(target: Model, path: Path) -> MLPSamples:
    """What the target's networks do on the beginning of a text.

    Raises:
        ExperimentError: There is no such file, or it is too short.
    """
    if not path.is_file() or target.checkpoint is None:
        raise ExperimentError(
            "thresholds of experts and of their channels are found on texts: give calibration_text=FILE or calibration=FILE, "
            f"got calibration_text={path}"
        )
    tokens = target.checkpoint.tokenizer()(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    length = min(_CALIBRATION_TOKENS, target.model.config.max_position_embeddings, len(tokens))
    rows = [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)][:_CALIBRATION_ROWS]
    if not rows:
        raise ExperimentError(f"{path.name} is empty")
    return sample_mlp(target.model, target.params, [(jnp.asarray([row], jnp.int32), None) for row in rows])
