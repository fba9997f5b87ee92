"""Dialogues of a tiny target: what they consist of, which are dropped, and that each follows from the seed and its index alone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import GenerateConfig, generate
from specjax.generate import _generate
from specjax.training.chat_template import ChatFormat
from specjax.training.sample_dialogues import DialogueBatch, DialogueConfig, answer_prompts, sample_dialogues
from specjax.training.token_files import TokenSequence
from tests.helpers import VOCAB_SIZE, random_prompts, tiny_target

# So many of the 64 tokens end a turn that most end within the limits; 59 and 40 are special, 41 is blank. With these lengths all prompts
# fall into one bucket.
ENDS = tuple(range(46, 59))
OPENINGS = ((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14), (15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3))
CHAT = ChatFormat(
    openings=OPENINGS,
    closing=(55, 60, 61),
    user_end_token_ids=ENDS,
    end_token_ids=ENDS,
    special_token_ids=frozenset({*ENDS, 59, 40, 60, 61}),
    blank_token_ids=frozenset({41}),
)
CONFIG = DialogueConfig(batch_size=4, max_prompt_tokens=40, max_user_tokens=8, max_answer_tokens=24)


def sampled(number: int, *, chat: ChatFormat = CHAT, config: DialogueConfig = CONFIG, params: Any = None, **arguments: Any) -> list:
    target, own = tiny_target()
    batches = sample_dialogues(target, own if params is None else params, chat, config, **arguments)
    return [next(batches) for _ in range(number)]


def answered(prompts: list, config: DialogueConfig = CONFIG, **arguments: Any) -> list[DialogueBatch]:
    return list(answer_prompts(*tiny_target(), prompts, config, end_token_ids=ENDS, **arguments))


def dialogues(batches: list[DialogueBatch]) -> list[TokenSequence]:
    return [dialogue for batch in batches for dialogue in batch.dialogues]


def values(batches: list[DialogueBatch]) -> list:
    return [(one.tokens.tolist(), one.loss_mask.tolist()) for one in dialogues(batches)]


def parts(dialogue: TokenSequence, chat: ChatFormat = CHAT) -> tuple[list[int], list[int], list[int]]:
    """Opening, user's words and answer."""
    tokens = dialogue.tokens.tolist()
    opening = next(list(opening) for opening in chat.openings if tokens[: len(opening)] == list(opening))
    start = next(i for i in range(len(opening), len(tokens)) if tuple(tokens[i : i + len(chat.closing)]) == chat.closing)
    return opening, tokens[len(opening) : start], tokens[start + len(chat.closing) :]


def greedy(prompt: list[int], **arguments: Any) -> list[int]:
    """What plain decoding makes of a prompt; the very program that answers greedily."""
    padded = np.zeros((4, 24), np.int32)
    padded[0, : len(prompt)] = prompt
    config = GenerateConfig(max_new_tokens=CONFIG.max_answer_tokens)
    output = generate(*tiny_target(), padded, config=config, prompt_lengths=[len(prompt), 1, 1, 1], eos_token_ids=ENDS, **arguments)
    return np.asarray(output.tokens)[0, : int(output.lengths[0])].tolist()


def test_a_dialogue_is_opening_words_closing_and_an_answer_on_which_the_loss_counts() -> None:
    batches = sampled(4)
    found = dialogues(batches)
    assert len(found) >= 6
    assert {len(parts(one)[0]) for one in found} == {14, 13}
    for one in found:
        opening, words, answer = parts(one)
        assert 0 < len(words) <= CONFIG.max_user_tokens
        assert CHAT.special_token_ids.isdisjoint(words)
        assert 0 < len(answer) <= CONFIG.max_answer_tokens
        assert not set(ENDS) & set(answer[:-1])
        assert answer[-1] in ENDS or len(answer) == CONFIG.max_answer_tokens
        assert one.loss_mask.tolist() == [False] * (len(opening) + len(words) + 3) + [True] * len(answer)
    assert len({tuple(parts(one)[1]) for one in found}) == len(found)
    for number, batch in enumerate(batches):
        assert batch.next_index == 4 * (number + 1)
        assert len(batch.dialogues) + sum(batch.dropped.values()) == 4
        assert batch.num_generated >= sum(len(parts(one)[1]) + len(parts(one)[2]) + 1 for one in batch.dialogues)


@pytest.mark.full
def test_a_run_that_is_gone_on_with_equals_one_in_one_go() -> None:
    straight = sampled(4)
    rest = sampled(2, start=straight[1].next_index, earlier=dialogues(straight[:2]))
    assert values(rest) == values(straight[2:])
    assert [batch.dropped for batch in rest] == [batch.dropped for batch in straight[2:]]
    assert values(sampled(1, config=dataclasses.replace(CONFIG, seed=1))) != values(straight[:1])


def test_earlier_dialogues_are_not_repeated() -> None:
    (batch,) = sampled(1)
    (again,) = sampled(1, earlier=batch.dialogues)
    assert again.dialogues == []
    assert again.dropped["repeated"] == len(batch.dialogues) > 0


def test_dialogues_take_temperatures_and_openings_in_turn() -> None:
    batches = sampled(2, config=dataclasses.replace(CONFIG, temperatures=(0.0, 1.5)))
    found = {one: [] for one in ((True, 14), (True, 13), (False, 14), (False, 13))}
    for one in dialogues(batches):
        opening, _, answer = parts(one)
        prompt = one.tokens.tolist()[: len(one.tokens) - len(answer)]
        found[answer == greedy(prompt), len(opening)].append(answer)
    # Greedy and sampled answers behind both openings.
    assert all(found.values()), found


def test_the_loss_counts_on_the_users_words_and_their_end_when_asked() -> None:
    plain, with_users = sampled(2), sampled(2, config=dataclasses.replace(CONFIG, user_loss=True))
    assert len(dialogues(plain)) == len(dialogues(with_users)) > 0
    for one, other in zip(dialogues(plain), dialogues(with_users), strict=True):
        opening, words, answer = parts(one)
        assert one.tokens.tolist() == other.tokens.tolist()
        # + 1: the closing begins with a token that ends a turn.
        expected = [False] * len(opening) + [True] * (len(words) + 1) + [False] * 2 + [True] * len(answer)
        assert other.loss_mask.tolist() == expected
    again = sampled(1, config=dataclasses.replace(CONFIG, user_loss=True), earlier=dialogues(with_users[:1]))
    assert again[0].dropped["repeated"] == len(with_users[0].dialogues)


def test_each_reason_to_drop_a_users_turn_is_counted() -> None:
    config = dataclasses.replace(CONFIG, user_temperature=0.0)
    first = greedy(list(OPENINGS[0]), ignore_eos=True)[:8]
    assert first[4] not in first[:4]
    ends = (first[4],) * len(ENDS)
    chat = dataclasses.replace(CHAT, openings=OPENINGS[:1], user_end_token_ids=ends, special_token_ids=frozenset(ends))
    (batch,) = sampled(1, chat=chat, config=config)
    assert batch.dropped == {"repeated": 3}
    assert batch.dialogues[0].tokens.tolist()[14:18] == first[:4]
    for changes, reason in [
        (dict(special_token_ids=frozenset({first[2]})), "special tokens"),
        (dict(blank_token_ids=frozenset(first[:4])), "empty"),
        (dict(user_end_token_ids=(first[0],) * len(ENDS)), "empty"),
        (dict(user_end_token_ids=(min(set(range(VOCAB_SIZE)) - set(first)),) * len(ENDS)), "too long"),
    ]:
        (batch,) = sampled(1, chat=dataclasses.replace(chat, **changes), config=config)
        assert batch.dropped == {reason: 4}
        assert batch.dialogues == []


def test_dialogues_with_logits_that_are_not_finite_are_dropped() -> None:
    _, params = tiny_target()
    # Token 61 is in the closing only.
    (batch,) = sampled(1, params=params | {"embedding": params["embedding"].at[61].set(jnp.nan)})
    assert batch.dialogues == []
    assert batch.dropped["non-finite logits"] > 0


def test_a_target_that_writes_nothing_to_keep_is_said() -> None:
    chat = dataclasses.replace(CHAT, blank_token_ids=frozenset(range(VOCAB_SIZE)))
    message = r"3 batches of 4 dialogues held none to keep \(dropped from the last: \{.*'empty'.*\}\): does this model write users' turns"
    with pytest.raises(ValueError, match=message):
        sampled(4, chat=chat)


def test_other_seeds_temperatures_and_batches_compile_nothing() -> None:
    sampled(1, config=dataclasses.replace(CONFIG, top_p=0.8))
    before = _generate._cache_size()
    sampled(3, config=dataclasses.replace(CONFIG, seed=5, temperatures=(0.0, 0.7), top_p=0.9))
    assert _generate._cache_size() == before


def test_answers_to_given_prompts_are_those_of_plain_decoding_whatever_batch_they_are_in() -> None:
    prompts = random_prompts((5, 17, 1, 24, 8, 3))
    batches = answered(prompts, dataclasses.replace(CONFIG, temperatures=(0.0,)))
    assert [batch.next_index for batch in batches] == [4, 6]
    expected = [[*prompt, *greedy(prompt)] for prompt in prompts]
    assert [one.tokens.tolist() for one in dialogues(batches)] == expected
    assert [one.loss_mask.tolist().index(True) for one in dialogues(batches)] == [5, 17, 1, 24, 8, 3]
    assert sum(batch.num_generated for batch in batches) == sum(map(len, expected)) - sum(map(len, prompts))
    # Sampled: other neighbours, other rows.
    assert values(answered(prompts, start=3)) == values(answered(prompts))[3:]


def test_prompts_that_cannot_be_answered_are_dropped_and_a_start_passes_over_prompts() -> None:
    good = random_prompts((5, 6, 7, 8, 9))
    prompts = [good[0], [], good[1], None, good[2], [1] * 41, good[3], good[4]]
    batches = answered(prompts)
    assert [batch.next_index for batch in batches] == [7, 8]
    assert [batch.dropped for batch in batches] == [{"empty": 1, "refused by the chat template": 1, "too long": 1}, {}]
    assert [one.tokens[: len(prompt)].tolist() for one, prompt in zip(dialogues(batches), good, strict=True)] == good
    assert values(answered(prompts, start=7)) == values(batches[1:])
    repeated = answered([good[0]] * 4)
    assert len(dialogues(repeated)) == 4
    assert len({tuple(one.tokens) for one in dialogues(repeated)}) > 1


def test_prompts_that_fill_the_last_batch_end_with_it() -> None:
    assert [len(batch.dialogues) for batch in answered(random_prompts((5, 6, 7, 8)))] == [4]
    (batch,) = answered([[], []])
    assert (batch.dialogues, batch.next_index, batch.dropped, batch.num_generated) == ([], 2, {"empty": 2}, 0)
    assert answered([]) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(batch_size=0), "DialogueConfig.batch_size must be a positive int, got 0"),
        (dict(max_answer_tokens=1.5), "DialogueConfig.max_answer_tokens must be a positive int, got 1.5"),
        (dict(temperatures=()), r"DialogueConfig.temperatures must be a tuple of numbers, got \(\)"),
        (dict(temperatures=[1.0]), r"DialogueConfig.temperatures must be a tuple of numbers, got \[1.0\]"),
        (dict(temperatures=(0.5, -1.0)), r"DialogueConfig.temperatures must be 0 \(greedy\) or positive and finite, got -1.0"),
        (dict(user_temperature=float("nan")), r"DialogueConfig.user_temperature must be 0 \(greedy\) or positive and finite, got nan"),
        (dict(top_p=0.0), r"DialogueConfig.top_p must be in \(0, 1\], got 0.0"),
        (dict(user_top_p=1.1), r"DialogueConfig.user_top_p must be in \(0, 1\], got 1.1"),
        (dict(seed=-1), r"DialogueConfig.seed must be an int from 0 to 2\^31 - 1, got -1"),
    ],
)
def test_a_config_checks_itself(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_dialogues_that_could_exceed_the_window_are_refused_before_anything_compiles() -> None:
    with pytest.raises(
        ValueError, match=r"a prompt of up to 317 tokens \(max_user_tokens = 300 and the chat template\) .* = 196 exceed .* 512"
    ):
        sampled(1, config=dataclasses.replace(CONFIG, max_user_tokens=300, max_answer_tokens=196))
    with pytest.raises(ValueError, match=r"a prompt of up to 500 tokens \(max_prompt_tokens\)"):
        answered([[1]], dataclasses.replace(CONFIG, max_prompt_tokens=500))


SHARDED = """
import json, sys
import jax, numpy as np
from specjax.training.sample_dialogues import sample_dialogues
from tests.helpers import tiny_target
from tests.specjax.training.test_sample_dialogues import CHAT, CONFIG, values

target, params = tiny_target()
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(-1, 1), ("data", "model"))
params = jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
batches = sample_dialogues(target, params, CHAT, CONFIG, mesh=mesh)
print(json.dumps([jax.device_count(), values([next(batches), next(batches)])]))
"""


@pytest.mark.full
def test_dialogues_sampled_on_two_devices_are_those_of_one() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    devices, found = json.loads(done.stdout.splitlines()[-1])
    assert devices == 2
    assert [tuple(one) for one in found] == values(sampled(2))
