"""Chat templates as token ids, on templates of the kinds that models have and a tokenizer of a token a byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specjax.training.chat_template import ChatTemplateError, chat_format, encode_chat, encode_prompt
from tests.tiny_checkpoint import byte_tokenizer

# Turns end with <e>, as in ChatML; a system message of its own, as Qwen's.
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<u>sys<e>\n{% endif %}"
    "{% for m in messages %}{{ '<a>' if m['role'] == 'assistant' else '<u>' }}{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
TRIMMED = CHATML.replace("m['content']", "m['content'] | trim")
# Answers before the last are left out, as the thoughts of reasoning models are.
FORGETFUL = CHATML.replace("m['content']", "('' if m['role'] == 'assistant' and not loop.last else m['content'])")
SHORTENING = CHATML.replace("m['content']", "m['content'].split('|')[-1]")
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
# A space between header and words, which the tokenizer below joins with the word.
SPACED = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<e>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo <3"},
    {"role": "user", "content": "yo <3"},
    {"role": "assistant", "content": "ab\ncd"},
]


def learned(tokenizer: Any, messages: list[dict[str, str]]) -> list[str]:
    """The runs of tokens where the loss counts, as text."""
    chat = encode_chat(tokenizer, messages, end_token_ids=[tokenizer.eos_token_id])
    runs, edges = [], np.flatnonzero(np.diff(np.concatenate([[False], chat.loss_mask, [False]]).astype(int)))
    for start, stop in edges.reshape(-1, 2):
        runs.append(tokenizer.decode(chat.tokens[start:stop]))
    return runs


def test_the_loss_of_a_hand_made_chat_counts_on_answers_and_the_tokens_that_end_them() -> None:
    tokenizer = byte_tokenizer(CHATML)
    chat = encode_chat(tokenizer, CHAT, end_token_ids=[tokenizer.eos_token_id])
    text = "<u>sys<e>\n<u>hi<e>\n<a>yo <3<e>\n<u>yo <3<e>\n<a>ab\ncd<e>\n"
    assert chat.tokens.tolist() == tokenizer.encode(text)
    # <u> s y s <e> \n <u> h i <e> \n <a> | y o _ < 3 <e> | \n <u> y o _ < 3 <e> \n <a> | a b \n c d <e> | \n
    assert chat.loss_mask.tolist() == [False] * 12 + [True] * 6 + [False] * 10 + [True] * 6 + [False]


@pytest.mark.parametrize("template", [TRIMMED, NO_SYSTEM])
def test_other_templates_count_the_same_words(template: str) -> None:
    chat = [{**message, "content": f"  {message['content']}\n" if template == TRIMMED else message["content"]} for message in CHAT]
    assert learned(byte_tokenizer(template), chat) == ["yo <3<e>", "ab\ncd<e>"]


def test_a_space_that_is_part_of_an_answers_first_token_counts() -> None:
    tokenizer = byte_tokenizer(SPACED, merges=(("Ġ", "h"),))
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert learned(tokenizer, chat) == [" hello<e>"]
    format_ = chat_format(tokenizer, end_token_ids=[tokenizer.eos_token_id])
    # The user's words begin with the space: that is how the tokenizer writes them.
    whole = [*format_.openings[0], *tokenizer.encode(" hi"), *format_.closing]
    assert whole == encode_prompt(tokenizer, chat[:1])


def test_an_end_that_is_not_right_behind_an_answer_does_not_count() -> None:
    tokenizer = byte_tokenizer(CHATML.replace("<e>\n", "!<e>\n"))
    assert learned(tokenizer, CHAT[:2]) == ["yo <3"]
    assert learned(byte_tokenizer(CHATML.replace("<e>", "")), CHAT[:2]) == ["yo <3"]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (FORGETFUL, CHAT, "the chat template leaves out an answer: 'yo <3'"),
        (SHORTENING, [CHAT[0], {"role": "assistant", "content": "a|b"}], r"the chat template changes an answer: 'a\|b'"),
        (NO_SYSTEM, [{"role": "system", "content": "x"}, *CHAT], "refuses messages of system, user, assistant.*no system role"),
        (None, CHAT, "the tokenizer has no chat template"),
    ],
)
def test_chats_that_a_template_does_not_render_as_they_are_are_refused(template: str | None, messages: list, message: str) -> None:
    tokenizer = byte_tokenizer(template)
    with pytest.raises(ValueError, match=message) as raised:
        encode_chat(tokenizer, messages, end_token_ids=[tokenizer.eos_token_id])
    assert isinstance(raised.value, ChatTemplateError) == (template is not None)


def test_a_forgetful_template_renders_a_chat_of_one_answer() -> None:
    assert learned(byte_tokenizer(FORGETFUL), CHAT[:2]) == ["yo <3<e>"]


def test_a_chat_without_answers_has_no_loss() -> None:
    assert learned(byte_tokenizer(CHATML), CHAT[:1]) == []


def test_what_stands_around_a_users_words_is_found() -> None:
    tokenizer = byte_tokenizer(CHATML)
    chat = chat_format(tokenizer, end_token_ids=[tokenizer.eos_token_id])
    assert [tokenizer.decode(opening) for opening in chat.openings] == ["<u>sys<e>\n<u>"]
    assert tokenizer.decode(chat.closing) == "<e>\n<a>"
    assert chat.user_end_token_ids == chat.end_token_ids == (tokenizer.eos_token_id,)
    assert {str(tokenizer.convert_ids_to_tokens(index)) for index in chat.special_token_ids} == {"<u>", "<a>", "<e>"}
    assert set(tokenizer.encode(" \n\t")) <= chat.blank_token_ids
    assert chat.blank_token_ids.isdisjoint(tokenizer.encode("a!<u><e>"))
    chat = chat_format(tokenizer, end_token_ids=[1], system_prompts=("be brief", "rhyme"))
    assert [tokenizer.decode(opening) for opening in chat.openings] == ["<u>be brief<e>\n<u>", "<u>rhyme<e>\n<u>"]
    assert encode_prompt(tokenizer, [{"role": "user", "content": "hi"}]) == tokenizer.encode("<u>sys<e>\n<u>hi<e>\n<a>")


def test_the_special_token_behind_a_users_words_ends_them_and_not_an_answer() -> None:
    tokenizer = byte_tokenizer("<u>{{ messages[0]['content'] }}<a>")
    chat = chat_format(tokenizer, end_token_ids=[tokenizer.eos_token_id])
    assert chat.user_end_token_ids == (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<a>"))
    assert chat.end_token_ids == (tokenizer.eos_token_id,)
    plain = chat_format(byte_tokenizer("Q: {{ messages[0]['content'] }} A:"), end_token_ids=[5])
    assert plain.user_end_token_ids == plain.end_token_ids == (5,)


@pytest.mark.parametrize(
    ("template", "arguments", "message"),
    [
        (CHATML, dict(end_token_ids=[]), "needs the ids that end a turn, got none"),
        (None, dict(end_token_ids=[1]), "the tokenizer has no chat template"),
        (NO_SYSTEM, dict(end_token_ids=[1], system_prompts=("x",)), "refuses messages of system, user: no system role"),
        ("<u>hello<a>", dict(end_token_ids=[1]), "should render a user's words once, got them 0 times"),
        (CHATML + "{{ messages[0]['content'] }}", dict(end_token_ids=[1]), "should render a user's words once, got them 2 times"),
        (
            CHATML + "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}",
            dict(end_token_ids=[1], system_prompts=("x", "y")),
            "should not depend on the system prompt",
        ),
    ],
)
def test_templates_that_cannot_open_a_users_turn_are_refused(template: str | None, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat_format(byte_tokenizer(template), **arguments)


def test_a_tokenizer_that_joins_the_template_with_words_is_refused() -> None:
    # "x" + "S", the stand-in's first letter, are one token, which would lose the "x".
    tokenizer = byte_tokenizer("<u>x{{ messages[0]['content'] }}<a>", merges=(("x", "S"),))
    with pytest.raises(ChatTemplateError, match="the tokenizer joins 'x' of the chat template with the user's words"):
        chat_format(tokenizer, end_token_ids=[1])
