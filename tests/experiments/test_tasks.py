"""Tasks from files as they are published, and from a library; how prompts are cut."""

from __future__ import annotations

import dataclasses
import gzip
import json

import pytest

from experiments.experiment import ExperimentError
from experiments.long_code import library_folder, long_code_prompts
from experiments.prompts import load_prompts, spread
from experiments.tasks import TASKS, TaskSource
from tests.tiny_checkpoint import byte_tokenizer

MEETING = {
    "meeting_transcripts": [
        {"speaker": "Ann", "content": "We start. " + "x" * 200},
        {"speaker": "Bob", "content": "The vote is on Monday."},
    ],
    "general_query_list": [{"query": "Summarise the meeting.", "answer": "The vote is on Monday."}],
    "specific_query_list": [{"query": "When is the vote?", "answer": "On Monday."}, {"query": "Who starts?", "answer": "Ann."}],
}
HUMAN_EVAL = {"task_id": "HumanEval/0", "prompt": "def one():\n", "entry_point": "one", "test": "def check(f):\n    assert f() == 1\n"}
MBPP = {"task_id": 1, "text": "Write a function that gives 2.", "test_list": ["assert two() == 2"], "test_setup_code": ""}
GSM8K = {"question": "How much is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"}
RIGHT = {
    "qmsum_summary": "The vote is on Monday.",
    "qmsum_questions": "On Monday.",
    "humaneval": "```python\ndef one():\n    return 1\n```",
    "mbpp": "```python\ndef two():\n    return 2\n```",
    "gsm8k": "It is\n#### 7",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The sets, in two folders, and a small library."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    (first / "qmsum_test.jsonl").write_text(json.dumps(MEETING) + "\n")
    with gzip.open(second / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(HUMAN_EVAL) + "\n")
    (second / "mbpp.jsonl").write_text(json.dumps(MBPP) + "\n")
    (second / "gsm8k_test.jsonl").write_text("\n".join(json.dumps(GSM8K | {"question": f"{n}: 3 + 4?"}) for n in range(5)))
    library = tmp_path_factory.mktemp("library") / "shapes"
    for package in ("flat", "solid"):
        (library / package).mkdir(parents=True)
        for name in "abcdef":
            lines = [f"def {package}_{name}_{n}(x): return x + {n}" for n in range(40)]
            (library / package / f"{name}.py").write_text("\n".join(lines))
    (library / "__init__.py").write_text("")
    return (str(first), str(second)), str(library)


def source(given, **changes) -> TaskSource:
    options = dict(folders=given[0], library=given[1], text="", count=None, max_prompt_tokens=8000, tokenizer=byte_tokenizer())
    return TaskSource(**(options | changes))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_scores_one_and_nonsense_less(folders, name):
    task = source(folders).load(name)
    for metric in task.metrics:
        assert task.examples[0].scores[metric](RIGHT[name]) == 1.0
        assert task.examples[0].scores[metric]("nonsense") < 0.2


def test_questions_about_a_meeting_stand_behind_its_transcript(folders):
    questions, summary = source(folders).load("qmsum_questions"), source(folders).load("qmsum_summary")
    assert (len(questions.examples), len(summary.examples)) == (2, 1)
    assert questions.examples[1].after.endswith("Who starts?")
    assert questions.examples[1].context.startswith("Ann: We start.")


def test_a_context_that_is_too_long_is_cut_in_its_middle(folders):
    short = source(folders, max_prompt_tokens=250)
    task = short.load("qmsum_summary")
    (whole,), (cut,) = source(folders).encode(task), short.encode(task)
    assert len(whole) > 250 >= len(cut) > 200
    text = short.tokenizer.decode(cut)
    assert text.startswith("<u>Below is the transcript")
    assert "Ann: We start." in text
    assert "on Monday.\n\nAnswer" in text
    assert text.endswith("Summarise the meeting.<a>")
    with pytest.raises(ExperimentError, match="the most is 60"):
        source(folders, max_prompt_tokens=60).encode(task)


def test_sets_are_found_in_any_folder_and_as_a_file_and_spread(folders):
    (first, _), _ = folders
    questions = [example.before for example in source(folders, count=2).load("gsm8k").examples]
    assert [question[0] for question in questions] == ["0", "2"]
    assert source(folders, folders=(f"{first}/qmsum_test.jsonl",)).load("qmsum_summary").examples
    with pytest.raises(ExperimentError, match=r"humaneval needs HumanEval.jsonl\* in one of the folders"):
        source(folders, folders=(first,)).load("humaneval")
    with pytest.raises(ExperimentError, match="gsm8k: at least one prompt is needed, got 0"):
        source(folders, count=0).load("gsm8k")
    with pytest.raises(ExperimentError, match="there is no task 'other'; there are qmsum_summary"):
        source(folders).load("other")


def test_examples_and_prompts_are_spread_over_the_whole_set(tmp_path):
    assert spread([1, 2, 3], 5) == spread([1, 2, 3], None) == [1, 2, 3]
    assert spread(list(range(10)), 5) == [0, 2, 4, 6, 8]
    assert spread(list(range(10)), 6) == [0, 1, 3, 5, 6, 8]  # more than half of them: not the first six
    assert spread(list(range(80)), 32)[-1] == 77
    (tmp_path / "set.jsonl").write_text("".join(json.dumps({"turns": [f"{number}"]}) + "\n" for number in range(10)))
    assert load_prompts(tmp_path, "set", 6) == ["0", "1", "3", "5", "6", "8"]


def test_answers_have_room_for_what_their_task_asks_for(folders):
    rooms = {name: source(folders).load(name).new_tokens for name in ("gsm8k", "humaneval", "mbpp", "qmsum_summary")}
    assert rooms == {"gsm8k": 512, "humaneval": 384, "mbpp": 384, "qmsum_summary": 128}


def test_a_score_that_cannot_be_computed_is_refused_before_anything_is_decoded(folders, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ExperimentError, match="rouge-score, which is not installed"):
        source(folders).load("qmsum_summary")
    assert source(folders).load("gsm8k").examples


def test_a_line_that_is_not_as_published_is_named(folders, tmp_path):
    (tmp_path / "mbpp.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "HumanEval.jsonl.gz").write_text("not compressed")
    with pytest.raises(ExperimentError, match="humaneval: HumanEval.jsonl.gz is not as published"):
        source(((str(tmp_path),), "")).load("humaneval")
    with pytest.raises(ExperimentError, match="mbpp: a line has no field 'test_list'"):
        source(folders, folders=(str(tmp_path),)).load("mbpp")


def test_long_code_fills_its_prompt_with_files_nearest_last_and_asks_for_the_next_line(folders):
    prompts = long_code_prompts(folders[1], count=3, tokens=10_000, num_tokens=len)
    for prompt in prompts:
        assert 9_000 < len(prompt.text) <= 10_000
        shown = [line.removeprefix("# shapes/") for line in prompt.text.splitlines() if line.startswith("#")]
        assert len(set(shown)) == len(shown) > 6
        package = shown[-1].partition("/")[0]
        near = [name.startswith(package) for name in shown]
        assert near == sorted(near)  # the other package's files stand first
        assert prompt.next_line.startswith(f"def {package}_")
        assert prompt.next_line not in prompt.text
    assert len({prompt.text for prompt in prompts}) == 3
    assert prompts == long_code_prompts(folders[1], count=3, tokens=10_000, num_tokens=len)


def test_long_code_is_a_bare_text_with_two_metrics(folders):
    code = source(folders, count=2, max_prompt_tokens=6000)
    task = code.load("long_code")
    assert task.metrics == ["exact_match", "edit_similarity"]
    tokens = code.encode(task)
    assert all(5000 < len(row) <= 6000 for row in tokens)
    assert code.tokenizer.decode(tokens[0]) == task.examples[0].context
    assert dataclasses.replace(code, count=1).load("long_code").examples[0].context == task.examples[0].context


def test_a_text_is_cut_into_prompts_and_what_really_follows(folders, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{number:03} " for number in range(100)))
    whole = source(folders, text=str(path), max_prompt_tokens=24)
    task = whole.load("text")
    assert [len(example.before) for example in task.examples] == [20] * 10
    assert task.examples[1].before + task.examples[1].continuation == "010 011 012 013 014 015 016 017 018 019 "
    assert task.metrics == []
    assert whole.encode(task)[0] == whole.tokenizer("000 001 002 003 004 ")["input_ids"]
    with pytest.raises(ExperimentError, match="has 400 tokens, a piece has 792"):
        source(folders, text=str(path), max_prompt_tokens=400).load("text")
    with pytest.raises(ExperimentError, match="text needs text=FILE"):
        source(folders).load("text")


def test_a_library_is_a_folder_or_a_package_and_must_be_large_enough(folders):
    assert (library_folder("experiments") / "long_code.py").is_file()
    with pytest.raises(ExperimentError, match="got 'no_such_package'"):
        library_folder("no_such_package")
    with pytest.raises(ExperimentError, match="4 are wanted"):
        long_code_prompts(folders[1], count=4, tokens=10**6, num_tokens=len)


def test_every_task_has_a_test_here():
    assert {*RIGHT, "long_code", "text"} == set(TASKS)
