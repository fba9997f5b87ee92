"""Dialogues sampled from the target itself, many at a time: the user's turn too, or the answers to given prompts.

A drafter learns to say what its target says, so it is trained on the target's own text. A chat model that is given its template up to where
the user's words begin writes a user's turn (Magpie, arXiv:2406.08464); given that and the assistant's header, it answers.

Rows of a batch wait for its longest one. Dialogue i follows from the seed and i, in any batch but for rounding.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specjax.model_config import ModelConfig
from specjax.models.transformer import Transformer
from specjax.state import FinishReason
from specjax.training.chat_template import ChatFormat
from specjax.training.sample_texts import Text, TextSampler
from specjax.training.token_files import TokenSequence

# After so many batches without a single dialogue, more of them would not help.
_MAX_EMPTY_BATCHES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class DialogueConfig:
    """How dialogues are sampled.

    Attributes:
        batch_size: B, dialogues at a time.
        max_prompt_tokens: Longer given prompts are dropped.
        max_user_tokens: A user's turn that has not ended by then is dropped.
        max_answer_tokens: An answer that has not ended by then ends there.
        temperatures: Of the answers: dialogues take them in turn. 0 is greedy.
        top_p: Of the answers.
        user_temperature: Of users' turns.
        user_top_p: Of users' turns.
        user_loss: The loss counts on users' turns too, where the model wrote them.
        seed: Of all that is sampled.

    Raises:
        ValueError: A value outside its range.
    """

    batch_size: int
    max_prompt_tokens: int = 1024
    max_user_tokens: int = 256
    max_answer_tokens: int = 512
    temperatures: tuple[float, ...] = (1.0,)
    top_p: float = 1.0
    user_temperature: float = 1.0
    user_top_p: float = 1.0
    user_loss: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_prompt_tokens", "max_user_tokens", "max_answer_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"DialogueConfig.{name} must be a positive int, got {value!r}")
        if not isinstance(self.temperatures, tuple) or not self.temperatures:
            raise ValueError(f"DialogueConfig.temperatures must be a tuple of numbers, got {self.temperatures!r}")
        for name, value in [*(("temperatures", value) for value in self.temperatures), ("user_temperature", self.user_temperature)]:
            if not 0 <= value < float("inf"):
                raise ValueError(f"DialogueConfig.{name} must be 0 (greedy) or positive and finite, got {value!r}")
        for name in ("top_p", "user_top_p"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"DialogueConfig.{name} must be in (0, 1], got {getattr(self, name)!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 31:
            raise ValueError(f"DialogueConfig.seed must be an int from 0 to 2^31 - 1, got {self.seed!r}")


@dataclasses.dataclass(frozen=True, eq=False)
class DialogueBatch:
    """What came of one batch.

    Attributes:
        dialogues: Prompt and answer each, the token that ends it included. The loss counts on the answer.
        next_index: Where to go on: the index of the first dialogue behind the batch.
        dropped: How many were dropped, by reason.
        num_generated: Tokens that the target wrote, those of dropped dialogues included.
    """

    dialogues: list[TokenSequence]
    next_index: int
    dropped: dict[str, int]
    num_generated: int


def sample_dialogues(
    target: Transformer,
    params: Any,
    chat: ChatFormat,
    config: DialogueConfig,
    *,
    start: int = 0,
    earlier: Iterable[TokenSequence] = (),
    mesh: jax.sharding.Mesh | None = None,
) -> Iterator[DialogueBatch]:
    """Samples dialogues of one turn without end, users' turns included.

    Dropped are users' turns that are `"empty"` (or blank), `"too long"`, `"repeated"`, or hold `"special tokens"`; and a dialogue with
    `"non-finite logits"`.

    Example:
        >>> chat = chat_format(tokenizer, end_token_ids=checkpoint.eos_token_ids())
        >>> for batch in sample_dialogues(target, params, chat, DialogueConfig(batch_size=64)):
        ...     writer.extend(batch.dialogues, position=batch.next_index, dropped=batch.dropped)

    Args:
        target: The target model.
        params: Its params; with a mesh, on its devices.
        chat: What stands around a user's words.
        config: How.
        start: Index of the first dialogue.
        earlier: Dialogues of smaller indices, which are not to be repeated.
        mesh: Devices to split a batch over, with axes `"data"`, whose size divides the batch, and `"model"`.

    Yields:
        Batches; one may hold no dialogue at all.

    Raises:
        ValueError: A dialogue could exceed the model's window, or three batches in a row held none.
    """
    check_window(target.config, config, chat)
    write_turns = _sampler(target, params, config, chat.user_end_token_ids, mesh, of_users=True)
    write_answers = _sampler(target, params, config, chat.end_token_ids, mesh, of_users=False)
    seen, num_empty = {_digest(dialogue.tokens[: _answer_start(dialogue)]) for dialogue in earlier}, 0
    for first in itertools.count(start, config.batch_size):
        indices = range(first, first + config.batch_size)
        openings = [chat.openings[index % len(chat.openings)] for index in indices]
        turns = write_turns(openings, indices, indices)
        prompts, dropped = _prompts(openings, turns, chat, seen)
        # Divided, so that every opening meets every temperature.
        answers = write_answers(prompts, indices, [index // len(chat.openings) for index in indices])
        dialogues = []
        for opening, turn, prompt, answer in zip(openings, turns, prompts, answers, strict=True):
            if prompt is None or not answer.is_finite:
                dropped["non-finite logits"] += prompt is not None
                continue
            dialogue = _dialogue(prompt, answer)
            if config.user_loss:
                ends = chat.closing[0] in chat.user_end_token_ids
                dialogue.loss_mask[len(opening) : len(opening) + len(turn.words) + ends] = True
            seen.add(_digest(prompt))
            dialogues.append(dialogue)
        num_empty = 0 if dialogues else num_empty + 1
        if num_empty == _MAX_EMPTY_BATCHES:
            raise ValueError(
                f"{num_empty} batches of {config.batch_size} dialogues held none to keep (dropped from the last: {dict(+dropped)}): does "
                "this model write users' turns? Another user_temperature or max_user_tokens may help, or given prompts"
            )
        num_generated = sum(len(text.tokens) for text in [*turns, *answers])
        yield DialogueBatch(dialogues=dialogues, next_index=indices.stop, dropped=dict(+dropped), num_generated=num_generated)


def answer_prompts(
    target: Transformer,
    params: Any,
    prompts: Iterable[Sequence[int] | None],
    config: DialogueConfig,
    *,
    end_token_ids: Sequence[int],
    start: int = 0,
    mesh: jax.sharding.Mesh | None = None,
) -> Iterator[DialogueBatch]:
    """Samples the answers to given prompts, repeated ones too.

    Dropped are prompts that are `"empty"`, `"too long"` or `"refused by the chat template"`, and what has `"non-finite logits"`.

    Args:
        target: The target model.
        params: Its params; with a mesh, on its devices.
        prompts: Token ids up to where the answer begins; `None` where the template refused the messages.
        config: How. What it says of users' turns is not read.
        end_token_ids: Any of them ends an answer.
        start: Pass over so many prompts.
        mesh: As in `sample_dialogues`.

    Yields:
        Batches until the prompts end; the last is padded.

    Raises:
        ValueError: A dialogue could exceed the model's window.
    """
    check_window(target.config, config, None)
    write_answers = _sampler(target, params, config, end_token_ids, mesh, of_users=False)
    remaining = enumerate(itertools.islice(prompts, start, None), start)
    next_index, ended = start, False
    while not ended:
        dropped: Counter[str] = Counter()
        taken: list[Sequence[int]] = []
        indices: list[int] = []
        for index, prompt in remaining:
            next_index = index + 1
            if prompt is None:
                dropped["refused by the chat template"] += 1
            elif not 0 < len(prompt) <= config.max_prompt_tokens:
                dropped["too long" if prompt else "empty"] += 1
            else:
                indices.append(index)
                taken.append(prompt)
            if len(taken) == config.batch_size:
                break
        ended = len(taken) < config.batch_size
        if not taken and not dropped:
            return
        answers = write_answers(taken, indices, indices) if taken else []
        pairs = zip(taken, answers, strict=True)
        dialogues = [_dialogue(prompt, answer) for prompt, answer in pairs if answer.is_finite]
        dropped["non-finite logits"] += len(taken) - len(dialogues)
        num_generated = sum(len(answer.tokens) for answer in answers)
        yield DialogueBatch(dialogues=dialogues, next_index=next_index, dropped=dict(+dropped), num_generated=num_generated)


def check_window(model: ModelConfig, config: DialogueConfig, chat: ChatFormat | None) -> int:
    """Checks that the longest dialogue fits.

    Args:
        model: The target's shape.
        config: How dialogues are sampled.
        chat: What stands around a user's words; `None` for given prompts.

    Returns:
        The longest prompt of an answer, in tokens.

    Raises:
        ValueError: It does not.
    """
    if chat is None:
        longest, what = config.max_prompt_tokens, "max_prompt_tokens"
    else:
        longest = max(map(len, chat.openings)) + config.max_user_tokens + len(chat.closing)
        what = f"max_user_tokens = {config.max_user_tokens} and the chat template"
    if longest + config.max_answer_tokens > model.max_position_embeddings:
        raise ValueError(
            f"a prompt of up to {longest} tokens ({what}) and an answer of up to max_answer_tokens = {config.max_answer_tokens} exceed the "
            f"model's window of {model.max_position_embeddings} tokens"
        )
    return longest


def _sampler(
    target: Transformer, params: Any, config: DialogueConfig, ends: Sequence[int], mesh: jax.sharding.Mesh | None, *, of_users: bool
) -> TextSampler:
    return TextSampler(
        target=target,
        params=params,
        batch_size=config.batch_size,
        max_new_tokens=config.max_user_tokens if of_users else config.max_answer_tokens,
        temperatures=(config.user_temperature,) if of_users else config.temperatures,
        top_p=config.user_top_p if of_users else config.top_p,
        end_token_ids=tuple(ends),
        # Another stream of keys for answers.
        seed=config.seed + (0 if of_users else 1 << 31),
        mesh=mesh,
    )


def _prompts(
    openings: Sequence[Sequence[int]], turns: Sequence[Text], chat: ChatFormat, seen: set[bytes]
) -> tuple[list[list[int] | None], Counter[str]]:
    """A prompt a row, or `None` for one that is dropped; and how many were, by reason."""
    prompts: list[list[int] | None] = []
    dropped: Counter[str] = Counter()
    here: set[bytes] = set()
    for opening, turn in zip(openings, turns, strict=True):
        prompt = [*opening, *turn.words, *chat.closing]
        digest = _digest(prompt)
        if not turn.is_finite:
            fault = "non-finite logits"
        elif turn.finish_reason != FinishReason.EOS:
            fault = "too long"
        elif chat.blank_token_ids.issuperset(turn.words):
            fault = "empty"
        elif not chat.special_token_ids.isdisjoint(turn.words):
            fault = "special tokens"
        else:
            fault = "repeated" if digest in seen or digest in here else ""
        prompts.append(None if fault else prompt)
        here.add(digest)
        dropped.update([fault] if fault else [])
    return prompts, dropped


def _dialogue(prompt: Sequence[int], answer: Text) -> TokenSequence:
    tokens = np.array([*prompt, *answer.tokens], np.int64)
    return TokenSequence(tokens=tokens, loss_mask=np.arange(len(tokens)) >= len(prompt))


def _answer_start(dialogue: TokenSequence) -> int:
    """Everything behind the last token without loss is the answer."""
    return int(np.flatnonzero(~dialogue.loss_mask).max(initial=-1)) + 1


def _digest(prompt: Sequence[int] | np.ndarray) -> bytes:
    return hashlib.blake2b(np.asarray(prompt, np.uint32).tobytes(), digest_size=8).digest()
