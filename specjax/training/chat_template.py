"""A tokenizer's chat template as token ids: what stands around a user's words, prompts, and whole chats with the loss on the answers.

The template is asked, never re-implemented: texts that stand in for a message are rendered, and found again in what comes out.
Magpie, arXiv:2406.08464, has a model write the user's turn in this way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from specjax.training.token_files import TokenSequence

# Letters only: no template trims or escapes them, and no chat contains them.
_STAND_IN = "SpecjaxStandsInFor{}Here"


class ChatTemplateError(ValueError):
    """The template refuses some messages, or changes them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """What stands around a user's words in a dialogue of one turn.

    Attributes:
        openings: Token ids up to the user's words, one tuple a system prompt.
        closing: From behind the user's words to where the answer begins.
        user_end_token_ids: Any of them ends a user's words: the model's EOS ids, and the special token that the template ends them with.
        end_token_ids: The former: any of them ends an answer.
        special_token_ids: Ids that words of a user do not hold, the former among them.
        blank_token_ids: Ids of nothing but white space.
    """

    openings: tuple[tuple[int, ...], ...]
    closing: tuple[int, ...]
    user_end_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    special_token_ids: frozenset[int]
    blank_token_ids: frozenset[int]


def chat_format(tokenizer: Any, *, end_token_ids: Sequence[int], system_prompts: Sequence[str] = ()) -> ChatFormat:
    """Finds out what a tokenizer's chat template puts around a user's words.

    Example:
        >>> chat_format(checkpoint.tokenizer(), end_token_ids=checkpoint.eos_token_ids())

    Args:
        tokenizer: A `transformers` tokenizer with a chat template.
        end_token_ids: The model's EOS ids.
        system_prompts: An opening for each; none: one opening without a system message of ours (the template may have its own).

    Raises:
        ValueError: No chat template, one that does not take a system message, or no EOS ids.
    """
    if not end_token_ids:
        raise ValueError("chat_format needs the ids that end a turn, got none: does the checkpoint have EOS ids?")
    stand_in = _STAND_IN.format("User")
    openings, closings = [], set()
    for system in system_prompts or (None,):
        messages = [{"role": "user", "content": stand_in}]
        messages = messages if system is None else [{"role": "system", "content": system}, *messages]
        text = _render(tokenizer, messages, add_generation_prompt=True)
        if text.count(stand_in) != 1:
            raise ChatTemplateError(f"the chat template should render a user's words once, got them {text.count(stand_in)} times")
        start = text.index(stand_in)
        stop = start + len(stand_in)
        ids, offsets = _encode(tokenizer, text)
        # A space is left to the user's words: tokenizers join it with the word behind it.
        before, behind = offsets[:, 1] <= len(text[:start].rstrip(" ")), offsets[:, 0] >= stop
        lost = text[offsets[before, 1].max(initial=0) : start] + text[stop : offsets[behind, 0].min(initial=len(text))]
        if lost.strip():
            raise ChatTemplateError(f"the tokenizer joins {lost!r} of the chat template with the user's words")
        openings.append(tuple(ids[before].tolist()))
        closings.add(tuple(ids[behind].tolist()))
    if len(closings) != 1:
        raise ChatTemplateError("what the chat template puts behind the user's words should not depend on the system prompt")
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = tokenizer.backend_tokenizer.decode_batch([[index] for index in range(len(tokenizer))], skip_special_tokens=False)
    special, closing = frozenset({*tokenizer.all_special_ids, *added, *end_token_ids}), closings.pop()
    return ChatFormat(
        openings=tuple(openings),
        closing=closing,
        user_end_token_ids=tuple(dict.fromkeys([*end_token_ids, *special.intersection(closing[:1])])),
        end_token_ids=tuple(end_token_ids),
        special_token_ids=special,
        blank_token_ids=frozenset(index for index, text in enumerate(texts) if not text.strip()),
    )


def encode_prompt(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a chat up to where the next answer begins.

    Raises:
        ValueError: No chat template, or one that refuses the messages.
    """
    return _encode(tokenizer, _render(tokenizer, messages, add_generation_prompt=True))[0].tolist()


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, end_token_ids: Sequence[int]) -> TokenSequence:
    """Token ids of a whole chat; the loss counts on the assistant's words and on the token that ends its turn.

    Args:
        tokenizer: A `transformers` tokenizer with a chat template.
        messages: `role` and `content` each.
        end_token_ids: Any of them ends a turn. It counts where it stands right behind an answer.

    Raises:
        ChatTemplateError: The template refuses the messages, or leaves out or changes an answer (of some models, that of earlier turns).
    """
    text = _render(tokenizer, messages, add_generation_prompt=False)
    ids, offsets = _encode(tokenizer, text)
    loss_mask = np.zeros(len(ids), bool)
    for start, stop in _answers(tokenizer, messages, text):
        # A space before the answer may be part of its first token.
        space = len(text[:start].rstrip())
        loss_mask |= (offsets[:, 0] >= space) & (offsets[:, 1] > start) & (offsets[:, 0] < stop)
        behind = int(np.flatnonzero(offsets[:, 0] >= stop).min(initial=len(ids)))
        if behind < len(ids) and ids[behind] in end_token_ids:
            loss_mask[behind] = True
    return TokenSequence(tokens=ids, loss_mask=loss_mask)


def _answers(tokenizer: Any, messages: Sequence[Mapping[str, str]], text: str) -> Iterable[tuple[int, int]]:
    """Where in the rendered text each of the assistant's messages stands."""
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    stand_ins = [_STAND_IN.format(f"Answer{index}of{len(answers)}") for index in range(len(answers))]
    remaining = iter(stand_ins)
    marked = [{**message, "content": next(remaining)} if message["role"] == "assistant" else message for message in messages]
    rest, pieces = _render(tokenizer, marked, add_generation_prompt=False), []
    for stand_in in stand_ins:
        piece, found, rest = rest.partition(stand_in)
        if not found:
            raise ChatTemplateError(f"the chat template leaves out an answer: {answers[len(pieces)]!r:.80}")
        pieces.append(piece)
    pieces.append(rest)
    if not text.startswith(pieces[0]):
        raise ChatTemplateError(f"the chat template renders what is before an answer by that answer: {answers[0]!r:.80}")
    position = len(pieces[0])
    for answer, piece in zip(answers, pieces[1:], strict=True):
        fits = [words for words in (answer, answer.strip()) if text.startswith(words + piece, position)]
        if not fits:
            raise ChatTemplateError(f"the chat template changes an answer: {answer!r:.80}")
        yield position, position + len(fits[0])
        position += len(fits[0]) + len(piece)


def _render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template")
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
    except jinja2.TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ChatTemplateError(f"the chat template refuses messages of {roles}: {error}") from error


def _encode(tokenizer: Any, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids `[L]`, and where in the text each begins and ends `[L,2]`."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return np.array(found["input_ids"], np.int64), np.array(found["offset_mapping"], np.int64).reshape(-1, 2)
