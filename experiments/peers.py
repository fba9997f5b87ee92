"""How many tokens a second do others decode with the same pair of models on the same card?

Command: python -m experiments.run peers target=TARGET drafter=DRAFTER data_dir=PROMPTS --record
Hardware: one H200 with torch; vLLM's rows need vllm (`systems=specjax,transformers dtype=float32` on a CPU)
Time: about 11 minutes, 7 without vLLM; not measured yet
Result: none on record yet

Hugging Face folders of a target and a draft model, the same prompts, greedily, and of each prompt the same number of new tokens: nothing
ends a text. Each system runs in a process of its own, one after another, so that no two share memory or a CUDA context. There it loads the
models, decodes the first prompts once to compile and warm up, and then all of them `repeats` times, `batch` at a time. Of each call the
median time counts, prefill included. All calls are of `batch` prompts: a last one of fewer would be another shape, which some would compile
while they are timed, and others not.

mean_acceptance_length is new tokens a verification, the bonus or recovered token included: ours and vLLM's 1 + accepted / steps; of
transformers, whose first verification is its prefill too, new tokens over the target's passes. `same_output` is the share of prompts whose
tokens are those of our plain decoding at that batch size: in bfloat16 near-ties part them.

A system that is not installed, or cannot do a batch, has no row, and the program says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.experiment import ExperimentError, local_field, path_field
from experiments.prompts import encode, load_prompts
from experiments.record import REPOSITORY

OURS = "specjax"
# Ours first: the others' outputs are held against it.
SYSTEMS = (
    OURS,
    "specjax_draft_model",
    "specjax_eagle3",
    "transformers",
    "transformers_static",
    "transformers_assisted",
    "vllm",
    "vllm_draft_model",
)
_WITH_DRAFT_MODEL = ("specjax_draft_model", "transformers_assisted", "vllm_draft_model")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        target: A Hugging Face folder.
        drafter: Likewise, of a draft model with the same tokenizer.
        eagle3: An EAGLE-3 drafter for the target, ours or as published; `none` leaves its row out.
        data_dir: Folder of prompt sets, `NAME.jsonl` with `turns`.
        sets: Their names.
        systems: What to run.
        batches: Prompts decoded together.
        prompts: How many, spread evenly over the sets and each of them; whole calls of every batch, unless `max_calls` need fewer.
        max_calls: At small batches fewer prompts are taken, those of so many calls.
        new_tokens: Of each prompt; two at least, as the first comes of the prefill.
        num_speculative_tokens: G.
        dtype: Of weights and compute.
        implementation: Of our kernels; see `Kernels.of`.
        chat_template: Prompts are user messages in the tokenizer's own chat template; `false` takes them as bare text.
        repeats: Timed runs a call; the median counts.
        timeout_s: The longest that one system may take.
        cache_dir: Where converted checkpoints are kept; `none` is the user's cache folder.
    """

    target: str = path_field("")
    drafter: str = path_field("")
    eagle3: str | None = path_field(None)
    data_dir: str = path_field("")
    sets: tuple[str, ...] = ("humaneval", "gsm8k", "mt_bench", "sum")
    systems: tuple[str, ...] = SYSTEMS
    batches: tuple[int, ...] = (1, 16)
    prompts: int = 16
    max_calls: int = 8
    new_tokens: int = 128
    num_speculative_tokens: int = 5
    dtype: str = "bfloat16"
    implementation: str = "auto"
    chat_template: bool = True
    repeats: int = 3
    timeout_s: int = 600
    cache_dir: str | None = local_field()

    def __post_init__(self) -> None:
        if set(self.systems) - set(SYSTEMS) or OURS not in self.systems:
            raise ExperimentError(f"systems must be some of {', '.join(SYSTEMS)}, and {OURS} among them, got {', '.join(self.systems)}")
        for name in ("prompts", "max_calls", "new_tokens", "num_speculative_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ExperimentError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.new_tokens < 2:
            raise ExperimentError(f"new_tokens must be at least 2, the first of which the prefill gives, got {self.new_tokens}")
        if not self.sets:
            raise ExperimentError("sets must name a prompt set, got none")
        if not self.batches or min(self.batches) < 1:
            raise ExperimentError(f"batches must be positive numbers, got {', '.join(map(str, self.batches)) or 'none'}")
        for batch in self.batches:
            if self.prompts < batch * self.max_calls and self.prompts % batch:
                raise ExperimentError(f"prompts must fill whole calls of each batch, got {self.prompts} for batches of {batch}")


def run(config: Config) -> Iterator[dict]:
    """One row a system and batch."""
    for key in ("target", "drafter", "data_dir"):
        if not getattr(config, key):
            raise ExperimentError(f"peers needs {key}=PATH")
    # The record asks JAX for the device's name; it must not take the device's memory for that.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    prompts = tokenized_prompts(config)
    ours: dict[int, list[list[int]]] = {}
    for system in (system for system in SYSTEMS if system in config.systems):
        if system == "specjax_eagle3" and config.eagle3 is None:
            print(f"{system}: no row: it needs eagle3=PATH", file=sys.stderr, flush=True)
            continue
        answer = ask(request(config, system, prompts), timeout_s=config.timeout_s)
        for reason in answer["left_out"]:
            print(f"{system}: no row: {reason}", file=sys.stderr, flush=True)
        for part in answer["parts"]:
            if system == OURS:
                ours[part["batch"]] = part["tokens"]
            yield row(config, system, answer["version"], part, prompts, ours.get(part["batch"]))
        if system == OURS and not ours:
            raise ExperimentError(f"{OURS} itself did not run: {'; '.join(answer['left_out'])}")


def tokenized_prompts(config: Config) -> list[list[int]]:
    """Token ids of the prompts, in turn from each set.

    Raises:
        ExperimentError: The target is no Hugging Face folder, or a set has too few prompts.
    """
    from transformers import AutoTokenizer

    folder = Path(config.target).expanduser()
    if not (folder / "config.json").is_file():
        raise ExperimentError(f"target must be a Hugging Face folder, which others can load: {folder.name} has no config.json")
    per_set = -(-config.prompts // len(config.sets))
    sets = [load_prompts(config.data_dir, name, per_set) for name in config.sets]
    for name, found in zip(config.sets, sets, strict=True):
        if len(found) < per_set:
            raise ExperimentError(f"prompts={config.prompts} takes {per_set} of each set, {name} has {len(found)}")
    texts = [text for texts in zip(*sets, strict=True) for text in texts][: config.prompts]
    return encode(AutoTokenizer.from_pretrained(folder), texts, chat_template=config.chat_template)


def request(config: Config, system: str, prompts: list[list[int]]) -> dict[str, Any]:
    """What a system's process is told."""
    drafters = dict.fromkeys(_WITH_DRAFT_MODEL, config.drafter) | {"specjax_eagle3": config.eagle3}
    fields = ("target", "new_tokens", "num_speculative_tokens", "dtype", "implementation", "repeats", "cache_dir")
    calls = [{"batch": batch, "prompts": prompts[: batch * config.max_calls]} for batch in config.batches]
    return {"system": system, "drafter": drafters.get(system), "calls": calls} | {name: getattr(config, name) for name in fields}


def ask(request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Runs a system in a process of its own.

    Args:
        request: From `request`.
        timeout_s: The longest that it may take.

    Returns:
        `version`, `parts` (see `experiments.peer_systems`) and `left_out`, reasons why parts are missing.
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    with tempfile.TemporaryDirectory() as folder:
        asked, answered, log = (Path(folder) / name for name in ("request.json", "answer.json", "log"))
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", "experiments.peer_systems", str(asked), str(answered)]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        # Written part by part: what came before an end that was not planned counts.
        text = answered.read_text(encoding="utf-8") if answered.exists() else '{"version": "unknown", "parts": [], "left_out": []}'
        answer = json.loads(text)
        if code != 0:
            last = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][-3:]
            how = f"it took more than {timeout_s:.0f} s" if code is None else f"its process ended with code {code}"
            answer["left_out"].append(f"{how}: {' | '.join(last)}")
        return answer


def _end(process: subprocess.Popen) -> None:
    """The process and those that it started: a server's engine outlives a parent that was killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def row(config: Config, system: str, version: str, part: dict[str, Any], prompts: list[list[int]], ours: list[list[int]] | None) -> dict:
    """What one system's part comes to.

    Args:
        config: Settings.
        system: Its name.
        version: Its library's.
        part: `{batch, tokens, seconds, mean_acceptance_length, load_s}`: of each prompt its new tokens, of each call its times.
        prompts: All prompts.
        ours: Our plain decoding's tokens at that batch.
    """
    tokens, drafted = part["tokens"], system in _WITH_DRAFT_MODEL
    if any(len(new) != config.new_tokens for new in tokens):
        raise ExperimentError(f"{system}: expected {config.new_tokens} new tokens of each prompt, got {sorted({*map(len, tokens)})}")
    seconds = sum(statistics.median(times) for times in part["seconds"])
    drafter = config.eagle3 if system == "specjax_eagle3" else config.drafter if drafted else None
    same = None if ours is None else sum(a == b for a, b in zip(tokens, ours, strict=True)) / len(tokens)
    return {
        "system": system,
        "version": version,
        "target": Path(config.target).name,
        "drafter": None if drafter is None else Path(drafter).name,
        "batch": part["batch"],
        "context": max(map(len, prompts[: len(tokens)])) + config.new_tokens,
        "tokens_per_s": len(tokens) * config.new_tokens / seconds,
        "mean_acceptance_length": part["mean_acceptance_length"],
        "same_output": same,
        "num_speculative_tokens": None if drafter is None else config.num_speculative_tokens,
        "prompts": len(tokens),
        "new_tokens": config.new_tokens,
        "seconds": seconds,
        "raw_seconds": part["seconds"],
        "load_s": part["load_s"],
        "dtype": config.dtype,
        "implementation": config.implementation if system.startswith(OURS) else system.partition("_")[0],
        "weights": f"real, {config.dtype}",
        "synthetic": False,
    }


def show(row: dict) -> str:
    """A row's main figures on one line."""
    length = row["mean_acceptance_length"]
    line = f"{row['system']:22} {row['version']:10} batch {row['batch']:<3} {row['tokens_per_s']:8.1f} tokens/s"
    line += "" if length is None else f"  mean acceptance length {length:.2f}"
    return line + ("" if row["same_output"] is None else f"  same output {row['same_output']:.0%}")


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    return {
        "system": row["system"],
        "version": row["version"],
        "drafter": row["drafter"],
        "batch": row["batch"],
        "context": row["context"],
        "tokens/s": row["tokens_per_s"],
        "mean acceptance length": row["mean_acceptance_length"],
        "same output as ours": None if row["same_output"] is None else f"{row['same_output']:.0%}",
    }
