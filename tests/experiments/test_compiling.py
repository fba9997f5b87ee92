"""Compiling side by side: what is said, what comes back, and what an interrupt leaves."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from typer.testing import CliRunner

from experiments import run
from experiments.compiling import compile_all
from experiments.experiment import Experiment, declarations
from tests.experiments.test_run_experiments import ROW, Example


def test_results_come_back_by_key_and_each_end_is_said(capsys):
    jobs = {(name, 1): (f"program {name}", lambda name=name: name.upper()) for name in "abc"}
    assert compile_all(jobs, threads=2) == {("a", 1): "A", ("b", 1): "B", ("c", 1): "C"}
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "3 of 3 ready" in lines[-1]
    assert {line.rpartition(": ")[2] for line in lines} == {"program a", "program b", "program c"}


def test_the_first_jobs_run_alone():
    running, most = [], {}

    def job(name: int) -> None:
        running.append(name)
        time.sleep(0.02)
        most[name] = len(running)
        running.remove(name)

    jobs = {name: (str(name), lambda name=name: job(name)) for name in range(6)}
    assert list(compile_all(jobs, threads=4, first=2)) == list(jobs)
    assert (most[0], most[1]) == (1, 1)
    assert max(most.values()) > 1


def test_what_a_job_raises_is_raised_and_no_other_job_begins():
    begun = []

    def fails():
        raise ValueError("too large")

    def late():
        begun.append(1)
        time.sleep(0.01)

    with pytest.raises(ValueError, match="too large"):
        compile_all({0: ("fails", fails)} | {index: ("late", late) for index in range(1, 200)}, threads=1)
    assert len(begun) < 199


def test_an_interrupt_ends_the_wait_at_once_and_begins_nothing_more():
    release, begun, main = threading.Event(), [], threading.main_thread()

    def endless():
        begun.append("first")
        assert main.ident is not None
        signal.pthread_kill(main.ident, signal.SIGINT)
        release.wait(60)

    # A shell has what it starts in the background ignore interrupts, and so would this test's process.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            compile_all({0: ("first", endless), 1: ("second", lambda: begun.append("second"))}, threads=1)
        assert not release.is_set()
    finally:
        signal.signal(signal.SIGINT, earlier)
        release.set()
    assert begun == ["first"]


def test_an_interrupted_run_says_which_rows_it_leaves_and_ends_without_waiting(monkeypatch, tmp_path):
    def rows(config):
        yield ROW
        raise KeyboardInterrupt

    def ends(code):
        raise SystemExit(code)

    monkeypatch.setattr(run, "load", lambda name: Experiment(declarations()[0], Example, rows, str))
    monkeypatch.setattr("os._exit", ends)
    result = CliRunner().invoke(run.app, ["acceptance", "--out", str(tmp_path)])
    assert result.exit_code == 130
    assert "interrupted after 1 rows, which are in" in result.stderr
    assert (tmp_path / "acceptance.json.partial").exists()
