"""A training of drafters, loaded and checked: the target, the token files, the new drafters; and how a finished one is saved."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.manifest import read_transformer_config
from specjax.checkpoints.store import Checkpoint, abstract_checkpoint, load_checkpoint, save_checkpoint
from specjax.commands.finished_drafter import (
    full_head_of,
    hidden_size_of,
    network_with_head,
    open_finished,
    params_with_head,
    states_covariance,
    task_of,
)
from specjax.commands.settle_settings import data_config, num_steps_of, settings_with_drafter, with_sequence_length
from specjax.commands.token_data import origin, tokenizer_and_ends
from specjax.commands.training_memory import plan_training, warn_of_float32
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.heads import DraftHead, LowRankHead, ScreenedHead, TrimmedHead
from specjax.drafting.heads.from_full_head import frequent_tokens
from specjax.drafting.heads.named_head import named_head
from specjax.drafting.medusa import Medusa
from specjax.model_config import ModelConfig
from specjax.training.data import TokenBatches
from specjax.training.evaluate import Evaluation
from specjax.training.hidden_covariance import hidden_covariance
from specjax.training.metrics import Report
from specjax.training.new_drafters import HeadStart, initial_params, new_eagle3, new_hydra, new_medusa
from specjax.training.partition import merge_params, split_params
from specjax.training.settings import DRAFT_MODEL, EAGLE3, TrainSettings
from specjax.training.target_batch import TargetArrays
from specjax.training.tasks.eagle3_task import Eagle3Task
from specjax.training.tasks.hydra_task import HydraTask
from specjax.training.tasks.medusa_task import MedusaTask
from specjax.training.tasks.task import TrainingTask
from specjax.training.token_counts import count_tokens
from specjax.training.token_files import TokenFiles, tokenizer_fingerprint
from specjax.training.train_config import TrainConfig
from specjax.training.train_step import DrafterTraining, union_of_feature_layers
from specjax.training.trainer import TrainResult, train

# Batches from which the covariance of the target's hidden states is taken.
_COVARIANCE_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class PreparedTraining:
    """All that a training run needs, loaded and checked.

    Attributes:
        settings: What to train, all settled that they leave open: this is what a checkpoint remembers.
        target: Checkpoint of the target.
        target_name: What it is called.
        target_identity: What tells its weights from others.
        files: What to train on.
        batches: From them.
        num_steps: Of the run; `None` where it has a time instead.
        networks: The drafters by the variants' names.
        drafters: By the same names, how each is trained.
        params: By the same names, what each begins with; of a run that goes on, the trained ones are shapes.
        finished: Checkpoint of the drafter that they are made from, without its weights; `None` if they are new.
    """

    settings: TrainSettings
    target: Checkpoint
    target_name: str
    target_identity: str
    files: TokenFiles
    batches: TokenBatches
    num_steps: int | None
    networks: dict[str, Any]
    drafters: dict[str, DrafterTraining]
    params: dict[str, Any]
    finished: Checkpoint | None = None

    def run(self, *, evaluations: int = 0, **options: Any) -> TrainResult:
        """Calls `train`, whose other arguments are options.

        Args:
            evaluations: How often `on_evaluation` is called.
            **options: See `train`.
        """
        config = TrainConfig(
            num_steps=self.num_steps,
            evaluations=evaluations,
            **{name: getattr(self.settings, name) for name in ("max_seconds", "report_every", "checkpoint_every", "compile_threads")},
        )
        target, identity = self.target, self.target_identity
        return train(config, target.model, target.params, self.drafters, self.params, self.batches, target_identity=identity, **options)

    def describe_data(self) -> str:
        """One line for people: the shape of batches, and how much of them is padding."""
        length = self.batches.sequence_length
        if self.settings.packed:
            return f"rows of {length} positions, each with {len(self.files) / self.batches.num_rows:.1f} sequences"
        padding = 1 - np.minimum(self.files.lengths, length).mean() / length
        cut = (self.files.lengths > length).mean()
        return f"rows of {length} positions, of which {padding:.0%} are padding" + (f"; {cut:.0%} of the sequences are cut" if cut else "")

    def save(self, name: str, path: Path, params: Any, record: Mapping[str, Any], *, force: bool) -> None:
        """Saves a drafter as a checkpoint that remembers its training, parameters in the compute dtype.

        Args:
            name: Which.
            path: Where.
            params: Its parameters.
            record: What there is to remember beside the settings and the data, JSON values.
            force: Replace a checkpoint that exists.
        """
        dtype = self.target.model.dtype
        leaves = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
        manifest = self.files.manifest
        made = {key: value for key, value in manifest.made.items() if value not in (None, [], ())}
        totals = {key: getattr(manifest, key) for key in ("num_sequences", "num_tokens", "num_loss_tokens")}
        variant = next(variant for variant in self.settings.variants if variant.name == name)
        settings = dataclasses.asdict(self.settings) | {"variants": [dataclasses.asdict(variant)]}
        metadata = {
            "source": f"{self.target_name}-{self.settings.drafter}-{name}",
            "source_format": "specjax train",
            "training": settings | {"data": {"made": made, **totals}, **record},
        }
        tokenizer = None
        if self.finished is not None:
            metadata["training"]["start"] = self.finished.metadata.get("source")
            tokenizer = self.finished.tokenizer_path
        save_checkpoint(path, self.networks[name].config, leaves, metadata, tokenizer, force=force)


def prepare_training(
    target: str | Path,
    data: str | Path | Sequence[str | Path],
    settings: TrainSettings,
    *,
    start: str | Path | None = None,
    dtype: Any = None,
    resumed: bool = False,
) -> PreparedTraining:
    """Loads a target, opens token files and makes new drafters. Other arguments and errors as those of `train_drafters`.

    Args:
        target: See `train_drafters`.
        data: Likewise.
        settings: Likewise.
        start: Likewise.
        dtype: Likewise.
        resumed: The run goes on from a checkpoint, which has the trained parameters: none are made.
    """
    config = read_transformer_config(target)
    abstract = abstract_checkpoint(target, dtype=dtype)
    if start is None and (settings.head_only or settings.drafter == DRAFT_MODEL):
        what = "a draft model" if settings.drafter == DRAFT_MODEL else f"the head alone of {settings.drafter}"
        raise ValueError(f"to train {what} there has to be a finished drafter to begin with, got none")
    finished = None if start is None else open_finished(start, settings, abstract, dtype=abstract.model.dtype)
    width = config.hidden_size if finished is None else hidden_size_of(finished.model)
    heads = {variant.name: named_head(variant.head, hidden_size=width, vocab_size=config.vocab_size) for variant in settings.variants}
    settings = settings_with_drafter(settings, heads, finished)
    tokenizer, ends = tokenizer_and_ends(abstract)
    files = open_token_files(data, tokenizer)
    settings = with_sequence_length(settings, files)
    config_of_data = data_config(settings)
    batches = TokenBatches(files, config_of_data, host=jax.process_index(), num_hosts=jax.process_count())
    networks = {
        name: _network(config, head, settings, abstract.model.dtype)
        if finished is None
        else network_with_head(finished.model, head, config)
        for name, head in heads.items()
    }
    drafters = {
        variant.name: DrafterTraining(
            task=(_task if finished is None else task_of)(networks[variant.name], settings),
            loss=variant.loss,
            optimizer=settings.optimizer,
            positions=settings.positions,
        )
        for variant in settings.variants
    }
    warn_of_float32(abstract.model)
    plan_training(abstract.model, drafters, networks, settings).check()
    checkpoint = load_checkpoint(target, dtype=dtype)
    loaded = None if start is None else load_checkpoint(start, dtype=abstract.model.dtype)
    covariance = None
    weighted = [heads[variant.name] for variant in settings.variants if variant.init == "weighted_svd"]
    if not resumed and any(isinstance(head, LowRankHead | ScreenedHead) for head in weighted):
        some = itertools.islice(TokenBatches(files, config_of_data), _COVARIANCE_BATCHES)
        layers = union_of_feature_layers(drafters)
        if loaded is None:
            covariance = hidden_covariance(checkpoint.model, checkpoint.params, some, feature_layers=layers)
        else:
            covariance = states_covariance(loaded, settings, checkpoint, some, feature_layers=layers)
    trimmed = {head.num_tokens for head in heads.values() if isinstance(head, TrimmedHead)}
    counts = count_tokens(files, config.vocab_size) if trimmed else None
    always = sorted({*ends, *tokenizer.all_special_ids})
    token_ids = {num_tokens: frequent_tokens(counts, num_tokens, always) for num_tokens in trimmed}
    arrays, params = TargetArrays.of(config, checkpoint.params), {}
    lm_head = arrays.lm_head if loaded is None else full_head_of(loaded.model, loaded.params, arrays)
    norm_scale = checkpoint.params["final_norm"]["scale"]
    made: dict[tuple[str, str | None], Any] = {}
    for variant in settings.variants:
        head_start, init = None, "random" if resumed else variant.init
        if (variant.head, init) in made:
            params[variant.name] = made[variant.head, init]
            continue
        if lm_head is not None and init is not None:
            options: dict[str, Any] = dict(init=init, covariance=covariance, token_ids=token_ids)
            head_start = HeadStart(lm_head=lm_head, norm_scale=norm_scale, **options)
        # One key for all: drafters that differ in their heads begin with the same body.
        rng = jax.random.key(settings.seed)
        if loaded is not None:
            params[variant.name] = params_with_head(loaded, heads[variant.name], head_start, rng)
        else:
            assert head_start is not None
            params[variant.name] = initial_params(networks[variant.name], head_start, rng)
        # To the host: the training makes its own copies, and the devices have better things to hold.
        made[variant.head, init] = params[variant.name] = jax.device_get(params[variant.name])
    if resumed:
        params = {name: _trained_as_shapes(params[name], training.task) for name, training in drafters.items()}
    identities = [origin(path, one)["target_digest"] for path, one in ((target, checkpoint), (start, loaded)) if path and one]
    return PreparedTraining(
        settings=settings,
        target=checkpoint,
        target_identity="+".join(identities),
        target_name=(checkpoint.metadata.get("source") or Path(target).resolve().name).removesuffix(".gguf"),
        files=files,
        batches=batches,
        num_steps=num_steps_of(settings, batches),
        networks=networks,
        drafters=drafters,
        params=params,
        finished=finished,
    )


def open_token_files(path: str | Path | Sequence[str | Path], tokenizer: Any) -> TokenFiles:
    """Token files that were made with this tokenizer.

    Raises:
        ValueError: There are none, or they were made with another one.
    """
    files, wanted = token_files(path), tokenizer_fingerprint(tokenizer)
    found = files.manifest.tokenizer
    if found != wanted:
        raise ValueError(f"{files.name} was made with another tokenizer than the target's: expected {wanted[:16]}, got {found[:16]}")
    return files


def token_files(data: str | Path | Sequence[str | Path]) -> TokenFiles:
    """Those of one folder, or of several."""
    return TokenFiles(data) if isinstance(data, str | Path) else TokenFiles(*data)


def _trained_as_shapes(params: Any, task: TrainingTask) -> Any:
    trained, fixed = split_params(params, task.is_trained)
    return merge_params(jax.eval_shape(lambda: trained), fixed)


def _network(target: ModelConfig, head: DraftHead, settings: TrainSettings, dtype: Any) -> Any:
    if settings.drafter == EAGLE3:
        assert settings.fc_norm is not None, "see settings_with_drafter"
        assert settings.norm_output is not None, "see settings_with_drafter"
        return new_eagle3(target, head, fc_norm=settings.fc_norm, norm_output=settings.norm_output, dtype=dtype)
    make = new_medusa if settings.drafter == "medusa" else new_hydra
    return make(target, head, num_draft_heads=settings.chain, dtype=dtype)


def _task(network: Any, settings: TrainSettings) -> TrainingTask:
    if isinstance(network, Eagle3):
        return Eagle3Task(network, num_steps=settings.chain)
    return MedusaTask(network) if isinstance(network, Medusa) else HydraTask(network)


def outcome(report: Report, evaluation: Evaluation | None) -> dict[str, Any]:
    """What a checkpoint remembers of how its training went, JSON values."""
    kept = ("loss", "acceptance", "acceptance_length", "positions", "loss_tokens")
    record = {"num_steps": report.step, "last_report": {name: getattr(report, name) for name in kept}}
    if evaluation is not None:
        record["held_out"] = dataclasses.asdict(evaluation) | {"acceptance_length": evaluation.acceptance_length}
    return record
