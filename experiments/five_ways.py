"""Which of five ways to decode is the fastest: with or without a drafter, over the whole cache or a part of it, checked densely or not?

Command: python -m experiments.run five_ways target=TARGET drafter=DRAFTER data=FOLDERS --record
Hardware: one H200
Time: not measured on a GPU yet; a way takes a compilation and a decode of all prompts
Result: none on record yet

The ways are plain decoding, plain decoding over a part of the cache, dense verification of drafts, sparse verification (both lossy where
sparse), and two levels, whose output is that of dense verification. All decode the same prompts, greedily, in one process, through the same
prefill, which is dense and does not count. `same_text` is the share of prompts whose tokens are those of plain dense decoding.

With a preset as the target weights and prompts are random, and acceptance is made up (SYNTHETIC): for times alone. Two levels are left out
there, because a dense pass over random weights accepts what no real one would: see `sparse_latency` for their times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.decoding import Decoded, Decoder
from experiments.experiment import ExperimentError, local_field, path_field
from experiments.models import LoadedDrafter, Model, load_drafter, load_model
from experiments.sparse_comparison import check_window, decoding_speed, keep_ratio, ratio
from experiments.sparse_quality import speed_of
from experiments.sparse_settings import DENSE, NamedSparsity, SparseWords, laid_out_for, named_settings
from experiments.tasks import TaskSource
from specjax import GenerateConfig, Lossless, RejectionSampling, SyntheticAcceptance
from specjax.capacity import bucket


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        name: What rows call it.
        drafts: A drafter proposes tokens.
        sparse: Passes leave something out.
        checked: Dense passes check what sparse ones commit.
    """

    name: str
    drafts: bool
    sparse: bool
    checked: bool = False


WAYS = (
    Way("autoregressive, dense", drafts=False, sparse=False),
    Way("autoregressive, sparse", drafts=False, sparse=True),
    Way("dense verification", drafts=True, sparse=False),
    Way("sparse verification", drafts=True, sparse=True),
    Way("two levels", drafts=True, sparse=True, checked=True),
)


@dataclasses.dataclass(frozen=True)
class Config(SparseWords):
    """Settings, and those of `SparseWords`.

    Attributes:
        target: A preset's name, or a checkpoint's path.
        drafter: Likewise; or "prompt_lookup".
        data: Folders of the task's data.
        task: Where prompts come from; see `experiments.tasks`. Not for a preset.
        library: What the task `long_code` is made of.
        text: What the task `text` is made of.
        prompts: How many.
        max_prompt_tokens: The most that a prompt has; of a preset's, what each has.
        new_tokens: Of each prompt; none ends before.
        num_speculative_tokens: G.
        max_sparse_steps: Of two levels, the most before a dense pass.
        adapt: Two levels choose how many, up to those, and may verify densely; `false` is always as many.
        mean_acceptance_length: SYNTHETIC, of a preset.
        batch: Prompts decoded together.
        dtype: Compute dtype, and that of random weights.
        implementation: Of the kernels; see `Kernels.of`.
        chat_template: Prompts of chat tasks are user messages in the tokenizer's template; `false` takes them as bare text.
        repeats: Timed runs a batch; the median counts.
        cache_dir: Where converted checkpoints are kept; `none` is the user's cache folder.
    """

    attention: tuple[float, ...] = (0.125,)
    reuse: tuple[str, ...] = ("tokens",)
    controls: tuple[str, ...] = ()
    target: str = path_field("")
    drafter: str = path_field("prompt_lookup")
    data: tuple[str, ...] = path_field(())
    task: str = "qmsum_questions"
    library: str = path_field("transformers")
    text: str = path_field("")
    prompts: int = 8
    max_prompt_tokens: int = 16000
    new_tokens: int = 128
    num_speculative_tokens: int = 5
    max_sparse_steps: int = 8
    adapt: bool = True
    mean_acceptance_length: float = 3.0
    batch: int = 1
    dtype: str = "bfloat16"
    implementation: str = "auto"
    chat_template: bool = True
    repeats: int = 3
    cache_dir: str | None = local_field()


def run(config: Config) -> Iterator[dict]:
    """A row a way, and for the sparse ones a row a setting."""
    if not config.target:
        raise ExperimentError("five_ways needs target=PATH or a preset")
    options: dict[str, Any] = {"dtype": config.dtype, "implementation": config.implementation, "cache_dir": config.cache_dir}
    target = load_model(config.target, **options)
    workload = Workload(
        config=config, target=target, drafter=load_drafter(config.drafter, target, **options), prompts=_prompts(config, target)
    )
    check_window(target, workload.prompts, config.new_tokens)
    settings = named_settings(config, target.model.config)
    plain, prefill_seconds = None, 0.0
    for way in WAYS:
        if way.checked and workload.synthetic:
            continue
        for named in settings if way.sparse else [None]:
            decoder = workload.decoder(way, named)
            decoded = decoder(workload.prompts, repeats=config.repeats)
            if plain is None:  # the first way, which the others are held against
                plain, prefill_seconds = decoded, decoder.prefill_seconds(workload.prompts, repeats=config.repeats)
            yield workload.row(way, named, decoded, plain, prefill_seconds)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is decoded, and by whom."""

    config: Config
    target: Model
    drafter: LoadedDrafter
    prompts: list[list[int]]
    made: dict[str, Model] = dataclasses.field(default_factory=dict)  # weights in another layout, once they are needed

    @property
    def synthetic(self) -> bool:
        """Whether acceptance is made up."""
        return self.target.checkpoint is None

    def decoder(self, way: Way, named: NamedSparsity | None) -> Decoder:
        """Compiles one way."""
        config = self.config
        rule: Any = RejectionSampling()
        if self.synthetic and way.drafts:
            rule = SyntheticAcceptance.from_mean_acceptance_length(config.mean_acceptance_length, config.num_speculative_tokens)
        sparsity = DENSE if named is None else named.sparsity
        if way.checked:
            sparsity = dataclasses.replace(sparsity, lossless=Lossless(max_steps=config.max_sparse_steps, adapt=config.adapt))
        static = GenerateConfig(
            max_new_tokens=config.new_tokens, num_speculative_tokens=config.num_speculative_tokens, verification=rule, sparsity=sparsity
        )
        drafter, params = (self.drafter.drafter, self.drafter.params) if way.drafts else (None, None)
        width = bucket(max(map(len, self.prompts)))
        # No EOS: every way writes as much, and so over contexts as long.
        target = laid_out_for(self.target, sparsity, self.made)
        return Decoder(target, drafter, params, config=static, batch=config.batch, width=width, eos_token_ids=())

    def row(self, way: Way, named: NamedSparsity | None, decoded: Decoded, plain: Decoded, prefill_seconds: float) -> dict:
        """What one way came to."""
        counts = decoded.statistics.summary()
        speed, plain_speed = (decoding_speed(found, prefill_seconds) for found in (decoded, plain))
        made_up = self.synthetic and way.drafts
        same = [ours == theirs for ours, theirs in zip(decoded.tokens, plain.tokens, strict=True)]
        return {
            "target": self.target.name,
            "drafter": self.drafter.name if way.drafts else "none",
            "weights": self.target.weights,
            "implementation": self.config.implementation,
            "synthetic": made_up,
            "way": way.name,
            "lossless": not way.sparse or way.checked,
            "method": "" if named is None else named.name,
            "context": float(np.mean([len(prompt) for prompt in self.prompts])) + self.config.new_tokens,
            "batch": self.config.batch,
            "prompts": len(self.prompts),
            "new_tokens": self.config.new_tokens,
            "mean_acceptance_length": counts["mean_acceptance_length"],
            "keep_ratio": keep_ratio(counts),
            "dense_acceptance_rate": counts["two_level"]["dense_acceptance_rate"] if "two_level" in counts else None,
            "steps_between_dense": _steps_between_dense(counts),
            "same_text": None if made_up else float(np.mean(same)),
            "tokens_per_s": speed,
            "ms_per_token": None if speed is None else 1e3 / speed,
            "speedup_over_autoregressive": ratio(speed, plain_speed),
        }


def _steps_between_dense(counts: dict[str, Any]) -> float | None:
    levels = counts.get("two_level")
    return None if levels is None else levels["sparse_steps"] / max(levels["dense_passes"], 1)


def _prompts(config: Config, target: Model) -> list[list[int]]:
    if target.checkpoint is None:
        sizes = (config.prompts, config.max_prompt_tokens)
        return np.random.default_rng(0).integers(0, target.model.config.vocab_size, sizes).tolist()
    source = TaskSource(
        folders=config.data,
        library=config.library,
        text=config.text,
        count=config.prompts,
        max_prompt_tokens=config.max_prompt_tokens,
        tokenizer=target.checkpoint.tokenizer(),
        chat_template=config.chat_template,
    )
    return source.encode(source.load(config.task))


def show(row: dict) -> str:
    """A row's main figures on one line; says what is lossy and what loses."""
    text = f"{row['way']:23} {row['method']:40} {'lossless' if row['lossless'] else 'lossy':8}  "
    text += f"acceptance length {row['mean_acceptance_length']:.2f}  {speed_of(row)}"
    text += "" if row["same_text"] is None else f"  same text {row['same_text']:.2f}"
    return text + ("  SYNTHETIC" if row["synthetic"] else "")


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    return {
        "way": row["way"] + (" (SYNTHETIC)" if row["synthetic"] else ""),
        "lossless": row["lossless"],
        "sparse": row["method"],
        "tokens": row["context"],
        "batch": row["batch"],
        "mean acceptance length": row["mean_acceptance_length"],
        "kept": row["keep_ratio"],
        "accepted by dense passes": row["dense_acceptance_rate"],
        "tokens/s": row["tokens_per_s"],
        "ms a token": row["ms_per_token"],
        "over plain": None if row["speedup_over_autoregressive"] is None else f"{row['speedup_over_autoregressive']:.2f} ×",
        "same text": row["same_text"],
    }


def plot(rows: list[dict], axes: Any) -> None:
    """Speeds of the ways."""
    names = [f"{row['way']}\n{row['method']}" for row in rows]
    axes.barh(range(len(rows)), [row["tokens_per_s"] or 0 for row in rows], color=["C0" if row["lossless"] else "C1" for row in rows])
    axes.set_yticks(range(len(rows)), names, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s (orange: lossy)")
