"""Scores of answers, against values worked out by hand or published, and intervals of their differences."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from experiments.bootstrap import paired_interval, rate_ratio_interval
from experiments.code_tests import code_of, defines, human_eval_program, mbpp_program, passes
from experiments.text_scores import edit_distance, edit_similarity, exact_match, final_number, rouge_l, same_number

PROBLEM = {
    "prompt": 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """The sum."""\n',
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
MBPP = {"test_list": ["assert half(4) == 2", "assert half(four) == 2"], "test_setup_code": "four = 4"}


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence():
    # Lin's own example (2004, section 3.1): "police killed the gunman" against candidates that share 3 and 2 words in order.
    reference = "police killed the gunman"
    assert rouge_l("police kill the gunman", [reference]) == 1.0  # the stems are the same
    assert rouge_l("the gunman kill police", [reference]) == pytest.approx(0.5)
    assert rouge_l("police ended the gunman", [reference]) == pytest.approx(0.75)
    # 5 of 8 words of the answer, 5 of 9 of the reference.
    first, second = "The quick brown dog jumps on the log.", "The quick brown fox jumps over the lazy dog"
    assert rouge_l(first, [second]) == pytest.approx(2 * 5 / (8 + 9))
    assert rouge_l(first, [second, first]) == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7 eggs\n#### 7", "7"),
        ("It costs $1,234.50.", "1234.50"),
        ("-3 degrees", "-3"),
        ("none", None),
        ("#### 12\n#### -8", "-8"),
        ("#### 5 (since 2 + 3 = 5, for 4 people)", "5"),
        ("#### $18.00 in 2 days", "18.00"),
        ("#### Answer: 5 for 4 people", "5"),
        ("#### Step 1: 3 eggs\nso \\boxed{18}", "18"),
        ("####\n18\n####", "18"),
        ("#### Step 2: add them\n3 + 4 = 7. The answer is 7.", "7"),
        ("#### Conclusion\nHe has 3 apples and 4 pears, so 7 in all.", "7"),
        ("#### 12. Add them up\n2+2 = 4. The answer is 4.", "4"),
        ("#### 2) Add them up\n2+2 = 4. The answer is 4.", "4"),
        ("#### 2 + 3 = 5", "5"),
        ("#### 10 / 2 = $5", "5"),
        ("#### 18.", "18"),
        ("#### The answer is 5, of 12", "5"),
        ("so \\[ \\boxed{12} \\] eggs per day for 7 days.", "12"),
        ("\\boxed{1{,}200}", "1200"),
        ("\\boxed{1\\,000}", "1000"),
        ("\\boxed{\\$1\\!000 \\text{ for 3}} in all, of 4", "1000"),
        ("\\boxed{3 \\times 4 = 12}", "12"),
        ("\\boxed{yes}, 4", "4"),
    ],
)
def test_the_final_number_is_the_one_that_is_given_as_such(text, number):
    found = final_number(text)
    assert (None if found is None else str(found)) == number


def test_numbers_that_are_written_differently_are_the_same():
    assert same_number("The answer is 1,000.00.", "#### 1000") == 1.0
    assert same_number("The answer is 100.", "#### 1000") == 0.0
    assert same_number("I do not know.", "#### 1000") == 0.0


def test_edit_distance_is_levenshteins():
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == edit_distance("abc", "") == 3
    assert edit_distance("flaw", "lawn") == 2


def test_lines_of_code_are_compared_without_indentation_and_what_follows():
    assert exact_match("\n    return x\n    y = 1", "return x") == 1.0
    assert exact_match("return y", "return x") == 0.0
    assert edit_similarity("    return y\n", "return x") == pytest.approx(7 / 8)
    assert edit_similarity("", "") == 1.0


def test_code_is_taken_out_of_an_answer():
    def first(answer):
        return code_of(answer, lambda code: True)

    assert first("Here:\n```python\nx = 1\n```\nThat is it.\n```\ny\n```") == "x = 1\n"
    assert first("```py\nx = 1") == "x = 1"
    assert first("x = 1") == "x = 1"
    assert first("Here:\n```python3\r\nx = 1\n```") == first("1. Here:\n   ```Python\n   x = 1\n   ```").rstrip(" ") == "x = 1\n"
    assert code_of("```\nx = 1\n```\n```c++\ny\n```", lambda code: "y" in code) == "y\n"
    assert code_of("```\n    x = 1\n```\n```\ny\n```", lambda code: "z" in code) == "    x = 1\n"


@pytest.mark.parametrize(("code", "is_one"), [("def f(): pass", True), ("f = lambda: 1", True), ("x = 1", False), ("pip install x", False)])
def test_a_definition_is_a_function_or_a_class(code, is_one):
    assert defines(code) is is_one


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return sum(numbers)\n\nprint(total(3))", True),  # the rest of the prompt's function; what follows is cut off
        ("Sure.\n```python\ndef total(numbers: List[int]) -> int:\n    return sum(numbers)\n```", True),  # its imports are the prompt's
        ("    return len(numbers)\n", False),
        ("    exit(0)\n", False),  # ends without an error, but before the tests
        ("    return (", False),
        ("```bash\npip install x\n```\n```python\ndef total(numbers):\n    return sum(numbers)\n```", True),
        ("1. So:\n   ```python3\n   def total(numbers):\n       return sum(numbers)\n   ```", True),
        ("```python\n    return sum(numbers)\n```", True),
        ("def total(numbers):\n    return sum(numbers)\n\nif __name__ == '__main__':\n    print(total([int(input())]))", True),
        ("def total(numbers):\n    return sum(numbers)\n\nif __name__ == '__main__':\n    import unittest\n    unittest.main()", True),
    ],
)
def test_human_eval_answers_pass_by_their_test_alone(answer, right):
    assert passes(human_eval_program(PROBLEM, answer)) is right


def test_mbpp_answers_pass_by_their_asserts_alone():
    assert passes(mbpp_program(MBPP, "```python\ndef half(x):\n    return x // 2\n```"))
    assert not passes(mbpp_program(MBPP, "def half(x):\n    return x"))
    assert passes(mbpp_program(MBPP, "For 4:\n```\n4\n```\nI write\n```python\ndef half(x):\n    return x // 2\n```"))


def test_a_program_is_a_module_of_its_own():
    assert passes(
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nassert A(1).x == 1"
    )


def test_a_program_is_ended_at_its_limits():
    assert not passes("while True: pass", seconds=1)
    assert not passes("import time; time.sleep(60)", seconds=1)
    assert not passes("x = bytearray(1 << 28)", memory_bytes=1 << 27)
    assert passes("x = bytearray(1 << 28)", memory_bytes=1 << 30)
    with pytest.raises(ValueError, match="seconds=0"):
        passes("", seconds=0)


def test_what_a_program_started_is_ended_with_it(tmp_path):
    started, ended = tmp_path / "started", tmp_path / "ended"
    child = f"open({str(started)!r}, 'w')\n    time.sleep(0.5)\n    open({str(ended)!r}, 'w')\n    os._exit(0)"
    wait = f"while not os.path.exists({str(started)!r}): pass"
    assert passes(f"import os, time\nif os.fork() == 0:\n    {child}\n{wait}")
    time.sleep(1.0)
    assert not ended.exists()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes that left the group are found by their environment")
def test_what_left_its_group_is_ended_too_though_it_keeps_writing(tmp_path):
    ticks = tmp_path / "ticks"
    writes = f"open(str(time.time_ns()), 'w')\n        open({str(ticks)!r}, 'a').write('x')"
    child = f"os.setsid()\n    while True:\n        {writes}\n        time.sleep(0.001)"
    assert passes(f"import os, time\nif os.fork() == 0:\n    {child}\nwhile not os.path.exists({str(ticks)!r}): pass")
    size = ticks.stat().st_size
    time.sleep(0.1)
    assert ticks.stat().st_size == size


def test_a_program_sees_neither_this_environment_nor_installed_packages(monkeypatch):
    monkeypatch.setenv("SOME_SETTING", "secret")
    assert passes("import os\nassert 'SOME_SETTING' not in os.environ\nassert os.listdir() == []")
    assert not passes("import numpy")


def test_the_paired_interval_is_that_of_the_normal_law_for_many_prompts():
    rng = np.random.default_rng(1)
    first = rng.random(2000)
    second = first + rng.normal(0.1, 0.2, 2000)
    low, high = paired_interval(first, second, seed=3)
    mean, half = (second - first).mean(), 1.96 * (second - first).std() / 2000**0.5
    # The quantiles of 10,000 draws scatter by a few hundredths of the interval's width.
    assert low == pytest.approx(mean - half, abs=half / 10)
    assert high == pytest.approx(mean + half, abs=half / 10)
    assert paired_interval(first, second, seed=3) == (low, high)


def test_equal_scores_have_an_interval_of_nothing_and_wrong_ones_are_refused():
    assert paired_interval([1.0, 0.0], [1.0, 0.0]) == (0.0, 0.0)
    with pytest.raises(ValueError, match="got 1 and 2"):
        paired_interval([1.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="got 0 and 0"):
        paired_interval([], [])
    with pytest.raises(ValueError, match="level"):
        paired_interval([1.0], [1.0], level=1.0)


def test_the_interval_of_a_ratio_of_rates_is_that_of_the_normal_law_for_many_prompts():
    rng, prompts = np.random.default_rng(0), 400
    steps = rng.integers(20, 60, prompts)
    lengths = rng.normal([2.0, 3.0], 0.4, (prompts, 2)) + rng.normal(0, 0.5, (prompts, 1))  # what is easy is easy for both
    first, second = (([*(steps * lengths[:, n])], [*steps]) for n in range(2))
    low, high = rate_ratio_interval([first], [second], seed=3)
    ratio = np.sum(second[0]) / np.sum(first[0])
    # The delta method: residuals of the ratio, prompt by prompt.
    error = 1.96 * np.std(np.array(second[0]) - ratio * np.array(first[0])) / np.mean(first[0]) / np.sqrt(prompts)
    assert ratio == pytest.approx(1.5, abs=0.05)
    assert (low, high) == (pytest.approx(ratio - error, abs=0.15 * error), pytest.approx(ratio + error, abs=0.15 * error))
    # Of two sets that are the same half of the variance is left.
    narrow = rate_ratio_interval([first, first], [second, second], seed=3)
    assert narrow[1] - narrow[0] == pytest.approx((high - low) / np.sqrt(2), rel=0.1)


def test_a_rate_is_the_mean_of_the_sets_whatever_their_sizes():
    first, second = [([2.0], [1.0]), ([8.0] * 3, [2.0] * 3)], [([4.0], [1.0]), ([4.0] * 3, [2.0] * 3)]
    assert rate_ratio_interval(first, second) == (1.0, 1.0)  # (4 + 2) / (2 + 4)


def test_prompts_without_steps_count_nothing_and_wrong_rates_are_refused():
    some = ([3.0, 0.0], [1.0, 0.0])
    assert rate_ratio_interval([some], [([6.0, 0.0], [1.0, 0.0])]) == (2.0, 2.0)
    for first, second in (([some], [([1.0], [1.0])]), ([], []), ([([], [])], [([], [])]), ([some], [([0.0, 0.0], [0.0, 0.0])])):
        with pytest.raises(ValueError, match="a ratio of rates needs"):
            rate_ratio_interval(first, second)
    with pytest.raises(ValueError, match="level must be"):
        rate_ratio_interval([some], [some], level=0.0)
