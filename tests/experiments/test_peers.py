"""The comparison with other systems: what its rows say, what has no row, and, where torch is installed, transformers itself."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import peer_systems, peers
from experiments.experiment import ExperimentError, parse_config
from experiments.record import check_row
from tests.checkpoints.sources import random_tensors, raw_config, write_folder, write_tokenizer

SMALL = ("sets=first,second", "prompts=4", "batches=1,2", "new_tokens=6", "num_speculative_tokens=2", "dtype=float32", "repeats=2")
KEYS = {"system", "version", "target", "drafter", "batch", "context", "tokens_per_s", "mean_acceptance_length", "same_output"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Qwen2 target, and a draft model that is the target with a little noise on it, so that some drafts are accepted and some are not."""
    folders = tmp_path_factory.mktemp("peers")
    raw = raw_config("qwen2", eos_token_id=3)
    tensors = random_tensors(raw)
    noise = np.random.default_rng(1)
    noisy = {name: (tensor + 0.006 * noise.normal(size=tensor.shape)).astype(np.float32) for name, tensor in tensors.items()}
    for name, weights in (("target", tensors), ("drafter", noisy)):
        write_tokenizer(write_folder(folders / name, raw, weights))
    return folders / "target", folders / "drafter"


def config(pair: tuple[Path, Path], data_dir: Path, *words: str) -> peers.Config:
    given = (f"target={pair[0]}", f"drafter={pair[1]}", f"data_dir={data_dir}")
    names = {word.partition("=")[0] for word in words}
    return parse_config(peers.Config, [*given, *(word for word in SMALL if word.partition("=")[0] not in names), *words])


def test_rows_hold_speed_acceptance_and_what_is_shared_with_our_output(
    pair: tuple[Path, Path], data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    asked = []

    def ask(request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        asked.append(request)
        if request["system"] == "vllm":
            return {"version": "absent", "parts": [], "left_out": ["vllm cannot be imported: it is not there"]}
        parts = []
        for call in request["calls"]:
            tokens = [[sum(prompt) % 7] * 6 for prompt in call["prompts"]]
            if request["drafter"]:
                tokens[0] = [9] * 6
            groups = len(tokens) // call["batch"]
            length = 2.5 if request["drafter"] else None
            parts.append(dict(batch=call["batch"], tokens=tokens, seconds=[[1.0, 3.0]] * groups, mean_acceptance_length=length, load_s=1.0))
        return {"version": "1.0", "parts": parts, "left_out": []}

    monkeypatch.setattr(peers, "ask", ask)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    rows = list(peers.run(config(pair, data_dir, "systems=transformers_assisted,vllm,specjax,specjax_eagle3", "max_calls=2")))
    assert [(row["system"], row["batch"]) for row in rows] == [
        ("specjax", 1), ("specjax", 2), ("transformers_assisted", 1), ("transformers_assisted", 2)
    ]  # fmt: skip
    told = capsys.readouterr().err
    assert "vllm: no row: vllm cannot be imported" in told
    assert "specjax_eagle3: no row: it needs eagle3=PATH" in told
    for row in rows:
        assert set(check_row(row)) > KEYS
        assert row["system"] in peers.show(row)
        assert peers.columns(row)["system"] == row["system"]
    alone, together, assisted, _ = rows
    assert (alone["target"], alone["drafter"], assisted["drafter"]) == ("target", None, "drafter")
    assert (alone["prompts"], together["prompts"]) == (2, 4)  # two calls of one, two of two
    assert alone["tokens_per_s"] == 2 * 6 / (2.0 + 2.0)
    assert (alone["mean_acceptance_length"], assisted["mean_acceptance_length"]) == (None, 2.5)
    assert (alone["same_output"], assisted["same_output"]) == (1.0, 0.5)
    assert assisted["num_speculative_tokens"] == 2
    prompts = asked[0]["calls"][1]["prompts"]
    assert alone["context"] == max(map(len, prompts[:2])) + 6
    assert [request["drafter"] for request in asked] == [None, str(pair[1]), None]
    assert len({str(request["calls"]) for request in asked}) == 1  # the same prompts


def test_what_cannot_be_compared_is_refused(pair: tuple[Path, Path], data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExperimentError, match="specjax among them, got transformers"):
        parse_config(peers.Config, ["systems=transformers"])
    with pytest.raises(ExperimentError, match="repeats must be at least 1, got 0"):
        parse_config(peers.Config, ["repeats=0"])
    with pytest.raises(ExperimentError, match="batches must be positive numbers, got none"):
        parse_config(peers.Config, ["batches="])
    with pytest.raises(ExperimentError, match="new_tokens must be at least 2, .*, got 1"):
        parse_config(peers.Config, ["new_tokens=1"])
    with pytest.raises(ExperimentError, match="sets must name a prompt set, got none"):
        parse_config(peers.Config, ["sets="])
    with pytest.raises(ExperimentError, match="peers needs drafter=PATH"):
        list(peers.run(parse_config(peers.Config, [f"target={pair[0]}"])))
    with pytest.raises(ExperimentError, match="must be a Hugging Face folder"):
        list(peers.run(config((data_dir, data_dir), data_dir)))
    short = dict(batch=1, tokens=[[1, 2]], seconds=[[1.0]], mean_acceptance_length=None, load_s=0.0)
    with pytest.raises(ExperimentError, match=r"transformers: expected 6 new tokens of each prompt, got \[2\]"):
        peers.row(config(pair, data_dir), "transformers", "1.0", short, [[1, 2, 3]], None)
    monkeypatch.setattr(peers, "ask", lambda request, timeout_s: {"version": None, "parts": [], "left_out": ["out of memory"]})
    with pytest.raises(ExperimentError, match="specjax itself did not run: out of memory"):
        list(peers.run(config(pair, data_dir)))


def test_calls_of_fewer_prompts_than_the_others_are_refused_before_any_system_runs(
    pair: tuple[Path, Path], data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["prompts=20", "batches=1,16"], ["prompts=8", "batches=16"]):
        with pytest.raises(ExperimentError, match=rf"whole calls of each batch, got {words[0][8:]} for batches of 16"):
            parse_config(peers.Config, words)
    assert parse_config(peers.Config, ["prompts=20", "batches=1,16", "max_calls=1"]).prompts == 20
    monkeypatch.setattr(peers, "ask", lambda request, timeout_s: pytest.fail("a system ran"))
    with pytest.raises(ExperimentError, match="prompts=12 takes 6 of each set, first has 5"):
        list(peers.run(config(pair, data_dir, "prompts=12")))
    with pytest.raises(ValueError, match="prompts must fill whole calls of 2, got 3"):
        peer_systems.time_calls(lambda rows: pytest.fail("a call ran"), [[1], [2], [3]], batch=2, repeats=1)


def test_a_package_that_is_not_installed_is_named_and_a_system_that_fails_keeps_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    written: list[dict] = []
    peer_systems.answer({"system": "vllm_draft_model"}, lambda found: written.append(dict(found)))
    assert written[-1]["parts"] == []
    assert "vllm cannot be imported" in written[-1]["left_out"][0]

    def failing(request: dict[str, Any]) -> Any:
        yield {"batch": 1}
        raise RuntimeError("the device went away")

    monkeypatch.setattr(peer_systems, "_specjax", failing)
    with pytest.raises(RuntimeError):
        peer_systems.answer({"system": "specjax"}, lambda found: written.append({**found, "parts": list(found["parts"])}))
    assert written[-1]["parts"] == [{"batch": 1}]


def test_calls_are_warmed_up_with_the_first_and_timed_one_by_one() -> None:
    seen: list[list[int]] = []

    def decode(rows: Any) -> list[list[int]]:
        seen.append([row[0] for row in rows])
        return [[row[0] * 10] for row in rows]

    times = dict(batch=2, repeats=2, warm_ups=2, warmed=lambda: seen.append([]))
    tokens, seconds = peer_systems.time_calls(decode, [[1], [2], [3], [4]], **times)
    assert seen == [[1, 2], [1, 2], [], [1, 2], [1, 2], [3, 4], [3, 4]]
    assert tokens == [[10], [20], [30], [40]]
    assert [len(times) for times in seconds] == [2, 2]


@pytest.mark.full
@pytest.mark.skipif(bool(find_spec("vllm")), reason="vllm is installed")
def test_a_systems_process_answers_and_its_end_is_told_when_it_fails(pair: tuple[Path, Path], data_dir: Path) -> None:
    given = peers.request(config(pair, data_dir), "vllm", [[1, 2]])
    answered = peers.ask(given, timeout_s=120)
    assert (answered["version"], answered["parts"]) == ("absent", [])
    assert "vllm cannot be imported" in answered["left_out"][0]
    failed = peers.ask(given | {"system": "other"}, timeout_s=120)
    assert "its process ended with code 1: " in failed["left_out"][0]
    assert "KeyError: 'other'" in failed["left_out"][0]


@pytest.mark.full
@pytest.mark.skipif(not find_spec("torch"), reason="needs torch: pip install 'specjax[parity]'")
def test_transformers_and_we_write_the_same_text_and_accept_the_same_drafts(
    pair: tuple[Path, Path], data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def ask(request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Here, to import torch once; and of what is alike at every batch, one."""
        if request["system"] in ("specjax_draft_model", "transformers_static"):
            request["calls"] = request["calls"][:1]
        answers: list[dict[str, Any]] = []
        peer_systems.answer(request, answers.append)
        return answers[-1]

    monkeypatch.setattr(peers, "ask", ask)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    systems = "systems=specjax,specjax_draft_model,transformers,transformers_static,transformers_assisted"
    words = (systems, "new_tokens=16", "repeats=1", f"cache_dir={tmp_path}")
    rows = {(row["system"], row["batch"]): row for row in peers.run(config(pair, data_dir, *words))}
    assert len(rows) == 7
    assert "transformers_assisted: no row: assisted generation decodes one prompt at a time, not 2" in capsys.readouterr().err
    for (system, _), row in rows.items():
        assert row["same_output"] == 1.0  # float32
        assert row["tokens_per_s"] > 0
        assert (row["mean_acceptance_length"] is None) == (row["drafter"] is None) == (system not in peers._WITH_DRAFT_MODEL)
        assert row["version"]
    # Of up to 3. Theirs is not quite ours: their first verification is the prefill, and our first token does not count.
    for system in ("specjax_draft_model", "transformers_assisted"):
        assert 1.2 < rows[system, 1]["mean_acceptance_length"] < 2.9
