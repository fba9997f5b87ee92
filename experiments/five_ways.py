"""Which of five ways to decode is the fastest: with or without a drafter, over the whole cache or a part of it, checked densely or not?

Command: python -m experiments.run five_ways target=TARGET drafter=DRAFTER data=FOLDERS --record
Hardware: one H200
Time: 3 minutes on an H200 for a preset's five ways; of a checkpoint a way takes a compilation and a decode of all prompts
Result: see "Sparse verification, measured" in the README, made from results/five_ways_8b.json

The ways are plain decoding, plain decoding over a part of the cache, dense verification of drafts, sparse verification (both lossy where
sparse), and two levels, whose output is that of dense verification. All decode the same prompts, greedily, in one process, and go on from
one prefill, which is dense and does not count (each prompt's second token comes of a dense pass too). `same_text` is the share of prompts
whose tokens are those of plain dense decoding. Two levels decide by times of steps and checks that are measured first, behind one batch of
prompts of typical length (`measured_costs=false`: by bytes, which tell of attention alone). Where times are lost in noise they decide by
bytes, or are left out.

With a preset as the target weights and contexts are random, and acceptance is made up (SYNTHETIC) at both levels: of the drafter's tokens,
and, by dense passes, of what sparse steps committed (`assumed_dense_acceptance`). That is for times alone, of the real loop's steps: see
`experiments.timed_ways`. The drafter is then "eagle3", of the shape published for that target, or another preset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from experiments.decoded_ways import Workload
from experiments.experiment import ExperimentError
from experiments.models import Model, load_drafter, load_model
from experiments.sparse_comparison import check_window
from experiments.sparse_settings import NamedSparsity, block_size_of, check_weights, named_settings
from experiments.speeds import speed_of
from experiments.tasks import TaskSource
from experiments.timed_ways import timed_ways
from experiments.ways import two_levels
from experiments.ways_config import Config
from specjax import RejectionSampling


def run(config: Config) -> Iterator[dict]:
    """A row a way, and for the sparse ones a row a setting."""
    if not config.target:
        raise ExperimentError("five_ways needs target=PATH or a preset")
    options: dict[str, Any] = {"dtype": config.dtype, "implementation": config.implementation, "cache_dir": config.cache_dir}
    target = load_model(config.target, **options)
    settings = named_settings(config, target.model.config)
    check_weights(settings, config, target)
    config = dataclasses.replace(config, block_size=block_size_of(settings))  # of caches from here on: settings have theirs
    check_two_levels(config, settings, measured=config.measured_costs or target.checkpoint is None)
    if target.checkpoint is None:
        yield from timed_ways(config, target, settings)
        return
    drafter, prompts = load_drafter(config.drafter, target, **options), _prompts(config, target)
    check_window(target, prompts, config.new_tokens)
    for batch in config.batches:
        yield from Workload(config=config, target=target, drafter=drafter, prompts=prompts, batch=batch).rows(settings)


def check_two_levels(config: Config, settings: list[NamedSparsity], *, measured: bool) -> None:
    """Whether dense passes can check the settings, said before anything is decoded.

    Args:
        config: Of the experiment.
        settings: What is left out.
        measured: Costs will be, so that there is something to choose by.

    Raises:
        ExperimentError: They cannot.
    """
    for named in settings:
        try:
            lossless = config.lossless(adapt=config.adapt and not measured)
            lossless.max_provisional(config.num_speculative_tokens)
            two_levels(named.sparsity, lossless).check_lossless(RejectionSampling(), do_sample=False)
        except ValueError as error:
            raise ExperimentError(f"two levels of {named.name}: {error}") from None


def _prompts(config: Config, target: Model) -> list[list[int]]:
    assert target.checkpoint is not None
    source = TaskSource(
        folders=config.data,
        library=config.library,
        text=config.text,
        count=config.prompts,
        max_prompt_tokens=config.max_prompt_tokens,
        tokenizer=target.checkpoint.tokenizer(),
        chat_template=config.chat_template,
    )
    return source.encode(source.load(config.task))


def _dense_acceptance(row: dict) -> float | None:
    return row["assumed_dense_acceptance"] if row["synthetic"] else row.get("dense_acceptance_rate")


def show(row: dict) -> str:
    """A row's main figures on one line; says what is lossy and what loses."""
    text = f"{row['way']:23} {row['method']:40} {'lossless' if row['lossless'] else 'lossy':8} {row['context']:7.0f} x {row['batch']}  "
    text += f"acceptance length {row['mean_acceptance_length']:.2f}  {speed_of(row)}"
    if row["speedup_over_dense_verification"] is not None:
        text += f", {row['speedup_over_dense_verification']:.2f} x dense verification"
    if row["dense_step_share"] is not None:
        accepted, least = _dense_acceptance(row), row["break_even_dense_acceptance"]
        text += "  dense level checked nothing, " if accepted is None else f"  dense level accepts {accepted:.3f}, "
        text += ("never pays" if least is None else f"pays above {least:.3f}") + f", {row['dense_step_share']:.0%} of its cycles dense"
    text += f"  same text {row['same_text']:.2f}" if "same_text" in row else ""
    return text + ("  SYNTHETIC" if row["synthetic"] else "")


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    shown = {
        "way": row["way"] + (" (SYNTHETIC)" if row["synthetic"] else ""),
        "lossless": row["lossless"],
        "sparse": row["method"],
        "tokens": row["context"],
        "batch": row["batch"],
        "mean acceptance length": row["mean_acceptance_length"],
        "kept": row["keep_ratio"],
        "accepted by dense passes": _dense_acceptance(row),
        "pays above": row["break_even_dense_acceptance"],
        "sparse steps a check": row["steps_between_dense"],
        "tokens/s": row["tokens_per_s"],
        "ms a token": row["ms_per_token"],
    }
    for name, key in (("over plain", "speedup_over_autoregressive"), ("over dense verification", "speedup_over_dense_verification")):
        shown[name] = None if row[key] is None else f"{row[key]:.2f} ×"
    return shown | ({"same text": row["same_text"]} if "same_text" in row else {})


def plots(rows: list[dict]) -> dict[str, Any]:
    """Speeds of the ways, a figure for each context and batch."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(f"{row['context']:.0f}x{row['batch']}", []).append(row)
    if len(groups) == 1:
        groups = {"": rows}
    return {name: lambda axes, group=group: _draw(axes, group) for name, group in groups.items()}


def _draw(axes: Any, rows: list[dict]) -> None:
    names = []
    for row in rows:
        accepted = "" if _dense_acceptance(row) is None else f", dense level accepts {_dense_acceptance(row):.2f}"
        names.append(f"{row['way']}{accepted}\n{row['method']}")
    axes.barh(range(len(rows)), [row["tokens_per_s"] or 0 for row in rows], color=["C0" if row["lossless"] else "C1" for row in rows])
    axes.set_yticks(range(len(rows)), names, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s (orange: lossy)")
