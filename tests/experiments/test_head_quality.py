"""Heads of two kinds of drafter held against their full heads, end to end on a tiny target, with given times: real ones mean nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import head_quality, head_rows, step_costs
from experiments.decoding import Call, Decoded
from experiments.draft_heads import bytes_read
from experiments.drafters import load_candidates, load_families, with_cut_heads
from experiments.experiment import ExperimentError, parse_config
from experiments.models import load_model
from experiments.record import check_row
from experiments.timing import LoopTiming
from specjax import Statistics
from specjax.checkpoints.store import load_checkpoint, save_checkpoint
from specjax.cost_model import throughput_ratio
from specjax.drafting.draft_model_network import DraftModelConfig
from specjax.drafting.heads import DraftHead, FullHead, LowRankHead, ScreenedHead, TrimmedHead
from specjax.training.new_drafters import new_eagle3
from tests.token_data import write_token_files
from tests.training import initial_params

SMALL = (
    "sets=first,second",
    "prompts_per_set=2",
    "batches=2",
    "temperatures=0",
    "new_tokens=8",
    "num_speculative_tokens=2",
    "dtype=float32",
)
LOOPS = ("compile_threads=2", "context=64", "short_steps=1", "long_steps=2", "loop_repeats=1")
# Milliseconds a step: a full head of 250 us and others of 50, in a step whose rest takes 4,500.
STEP_MS = {"plain": 4.0, "step": 5.0, "given": 0.3, "head full": 0.8}
# A quotient of float64 against one of float32.
ROUNDING = 1e-6
OPTIONS = dict(dtype="float32", implementation="auto", cache_dir=None)


@pytest.fixture(scope="module")
def drafters(target_path: Path, drafter_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, target, draft = tmp_path_factory.mktemp("drafters"), load_checkpoint(target_path), load_checkpoint(drafter_path)
    paths = {"draft": drafter_path}

    def remember(init: str) -> dict[str, Any]:
        return {
            "source": init,
            "training": {"variants": [{"init": init, "loss": {"kind": "forward_kl"}}], "last_report": {"loss_tokens": 7}},
        }

    for name, head in {"eagle3": FullHead(), "eagle3-low-rank": LowRankHead(rank=4)}.items():
        network = new_eagle3(target.model.config, head, dtype=jnp.float32)
        paths[name] = folder / name
        save_checkpoint(paths[name], network.config, initial_params(network), remember("svd"))
    rng, decoder = np.random.default_rng(0), draft.model.config
    arrays = {"down": rng.normal(size=(4, 16)).astype(np.float32), "up": rng.normal(size=(decoder.vocab_size, 4)).astype(np.float32)}
    paths["draft-low-rank"] = folder / "draft-low-rank"
    config = DraftModelConfig(decoder=decoder, head=LowRankHead(rank=4))
    save_checkpoint(paths["draft-low-rank"], config, draft.params | {"draft_head": arrays}, remember("weighted_svd"), draft.tokenizer_path)
    return paths


@pytest.fixture
def fixed_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(loops: dict, **settings: Any) -> dict:
        return {name: timing(STEP_MS.get(name, 0.4 if name.startswith("head") else 4.2)) for name in loops}

    def timing(ms_per_step: float) -> LoopTiming:
        return LoopTiming(ms_per_step=(ms_per_step,), raw_short_ms=(0.0,), raw_long_ms=(ms_per_step,), compile_s=0.0, temp_bytes=None)

    monkeypatch.setattr(step_costs, "time_loops", timed)
    # Nor can a prefill of a few tokens be told from the decoding of as few.
    monkeypatch.setattr(head_rows.Decoder, "prefill_seconds_by_call", lambda self, prompts, **options: [0.0] * (len(prompts) // 2))


@pytest.mark.full
def test_each_kind_of_drafter_is_compared_with_its_own_full_head(
    drafters: dict[str, Path], target_path: Path, data_dir: Path, tmp_path: Path, fixed_times: None, full_grid: bool
) -> None:
    data = write_token_files(tmp_path / "tokens", target_path)
    # The draft model itself stands in the checkpoint with another head as well.
    names = ("eagle3", "eagle3-low-rank", "draft-low-rank") if full_grid else ("draft-low-rank",)
    chosen = [str(drafters[name]) for name in names]
    paths = (f"target={target_path}", f"drafters={','.join(chosen)}", f"data_dir={data_dir}", "derive=trimmed:40")
    paths += (f"data={data}",)
    rows = [check_row(row) for row in head_quality.run(parse_config(head_quality.Config, (*paths, *SMALL, *LOOPS)))]
    heads = ["full", "low_rank", "trimmed"]
    families = ("eagle3", "draft_model") if full_grid else ("draft_model",)
    assert {row["drafter"] for row in rows} == set(families)
    for family in families:
        mine = [row for row in rows if row["drafter"] == family]
        # At equal batch and temperature the sets' rows by size of the head, then the means.
        sizes = {row["head"]: row["head_bytes"] for row in mine}
        assert sizes == {"full": 259 * 16 * 4, "low_rank": (259 + 16) * 4 * 4, "trimmed": 40 * 16 * 4}
        assert [(row["dataset"], row["head"]) for row in mine] == [
            *((name, head) for head in heads for name in ("first", "second")),
            *(("mean", head) for head in heads),
        ]
        assert [(row["dataset"], row["head"]) for row in head_quality.table_rows(mine)] == [("mean", head) for head in heads]
        full_rows = {row["dataset"]: row for row in mine if row["head"] == "full"}
        for row in mine:
            full = full_rows[row["dataset"]]
            assert row["rho_tau"] == pytest.approx(row["mean_acceptance_length"] / full["mean_acceptance_length"])
            assert row["kappa"] == pytest.approx(2 * 250 / 4500)
            assert row["nu"] == pytest.approx(1 if row["head"] == "full" else 0.2)
            assert row["predicted_speedup_over_full"] == throughput_ratio(acceptance_ratio=row["rho_tau"], kappa=row["kappa"], nu=row["nu"])
            assert row["predicted_gain_error"] == pytest.approx(row["predicted_speedup_over_full"] / row["speedup_over_full"] - 1)
            assert row["speedup_over_full"] == pytest.approx(row["tokens_per_s"] / full["tokens_per_s"])
            assert row["rho_tau_interval"][0] - ROUNDING <= row["rho_tau"] <= row["rho_tau_interval"][1] + ROUNDING
            assert row["speedup_over_full_interval"] is None  # one batch of two prompts a set
            assert 0 < row["tokens_per_call_step"] <= row["mean_acceptance_length"] + ROUNDING
            waiting = row["tokens_per_call_step"] / full["tokens_per_call_step"] / row["rho_tau"]
            assert row["predicted_with_slowest_rows"] == pytest.approx(waiting * row["predicted_speedup_over_full"])
            assert (row["share_outside"] is not None) == (row["head"] == "trimmed")
            # Random weights accept next to nothing.
            assert row["undertrained"] is True
            assert "UNDERTRAINED" in head_quality.show(row)
            assert head_quality.columns(row)["head"] == head_quality.name_of(row)
        cut = next(row for row in mine if row["head"] == "trimmed")
        assert (cut["init"], cut["train_tokens"], "cut" in head_quality.show(cut)) == (
            "cut from full",
            full_rows["first"]["train_tokens"],
            True,
        )
    inits = {(row["drafter"], row["init"], row["train_tokens"]) for row in rows if row["head"] == "low_rank"}
    assert inits == {(family, "svd" if family == "eagle3" else "weighted_svd", 7) for family in families}


def test_a_draft_models_own_head_is_there_beside_the_other_one(drafters: dict[str, Path]) -> None:
    candidates = load_candidates([str(drafters["draft-low-rank"])], **OPTIONS)
    assert candidates.family == "draft_model"
    network, params = candidates.trained["full"]
    assert network.config.head == FullHead(shared=True)
    assert "draft_head" not in params
    assert list(candidates.heads) == ["full", "low_rank, R 4"]


def test_a_screened_heads_full_head_is_there_beside_it(tmp_path: Path, target_path: Path) -> None:
    head = ScreenedHead(rank=4, num_candidates=8)
    network = new_eagle3(load_checkpoint(target_path).model.config, head, dtype=jnp.float32)
    record = {"training": {"variants": [{"init": "svd", "loss": {"kind": "forward_kl"}}]}}
    save_checkpoint(tmp_path / "screened", network.config, initial_params(network), record)
    candidates = load_candidates([str(tmp_path / "screened")], **OPTIONS)
    full, params = candidates.trained["full"]
    assert full.config.head == FullHead()
    np.testing.assert_array_equal(params["draft_head"]["lm_head"], candidates.params["draft_head"]["lm_head"])
    np.testing.assert_array_equal(candidates.heads["full"][1]["lm_head"], candidates.params["draft_head"]["lm_head"])
    assert candidates.metadata["full"]["training"]["variants"][0]["init"] == "that of the screened head"


def test_a_cut_head_is_the_full_ones_rows_of_the_frequent_tokens(drafters: dict[str, Path]) -> None:
    candidates = load_candidates([str(drafters["eagle3"])], **OPTIONS)
    counts = np.arange(259)
    cut = with_cut_heads(candidates, ["trimmed:3", "trimmed:3"], counts, always=[0])
    assert list(cut.heads) == ["full", "trimmed, 3 rows, cut"]
    head, arrays = cut.heads["trimmed, 3 rows, cut"]
    assert head == TrimmedHead(num_tokens=3)
    np.testing.assert_array_equal(arrays["token_ids"], [0, 257, 258])
    np.testing.assert_array_equal(arrays["lm_head"], candidates.params["draft_head"]["lm_head"][np.array([0, 257, 258])])
    network, params = cut.trained["trimmed, 3 rows, cut"]
    assert network.config.head == head
    np.testing.assert_array_equal(params["fc"], candidates.params["fc"])
    for name, message in (("low_rank:4", "rows of the full head, got 'low_rank:4'"), ("trimmed:300", "at most vocab_size = 259")):
        with pytest.raises(ExperimentError, match=message):
            with_cut_heads(candidates, [name], counts, always=[0])


def test_a_trained_trimmed_head_and_one_cut_to_its_size_stand_side_by_side(
    drafters: dict[str, Path], target_path: Path, tmp_path: Path
) -> None:
    network = new_eagle3(load_checkpoint(target_path).model.config, TrimmedHead(num_tokens=3), dtype=jnp.float32)
    save_checkpoint(tmp_path / "trimmed", network.config, initial_params(network), {"training": {"variants": [{"init": "svd"}]}})
    candidates = load_candidates([str(drafters["eagle3"]), str(tmp_path / "trimmed")], **OPTIONS)
    both = with_cut_heads(candidates, ["trimmed:3"], np.arange(259), always=[])
    assert list(both.heads) == ["full", "trimmed, 3 rows", "trimmed, 3 rows, cut"]
    for name, ids, init in (("trimmed, 3 rows", [0, 1, 2], "svd"), ("trimmed, 3 rows, cut", [256, 257, 258], "cut from full")):
        np.testing.assert_array_equal(both.trained[name][1]["draft_head"]["token_ids"], ids)
        assert both.metadata[name]["training"]["variants"][0]["init"] == init


def test_a_cut_heads_tokens_are_counted_in_all_folders(drafters: dict[str, Path], target_path: Path, tmp_path: Path) -> None:
    folders = [write_token_files(tmp_path / str(first), target_path, ids=(first, first + 9)) for first in (10, 100)]
    candidates, target = load_candidates([str(drafters["eagle3"])], **OPTIONS), load_model(str(target_path), **OPTIONS)
    for chosen, expected in ((folders[:1], {*range(10, 19)}), (folders, {*range(10, 19), *range(100, 109)})):
        config = head_quality.Config(derive=("trimmed:40",), data=tuple(map(str, chosen)))
        cut = head_quality.derived(config, candidates, target)
        ids = {*np.asarray(cut.heads["trimmed, 40 rows, cut"][1]["token_ids"]).tolist()}
        assert expected <= ids
        assert (100 in ids) == (100 in expected)  # what was not counted fills up from the lowest ids


def test_lengths_and_speeds_are_counted_by_prompt_and_by_batch() -> None:
    calls = (Call(2.0, (9, 5), (4, 1), (4, 3)), Call(1.0, (1, 4), (0, 3), (0, 0)))
    decoded = Decoded(tokens=[], seconds=3.0, statistics=Statistics.zeros(1, 4), calls=calls)
    assert head_rows.acceptance_length(decoded) == ([8, 4, 0, 3], [4, 1, 0, 3])
    assert head_rows.speed(decoded) == ([12, 3], [2.0, 1.0])
    assert head_rows.tokens_per_call_step(decoded) == 15 / (2 * 4 + 2 * 3)


@pytest.mark.parametrize(("batch", "speedups"), [(1, [2.0, 2.0]), (2, None)])
def test_intervals_are_those_of_both_ratios_to_the_full_head(batch: int, speedups: list[float] | None) -> None:
    def decoded(seconds: float, accepted: int) -> Decoded:
        # Prompts of one and of two steps.
        calls = tuple(Call(steps * seconds, (1 + steps * (1 + accepted),), (steps,), (steps * accepted,)) for steps in (1, 2))
        return Decoded(tokens=[], seconds=0.0, statistics=Statistics.zeros(1, 4), calls=calls)

    setting: Any = SimpleNamespace(batch=batch)
    found = head_rows.Setting._intervals(setting, [decoded(0.75, 2)], [decoded(1.0, 1)])
    # Each prompt gives the same two ratios, whichever are drawn.
    assert found == {"rho_tau_interval": pytest.approx([1.5, 1.5]), "speedup_over_full_interval": speedups and pytest.approx(speedups)}


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (FullHead(), 2 * 100 * 16),
        (FullHead(shared=True), 2 * 100 * 16),
        (LowRankHead(rank=4), 2 * 4 * 116),
        (TrimmedHead(num_tokens=7), 2 * 7 * 16),
        (ScreenedHead(rank=4, num_candidates=5), 2 * (4 * 116 + 3 * 5 * 16)),
        (ScreenedHead(rank=4, num_candidates=50, shared=True), 2 * (4 * 116 + 100 * 16)),
    ],
)
def test_a_heads_bytes_are_those_of_the_weights_that_it_reads_wherever_they_lie(head: DraftHead, expected: int) -> None:
    assert bytes_read(head, hidden_size=16, vocab_size=100, itemsize=2, batch=3) == expected


@pytest.mark.parametrize(
    ("per_set", "available", "batch", "expected"),
    [(8, 80, 64, 64), (None, 80, 64, 64), (None, 80, 1, 80), (8, 80, 1, 8), (8, 5, 64, 5), (13, 80, 4, 12)],
)
def test_prompts_fill_whole_batches_where_there_are_enough(per_set: int | None, available: int, batch: int, expected: int) -> None:
    assert head_quality.number_of_prompts(head_quality.Config(prompts_per_set=per_set), available, batch) == expected


@pytest.mark.full
def test_what_cannot_be_compared_is_refused(drafters: dict[str, Path], target_path: Path, data_dir: Path) -> None:
    config = head_quality.Config(target=str(target_path), data_dir=str(data_dir), sets=("first",), dtype="float32")
    low_rank = (str(drafters["eagle3-low-rank"]),)
    for changes, message in (
        ({}, "head_quality needs target=PATH, drafters=PATH,PATH and data_dir=PATH"),
        ({"drafters": low_rank}, "one of the drafters must have the full head, got low_rank, R 4"),
        ({"drafters": low_rank, "derive": ("trimmed:40",)}, "derive and data go together"),
    ):
        with pytest.raises(ExperimentError, match=message):
            list(head_quality.run(dataclasses.replace(config, **changes)))
    paths = [str(drafters[name]) for name in ("eagle3", "draft")]
    assert list(load_families(paths, **OPTIONS)) == ["eagle3", "draft_model"]
    with pytest.raises(ExperimentError, match="must be of one kind, got eagle3 and draft_model"):
        load_candidates(paths, **OPTIONS)
    with pytest.raises(ExperimentError, match="a second drafter with the head full"):
        load_candidates([str(drafters["draft"])] * 2, **OPTIONS)
