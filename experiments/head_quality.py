"""Which draft LM head is worth most with a real target: what each keeps of the acceptance, and what that gains in tokens a second?

Command: python -m experiments.run head_quality target=TARGET drafters=FULL,LOW_RANK,TRIMMED,SCREENED data_dir=PROMPTS --record
Hardware: one H200 for a 1.5B target in bfloat16
Time: 5 minutes on an H200 for five heads and one batch size; most of it is compilation
Result: see "What a draft head keeps" in the README, made from results/head_quality.json

The drafters are checkpoints of `specjax train`: EAGLE-3 drafters of one body's shape, trained alike, one of them with the full head (or
with a screened one, which holds it); or a draft model with other heads than its own, which is there as well; or both kinds, each held
against its own full head. Every prompt set is decoded with each of them and plainly, at every batch size and temperature, in one process.
`derive` adds heads that are rows of the full one, for tokens that are frequent in `data`, so that a trimmed head as large as another one
costs no training.

`rho_tau` is a drafter's mean acceptance length over the full head's, on the same prompts. `kappa` and `nu` are measured beforehand with the
library's own steps (see `recommend_head`), and with rho_tau make `predicted_speedup_over_full`: SlimSpec's model, arXiv:2605.10453.
`tokens_per_s` counts from each prompt's first token on: the prefill is the same for all. A batch takes as long as its slowest row, while
`rho_tau` is a mean over the rows: at larger batches the gain may differ from the prediction, which is that of a step. What a row receives
in a step of its batch is `tokens_per_call_step`, and `predicted_with_slowest_rows` is predicted from that. `rho_tau_interval` and
`speedup_over_full_interval` are 95 % bootstrap intervals over prompts, each prompt with both heads; the latter at batch 1 alone.

`head_bytes` are the weights that a head reads for one draft token of each row. `share_outside` is the part of the target's own text that a
trimmed head can never draft: no training brings that back. Where even the full head's mean acceptance length over the sets is below 2.3,
rows say `undertrained`: what a head loses of little says little.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.compiling import say
from experiments.draft_heads import CUT_FROM_FULL, FULL, label
from experiments.drafters import Candidates, load_families, with_cut_heads
from experiments.experiment import ExperimentError
from experiments.head_quality_config import Config
from experiments.head_rows import Setting
from experiments.models import Model, load_model
from experiments.prompts import encode, load_prompts
from experiments.train_figures import Draw
from specjax.commands.prepare_training import open_token_files
from specjax.commands.token_data import tokenizer_and_ends
from specjax.training.token_counts import count_tokens


def run(config: Config) -> Iterator[dict]:
    """One row a set, drafter, batch size and temperature, and one for the mean of the sets."""
    if not config.target or not config.data_dir or not config.drafters:
        raise ExperimentError("head_quality needs target=PATH, drafters=PATH,PATH and data_dir=PATH")
    if bool(config.derive) != bool(config.data):
        raise ExperimentError(f"derive and data go together, got derive={','.join(config.derive)} and data={','.join(config.data)}")
    options: dict[str, Any] = {"dtype": config.dtype, "implementation": config.implementation, "cache_dir": config.cache_dir}
    say("loading the target")
    target = load_model(config.target, **options)
    if target.checkpoint is None:
        raise ExperimentError(f"head_quality needs a target with a tokenizer, {config.target!r} is a preset")
    say("loading the drafters")
    families = load_families(config.drafters, **options)
    for name, candidates in families.items():
        if FULL not in candidates.trained:
            raise ExperimentError(f"one of the drafters must have the full head, got {', '.join(candidates.trained)}")
        if config.derive:
            families[name] = derived(config, candidates, target)
    tokenizer = target.checkpoint.tokenizer()
    texts = {name: load_prompts(config.data_dir, name) for name in config.sets}
    for batch in config.batches:
        kept = {name: load_prompts(config.data_dir, name, number_of_prompts(config, len(rows), batch)) for name, rows in texts.items()}
        prompts = {name: encode(tokenizer, rows, chat_template=config.chat_template) for name, rows in kept.items()}
        for temperature in config.temperatures:
            yield from Setting.build(config, target, families, prompts, batch, temperature).rows(prompts)


def number_of_prompts(config: Config, available: int, batch: int) -> int:
    """How many prompts of a set are decoded: whole batches, where there are enough."""
    wanted = min(max(config.prompts_per_set or available, batch), available)
    return wanted // batch * batch or wanted


def derived(config: Config, candidates: Candidates, target: Model) -> Candidates:
    """The drafters of a family, and those whose heads are rows of the full one."""
    assert target.checkpoint is not None
    tokenizer, ends = tokenizer_and_ends(target.checkpoint)
    try:
        counts = count_tokens(open_token_files(config.data, tokenizer), target.model.config.vocab_size)
    except ValueError as error:
        raise ExperimentError(f"data={','.join(config.data)}: {error}") from None
    return with_cut_heads(candidates, config.derive, counts, sorted({*ends, *tokenizer.all_special_ids}))


def show(row: dict) -> str:
    """A row's main figures on one line."""
    text = f"{row['drafter']:11} {row['dataset']:10} batch {row['batch']:2} T {row['temperature']:g}  {name_of(row):29}  "
    text += f"mean acceptance length {row['mean_acceptance_length']:.3f} (rho {with_interval(row, 'rho_tau')})  "
    text += f"nu {row['nu']:.3f} kappa {row['kappa']:.3f}  "
    text += f"{row['tokens_per_s']:.0f} tokens/s: {row['speedup_over_autoregressive']:.2f} x, "
    text += f"over full {with_interval(row, 'speedup_over_full')} "
    text += f"(predicted {row['predicted_speedup_over_full']:.3f})"
    text += "" if row["share_outside"] is None else f"  outside {row['share_outside']:.4f}"
    return f"{text}  UNDERTRAINED" if row["undertrained"] else text


def with_interval(row: dict, key: str) -> str:
    """A ratio, and between which two numbers it lies where that is known."""
    interval = row.get(f"{key}_interval")
    return f"{row[key]:.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval and interval[0] < interval[1] else "")


def name_of(row: dict) -> str:
    """A head as the terminal and the tables show it."""
    return f"{label(row)}, cut" if row["init"] == CUT_FROM_FULL else label(row)


def table_rows(rows: list[dict]) -> list[dict]:
    """The means over the sets."""
    return [row for row in rows if row["dataset"] == "mean"]


def plots(rows: list[dict]) -> dict[str, Draw]:
    """The gain of each head of the first kind of drafter, at the first batch size and temperature, by the bytes that it reads."""
    first = [row for row in table_rows(rows) if all(row[key] == rows[0][key] for key in ("drafter", "batch", "temperature"))]
    return {"": lambda axes: _gains(axes, first)}


def _gains(axes: Any, rows: list[dict]) -> None:
    for row in rows:
        size = row["head_bytes"] / 1e6
        axes.plot(size, row["speedup_over_full"], "o", color="C0")
        axes.plot(size, row["predicted_speedup_over_full"], "x", color="C1")
        axes.annotate(name_of(row), (size, row["speedup_over_full"]), xytext=(4, -11), textcoords="offset points", fontsize=8)
    axes.plot([], [], "o", color="C0", label="measured")
    axes.plot([], [], "x", color="C1", label="predicted from its acceptance and its time")
    axes.set_xscale("log")
    axes.set_xlabel(f"MB that the head reads a draft token (batch {rows[0]['batch']}, temperature {rows[0]['temperature']:g})")
    axes.set_ylabel("tokens a second over the full head's")
    axes.legend(loc="upper right")


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    return {
        "drafter": f"{row['drafter']} (undertrained)" if row["undertrained"] else row["drafter"],
        "batch": row["batch"],
        "temperature": row["temperature"],
        "head": name_of(row),
        "MB a draft token": row["head_bytes"] / 1e6,
        "mean acceptance length": row["mean_acceptance_length"],
        "ρ_τ": with_interval(row, "rho_tau") if "rho_tau_interval" in row else row["rho_tau"],
        "ν": row["nu"],
        "κ": row["kappa"],
        "tokens/s": row["tokens_per_s"],
        "over plain": f"{row['speedup_over_autoregressive']:.2f} ×",
        "over full": f"{with_interval(row, 'speedup_over_full')} ×",
        "predicted": f"{row['predicted_speedup_over_full']:.3f} ×",
        "text outside": row["share_outside"],
    }
