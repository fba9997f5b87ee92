"""How good an answer is, from 0 to 1: ROUGE-L, exact match of a final number, edit similarity and exact match of a line."""

from __future__ import annotations

import decimal
import functools
import importlib.util
import re
from collections.abc import Sequence

from experiments.experiment import ExperimentError

# A number with thousands separators or without, the sign and decimals included.
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# What LaTeX writes between digits, or before them.
_TYPESETTING = re.compile(r"\{,\}|\\[,!$]")
# A number behind the mark that GSM8K's solutions end with, but for signs such as a currency's and the word "answer"; other words make the
# line a heading, and so do a full stop or a bracket behind the number and a word behind that.
_MARKED = re.compile(
    rf"####[^\w\n-]*(?:(?:the )?(?:final )?answer\b(?: is\b)?[^\w-]*)?((?>{_NUMBER.pattern}))(?![.)]\s+[^\W\d])([^\n]*)", re.IGNORECASE
)
_CALCULATED = re.compile(r"\s*(?:[-+*/×÷=]|\\times|\\div)")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """The best F-measure of the longest common subsequence of stemmed words: ROUGE-L as summaries are usually scored.

    Args:
        answer: What was generated.
        references: Good answers, at least one.

    Reference: Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004; computed by the package rouge-score.
    """
    return float(max(_rouge_scorer().score(reference, answer)["rougeL"].fmeasure for reference in references))


def require_rouge() -> None:
    """Whether ROUGE-L can be computed here: to be asked before hours of decoding.

    Raises:
        ExperimentError: Its package is not installed.
    """
    if importlib.util.find_spec("rouge_score") is None:
        raise ExperimentError('ROUGE-L is computed by the package rouge-score, which is not installed: pip install "specjax[scores]"')


@functools.cache
def _rouge_scorer():
    # Imported here: an extra of the project, which only summaries need.
    from rouge_score import rouge_scorer

    return rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)


def final_number(text: str) -> decimal.Decimal | None:
    r"""The number that a worked solution gives as its own; `None` without any.

    The first of these that there is: what directly follows the last `####`, of an equation what stands behind its `=`; what the last
    `\boxed{...}` holds, likewise; the last number of all. Behind an answer stand units and remarks, which have numbers too.
    """
    text = _TYPESETTING.sub("", text)
    marked, boxed = _MARKED.match(text[text.rfind("####") :]) if "####" in text else None, _BOXED.findall(text)
    found: list[str] = []
    if marked:
        found = [marked[1]]
        if _CALCULATED.match(marked[2]):
            found = _NUMBER.findall(marked[2].rpartition("=")[2])[:1] or found
    elif boxed:
        found = _NUMBER.findall(boxed[-1].rpartition("=")[2])
    found = found or _NUMBER.findall(text)[-1:]
    return decimal.Decimal(found[0].replace(",", "")) if found else None


def same_number(answer: str, reference: str) -> float:
    """1 if both end with the same number: exact match as on GSM8K."""
    ours = final_number(answer)
    return float(ours is not None and ours == final_number(reference))


def first_line(answer: str) -> str:
    """What a completion says for the line that it was asked for: its first line that is not empty, without the spaces around it."""
    return next((line.strip() for line in answer.splitlines() if line.strip()), "")


def exact_match(answer: str, reference: str) -> float:
    """1 if the first lines are the same."""
    return float(first_line(answer) == first_line(reference))


def edit_similarity(answer: str, reference: str) -> float:
    """`1 - Levenshtein distance / length of the longer` of the first lines; two empty ones are the same."""
    ours, theirs = first_line(answer), first_line(reference)
    longer = max(len(ours), len(theirs))
    return 1 - edit_distance(ours, theirs) / longer if longer else 1.0


def edit_distance(first: str, second: str) -> int:
    """The fewest insertions, deletions and replacements of characters that make one of the other (Levenshtein)."""
    costs = list(range(len(second) + 1))
    for row, ours in enumerate(first, 1):
        diagonal, costs[0] = costs[0], row
        for column, theirs in enumerate(second, 1):
            diagonal, costs[column] = costs[column], min(costs[column] + 1, costs[column - 1] + 1, diagonal + (ours != theirs))
    return costs[-1]
