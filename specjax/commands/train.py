"""`specjax train`: a drafter for a target, or several side by side, distilled from token files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import typer

from specjax.checkpoints.convert import one_line_errors
from specjax.commands.train_drafters import TrainedDrafter, train_drafters
from specjax.drafting.heads.named_head import HEAD_NAMES
from specjax.training.distillation import LossPositions
from specjax.training.losses import DraftLoss
from specjax.training.new_drafters import INITS
from specjax.training.optimizer import OptimizerConfig
from specjax.training.settings import DEFAULT_INIT, DRAFTERS, TrainSettings, Variant


def train_command(
    target: Annotated[Path, typer.Argument(help="The target's checkpoint, made by `specjax convert`.")],
    data: Annotated[Path, typer.Argument(help="Token files, made by `specjax distill` or `specjax tokenize`.")],
    destination: Annotated[Path, typer.Argument(help="The folder for the drafters' checkpoints and the state of the run.")],
    drafter: Annotated[str, typer.Option(help=f"One of {', '.join(DRAFTERS)}.")] = TrainSettings.drafter,
    head: Annotated[list[str] | None, typer.Option(help=f"{HEAD_NAMES}. Several are trained side by side. Default: low_rank:8.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps. Default: what --max-seconds or --epochs comes to.")] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Time for the training steps alone, compiling and saving aside; with --steps whichever is less.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="How often the data comes, instead of --steps and --max-seconds. Default: once.")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Sequences a training step, a multiple of the number of devices.")
    ] = TrainSettings.batch_size,
    sequence_length: Annotated[
        int | None, typer.Option(help="Longer sequences are cut. Default: as long as the longest, up to 1024.")
    ] = None,
    packed: Annotated[bool, typer.Option(help="Fill each row with several sequences, which see each other.")] = TrainSettings.packed,
    more_data: Annotated[list[Path] | None, typer.Option(help="Further token files, read as one with the data.")] = None,
    chain: Annotated[
        int, typer.Option(help="Draft steps that EAGLE-3 is trained through; heads of Medusa and Hydra.")
    ] = TrainSettings.chain,
    loss: Annotated[str, typer.Option(help="forward_kl, lk_alpha or lk_lambda.")] = DraftLoss.kind,
    eta: Annotated[float, typer.Option(help="Of lk_lambda.")] = DraftLoss.eta,
    decay: Annotated[float, typer.Option(help="Step i of the chain counts decay^i.")] = DraftLoss.decay,
    learning_rate: Annotated[float, typer.Option(help="The highest.")] = OptimizerConfig.learning_rate,
    warmup_steps: Annotated[int, typer.Option(help="Steps over which it rises.")] = OptimizerConfig.warmup_steps,
    every: Annotated[int, typer.Option(help="Take the loss at every k-th position.")] = LossPositions.every,
    chunk_size: Annotated[int, typer.Option(help="Positions whose logits are held at once.")] = LossPositions.chunk_size,
    init: Annotated[
        str | None,
        typer.Option(
            help=f"How draft heads begin: {', '.join(INITS)}. Default: {DEFAULT_INIT}; the head that the drafter of --from has goes on."
        ),
    ] = None,
    fc_norm: Annotated[
        bool | None,
        typer.Option("--fc-norm/--no-fc-norm", help="EAGLE-3: norm the features of each boundary. Default: yes; with --from as it has it."),
    ] = None,
    norm_output: Annotated[
        bool | None,
        typer.Option(
            "--norm-output/--no-norm-output",
            help="EAGLE-3: recursive steps go on from the normed state. Default: yes; with --from as it has it.",
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="A finished drafter to begin with: an EAGLE-3 drafter, or the draft model of --drafter draft_model."),
    ] = None,
    head_only: Annotated[
        bool, typer.Option("--head-only", help="Train nothing but the draft head; with --from.")
    ] = TrainSettings.head_only,
    held_out: Annotated[Path | None, typer.Option(help="Token files to evaluate the finished drafters on.")] = None,
    seed: Annotated[int, typer.Option(help="Of the parameters, and of the order of the data.")] = TrainSettings.seed,
    report_every: Annotated[int, typer.Option(help="Steps between reports.")] = TrainSettings.report_every,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints of the run; 0 makes none.")
    ] = TrainSettings.checkpoint_every or 0,
    compile_threads: Annotated[int, typer.Option(help="Drafters to compile at a time.")] = TrainSettings.compile_threads,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32; the target's if not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace finished drafters, and an unfinished run of other settings.")] = False,
) -> None:
    """Trains drafters for a target. A run that was interrupted goes on where it was."""
    with one_line_errors():
        if dtype not in (None, "bfloat16", "float32"):
            raise ValueError(f"--dtype must be bfloat16 or float32, got {dtype!r}")
        losses = DraftLoss(kind=loss, eta=eta, decay=decay)
        settings = TrainSettings(
            drafter=drafter,
            variants=tuple(Variant(head=name, init=init, loss=losses) for name in head or [Variant.head]),
            num_steps=steps,
            max_seconds=max_seconds,
            num_epochs=epochs,
            batch_size=batch_size,
            sequence_length=sequence_length,
            packed=packed,
            chain=chain,
            optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=warmup_steps),
            positions=LossPositions(every=every, chunk_size=chunk_size),
            fc_norm=fc_norm,
            norm_output=norm_output,
            head_only=head_only,
            seed=seed,
            report_every=report_every,
            checkpoint_every=checkpoint_every or None,
            compile_threads=compile_threads,
        )
        number = None if dtype is None else jnp.dtype(dtype)
        trained = train_drafters(
            target, [data, *(more_data or [])], destination, settings, start=start, held_out=held_out, dtype=number, force=force
        )
    for one in trained.values():
        typer.echo(f"{one.path}: {_summary(one)}")


def _summary(trained: TrainedDrafter) -> str:
    text = f"expected acceptance length {trained.report.acceptance_length:.2f} at the end of the training"
    return text if trained.evaluation is None else f"{text}, {trained.evaluation.acceptance_length:.2f} on the held-out data"
