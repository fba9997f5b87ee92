"""Can a mixture of experts with learned routing be trained from nothing, so that leaving experts out can be studied on it?

Command: python -m experiments.run train_moe tokenizer=CHECKPOINT data=TOKENS validation=TOKENS out=FOLDER max_seconds=300 --record
Hardware: one H200
Time: `max_seconds`, and a minute of compilation
Result: none on record yet

A decoder of Qwen3-MoE's family (softmax routing, normalised weights, every token takes 8 of 32 experts), trained on token files of
`specjax tokenize` with AdamW and the load-balancing loss of Switch (arXiv:2101.03961). What it leaves in `out` is a checkpoint like any
other: a target for `sparse_quality`, for `specjax distill` and for `specjax train`. It is small, and good for comparisons of settings
alone.

`least_used` is the choices that fall on the least used expert of any layer, over an even share; `most_used` likewise. `perplexity` is of
the texts trained on since the last row, `validation_perplexity` of texts held out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.experiment import ExperimentError, local_field, path_field
from experiments.moe_training import MoETraining, TextLoss, evaluate_texts, moe_step, together
from specjax import Kernels, ModelConfig, MoEConfig, Transformer
from specjax.checkpoints.store import Checkpoint, abstract_checkpoint, save_checkpoint
from specjax.training.data import DataConfig, TokenBatch, TokenBatches
from specjax.training.optimizer import OptimizerConfig
from specjax.training.token_files import TokenFiles, tokenizer_fingerprint
from specjax.training.train_config import RunLength, TrainConfig
from specjax.training.train_step import TrainState


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        tokenizer: A checkpoint of ours, whose tokenizer made the data; the model gets it.
        data: Token files, made by `specjax tokenize`; several folders are read as one.
        validation: Token files that are held out; `none` reports no validation.
        out: Where the checkpoint is written; what is there is kept, and the run refused.
        num_layers: L.
        hidden_size: D.
        num_heads: N, of 64 each.
        num_kv_heads: K.
        num_experts: E.
        experts_per_token: k.
        expert_size: Width of one expert.
        sequence_length: T.
        batch: Rows a step.
        micro_batch: Rows whose activations are held at a time.
        steps: The most training steps; `none` where `max_seconds` alone says how long.
        max_seconds: Time of the training steps alone.
        learning_rate: The highest.
        warmup_steps: Steps over which it rises; a run of a few minutes has some hundreds in all.
        weight_decay: Of matrices.
        balance_weight: What the load-balancing loss counts.
        report_every: Steps a row.
        validation_batches: Batches that a validation reads.
        seed: Of the weights and the shuffle.
        dtype: Compute dtype; weights are trained in float32, and stored in this.
    """

    tokenizer: str = path_field("")
    data: tuple[str, ...] = path_field(())
    validation: str | None = path_field()
    out: str | None = local_field()
    num_layers: int = 8
    hidden_size: int = 512
    num_heads: int = 8
    num_kv_heads: int = 4
    num_experts: int = 32
    experts_per_token: int = 8
    expert_size: int = 256
    sequence_length: int = 1024
    batch: int = 64
    micro_batch: int = 16
    steps: int | None = None
    max_seconds: float | None = 300.0
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    balance_weight: float = 0.01
    report_every: int = 100
    validation_batches: int = 4
    seed: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.micro_batch < 1 or self.batch % self.micro_batch:
            raise ExperimentError(f"batch must be a multiple of micro_batch, got {self.batch} and {self.micro_batch}")
        if self.steps is None and self.max_seconds is None:
            raise ExperimentError("train_moe needs steps=NUMBER or max_seconds=NUMBER")


def run(config: Config) -> Iterator[dict]:
    """One row every `report_every` steps, and one at the end; then the checkpoint is written."""
    if not config.tokenizer or not config.data or not config.out:
        raise ExperimentError("train_moe needs tokenizer=CHECKPOINT, data=TOKENS and out=FOLDER")
    out = Path(config.out).expanduser()
    if out.exists():
        raise ExperimentError(f"out={out} exists already")
    checkpoint = abstract_checkpoint(config.tokenizer)
    training = training_of(config, checkpoint)
    texts = _batches(config, config.data, checkpoint)
    held_out = [] if config.validation is None else _held_out(config, checkpoint)
    state = TrainState.of(training.optimizer, training.model.init_params(jax.random.key(config.seed)))
    length = RunLength(
        TrainConfig(num_steps=config.steps, max_seconds=config.max_seconds), step=0, num_steps=None, warmup_steps=config.warmup_steps
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, next(texts)))
    compiled_step = moe_step.lower(*shapes, length.for_learning_rate, training=training).compile()  # its time is not the training's
    step, since, begin = 0, [], time.perf_counter()
    while not length.is_over(step):
        state, found = compiled_step(state, next(texts), length.for_learning_rate)
        step += 1
        since.append(found)
        length.step_done(step, found.sum_nll)
        if step % config.report_every == 0 or length.is_over(step):
            jax.block_until_ready(since)
            seconds = time.perf_counter() - begin
            yield _row(config, training.model, step, _sum(since), seconds, len(since), _validation(training, state.trained, held_out))
            since, begin = [], time.perf_counter()
    params = jax.tree.map(lambda x: x.astype(config.dtype), state.trained)
    metadata = {"source": "a mixture of experts trained by specjax", "quantisation": "none", "training_steps": step}
    save_checkpoint(out, training.model.config, params, metadata, checkpoint.tokenizer_path)


def training_of(config: Config, checkpoint: Checkpoint) -> MoETraining:
    """The model and how it is trained.

    Args:
        config: Settings.
        checkpoint: Whose tokenizer it takes.
    """
    shape = ModelConfig(
        vocab_size=len(checkpoint.tokenizer()),
        hidden_size=config.hidden_size,
        intermediate_size=config.expert_size * config.experts_per_token,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=64,
        max_position_embeddings=config.sequence_length,
        tie_word_embeddings=True,
        qk_norm="head",
        moe=MoEConfig(num_experts=config.num_experts, num_experts_per_token=config.experts_per_token, intermediate_size=config.expert_size),
    )
    # "dense": the implementation that has a gradient, and reads every expert, as a batch of thousands of tokens does anyway.
    model = Transformer(shape, dtype=jnp.dtype(config.dtype), param_dtype=jnp.float32, kernels=Kernels(experts="dense"))
    optimizer = OptimizerConfig(
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        clip_norm=1.0,
        final_ratio=0.1,
    )
    return MoETraining(model, optimizer, config.balance_weight, config.micro_batch)


def show(row: dict) -> str:
    """A row's main figures on one line."""
    validation = "" if row["validation_perplexity"] is None else f", held out {row['validation_perplexity']:.2f}"
    return (
        f"step {row['step']:6}  {row['train_tokens'] / 1e6:8.2f} M tokens  perplexity {row['perplexity']:9.2f}{validation}  "
        f"balance {row['balance']:.3f}, experts {row['least_used']:.2f} to {row['most_used']:.2f} of an even share  "
        f"{row['tokens_per_s']:.0f} tokens/s"
    )


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    return {
        "million tokens": row["train_tokens"] / 1e6,
        "perplexity": row["perplexity"],
        "held out": row["validation_perplexity"],
        "load-balancing loss": row["balance"],
        "least used expert": row["least_used"],
        "most used expert": row["most_used"],
        "tokens/s": row["tokens_per_s"],
    }


def plot(rows: list[dict], axes: Any) -> None:
    """Perplexities against tokens seen."""
    tokens = [row["train_tokens"] / 1e6 for row in rows]
    for key, label in (("perplexity", "trained on"), ("validation_perplexity", "held out")):
        if rows[0][key] is not None:
            axes.plot(tokens, [row[key] for row in rows], marker="o", label=label)
    axes.set_yscale("log")
    axes.set_xlabel("million tokens seen")
    axes.set_ylabel("perplexity")
    axes.legend()


def _batches(config: Config, paths: tuple[str, ...], checkpoint: Checkpoint, *, endless: bool = True) -> TokenBatches:
    try:
        files = TokenFiles(*paths)
    except ValueError as error:
        raise ExperimentError(str(error)) from None
    if files.manifest.tokenizer != tokenizer_fingerprint(checkpoint.tokenizer()):
        raise ExperimentError(f"{files.name} was made with another tokenizer than that of {config.tokenizer}")
    how = DataConfig(
        batch_size=config.batch,
        sequence_length=config.sequence_length,
        long_sequences="split",
        seed=config.seed,
        num_epochs=None if endless else 1,
    )
    return TokenBatches(files, how)


def _held_out(config: Config, checkpoint: Checkpoint) -> list[TokenBatch]:
    assert config.validation is not None
    batches = _batches(config, (config.validation,), checkpoint, endless=False)
    return [batch for _, batch in zip(range(config.validation_batches), batches, strict=False)]


def _validation(training: MoETraining, params: Any, held_out: list[TokenBatch]) -> TextLoss | None:
    found = [evaluate_texts(params, batch, model=training.model, micro_batch=training.micro_batch) for batch in held_out]
    return _sum(found) if found else None


def _sum(found: list[TextLoss]) -> TextLoss:
    return together(jax.tree.map(lambda *parts: jnp.stack(parts), *found))


def _row(config: Config, model: Transformer, step: int, found: TextLoss, seconds: float, steps: int, validation: TextLoss | None) -> dict:
    shape = jax.eval_shape(model.init_params, jax.random.key(0))
    return {
        "model": f"{config.num_layers} layers, {config.experts_per_token} of {config.num_experts} experts",
        "weights": "trained",
        "implementation": model.kernels.experts,
        "synthetic": False,
        "dtype": config.dtype,
        "num_params": sum(leaf.size for leaf in jax.tree.leaves(shape)),
        "step": step,
        "train_tokens": step * config.batch * config.sequence_length,
        "perplexity": float(np.exp(found.sum_nll / found.num_tokens)),
        "validation_perplexity": None if validation is None else float(np.exp(validation.sum_nll / validation.num_tokens)),
        "balance": float(found.balance),
        "least_used": float(found.shares.min() * config.num_experts),
        "most_used": float(found.shares.max() * config.num_experts),
        "tokens_per_s": steps * config.batch * config.sequence_length / seconds,
    }
