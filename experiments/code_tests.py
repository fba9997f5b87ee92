"""Whether generated code passes its tests (pass@1), each program in a process of its own with limits of time and memory.

The process runs an isolated interpreter in a folder that is deleted afterwards, without this one's environment or input. That keeps honest
mistakes from harm: endless loops, runaway memory, large files. It is no jail for code that means harm, and does not cut off the network.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

_FENCED = re.compile(r"(?P<indent>^[ \t]*)?```[\w+-]*[ \t]*\r?\n(?P<code>.*?)(?:```|\Z)", re.DOTALL | re.MULTILINE)
# What begins at the margin behind a completed function: the completion is over.
_NEXT_STATEMENT = re.compile(r"\n(?=(?:def|class|if|print|assert|for|import|from)\b|[#@`])")
# A status that no program ends with by chance or by `sys.exit()`.
_PASSED = 117
# Looks for processes that left a program's group: what they start meanwhile is found in the next one.
_ROUNDS = 10

# Limits are set in the process itself, before the program: a function run between fork and exec could block in a process with threads.
# The program is a module that was imported: what an answer does as a script (its own tests, asking for input) is left out.
_RUNNER = """
import os, resource, sys, types
end, (seconds, memory, size) = os._exit, map(int, sys.argv[1:])
for name, limit in (("CPU", seconds), ("AS", memory), ("FSIZE", size), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
module = sys.modules["program"] = types.ModuleType("program")
exec(compile(sys.stdin.read(), "program", "exec"), module.__dict__)
end(%d)
"""


def passes(program: str, *, seconds: float = 10.0, memory_bytes: int = 1 << 30) -> bool:
    """Runs a program, tests at its end, and says whether it reached the end without an error.

    Args:
        program: Python source.
        seconds: Wall time that it may take, interpreter's start included.
        memory_bytes: Address space that it may take.

    Raises:
        ValueError: A limit that is not positive.
    """
    if seconds <= 0 or memory_bytes <= 0:
        raise ValueError(f"limits must be positive, got {seconds=} and {memory_bytes=}")
    limits = (int(seconds) + 1, memory_bytes, 1 << 20)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # what a program left there may resist
        # -I: neither the environment nor the user's packages; -S: no installed ones; -B: no bytecode.
        command = [sys.executable, "-I", "-S", "-B", "-c", _RUNNER % _PASSED, *map(str, limits)]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that what it starts can be ended with it
        )
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end_all(process, folder)
    return process.returncode == _PASSED


def _end_all(process: subprocess.Popen, folder: str) -> None:
    """Ends a program and what it started: its process group, and where the system shows environments (Linux) those that left the group."""
    with contextlib.suppress(ProcessLookupError):  # it has ended, and so has all that stayed with it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(_ROUNDS):
        escaped = _started_in(folder)
        if not escaped:
            return
        for number in escaped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def _started_in(folder: str) -> list[int]:
    """Processes whose environment names the folder, which is one program's own."""
    found, mark = [], f"HOME={folder}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def code_of(answer: str, is_wanted: Callable[[str], bool]) -> str:
    """The code in a chat model's answer: the first fenced block that is wanted, or the first one, or without any all of it.

    A fence that is left open goes to the end. Blocks lose the indentation of their fence, and those that are wanted all that they have.
    """
    blocks = [re.sub(rf"^{found['indent'] or ''}", "", found["code"], flags=re.MULTILINE) for found in _FENCED.finditer(answer)] or [answer]
    return next((code for code in map(textwrap.dedent, blocks) if is_wanted(code)), blocks[0])


def defines(code: str) -> bool:
    """Whether this is Python, with a function or a class in it."""
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    named = [statement.value if isinstance(statement, ast.Assign) else statement for statement in statements]
    return any(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda) for each in named)


def human_eval_program(problem: dict, answer: str) -> str:
    """The program that a HumanEval problem's test makes of an answer.

    Args:
        problem: A line of the set: `prompt`, `entry_point`, `test`.
        answer: A whole function in a fenced block or bare, or the rest of the prompt's.
    """
    entry_point = re.compile(rf"^(?:async )?def {re.escape(problem['entry_point'])}\b", re.MULTILINE)
    code = code_of(answer, lambda code: entry_point.search(code) is not None)
    whole = entry_point.search(code)
    # The prompt stands first in both cases: its imports and helpers count for a whole function too, which replaces its own.
    completed = f"{problem['prompt']}    pass\n\n{code}" if whole else problem["prompt"] + _NEXT_STATEMENT.split(code)[0]
    return f"{completed}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"


def mbpp_program(problem: dict, answer: str) -> str:
    """The program that an MBPP problem's asserts make of an answer.

    Args:
        problem: A line of the set: `test_list`, `test_setup_code`.
        answer: The code, in a fenced block or bare.
    """
    return "\n".join([code_of(answer, defines), problem.get("test_setup_code") or "", *problem["test_list"], ""])
