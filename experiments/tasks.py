"""Tasks whose answers can be scored: meetings to summarise and ask about, code to write or complete, sums to work out.

The data are the user's, under their published names and in their published form: `qmsum_test.jsonl` (or any `qmsum*.jsonl`),
`HumanEval.jsonl.gz`, `mbpp.jsonl`, `gsm8k_test.jsonl`, in any of the folders given. `long_code` is made of an installed library, `text` of
any plain text: each piece of it is a prompt, and what follows is to be predicted.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.code_tests import human_eval_program, mbpp_program, passes
from experiments.experiment import ExperimentError
from experiments.long_code import long_code_prompts
from experiments.prompts import encode, spread
from experiments.text_scores import edit_similarity, exact_match, require_rouge, rouge_l, same_number

Score = Callable[[str], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt, and how an answer to it is scored.

    Attributes:
        before: How the prompt begins.
        context: What follows, of which the middle may be cut where the model's window is too small.
        after: How it ends.
        scores: By the metric's name, from an answer to a number from 0 to 1.
        continuation: What really follows, where that is what a model is judged by; no answer is scored then.
    """

    before: str
    context: str = ""
    after: str = ""
    scores: dict[str, Score] = dataclasses.field(default_factory=dict)
    continuation: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A set of examples that are scored alike.

    Attributes:
        name: The set's.
        examples: In order.
        chat: Prompts are user messages; `False` where the model just goes on writing.
        new_tokens: That answers have room for, where nothing else is asked for.
    """

    name: str
    examples: list[Example]
    chat: bool = True
    new_tokens: int = 128

    @property
    def metrics(self) -> list[str]:
        """What answers are scored by."""
        return list(self.examples[0].scores)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSource:
    """Where tasks come from, and how large they may be.

    Attributes:
        folders: Folders, or files, of data.
        library: What `long_code` is made of: an installed package or a folder.
        text: What `text` is made of: a file.
        count: Examples, spread evenly over a set; `None` is all (of `long_code` 32).
        max_prompt_tokens: The most that a prompt has.
        tokenizer: The target's.
        chat_template: Prompts of chat tasks are user messages in the tokenizer's own template; `False` takes them as bare text.
    """

    folders: tuple[str, ...]
    library: str
    text: str
    count: int | None
    max_prompt_tokens: int
    tokenizer: Any
    chat_template: bool = True

    def load(self, name: str) -> Task:
        """A task by name.

        Raises:
            ExperimentError: There is none of that name, fewer than one example is wanted, its data are in no folder, a line of them is not
                as published, or what scores it is not installed.
        """
        if self.count is not None and self.count < 1:
            raise ExperimentError(f"{name}: at least one prompt is needed, got {self.count}")
        if name not in TASKS:
            raise ExperimentError(f"there is no task {name!r}; there are {', '.join(TASKS)}")
        if name == "long_code":
            return _long_code(self)
        if name == "text":
            return _text(self)
        pattern, examples_of = _FILES[name]
        if name.startswith("qmsum"):
            require_rouge()
        lines = _read(self.folders, name, pattern)
        try:
            examples = [example for line in lines for example in examples_of(line)]
        except KeyError as error:
            raise ExperimentError(f"{name}: a line has no field {error}, see how the set is published") from None
        return Task(name=name, examples=spread(examples, self.count), new_tokens=_NEW_TOKENS.get(name, Task.new_tokens))

    def encode(self, task: Task) -> list[list[int]]:
        """Token ids of a task's prompts, their contexts cut in the middle where they are too long.

        Raises:
            ExperimentError: A prompt that is too long without any context, or a chat template that the tokenizer has not.
        """
        return [self._encode(task, example) for example in task.examples]

    def _encode(self, task: Task, example: Example) -> list[int]:
        context = self.tokenizer(example.context, add_special_tokens=False, verbose=False)["input_ids"]
        room = len(context)
        while True:
            text = example.context if room == len(context) else self._cut(context, room)
            prompt = example.before + text + example.after
            (tokens,) = encode(self.tokenizer, [prompt], chat_template=self.chat_template and task.chat)
            over = len(tokens) - self.max_prompt_tokens
            if over <= 0:
                return tokens
            if room == 0:
                raise ExperimentError(f"{task.name}: a prompt has {len(tokens)} tokens, the most is {self.max_prompt_tokens}")
            room = max(room - over, 0)  # text of cut tokens may have other tokens at the seam: once more, then

    def _cut(self, context: Sequence[int], room: int) -> str:
        head, tail = context[: room // 2], context[len(context) - (room - room // 2) :]
        return self.tokenizer.decode(head) + " … " + self.tokenizer.decode(tail) if room else ""


def _read(folders: Sequence[str], name: str, pattern: str) -> list[dict]:
    """The lines of the first file of that name."""
    for folder in folders:
        path = Path(folder).expanduser()
        found = [path] if path.is_file() and path.match(pattern) else sorted(path.glob(pattern))
        for file in found[:1]:
            with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
                try:
                    return [json.loads(line) for line in lines if line.strip()]
                except (UnicodeDecodeError, json.JSONDecodeError, gzip.BadGzipFile) as error:
                    raise ExperimentError(f"{name}: {file.name} is not as published: {error}") from None
    raise ExperimentError(f"{name} needs {pattern} in one of the folders {', '.join(folders) or '(none given)'}: give data=FOLDER,...")


def _qmsum(kind: str) -> Callable[[dict], list[Example]]:
    """Queries of the whole meeting (`general_query_list`), or questions about parts of it (`specific_query_list`)."""

    def examples(meeting: dict) -> list[Example]:
        transcript = "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in meeting["meeting_transcripts"])
        return [
            Example(
                before="Below is the transcript of a meeting.\n\n",
                context=transcript,
                after=f"\n\nAnswer in a few sentences, from the transcript alone.\n{query['query']}",
                scores={"rouge_l": lambda answer, reference=query["answer"]: rouge_l(answer, [reference])},
            )
            for query in meeting[kind]
        ]

    return examples


def _gsm8k(problem: dict) -> list[Example]:
    before = f"{problem['question']}\n\nThink step by step, and give the final number on a last line as: #### number"
    return [Example(before=before, scores={"exact_match": lambda answer: same_number(answer, problem["answer"])})]


def _human_eval(problem: dict) -> list[Example]:
    before = f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{problem['prompt']}```"
    return [Example(before=before, scores={"pass_at_1": lambda answer: float(passes(human_eval_program(problem, answer)))})]


def _mbpp(problem: dict) -> list[Example]:
    tests = "\n".join(problem["test_list"])
    before = f"{problem['text']}\nAnswer with Python code in one code block. These tests must pass:\n\n```python\n{tests}\n```"
    return [Example(before=before, scores={"pass_at_1": lambda answer: float(passes(mbpp_program(problem, answer)))})]


def _long_code(source: TaskSource) -> Task:
    prompts = long_code_prompts(
        source.library,
        count=source.count or 32,
        tokens=source.max_prompt_tokens - 16,  # files tokenised together may have a few tokens more than one by one
        num_tokens=lambda text: len(source.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]),
    )
    examples = [
        Example(
            before="",
            context=prompt.text,
            scores={
                "exact_match": lambda answer, line=prompt.next_line: exact_match(answer, line),
                "edit_similarity": lambda answer, line=prompt.next_line: edit_similarity(answer, line),
            },
        )
        for prompt in prompts
    ]
    return Task(name="long_code", examples=examples, chat=False)


def _text(source: TaskSource) -> Task:
    path = Path(source.text).expanduser()
    if not path.is_file():
        raise ExperimentError(f"text needs text=FILE, got {source.text!r}")
    tokens = source.tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    # Half of a piece is the prompt, cut again once decoded: a few tokens short of it.
    half = source.max_prompt_tokens - 4
    pieces = [tokens[at : at + 2 * half] for at in range(0, len(tokens) - 2 * half + 1, 2 * half)]
    if not pieces:
        raise ExperimentError(f"{path.name} has {len(tokens)} tokens, a piece has {2 * half}: give a smaller max_prompt_tokens")
    decode = source.tokenizer.decode
    examples = [Example(before=decode(piece[:half]), continuation=decode(piece[half:])) for piece in spread(pieces, source.count)]
    return Task(name="text", examples=examples, chat=False)


_FILES: dict[str, tuple[str, Callable[[dict], list[Example]]]] = {
    "qmsum_summary": ("qmsum*.jsonl", _qmsum("general_query_list")),
    "qmsum_questions": ("qmsum*.jsonl", _qmsum("specific_query_list")),
    "humaneval": ("HumanEval.jsonl*", _human_eval),
    "mbpp": ("mbpp.jsonl*", _mbpp),
    "gsm8k": ("gsm8k_test.jsonl*", _gsm8k),
}
# A worked solution, or a whole function with some words about it.
_NEW_TOKENS = {"gsm8k": 512, "humaneval": 384, "mbpp": 384}
TASKS = (*_FILES, "long_code", "text")
