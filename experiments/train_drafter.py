"""How long are the drafts that a target accepts, by what its drafter has seen, and by rank, warm start and loss?

Command: python -m experiments.run train_drafter target=TARGET data=TOKENS out=FOLDER data_dir=PROMPTS --record
Hardware: one H200 or several
Time: 5 minutes for 20 million loss tokens of SmolLM2-135M, one drafter, evaluations included
Result: SmolLM2's drafter reaches a mean acceptance length of 2.56 over six sets; a start from the target's own head helps much

Drafters are trained side by side on one stream of the target's features. At every evaluation each of them drafts for the target on real
prompts, greedily, through `speculative_generate`: `mean_acceptance_length` is what it delivers, the bonus included. What the training
itself expects of sampled drafts stands beside it, as `expected_acceptance_length`. `max_seconds` is for the training steps alone.

A variant is HEAD, HEAD@INIT or HEAD@INIT@LOSS, as in `low_rank:8@svd@lk_lambda`. Finished drafters are left in `out`, a checkpoint each.
"""

from __future__ import annotations

import dataclasses
import queue
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.acceptance import end_of_text
from experiments.decoding import Decoder
from experiments.draft_heads import describe
from experiments.experiment import ExperimentError, local_field, path_field
from experiments.models import Model, converted, stored_as
from experiments.prompts import encode, load_prompts
from experiments.train_figures import GONE_ON_WITH, Draw, training_figures
from specjax import GenerateConfig, Kernels
from specjax.capacity import bucket
from specjax.checkpoints.pairing import drafter_for_target
from specjax.checkpoints.store import Checkpoint
from specjax.commands.finished_drafter import hidden_size_of
from specjax.commands.prepare_training import PreparedTraining, outcome, prepare_training
from specjax.commands.train_drafters import REPORTS, STATE_FOLDER, run_checkpoints
from specjax.training.distillation import LossPositions
from specjax.training.losses import DraftLoss
from specjax.training.metrics import Report
from specjax.training.optimizer import OptimizerConfig
from specjax.training.settings import TrainSettings, Variant


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        target: A checkpoint's path.
        data: Token files, made by `specjax distill`; several folders are read as one.
        out: Folder for the finished drafters and the state of the run.
        drafter: eagle3, medusa, hydra or draft_model.
        start: A finished drafter's checkpoint to begin with, see `train_drafters`.
        head_only: Train nothing but its draft head.
        variants: HEAD, HEAD@INIT or HEAD@INIT@LOSS.
        steps: Training steps; with `max_seconds` the most, or `none`.
        max_seconds: Time for them, without compiling and evaluations.
        evaluations: How often the drafters draft for the target on the way, the end included.
        batch_size: Sequences a training step.
        sequence_length: T; `none` is that of the longest sequence, up to 1,024.
        packed: Rows of several sequences each, see `DataConfig`.
        chain: Draft steps that are trained.
        learning_rate: The highest.
        warmup_steps: Steps over which it rises.
        every: The loss is taken at every k-th position.
        chunk_size: Positions whose logits are held at once.
        eta: Of the loss lk_lambda.
        fc_norm: See `new_eagle3`.
        norm_output: See `new_eagle3`.
        data_dir: Folder of prompt sets, `NAME.jsonl` with `turns`.
        sets: Their names.
        prompts_per_set: Spread evenly over the set.
        new_tokens: Limit a prompt.
        num_speculative_tokens: G.
        chat_template: Prompts are user messages in the tokenizer's own chat template.
        seed: Of parameters and data.
        dtype: Compute dtype.
        implementation: Of the decoding's kernels; see `Kernels.of`.
        checkpoint_every: Steps between checkpoints of the run, from which the same command goes on; `none` makes none.
        compile_threads: Programs to compile at a time.
        cache_dir: Where converted checkpoints are kept; `none` is the user's cache folder.
    """

    target: str = path_field("")
    data: tuple[str, ...] = path_field(())
    out: str | None = local_field()
    drafter: str = "eagle3"
    start: str = path_field("")
    head_only: bool = TrainSettings.head_only
    variants: tuple[str, ...] = ("low_rank:8",)
    steps: int | None = 1000
    max_seconds: float | None = None
    evaluations: int = 5
    batch_size: int = 64
    sequence_length: int | None = None
    packed: bool = False
    chain: int = 5
    learning_rate: float = OptimizerConfig.learning_rate
    warmup_steps: int = OptimizerConfig.warmup_steps
    every: int = 1
    chunk_size: int = LossPositions.chunk_size
    eta: float = DraftLoss.eta
    fc_norm: bool | None = TrainSettings.fc_norm
    norm_output: bool | None = TrainSettings.norm_output
    data_dir: str = path_field("")
    sets: tuple[str, ...] = ("humaneval", "gsm8k", "sum", "mt_bench", "alpaca", "qa")
    prompts_per_set: int | None = 13
    new_tokens: int = 128
    num_speculative_tokens: int = 5
    chat_template: bool = True
    seed: int = 0
    dtype: str = "bfloat16"
    implementation: str = "auto"
    checkpoint_every: int | None = None
    compile_threads: int = 8
    cache_dir: str | None = local_field()

    def variant(self, word: str) -> Variant:
        """What a word says."""
        head, *rest = word.split("@")
        if len(rest) > 2:
            raise ExperimentError(f"a variant is HEAD, HEAD@INIT or HEAD@INIT@LOSS, got {word!r}")
        init = {"init": rest[0]} if rest and rest[0] else {}
        kind = rest[1] if len(rest) == 2 else DraftLoss.kind
        return Variant(head=head, loss=DraftLoss(kind=kind, eta=self.eta), **init)

    def settings(self) -> TrainSettings:
        """For the training."""
        return TrainSettings(
            drafter=self.drafter,
            variants=tuple(self.variant(word) for word in self.variants),
            num_steps=self.steps,
            max_seconds=self.max_seconds,
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            packed=self.packed,
            chain=self.chain,
            optimizer=OptimizerConfig(learning_rate=self.learning_rate, warmup_steps=self.warmup_steps),
            positions=LossPositions(every=self.every, chunk_size=self.chunk_size),
            fc_norm=self.fc_norm,
            norm_output=self.norm_output,
            head_only=self.head_only,
            seed=self.seed,
            checkpoint_every=self.checkpoint_every,
            compile_threads=self.compile_threads,
        )


def run(config: Config) -> Iterator[dict]:
    """One row a drafter and evaluation for each set, and one for their mean."""
    for key in ("target", "data", "out", "data_dir"):
        if not getattr(config, key):
            raise ExperimentError(f"train_drafter needs {key}=PATH")
    if config.evaluations < 1 or (config.steps is None and config.max_seconds is None):
        raise ExperimentError(f"there must be evaluations, and steps or max_seconds, got {config.evaluations} and none")
    assert config.out is not None
    out = Path(config.out).expanduser()
    try:
        settings = config.settings()
        checkpoints = run_checkpoints(out / STATE_FOLDER, settings, force=False)
        resumed = checkpoints is not None and checkpoints.will_restore()
        finished = [variant.name for variant in settings.variants if (out / variant.name).exists()]
        if finished and not resumed:
            raise ExperimentError(f"{out} has drafters already: {', '.join(finished)}; out must be a folder without these")
        path = converted(Path(config.target).expanduser(), dtype=config.dtype, cache_dir=config.cache_dir)
        start = None
        if config.start:
            start = converted(Path(config.start).expanduser(), dtype=config.dtype, cache_dir=config.cache_dir, target=path)
        prepared = prepare_training(path, config.data, settings, start=start, dtype=jnp.dtype(config.dtype), resumed=resumed)
    except ValueError as error:
        raise ExperimentError(str(error)) from error
    print(prepared.describe_data(), file=sys.stderr)
    checkpoint = prepared.target
    model = checkpoint.model.clone(kernels=Kernels.of(config.implementation))
    target = Model(prepared.target_name, model, checkpoint.params, stored_as(checkpoint.metadata, config.dtype), checkpoint, path)
    rows: queue.Queue[dict | None] = queue.Queue()
    evaluator, means, stop = Evaluator(config, target, prepared), {}, threading.Event()

    def go_on() -> None:
        if stop.is_set():
            raise _Stopped

    def evaluate(params: Mapping[str, Any], reports: Mapping[str, Report]) -> None:
        for row in evaluator(params, reports):
            go_on()
            rows.put(row)
            if row["dataset"] == "mean":
                means[row["variant"]] = row

    def work() -> None:
        # In a thread of its own, so that rows are recorded while the training goes on.
        try:
            result = prepared.run(
                evaluations=config.evaluations,
                on_evaluation=evaluate,
                before_step=go_on,
                checkpoints=checkpoints,
                report_path=out / REPORTS,
                show_progress=True,
            )
            for name, params in result.params.items():
                record = outcome(result.reports[name], None) | {"evaluation": means[name]}
                prepared.save(name, out / name, params, record, force=True)
            shutil.rmtree(out / STATE_FOLDER, ignore_errors=True)
        finally:
            rows.put(None)

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(work)
        try:
            while (row := rows.get()) is not None:
                yield row
        finally:
            # Interrupted, or nobody wants further rows: then the training ends before its next step.
            stop.set()
        training.result()


class _Stopped(Exception):
    """Ends the training's thread."""


class Evaluator:
    """Drafters in training, drafting for their target."""

    def __init__(self, config: Config, target: Model, prepared: PreparedTraining) -> None:
        """Reads the prompts."""
        assert target.checkpoint is not None
        self._config, self._target, self.prepared = config, target, prepared
        tokenizer = target.checkpoint.tokenizer()
        texts = {name: load_prompts(config.data_dir, name, config.prompts_per_set) for name in config.sets}
        self._prompts = {name: encode(tokenizer, rows, chat_template=config.chat_template) for name, rows in texts.items()}

    def __call__(self, params: Mapping[str, Any], reports: Mapping[str, Report]) -> Iterator[dict]:
        """Decodes every set with every drafter.

        Args:
            params: By name, of all drafters.
            reports: By name, the latest ones.
        """
        config = self._config
        longest = max(len(tokens) for rows in self._prompts.values() for tokens in rows)
        batch = max(len(rows) for rows in self._prompts.values())
        tokenizer_path = None if self.prepared.finished is None else self.prepared.finished.tokenizer_path

        def decoder(name: str) -> Decoder:
            network = self.prepared.networks[name]
            dtype = jnp.dtype(config.dtype)
            leaves = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params[name])
            draft = Checkpoint(network.clone(param_dtype=dtype), jax.device_put(leaves, jax.devices()[0]), {}, tokenizer_path)
            assert self._target.checkpoint is not None
            ready = drafter_for_target(draft, dataclasses.replace(self._target.checkpoint, params=self._target.params))
            return Decoder(
                self._target,
                ready.drafter,
                ready.params,
                config=GenerateConfig(max_new_tokens=config.new_tokens, num_speculative_tokens=config.num_speculative_tokens),
                batch=batch,
                width=bucket(longest),
                eos_token_ids=end_of_text(self._target),
            )

        with ThreadPoolExecutor(config.compile_threads) as pool:
            decoders = dict(zip(params, pool.map(decoder, params), strict=True))
        for name, decode in decoders.items():
            mine = []
            for dataset, prompts in self._prompts.items():
                counts = decode(prompts).statistics.summary()
                row = self._row(name, reports[name]) | {"dataset": dataset, "prompts": len(prompts)} | _kept(counts)
                mine.append(row)
                yield row
            means = {key: np.mean([row[key] for row in mine], axis=0).tolist() for key in _kept(mine[0])}
            yield self._row(name, reports[name]) | {"dataset": "mean", "prompts": sum(row["prompts"] for row in mine)} | means

    def _row(self, name: str, report: Report) -> dict:
        config, config_of_target = self._config, self._target.model.config
        variant = next(variant for variant in self.prepared.settings.variants if variant.name == name)
        return {
            "target": self._target.name,
            "drafter": config.drafter,
            "variant": name,
            **describe(self.prepared.networks[name].config.head, config_of_target.vocab_size),
            "hidden_size": config_of_target.hidden_size if self.prepared.finished is None else hidden_size_of(self.prepared.finished.model),
            "init": variant.init or GONE_ON_WITH,
            "loss": variant.loss.kind,
            "weights": self._target.weights,
            "implementation": config.implementation,
            "synthetic": False,
            "step": report.step,
            "train_tokens": report.loss_tokens,
            "train_positions": report.positions,
            "positions_per_s": report.positions_per_s,
            "train_loss": report.loss,
            "expected_acceptance_length": report.acceptance_length,
            "num_speculative_tokens": config.num_speculative_tokens,
            "temperature": 0.0,
        }


def _kept(counts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: counts[key] for key in ("mean_acceptance_length", "acceptance_rate_per_position")}


def show(row: dict) -> str:
    """A row's main figures on one line."""
    return (
        f"step {row['step']:6} {row['train_tokens'] / 1e6:7.2f} M tokens  {row['variant']:32} {row['dataset']:10} "
        f"mean acceptance length {row['mean_acceptance_length']:.3f}  (training: loss {row['train_loss']:.3f}, expects "
        f"{row['expected_acceptance_length']:.2f}; {row['positions_per_s']:.0f} positions/s)"
    )


def table_rows(rows: list[dict]) -> list[dict]:
    """Means over the sets: of one drafter at every evaluation, and then each set at the last one; of several at the last one alone."""
    last = max(row["step"] for row in rows)
    if len({row["variant"] for row in rows}) > 1:
        return [row for row in rows if row["dataset"] == "mean" and row["step"] == last]
    return [row for row in rows if row["dataset"] == "mean"] + [row for row in rows if row["dataset"] != "mean" and row["step"] == last]


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    return {
        "drafter": row["variant"],
        "tokens seen": f"{row['train_tokens'] / 1e6:.1f} M",
        "set": row["dataset"],
        "mean acceptance length": row["mean_acceptance_length"],
        "expected in training": row["expected_acceptance_length"],
    }


def plots(rows: list[dict]) -> dict[str, Draw]:
    """See `training_figures`."""
    return training_figures(rows)
