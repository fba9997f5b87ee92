"""`specjax distill`: training data for drafters, sampled from the target itself."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from specjax.atomic import check_destination, check_keeps
from specjax.capacity import bucket, rounded_capacity
from specjax.checkpoints.convert import one_line_errors
from specjax.checkpoints.manifest import read_transformer_config
from specjax.checkpoints.store import abstract_checkpoint, load_checkpoint
from specjax.commands.memory_plan import plan_memory
from specjax.commands.token_data import origin, summary, token_progress, tokenizer_and_ends
from specjax.training.chat_template import ChatTemplateError, chat_format, encode_prompt
from specjax.training.records import messages_of, prompt_of, read_records
from specjax.training.sample_dialogues import DialogueConfig, answer_prompts, check_window, sample_dialogues
from specjax.training.token_files import TokenSequence, tokenizer_fingerprint
from specjax.training.token_manifest import MANIFEST, TokenManifest, read_token_manifest
from specjax.training.token_writer import TokenWriter, writing_token_files


@dataclasses.dataclass(frozen=True)
class Distillation:
    """What `distill` did.

    Attributes:
        manifest: Of the token files.
        tokens_per_second: Tokens that the target wrote, those of dropped dialogues included; without the first batch, which compiles,
            where there is another.
    """

    manifest: TokenManifest
    tokens_per_second: float


def distill(
    target: str | Path,
    destination: str | Path,
    config: DialogueConfig,
    *,
    num_sequences: int | None = None,
    num_tokens: int | None = None,
    prompts: str | Path | None = None,
    system_prompts: tuple[str, ...] = (),
    dtype: Any = None,
    force: bool = False,
    progress: bool = True,
) -> Distillation:
    """Samples dialogues from a target into token files. An interrupted run is gone on with by the same call.

    Example:
        >>> distill("models/target", "data/sampled", DialogueConfig(batch_size=64), num_tokens=10_000_000)

    Args:
        target: The target's checkpoint. On several devices each has all of it, and a share of the batch.
        destination: The folder to create.
        config: How to sample.
        num_sequences: Stop at so many dialogues.
        num_tokens: Stop with the dialogue that reaches so many tokens, prompts included.
        prompts: JSON lines (`messages`, `conversations`, `turns` or `prompt`) to answer; `None`: the target writes the user's turns too.
        system_prompts: Without `prompts`: dialogues take these in turn.
        dtype: Of the target's parameters; as stored if `None`.
        force: Replace token files that exist, and an unfinished run with other settings.
        progress: Show a progress bar on stderr.

    Raises:
        ValueError: Settings that do not fit each other or the target, a file that cannot be read, or a target that writes nothing to keep.
        OSError: The destination exists, holds what is read, or cannot be written.
    """
    limits = {"num_sequences": num_sequences, "num_tokens": num_tokens}
    given = {name: value for name, value in limits.items() if value is not None}
    if any(value < 1 for value in given.values()) or len(given) > 1 or (not given and prompts is None):
        raise ValueError(f"distill needs one of num_sequences and num_tokens, at least 1 (none with prompts: all of them), got {limits}")
    if prompts is not None and (system_prompts or config.user_loss):
        raise ValueError("system_prompts and user_loss are for turns that the target writes: prompts have their own, and no loss")
    check_destination(destination, force=force, marker=MANIFEST, keep_unfinished=True)
    check_keeps(destination, target, *([] if prompts is None else [prompts]))
    model_config = read_transformer_config(target)
    abstract = abstract_checkpoint(target, dtype=dtype)
    tokenizer, ends = tokenizer_and_ends(abstract)
    chat = None if prompts is not None else chat_format(tokenizer, end_token_ids=ends, system_prompts=system_prompts)
    longest = check_window(model_config, config, chat)
    num_prompts = None if prompts is None else sum(1 for _ in _messages(prompts))
    slots = rounded_capacity(bucket(longest) + bucket(config.max_answer_tokens) + 1)
    plan_memory([abstract.model], batch_size=config.batch_size, capacity=slots).check()
    mesh = _mesh(config.batch_size)
    everywhere = None if mesh is None else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    checkpoint = load_checkpoint(target, dtype=dtype, shardings=everywhere)
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name != "batch_size"}
    with (
        writing_token_files(
            destination,
            vocab_size=model_config.vocab_size,
            tokenizer=tokenizer_fingerprint(tokenizer),
            made={"kind": "sampled", **origin(target, abstract), **settings, "system_prompts": system_prompts, "prompts": _digest(prompts)},
            force=force,
            resume=True,
        ) as writer,
        token_progress("Sampling", total=num_sequences or num_tokens or num_prompts, shown=progress) as update,
    ):
        arguments: dict[str, Any] = {"start": writer.position, "mesh": mesh}
        if prompts is not None:
            encoded = _encoded(tokenizer, prompts)
            batches = answer_prompts(checkpoint.model, checkpoint.params, encoded, config, end_token_ids=ends, **arguments)
        else:
            assert chat is not None
            batches = sample_dialogues(checkpoint.model, checkpoint.params, chat, config, earlier=writer.written(), **arguments)
        rate = 0.0
        while (room := _Room.of(writer, num_sequences, num_tokens)).is_left and (batch := next(batches, None)) is not None:
            writer.extend(room.take(batch.dialogues), position=batch.next_index, dropped=batch.dropped)
            done = writer.num_sequences if num_sequences else writer.num_tokens if num_tokens else writer.position
            rate = update(done, batch.num_generated)
    return Distillation(manifest=read_token_manifest(destination), tokens_per_second=rate)


@dataclasses.dataclass(frozen=True)
class _Room:
    """How much more there is to sample; `None` without limit."""

    sequences: int | None
    tokens: int | None

    @classmethod
    def of(cls, writer: TokenWriter, num_sequences: int | None, num_tokens: int | None) -> _Room:
        return cls(
            sequences=None if num_sequences is None else num_sequences - writer.num_sequences,
            tokens=None if num_tokens is None else num_tokens - writer.num_tokens,
        )

    @property
    def is_left(self) -> bool:
        return all(limit is None or limit > 0 for limit in (self.sequences, self.tokens))

    def take(self, dialogues: list[TokenSequence]) -> list[TokenSequence]:
        """The first of them, up to the one that reaches the limit."""
        taken = dialogues[: self.sequences]
        before = np.cumsum([0, *(len(dialogue.tokens) for dialogue in taken)])[:-1]
        return taken if self.tokens is None else [one for one, sofar in zip(taken, before, strict=True) if sofar < self.tokens]


def _mesh(batch_size: int) -> jax.sharding.Mesh | None:
    devices = jax.devices()
    if batch_size % len(devices):
        raise ValueError(f"batch_size must be a multiple of the {len(devices)} devices, got {batch_size}")
    return None if len(devices) == 1 else jax.sharding.Mesh(np.array(devices).reshape(-1, 1), ("data", "model"))


def _messages(path: str | Path) -> Iterator[list[dict[str, Any]]]:
    for where, record in read_records(path):
        yield prompt_of(messages_of(record, where), where)


def _encoded(tokenizer: Any, path: str | Path) -> Iterator[list[int] | None]:
    for messages in _messages(path):
        try:
            yield encode_prompt(tokenizer, messages)
        except ChatTemplateError:
            yield None


def _digest(path: str | Path | None) -> str | None:
    if path is None:
        return None
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def distill_command(
    target: Annotated[Path, typer.Argument(help="The target's checkpoint, made by `specjax convert`.")],
    destination: Annotated[Path, typer.Argument(help="The folder of token files to create.")],
    num_sequences: Annotated[int | None, typer.Option(help="Stop at so many dialogues.")] = None,
    num_tokens: Annotated[int | None, typer.Option(help="Or with the dialogue that reaches so many tokens.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with messages, turns or prompt to answer. Default: the target writes these too.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Dialogues at a time, a multiple of the number of devices.")] = 64,
    max_user_tokens: Annotated[int, typer.Option(help="Longest turn of a user that is kept.")] = DialogueConfig.max_user_tokens,
    max_answer_tokens: Annotated[int, typer.Option(help="Where answers are cut.")] = DialogueConfig.max_answer_tokens,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longest of --prompts that is answered.")] = DialogueConfig.max_prompt_tokens,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Of answers; 0 is greedy. Given several times, dialogues take them in turn. Default: 1.")
    ] = None,
    top_p: Annotated[float, typer.Option(help="Of answers.")] = DialogueConfig.top_p,
    user_temperature: Annotated[float, typer.Option(help="Of users' turns.")] = DialogueConfig.user_temperature,
    user_top_p: Annotated[float, typer.Option(help="Of users' turns.")] = DialogueConfig.user_top_p,
    user_loss: Annotated[bool, typer.Option("--user-loss", help="The loss counts on users' turns too.")] = False,
    system: Annotated[list[str] | None, typer.Option(help="A system prompt. Given several times, dialogues take them in turn.")] = None,
    seed: Annotated[int, typer.Option(help="Of all that is sampled.")] = DialogueConfig.seed,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32; as stored if not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace token files that exist, or an unfinished run of other settings.")] = False,
) -> None:
    """Samples training data from a target: prompts and answers. A run that was interrupted goes on where it was."""
    with one_line_errors():
        if dtype not in (None, "bfloat16", "float32"):
            raise ValueError(f"--dtype must be bfloat16 or float32, got {dtype!r}")
        done = distill(
            target,
            destination,
            DialogueConfig(
                batch_size=batch_size,
                max_prompt_tokens=max_prompt_tokens,
                max_user_tokens=max_user_tokens,
                max_answer_tokens=max_answer_tokens,
                temperatures=tuple(temperature or DialogueConfig.temperatures),
                top_p=top_p,
                user_temperature=user_temperature,
                user_top_p=user_top_p,
                user_loss=user_loss,
                seed=seed,
            ),
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            prompts=prompts,
            system_prompts=tuple(system or ()),
            dtype=None if dtype is None else jnp.dtype(dtype),
            force=force,
        )
    typer.echo(f"{summary(destination, done.manifest)}; {done.tokens_per_second:,.0f} tokens/s written by the target")
