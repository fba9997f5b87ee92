"""Timing draft heads on a tiny shape: what is in the loops, and what the rows say. The times themselves mean nothing here."""

from __future__ import annotations

import re
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import head_latency
from experiments.draft_heads import GivenToken, bytes_read, describe, named_head, random_head
from experiments.drafters import eagle3_config
from experiments.experiment import ExperimentError, parse_config
from experiments.presets import PRESETS
from experiments.record import check_row
from experiments.timing import Loop, time_loops
from experiments.ways import WAYS
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.heads import FullHead, LowRankHead, ScreenedHead, TrimmedHead
from tests.compiled import instructions_in_loops

G = 2
SMALL = ("models=tiny", "batches=2", "picks=argmax", "heads=low_rank:8", f"num_speculative_tokens={G}", "context=64", "dtype=float32")
SMALL += ("short_steps=1", "long_steps=3", "repeats=3", "compile_threads=2")
LLAMA = {"hidden_size": 4096, "vocab_size": 128256}
H200_L2_BYTES = 60e6
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def bench():
    return head_latency.Bench.of("tiny", parse_config(head_latency.Config, SMALL))


def products(loop: Loop) -> tuple[int, int]:
    """Matrix products of the compiled loop, and those of them that run in every iteration."""

    def repeated(params, state, num_steps):
        return jax.lax.fori_loop(0, num_steps, lambda _, state: loop.step(params, state), state)

    text = jax.jit(repeated).lower(loop.params, loop.state, np.int32(1)).compile().as_text()
    is_product = re.compile(r" (dot|custom-call)\(")
    return sum(map(bool, map(is_product.search, text.splitlines()))), sum(map(bool, map(is_product.search, instructions_in_loops(text))))


def test_the_chains_differ_in_their_heads_products_alone_and_nothing_leaves_the_loop(bench):
    # qkv, scores, mixed values, output, gate and up, down; once a draft token. And the fusion of the features.
    bodies = 6 * G + 1
    given = GivenToken(vocab_size=bench.target.vocab_size), {}
    for head, extra in ((given, 0), (bench.candidates.heads["low_rank:8"], 2 * G)):
        assert products(bench.loop(*head, 2, sample=False)) == (bodies + extra, bodies + extra)


def test_a_step_drafts_other_tokens_each_time_and_keeps_what_they_were_sampled_from(bench):
    for head, sample in (((GivenToken(vocab_size=96), {}), False), (bench.candidates.heads["full"], True)):
        loop = bench.loop(*head, 2, sample=sample)
        step, state, drafts = jax.jit(loop.step), loop.state, []
        for _ in range(3):
            state = step(loop.params, state)
            drafts.append(np.asarray(state.draft.tokens))
            np.testing.assert_array_equal(state.draft.num_drafted, G)
        assert len({draft.tobytes() for draft in drafts}) == 3
        assert len(np.unique(drafts)) > 3
        assert np.min(drafts) >= 0
        assert np.max(drafts) < bench.target.vocab_size
        if sample:
            np.testing.assert_allclose(np.asarray(state.draft.probs).sum(axis=-1), 1.0, rtol=1e-5)  # float32 sums of 96
        else:
            assert state.draft.probs is None
        # The first token of each draft is committed, and the drafter's cache follows.
        np.testing.assert_array_equal(state.context.length, loop.state.context.length + 3)
        np.testing.assert_array_equal(state.drafter_state.cache.length, state.context.length - 1)


def test_rows_hold_the_marginal_time_beside_the_full_heads(bench):
    full, low_rank = rows = [check_row(row) for row in bench.rows(2)]
    assert [(row["pick"], row["name"]) for row in rows] == [("argmax", "full"), ("argmax", "low_rank:8")]
    for row in rows:
        assert row["us"] == statistics.median(row["raw_us"])
        assert row["us_min"] <= row["us"] <= row["us_max"]
        assert row["share_of_drafting"] == pytest.approx(G * row["us"] / row["drafting_us"])
        assert row["drafting_us"] == pytest.approx(1e3 * row["ms_per_step"] - row["loop_us"])
        assert (row["model"], row["batch"], row["rows"], row["weights"], row["synthetic"]) == ("tiny", 2, 96, "random", False)
        assert row["bodies_floor_us"] > 0
        assert head_latency.columns(row)["head"] in ("full", "low_rank, R 4")
        assert "2 " in head_latency.show(row)
    assert (full["nu"], full["nu_min"], full["nu_max"]) == (1.0, 1.0, 1.0)
    assert (full["rank"], low_rank["rank"]) == (None, 4)
    assert full["us"] == full["us_full"] == low_rank["us_full"]


def test_the_floor_of_a_sampled_token_has_its_probabilities_written(bench):
    per_us = head_latency.Config().bandwidth_bytes_per_s / 1e6
    head, _ = bench.candidates.heads["full"]
    assert bench.floor_us(head, "argmax", 2) == pytest.approx(4 * 96 * 32 / per_us)
    assert bench.floor_us(head, "sample", 2) == pytest.approx((4 * 96 * 32 + 2 * 96 * 4) / per_us)


@FULL
def test_every_kind_of_head_is_timed_with_every_pick():
    settings = [word for word in SMALL if not word.startswith(("heads", "picks"))]
    rows = list(head_latency.run(parse_config(head_latency.Config, [*settings, "heads=low_rank:16,trimmed:32,screened:8:16"])))
    kinds = ["full", "low_rank", "trimmed", "screened"]
    assert [(row["pick"], row["head"]) for row in rows] == [(pick, kind) for pick in ("argmax", "sample") for kind in kinds]
    assert [row["rows"] for row in rows] == [96, 96, 32, 96] * 2


@pytest.mark.parametrize("name", ["llama31_8b", pytest.param("gpt_oss_20b", marks=FULL), pytest.param("qwen3_30b_a3b", marks=FULL)])
def test_the_default_heads_fit_the_published_shapes(name):
    def step_every_head() -> dict:
        bench, states = head_latency.Bench.of(name, head_latency.Config()), {}
        for head in bench.candidates.heads:
            for pick in head_latency.PICKS:
                loop = bench.loop(*bench.candidates.heads[head], 8, sample=pick == "sample")
                states[head, pick] = loop.state, loop.step(loop.params, loop.state)
        return states

    states = jax.eval_shape(step_every_head)  # no array is made
    assert len(states) == 2 * (1 + len(head_latency.Config().heads))
    for before, after in states.values():
        assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(lambda x: (x.shape, x.dtype), after)


@pytest.mark.parametrize("name", head_latency.Config().models)
def test_a_drafters_body_flushes_the_cache_between_two_heads(name):
    config = eagle3_config(name, FullHead())
    shapes = jax.eval_shape(Eagle3(config).init_params, jax.random.key(0))
    layer = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes["layer_0"]))
    assert layer > 3 * H200_L2_BYTES
    assert (config.decoder.hidden_size, config.decoder.vocab_size) == (PRESETS[name]().hidden_size, PRESETS[name]().vocab_size)


def test_the_layer_of_the_8b_targets_drafter_has_the_published_243_million_parameters():
    shapes = jax.eval_shape(Eagle3(eagle3_config("llama31_8b", FullHead())).init_params, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes["layer_0"])) == pytest.approx(243e6, rel=0.01)


def test_floors_count_the_weights_that_a_head_reads():
    def floor_us(name: str, batch: int = 1) -> float:
        return bytes_read(named_head(name, **LLAMA), **LLAMA, itemsize=2, batch=batch) / 4.3e12 * 1e6

    assert floor_us("full") == pytest.approx(244, abs=1)
    assert floor_us("low_rank:8") == pytest.approx(31.5, abs=0.1)
    assert floor_us("low_rank:8") / floor_us("full") == pytest.approx(0.129, abs=0.001)
    assert floor_us("trimmed:65536") / floor_us("full") == pytest.approx(0.511, abs=0.001)
    assert floor_us("screened:8:2048") == pytest.approx(floor_us("low_rank:8") + 2048 * 4096 * 2 / 4.3e6)
    assert floor_us("screened:8:2048", batch=64) == pytest.approx(floor_us("low_rank:8") + floor_us("trimmed:128256"))


def test_heads_are_named_and_described():
    sizes = {"hidden_size": 64, "vocab_size": 100}
    expected = {
        "full": (FullHead(), ("full", None, 100)),
        "low_rank:8": (LowRankHead(rank=8), ("low_rank", 8, 100)),
        "trimmed:40": (TrimmedHead(num_tokens=40), ("trimmed", None, 40)),
        "screened:4:10": (ScreenedHead(rank=16, num_candidates=10), ("screened", 16, 100)),
    }
    made: dict = {}
    for name, (head, description) in expected.items():
        assert named_head(name, **sizes) == head
        assert tuple(describe(head, 100).values()) == description
        arrays = random_head(head, **sizes, dtype=jnp.bfloat16, made=made)
        wanted = jax.eval_shape(lambda rng, head=head: head.init_params(rng, **sizes, dtype=jnp.bfloat16), jax.random.key(0))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), arrays) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
    assert len(made) == 7  # the screened head scores with the full one's matrix; its factors have another rank


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("slim", "'slim': expected full, .*low_rank:DIVISOR"),
        ("low_rank", "expected full"),
        ("low_rank:x", "invalid literal"),
        ("low_rank:7", "must divide hidden_size = 64, got 7"),
        ("trimmed:101", "at most vocab_size = 100, got 101"),
    ],
)
def test_unknown_heads_are_refused_by_name(name, message):
    with pytest.raises(ExperimentError, match=message):
        named_head(name, hidden_size=64, vocab_size=100)


def test_models_and_picks_that_are_not_known_are_refused():
    with pytest.raises(ExperimentError, match="known for llama31_8b, .*not for 'smollm2_135m'"):
        list(head_latency.run(parse_config(head_latency.Config, ["models=smollm2_135m"])))
    with pytest.raises(ExperimentError, match="picks must be some of argmax, sample, got beam"):
        parse_config(head_latency.Config, ["picks=beam"])


def test_loops_side_by_side_are_each_timed_as_often(capsys):
    loops: dict[Any, Loop] = {
        name: Loop(lambda factor, x: x * factor, jnp.float32(factor), jnp.ones(3)) for name, factor in (("a", 1.0), ("b", 2.0))
    }
    times = time_loops(loops, short=1, long=4, repeats=3, compile_threads=2)
    assert list(times) == ["a", "b"]
    assert {line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()} == {"loop of a", "loop of b"}
    time_loops({(WAYS[0], None): loops["a"]}, short=1, long=2, repeats=1)
    assert capsys.readouterr().err.endswith(f"loop of {WAYS[0].name}\n")
    for timing in times.values():
        pairs = zip(timing.raw_long_ms, timing.raw_short_ms, strict=True)
        assert timing.ms_per_step == tuple((long_ms - short_ms) / 3 for long_ms, short_ms in pairs)
        assert len(timing.ms_per_step) == 3
