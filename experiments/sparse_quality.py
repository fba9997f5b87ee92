"""What do answers lose when verification is sparse, on real tasks: their scores, their drafts' acceptance, and what is saved for it?

Command: python -m experiments.run sparse_quality target=TARGET drafter=DRAFTER data=FOLDERS tasks=qmsum_questions,long_code --record
Hardware: one H200 for a 1.5B target in bfloat16 at 16 K tokens (a small pair at a few hundred tokens runs on a CPU)
Time: 8 minutes on an H200 for 10 settings of attention and 48 prompts of 12,000 tokens; half of it is compilation
Result: see "Sparse verification, measured" in the README, made from results/sparse_quality_qmsum.json

Sparse verification is lossy. Every task is decoded plainly, with dense verification (the row "dense") and with every sparse setting,
greedily, on the same prompts and in one process. `score_difference_interval` is the paired bootstrap's (95 %) of sparse less dense. Along
the text that dense verification wrote (of the task `text`: along what really follows) the sparse target is held against the dense one:
`token_agreement` is the share of the same most probable tokens, `kl` the mean KL(dense, sparse) in nats. There, a score is the mean
negative log-likelihood in nats a token: lower is better, and its exponential is the perplexity.

Speeds are taken apart from the answers, of `timed_batches` full batches in which no row ends at an EOS: else a batch would go on with
fewer and fewer rows, and longer answers would count as faster steps. They count new tokens of all rows, behind each prompt's first token:
the prefill is dense for all, and shared (`share_prefill`), so that each prompt's second token comes of a dense pass too.
`timed_mean_acceptance_length` is of the text that was timed, which goes on behind its end.

`finished_sparse` is the share of answers that ended with an EOS; the others were cut off at the limit `new_tokens`, and their scores say
little.

`keep_ratio` is measured: blocks read, channels computed or experts taken over all, for the answers. `flops_ratio` and `bytes_ratio` compare
the mean verification pass of the timed batches with a dense one, by counting (`specjax.sparsity.work`). `context` is the mean length of the
prompts, in tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.compiling import say
from experiments.experiment import ExperimentError, local_field, path_field
from experiments.models import load_drafter, load_model
from experiments.sparse_comparison import Comparison, sample_texts
from experiments.sparse_pair import Pair
from experiments.sparse_settings import SparseWords, block_size_of, check_weights, named_settings
from experiments.speeds import speed_of, was_timed
from experiments.tasks import TaskSource
from experiments.trade_off import trade_off

NO_DRAFTER = "none"


@dataclasses.dataclass(frozen=True)
class Config(SparseWords):
    """Settings, and those of `SparseWords`.

    Attributes:
        target: A checkpoint's path (ours, a Hugging Face folder or a GGUF file).
        drafter: Likewise, of any kind that fits; "prompt_lookup", or "none" to decode plainly.
        data: Folders of the tasks' data.
        tasks: Names of tasks; see `experiments.tasks`.
        library: What the task `long_code` is made of: an installed package's name, or a folder.
        text: A file of plain text for the task `text`.
        calibration_text: A file of plain text on which thresholds of experts and their channels are found.
        prompts: Of a task, spread evenly over it; `none` takes all.
        max_prompt_tokens: Longer prompts are cut in the middle of their context.
        new_tokens: Limit a prompt, one for all tasks or one a task; none: 512 of `gsm8k`, 384 of `humaneval` and `mbpp`, 128 of others.
        num_speculative_tokens: G.
        longest: Tokens of a prompt and its answer that caches have room for at least: tasks of about one length then share their programs.
        batch: Prompts decoded together.
        dtype: Compute dtype.
        implementation: Of the kernels; see `Kernels.of`.
        chat_template: Prompts of chat tasks are user messages in the tokenizer's template; `false` takes them as bare text.
        repeats: Timed runs a batch; the median counts.
        timed_batches: Batches that are timed, the first ones; the other prompts are decoded for their answers alone.
        resamples: Of the bootstrap.
        compile_threads: Programs to compile at a time; each runs once when it is compiled, with caches of its own.
        share_prefill: All settings go on from caches that took the prompts in once: memory for the caches of all prompts is needed.
            `false`: each setting takes each prompt in anew.
        cache_dir: Where converted checkpoints are kept; `none` is the user's cache folder.
    """

    target: str = path_field("")
    drafter: str = path_field(NO_DRAFTER)
    data: tuple[str, ...] = path_field(())
    tasks: tuple[str, ...] = ("qmsum_questions", "long_code")
    library: str = path_field("transformers")
    text: str = path_field("")
    calibration_text: str = path_field("")
    prompts: int | None = 32
    max_prompt_tokens: int = 16000
    new_tokens: tuple[int, ...] = ()
    num_speculative_tokens: int = 5
    longest: int = 0
    batch: int = 1
    dtype: str = "bfloat16"
    implementation: str = "auto"
    chat_template: bool = True
    repeats: int = 1
    timed_batches: int = 2
    resamples: int = 10_000
    compile_threads: int = 4
    share_prefill: bool = True
    cache_dir: str | None = local_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.new_tokens) not in (0, 1, len(self.tasks)) or min(self.new_tokens, default=1) < 1:
            given = ",".join(map(str, self.new_tokens))
            raise ExperimentError(f"new_tokens must be positive, one for all or one for each of {', '.join(self.tasks)}, got {given}")
        for name in ("repeats", "timed_batches"):
            if getattr(self, name) < 1:
                raise ExperimentError(f"{name} must be at least 1, got {getattr(self, name)}")


def run(config: Config) -> Iterator[dict]:
    """For each task and metric a row of dense verification, and then one for every setting."""
    if not config.target:
        raise ExperimentError("sparse_quality needs target=PATH")
    options: dict[str, Any] = {"dtype": config.dtype, "implementation": config.implementation, "cache_dir": config.cache_dir}
    say("loading the target")
    target = load_model(config.target, **options)
    if target.checkpoint is None:
        raise ExperimentError(f"sparse_quality needs a target with a tokenizer, {config.target!r} is a preset")
    tokenizer = target.checkpoint.tokenizer()
    source = TaskSource(
        folders=config.data,
        library=config.library,
        text=config.text,
        count=config.prompts,
        max_prompt_tokens=config.max_prompt_tokens,
        tokenizer=tokenizer,
        chat_template=config.chat_template,
    )
    tasks = [source.load(name) for name in config.tasks]
    if config.new_tokens:
        limits = config.new_tokens * (len(tasks) if len(config.new_tokens) == 1 else 1)
        tasks = [dataclasses.replace(task, new_tokens=limit) for task, limit in zip(tasks, limits, strict=True)]
    samples = None
    if config.needs_samples(target.model.config):
        samples = sample_texts(target, Path(config.calibration_text))
    settings = named_settings(config, target.model.config, samples)
    check_weights(settings, config, target)
    say("loading the drafter")
    drafter = None if config.drafter == NO_DRAFTER else load_drafter(config.drafter, target, **options)
    pair = Pair(
        target=target,
        drafter=drafter,
        num_speculative_tokens=config.num_speculative_tokens,
        batch=config.batch,
        repeats=config.repeats,
        timed_batches=config.timed_batches,
        resamples=config.resamples,
        compile_threads=config.compile_threads,
        implementation=config.implementation,
        block_size=block_size_of(settings),
        share_prefill=config.share_prefill,
        longest=config.longest,
    )
    for task in tasks:
        say(f"{task.name}: tokenizing {len(task.examples)} prompts")
        comparison = Comparison.build(dataclasses.replace(pair, new_tokens=task.new_tokens), task, source.encode(task), tokenizer, settings)
        yield from comparison.dense_rows()
        for named in settings:
            yield from comparison.sparse_rows(named)


def show(row: dict) -> str:
    """A row's main figures on one line."""
    text = f"{row['dataset']:16} {row['metric']:15} {row['method']:9} {row['setting']:>10} {row['reuse']:24} {row['score_sparse']:.4f}"
    if row["method"] != "dense":
        low, high = row["score_difference_interval"]
        text += f" ({row['score_sparse'] - row['score_dense']:+.4f}, 95 % {low:+.4f} to {high:+.4f})"
        text += f"  same tokens {row['token_agreement']:.4f}  KL {row['kl']:.4f}"
    text += f"  finished {row['finished_sparse']:.2f} ({row['finished_dense']:.2f} dense)"
    text += f"  acceptance length {row['mean_acceptance_length_sparse']:.2f} ({row['mean_acceptance_length_dense']:.2f} dense)"
    text += f"  keeps {row['keep_ratio']:.3f}, bytes {row['bytes_ratio']:.3f}, operations {row['flops_ratio']:.3f}"
    return f"{text}  {speed_of(row)}"


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    low, high = row["score_difference_interval"]
    shown = {
        "set": row["dataset"],
        "prompts": row["prompts"],
        "tokens": row["context"],
        "metric": row["metric"],
        "method": " ".join(filter(None, [row["method"], row["setting"]])),
        "reuse": row["reuse"],
        "kept": row["keep_ratio"],
        "score": row["score_sparse"],
        "less dense": row["score_sparse"] - row["score_dense"],
        "95 %": f"{low:+.3f} to {high:+.3f}",
        "same tokens": row["token_agreement"],
        "KL": row["kl"],
        "mean acceptance length": row["mean_acceptance_length_sparse"],
    }
    if not was_timed(row):
        return shown
    return shown | {
        "finished": row["finished_sparse"],
        "bytes": row["bytes_ratio"],
        "operations": row["flops_ratio"],
        "tokens/s": row["tokens_per_s"],
        "over plain": None if row["speedup_over_autoregressive"] is None else f"{row['speedup_over_autoregressive']:.2f} ×",
    }


def plots(rows: list[dict]) -> dict[str, Any]:
    """Scores against what is kept, a figure for each task and metric; and speed against agreement, `trade-off`."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(f"{row['dataset']}-{row['metric']}", []).append(row)
    figures: dict[str, Any] = {name: lambda axes, group=group: _draw(axes, group) for name, group in groups.items()}
    both = trade_off(rows)
    return figures if both is None else {"trade-off": both} | figures


def _draw(axes: Any, rows: list[dict]) -> None:
    lines: dict[str, list[dict]] = {}
    for row in rows:
        label = f"{row['method']}, choice of {row['reuse']}" if row["reuse"] not in ("", "none") else row["method"]
        lines.setdefault(label, []).append(row)
    for label, line in lines.items():
        line = sorted(line, key=lambda row: row["keep_ratio"])
        differences = [row["score_sparse"] - row["score_dense"] for row in line]
        ends = [
            [max(difference - row["score_difference_interval"][0], 0) for difference, row in zip(differences, line, strict=True)],
            [max(row["score_difference_interval"][1] - difference, 0) for difference, row in zip(differences, line, strict=True)],
        ]
        axes.errorbar([row["keep_ratio"] for row in line], differences, yerr=ends, marker="o", capsize=3, label=label)
    axes.axhline(0, color="gray", linestyle="--")
    axes.set_xlabel("kept")
    axes.set_ylabel(f"{rows[0]['metric']}, sparse less dense")
    axes.legend(fontsize=7)
