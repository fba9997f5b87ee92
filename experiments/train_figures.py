"""What a training of drafters shows: mean acceptance length against tokens seen, and by rank, start and loss where those vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.training.losses import DraftLoss
from specjax.training.settings import DEFAULT_INIT

GONE_ON_WITH = "finished"
STARTS = {
    GONE_ON_WITH: "the finished drafter's own head",
    "weighted_svd": "the target's head, where its hidden states go",
    "svd": "the target's head, in all directions alike",
    "random": "random",
}
_USUAL = (DEFAULT_INIT, GONE_ON_WITH)
LOSSES = {"forward_kl": "KL divergence", "lk_alpha": "acceptance (LK)", "lk_lambda": "acceptance and KL divergence, blended (LK)"}
_BY_TOKENS, _LENGTH = "million tokens seen", "mean acceptance length"

Draw = Callable[[Any], None]


def training_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Draw]:
    """By what a figure is of, a function that draws it on Matplotlib's axes.

    Args:
        rows: Of the experiment `train_drafter`.

    Returns:
        `""`, a curve for each drafter, always. `"rank"`, the final lengths of low-rank heads and the full one, `"init"` and `"loss"`,
        curves of drafters that differ in nothing else: each where there are such drafters.
    """
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["dataset"] == "mean":
            curves.setdefault(row["variant"], []).append(row)
    lines = list(curves.values())
    figures: dict[str, Draw] = {"": lambda axes: _curves(axes, {_name(line[-1]): line for line in lines})}
    usual = [line[-1] for line in lines if _is_usual(line[-1])]
    if len({row["rank"] for row in usual if row["head"] in ("low_rank", "full")}) > 1:
        figures["rank"] = lambda axes: _ranks(axes, usual)
    for key, labels in (("init", STARTS), ("loss", LOSSES)):
        compared = _differing_in(lines, key)
        if compared:
            heads = {_head(line[-1]) for line in compared}
            named = {_with_head(labels[line[-1][key]], line[-1], shown=len(heads) > 1): line for line in compared}
            figures[key] = lambda axes, named=named: _curves(axes, named)
    return figures


def _is_usual(row: Mapping[str, Any]) -> bool:
    # The full head has no factors: whatever its start is called, it begins as the target's own but with "random".
    start = row["init"] in _USUAL or (row["head"] == "full" and row["init"] != "random")
    return start and row["loss"] == DraftLoss.kind


def _differing_in(lines: Sequence[list[Mapping[str, Any]]], key: str) -> list[list[Mapping[str, Any]]]:
    """The curves of which another one differs in `key` alone."""

    def others(line: list[Mapping[str, Any]]) -> tuple:
        return tuple(line[-1][name] for name in ("head", "rank", "rows", "init", "loss") if name != key)

    groups: dict[tuple, list] = {}
    for line in lines:
        groups.setdefault(others(line), []).append(line)
    return [line for group in groups.values() if len(group) > 1 for line in group]


def _curves(axes: Any, lines: Mapping[str, list[Mapping[str, Any]]]) -> None:
    for name, line in lines.items():
        axes.plot([row["train_tokens"] / 1e6 for row in line], [row["mean_acceptance_length"] for row in line], marker="o", label=name)
    axes.set_xlabel(_BY_TOKENS)
    axes.set_ylabel(_LENGTH)
    axes.legend()


def _ranks(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    low = sorted((row for row in rows if row["head"] == "low_rank"), key=lambda row: row["rank"])
    axes.plot([row["rank"] for row in low], [row["mean_acceptance_length"] for row in low], marker="o", label="low-rank head")
    for row in rows:
        if row["head"] == "full":
            axes.axhline(row["mean_acceptance_length"], color="gray", linestyle="--", label="full head")
            break
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["rank"] for row in low], [f"{row['rank']}\n{_share(row)}" for row in low])
    axes.minorticks_off()
    axes.set_xlabel("rank of the draft head")
    axes.set_ylabel(f"{_LENGTH} at the end")
    axes.legend()


def _share(row: Mapping[str, Any]) -> str:
    share = row["hidden_size"] / row["rank"]
    return f"D/{share:.0f}" if share.is_integer() else f"D/{share:.1f}"


def _head(row: Mapping[str, Any]) -> str:
    match row["head"]:
        case "low_rank":
            return f"low-rank head, {_share(row)}"
        case "trimmed":
            return f"head of {row['rows']:,} tokens"
        case "screened":
            return f"screened head, {_share(row)}"
        case _:
            return "full head"


def _with_head(text: str, row: Mapping[str, Any], *, shown: bool) -> str:
    return f"{_head(row)}: {text}" if shown else text


def _name(row: Mapping[str, Any]) -> str:
    parts = [_head(row)]
    parts += [f"start: {STARTS[row['init']]}"] if row["init"] not in _USUAL else []
    parts += [f"loss: {LOSSES[row['loss']]}"] if row["loss"] != DraftLoss.kind else []
    return "; ".join(parts)
