"""The runner: listing, `key=value` settings, and JSON that is never half written."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.experiment import ExperimentError, changed, declarations, local_field, parse_config, path_field, portable
from experiments.record import REPOSITORY, Record, collect, git_sha, write_json
from experiments.run import RESULTS, app

TOP_KEYS = {"experiment", "question", "command", "git_sha", "versions", "device", "config", "rows"}
VERSIONS = {"python", "jax", "jaxlib", "flax", "numpy", "specjax", "XLA_FLAGS"}
DEVICE = {"kind", "count", "platform", "memory_bytes"}
RECORD = Record(experiment="name", question="?", command="python", git_sha="abc", config={})
ROW = {"implementation": "reference", "weights": "random", "synthetic": False}


@dataclasses.dataclass(frozen=True)
class Example:
    count: int = 1
    rate: float = 0.5
    flag: bool = False
    name: str = "a"
    sizes: tuple[int, ...] = (1, 2)
    words: tuple[str, ...] = ()
    limit: int | None = None
    folder: str | None = path_field()
    cache: str | None = local_field()


def test_settings_are_parsed_by_their_type():
    words = ["count=3", "rate=1e-2", "flag=true", "name=b=c", "sizes=4,5", "words=x", "limit=7", "folder=/some/where/model"]
    config = parse_config(Example, words)
    assert config == Example(count=3, rate=0.01, flag=True, name="b=c", sizes=(4, 5), words=("x",), limit=7, folder="/some/where/model")
    assert parse_config(Example, ["sizes=", "limit=none"]) == Example(sizes=())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("cuont=1", r"unknown key 'cuont'; known keys: count \(int\), rate \(float\), flag \(true or false\)"),
        ("count=x", "count must be int, got 'x'"),
        ("count=1.5", "count must be int, got '1.5'"),
        ("flag=1", "flag must be true or false, got '1'"),
        ("sizes=1,b", "sizes must be a comma-separated list of int, got '1,b'"),
        ("limit=many", "limit must be int or none, got 'many'"),
        ("count", "expected key=value, got 'count'"),
    ],
)
def test_bad_settings_name_what_was_expected_and_what_came(word, message):
    with pytest.raises(ExperimentError, match=message):
        parse_config(Example, [word])


def test_a_key_given_twice_is_refused():
    with pytest.raises(ExperimentError, match="'count' is given twice"):
        parse_config(Example, ["count=1", "count=2"])


def test_records_hold_no_folders_of_this_machine():
    config = Example(folder="/some/where/model", sizes=(3,), cache="/some/where/else")
    assert portable(config)["folder"] == "model"
    assert "cache" not in portable(config)
    assert changed(config) == ["sizes=3", "folder=model"]


def test_every_experiment_declares_itself_and_the_list_shows_it():
    found = declarations()
    assert {declaration.name for declaration in found} >= {"acceptance", "decode_latency", "quickstart"}
    shown = CliRunner().invoke(app, [])
    assert shown.exit_code == 0
    for declaration in found:
        assert declaration.name in shown.output
        assert declaration.command.startswith(f"python -m experiments.run {declaration.name}")
        assert declaration.question.endswith("?")


def test_a_run_writes_the_whole_json(tmp_path):
    words = [
        "decode_latency",
        "model=tiny",
        "modes=decode",
        "contexts=64",
        "rows=1",
        "copy_mib=1",
        "short_steps=1",
        "long_steps=2",
        "repeats=1",
    ]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path), "--git-sha", "abc123", "--save-as", "other"])
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["other.json"]
    result = json.loads((tmp_path / "other.json").read_text())
    check_schema(result)
    assert result["git_sha"] == "abc123"
    assert result["command"] == " ".join(["python -m experiments.run", *words, "--save-as other"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "no experiment is named"),
        (["decode_latency", "modle=tiny"], "modle"),
        (["quickstart", "model=/no/such/file"], "neither"),
    ],
)
def test_wrong_calls_end_with_a_message_and_a_code(words, message, tmp_path):
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert done.exit_code != 0
    assert message in done.output
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_failing_run_keeps_the_old_result_and_its_own_rows(tmp_path):
    path = tmp_path / "name.json"
    write_json(path, "old")

    def rows():
        yield ROW | {"number": np.float32(1)}
        raise RuntimeError("the device went away")

    with pytest.raises(RuntimeError):
        list(collect(RECORD, rows(), path))
    assert json.loads(path.read_text()) == "old"
    kept = json.loads((tmp_path / "name.json.partial").read_text())
    assert kept["rows"] == [ROW | {"number": 1.0}]
    assert kept["interrupted"] is True


def test_rows_are_appended_to_what_is_there_with_their_own_origin(tmp_path):
    path = tmp_path / "name.json"
    first, second, third = (dataclasses.replace(RECORD, command=f"python {n}", git_sha=f"sha{n}") for n in range(3))
    assert first.earlier(path) is None
    list(collect(first, [ROW | {"n": 0}, ROW | {"n": 1}], path, first.earlier(path)))
    before = json.loads(path.read_text())
    appended = collect(second, [ROW | {"n": 2}, ROW | {"n": 3}], path, second.earlier(path))
    next(appended)
    # Interrupted now, the old rows would stand where they were, and in the partial file beside the new one.
    assert json.loads(path.read_text()) == before
    partial = json.loads(path.with_suffix(".json.partial").read_text())
    assert ([row["n"] for row in partial["rows"]], partial["interrupted"]) == ([0, 1, 2], True)
    list(appended)
    list(collect(third, [ROW | {"n": 4}], path, third.earlier(path)))
    result = json.loads(path.read_text())
    assert [row["n"] for row in result["rows"]] == [0, 1, 2, 3, 4]
    assert {key: value for key, value in result.items() if key in TOP_KEYS - {"rows"}} == {key: before[key] for key in TOP_KEYS - {"rows"}}
    assert [(part["first_row"], part["command"], part["git_sha"]) for part in result["appended"]] == [
        (2, "python 1", "sha1"),
        (4, "python 2", "sha2"),
    ]
    with pytest.raises(ExperimentError, match="already holds the rows of this command: python 1"):
        second.earlier(path)
    with pytest.raises(ExperimentError, match="already holds the rows of this command"):
        dataclasses.replace(second, command=f"{second.command} --append").earlier(path)
    with pytest.raises(ExperimentError, match=r"name\.json holds rows of name, to which those of other cannot be appended"):
        dataclasses.replace(third, experiment="other").earlier(path)


def interrupted(record, path, *numbers):
    rows = collect(
        record, ({**ROW, "n": n} for n in (*numbers, None)), path, record.earlier(path) if "--append" in record.command else None
    )
    for _ in numbers:
        next(rows)
    rows.close()


def test_rows_of_an_interrupted_run_are_appended_to(tmp_path):
    path = tmp_path / "name.json"
    first, second, third = (dataclasses.replace(RECORD, command=f"python {n} --append") for n in range(3))
    interrupted(first, path, 0, 1)
    interrupted(second, path, 2)
    with pytest.raises(ExperimentError, match=r"name\.json\.partial already holds the rows of this command: python 0"):
        first.earlier(path)
    list(collect(third, [ROW | {"n": 3}], path, third.earlier(path)))
    assert [found.name for found in tmp_path.iterdir()] == ["name.json"]
    result = json.loads(path.read_text())
    assert [row["n"] for row in result["rows"]] == [0, 1, 2, 3]
    assert [(part["first_row"], part["earlier_interrupted"]) for part in result["appended"]] == [(2, True), (3, True)]
    assert "interrupted" not in result


def test_rows_of_an_interrupted_run_are_not_overwritten_by_another(tmp_path, capsys):
    path, partial = tmp_path / "name.json", tmp_path / "name.json.partial"
    first, second = (dataclasses.replace(RECORD, command=f"python {n}") for n in range(2))
    interrupted(first, path, 0)
    interrupted(first, path, 1, 2)  # once more: its own rows take their place
    interrupted(second, path, 3)
    assert (
        f"name.json.partial held 2 rows of an interrupted run: they are now in {tmp_path / 'name.1.json.partial'}"
        in capsys.readouterr().err
    )
    list(collect(first, [ROW | {"n": 4}], path))
    assert {found.name for found in tmp_path.iterdir()} == {"name.json", "name.1.json.partial", "name.2.json.partial"}
    interrupted(second, path, 5)
    list(collect(first, [], path))  # without a row
    assert [row["n"] for row in json.loads(partial.read_text())["rows"]] == [5]


_RUN_PEERS = """
import sys
from pathlib import Path
from experiments import peers, run
peers.REPOSITORY, peers.tokenized_prompts = Path(sys.argv[1]), lambda config: [[1]]
run.app(["peers", "target=t", "drafter=d", "data_dir=p", "--out", sys.argv[1], "--git-sha", "abc"])
"""


def test_a_run_that_is_terminated_leaves_no_process_behind(tmp_path):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("")
    system = "import os, pathlib, time\npathlib.Path('part').write_text(str(os.getpid()))\nos.rename('part', 'pid')\ntime.sleep(120)"
    (tmp_path / "experiments" / "peer_systems.py").write_text(system)
    process = subprocess.Popen([sys.executable, "-c", _RUN_PEERS, str(tmp_path)], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "pid").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, "interrupted after 0 rows" in said) == (130, True)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_rows_must_say_what_they_were_measured_with(tmp_path):
    with pytest.raises(ValueError, match="a row lacks weights"):
        list(collect(RECORD, [{"implementation": "reference", "synthetic": False}], tmp_path / "name.json"))


def test_not_a_number_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "name.json", {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_the_commit_is_marked_where_the_tree_has_changes(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True, capture_output=True)

    assert git_sha(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    clean = git_sha(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "experiments" / "results").mkdir(parents=True)
    (tmp_path / "experiments" / "results" / "a.json").write_text("1")
    assert git_sha(tmp_path) == clean
    (tmp_path / "file").write_text("2")
    assert git_sha(tmp_path) == f"{clean}-dirty"


def test_a_recorded_result_needs_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.run.git_sha", lambda: None)
    done = CliRunner().invoke(app, ["decode_latency", "model=tiny", "--record"])
    assert done.exit_code != 0
    assert "--git-sha" in done.output


def test_the_runner_starts_as_a_module_from_the_checkout():
    done = subprocess.run([sys.executable, "-m", "experiments.run", "--help"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--record" in done.stdout


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_are_complete_and_hold_no_machine_paths(path):
    text = path.read_text(encoding="utf-8")
    result = json.loads(text)
    check_schema(result)
    assert result["git_sha"] != "unknown"
    assert not any(marker in text for marker in ("/home/", "/root/", "/tmp/", "/work/", "/Users/"))


def check_schema(result):
    assert set(result) - {"interrupted", "appended"} == TOP_KEYS
    assert all(
        set(part) - {"earlier_interrupted"} == {"first_row", *TOP_KEYS} - {"experiment", "question", "rows"}
        for part in result.get("appended", [])
    )
    assert set(result["versions"]) == VERSIONS
    assert set(result["device"]) == DEVICE
    assert result["experiment"] in {declaration.name for declaration in declarations()}
    assert result["rows"]
    for row in result["rows"]:
        assert isinstance(row["implementation"], str)
        assert isinstance(row["weights"], str)
        assert isinstance(row["synthetic"], bool)
