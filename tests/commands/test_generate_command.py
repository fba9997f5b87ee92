"""`specjax generate`, on a tiny checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from specjax import (
    GenerateConfig,
    Lossless,
    Reuse,
    SamplingParams,
    SparseAttention,
    SparseFFN,
    SparsityConfig,
    Statistics,
    Transformer,
    generate,
)
from specjax.checkpoints.kinds import build_model
from specjax.checkpoints.store import load_checkpoint, read_model, save_checkpoint
from specjax.commands import generate as command
from specjax.commands import memory_plan
from specjax.commands.generate import _print_statistics
from specjax.commands.main import app
from specjax.commands.memory_plan import MemoryPlan, plan_memory
from specjax.drafting.medusa import MedusaConfig
from specjax.two_level import measured_costs
from specjax.two_level.level_counts import LevelCounts
from specjax.two_level.measured_costs import TwoLevelCosts
from tests.drafters import write_drafter
from tests.helpers import tiny_config
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "draft", seed=1)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, words)])


def test_the_text_streams_and_equals_that_of_the_library_for_every_drafter(target: Path, draft: Path) -> None:
    checkpoint = load_checkpoint(target)
    tokenizer = checkpoint.tokenizer()
    prompt = tokenizer.encode("abcabc")
    output = generate(checkpoint.model, checkpoint.params, [prompt], config=GenerateConfig(max_new_tokens=12), ignore_eos=True)
    expected = tokenizer.decode(output.tokens[0], skip_special_tokens=True)
    for drafter in ("none", "prompt-lookup", draft):
        done = run(target, "abcabc", "--raw", "--ignore-eos", "--max-new-tokens", 12, "--num-speculative-tokens", 2, "--drafter", drafter)
        assert done.exit_code == 0, done.output
        assert done.stdout.rstrip("\n") == expected.rstrip("\n").rstrip("\ufffd")
        assert "memory: weights" in done.stderr
        assert "12 tokens, stopped by LENGTH" in done.stderr
        assert ("mean_acceptance_length" in done.stderr) == (drafter != "none")


def test_a_sparse_target_says_so_and_with_everything_kept_writes_the_same_text(target: Path, tmp_path: Path) -> None:
    words = (target, "abcabc", "--raw", "--ignore-eos", "--max-new-tokens", 12, "--drafter", "none")
    attention = SparseAttention(block_size=8, keep=0.0, dense_below=0, head_blocks=1, tail_blocks=0)
    few = SparsityConfig(attention=attention, ffn=SparseFFN(keep=0.5))
    row = dict(setting="all", token_agreement=1.0, bytes_ratio=1.0, flops_ratio=1.0)
    row["sparsity"] = SparsityConfig(attention=dataclasses.replace(attention, keep=1.0)).to_json()
    file, calibration = tmp_path / "few.json", tmp_path / "calibration.json"
    file.write_text(json.dumps(few.to_json()))
    calibration.write_text(json.dumps({"rows": [row]}))
    lossy, whole = (run(*words, "--sparsity", path) for path in (file, calibration))
    assert lossy.exit_code == whole.exit_code == 0, lossy.output + whole.output
    assert whole.stdout == run(*words).stdout
    assert "sparse (lossy): kept 1.000 of the cache; a step moves 1.0" in whole.stderr
    assert "of the channels; a step moves 0." in lossy.stderr
    refused = run(*words, "--sparsity", calibration, "--agreement", 1.1)
    assert "--lossless checks sparse passes: give --sparsity FILE too" in run(*words, "--lossless").stderr
    assert "none of 1 settings agrees with dense passes on a share of 1.1 of the tokens" in refused.stderr
    file.write_text(json.dumps({"attention": {"rho": 1}}))
    assert "SparseAttention has no field ['rho']" in run(*words, "--sparsity", file).stderr


def test_the_chat_template_is_applied_unless_raw(target: Path) -> None:
    words = (target, "hello", "--max-new-tokens", 8, "--ignore-eos", "--drafter", "none")
    assert run(*words).stdout != run(*words, "--raw").stdout


@pytest.mark.full
def test_sampling_is_repeatable_by_seed(target: Path) -> None:
    words = (target, "hello", "--max-new-tokens", 12, "--ignore-eos", "--temperature", 1.5, "--top-p", 0.9, "--num-speculative-tokens", 2)
    one, again, other = run(*words, "--seed", 1), run(*words, "--seed", 1), run(*words, "--seed", 2)
    assert one.exit_code == 0, one.output
    assert one.stdout == again.stdout != other.stdout


@pytest.mark.full
def test_a_sparse_target_that_is_checked_writes_the_dense_text_and_says_when_it_pays(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (target, "abcabc", "--raw", "--ignore-eos", "--max-new-tokens", 12, "--drafter", "none")
    few = SparsityConfig(attention=SparseAttention(block_size=8, keep=0.0, dense_below=0, head_blocks=1, tail_blocks=0))
    file = tmp_path / "few.json"
    file.write_text(json.dumps(few.to_json()))

    def times(loops: dict[str, Any], params: Any, state: Any, *lengths: object) -> tuple[dict[str, float], LevelCounts]:
        return {"dense": 4.0, "sparse": 1.0, "cycle": 13.0}, loops["cycle"](params, state, np.int32(1)).statistics.levels

    monkeypatch.setattr(measured_costs, "_times", times)  # those of a few tiny steps are noise
    done = run(*words, "--sparsity", file, "--lossless")
    assert done.exit_code == 0, done.output
    assert done.stdout == run(*words).stdout
    assert "check of up to 8 steps 5 ms (1.25); with 1.00 tokens a step two levels pay where" in done.stderr
    assert "sparse, checked by dense passes (lossless): kept 0." in done.stderr


def test_what_is_timed_for_two_levels_samples_as_what_runs(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, file = [], tmp_path / "few.json"
    file.write_text(json.dumps(SparsityConfig(attention=SparseAttention(block_size=8)).to_json()))

    def costs(*models: object, **given: object) -> TwoLevelCosts:
        seen.append(given["sampling"])
        return TwoLevelCosts(dense_ms=4.0, sparse_ms=1.0, check_ms=5.0, max_steps=8, draft_length=5)

    def stream(*models: object, **given: object) -> None:
        seen.append(given["sampling"])
        raise ValueError("far enough")

    monkeypatch.setattr(command, "measure_costs", costs)
    monkeypatch.setattr(command, "stream_generate", stream)
    words = ("--drafter", "none", "--sparsity", file, "--lossless", "--temperature", 0.8)
    assert "far enough" in run(target, "abc", *words).stderr
    assert seen == [SamplingParams(temperature=0.8)] * 2


def test_where_steps_cannot_be_timed_two_levels_go_on_with_what_is_known(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, file = [], tmp_path / "few.json"
    few = SparsityConfig(attention=SparseAttention(block_size=8))

    def stream(*models: object, config: GenerateConfig, **given: object) -> None:
        seen.append(config.sparsity.lossless)
        raise ValueError("far enough")

    def lossless(sparsity: SparsityConfig, prompt: str = "ab" * 200) -> str:
        file.write_text(json.dumps(sparsity.to_json()))
        return run(target, prompt, "--raw", "--max-new-tokens", 40, "--sparsity", file, "--lossless").stderr

    monkeypatch.setattr(command, "stream_generate", stream)
    # The call needs 440 tokens of a window of 512, the loops would need 147 behind the prompt.
    said = lossless(few)
    assert "two levels choose by bytes: loops of steps have no room: row 0: a prompt of" in said
    assert "far enough" in said
    channels = SparsityConfig(ffn=SparseFFN(keep=0.5), lossless=Lossless(max_steps=7, step_cost=0.5))
    assert "two levels choose by the step_cost of the file: loops of steps have no room" in lossless(channels)
    assert seen == [Lossless(), Lossless(max_steps=7, step_cost=0.5)]
    assert "nothing to choose by, give a" in lossless(SparsityConfig(ffn=SparseFFN(keep=0.5)))
    # Memory for the call, but not for the loops and the caches that they start from.
    call = plan_memory([read_model(target)], batch_size=1, capacity=128, sparsity=few)
    monkeypatch.setattr(memory_plan, "device_bytes", lambda device: call.params_bytes + call.cache_bytes)
    said = lossless(few, "abc")
    assert "two levels choose by bytes: the device has no memory for two of the caches: memory: weights" in said
    assert seen[2:] == [Lossless()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-1"], "SamplingParams.temperature must be 0 (greedy) or a positive finite number"),
        (["--temperature", "nan"], "SamplingParams.temperature must be 0 (greedy) or a positive finite number"),
        (["--temperature", "1", "--top-p", "0"], "SamplingParams.top_p must be in (0, 1]"),
        (["--top-p", "2"], "SamplingParams.top_p must be in (0, 1]"),
        (["--top-k", "-3"], "SamplingParams.top_k must be an int of at least 0"),
        (["--max-new-tokens", "-1"], "GenerateConfig.max_new_tokens must be an int of at least 0, got -1"),
        (["--max-new-tokens", "600"], "exceed the model's window of 512 tokens"),
        (["--num-speculative-tokens", "-2"], "GenerateConfig.num_speculative_tokens must be a positive int, got -2"),
        (["--dtype", "int8"], "--dtype must be bfloat16 or float32, got 'int8'"),
        (["--drafter", "nowhere"], "nowhere is not a specjax checkpoint"),
        (["--sparsity", "nowhere.json"], "--sparsity nowhere.json is no JSON that can be read"),
    ],
)
def test_bad_input_is_one_line_before_weights_are_read(
    target: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_load(monkeypatch)
    done = run(target, "hello", *words)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert "compiling" not in done.stderr


def refuse_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "load_checkpoint", lambda *arguments, **options: pytest.fail("the weights were read"))


def test_a_prompt_that_cannot_be_continued_is_refused_before_weights_are_read(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_load(monkeypatch)
    assert "an empty prompt has nothing to continue" in run(target, "", "--raw").stderr
    assert "a prompt of 500 tokens and up to 256 new ones exceed the model's window of 512 tokens" in run(target, "a" * 500, "--raw").stderr
    checkpoint = read_model(target)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(checkpoint.init_params, jax.random.key(0)))
    save_checkpoint(tmp_path / "mute", checkpoint.config, params, {"source": "mute"})
    assert "the checkpoint made from mute holds no tokenizer" in run(tmp_path / "mute", "hello").stderr


def test_memory_is_planned_for_the_tokens_of_the_prompt(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(*models: object, **given: object) -> None:
        raise ValueError("far enough")

    monkeypatch.setattr(command, "stream_generate", stream)
    plan = plan_memory([read_model(target)], batch_size=1, capacity=128)
    monkeypatch.setattr(memory_plan, "device_bytes", lambda device: plan.params_bytes + plan.cache_bytes)
    words = ("--raw", "--max-new-tokens", 4, "--drafter", "none")
    assert "far enough" in run(target, "<u>" * 60, *words).stderr  # 60 tokens of three bytes each
    assert "weights and caches need" in run(target, "a" * 180, *words).stderr


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        ("eagle3", "embedding"),
        pytest.param("medusa", "LM head, final norm", marks=pytest.mark.full),
        pytest.param("hydra", "embedding, final norm", marks=pytest.mark.full),
    ],
)
def test_a_drafter_on_the_targets_features_gives_the_same_text_and_says_what_it_shares(
    target: Path, tmp_path: Path, kind: str, shared: str
) -> None:
    drafter = write_drafter(tmp_path / "drafter", target, kind)
    words = (target, "hello", "--max-new-tokens", 8, "--num-speculative-tokens", 2, "--drafter")
    done = run(*words, drafter)
    assert done.exit_code == 0, done.output
    assert done.stdout == run(*words, "none").stdout
    assert f"the drafter uses the target's {shared}\n" in done.stderr
    assert "mean_acceptance_length" in done.stderr


def test_a_drafter_in_the_targets_place_and_one_for_another_target_are_refused(target: Path, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "medusa", target, "medusa")
    done = run(drafter, "hello")
    assert done.exit_code == 1
    assert "is the checkpoint of a drafter (medusa), not of a language model" in done.stderr
    config = MedusaConfig(hidden_size=32, vocab_size=read_model(target).config.vocab_size, num_draft_heads=2)
    save_checkpoint(tmp_path / "wide", config, build_model(config, jnp.float32).init_params(jax.random.key(0)))
    done = run(target, "hello", "--drafter", tmp_path / "wide")
    assert done.exit_code == 1
    assert "the drafter was made for a target of width 32, this one has 16" in done.stderr
    assert "compiling" not in done.stderr


@pytest.mark.filterwarnings("default:the drafter must have")
@pytest.mark.full
def test_a_drafter_with_another_tokenizer_is_refused_and_may_be_forced(target: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", special_tokens=("<a>", "<u>"))
    words = (target, "hello", "--max-new-tokens", 8, "--num-speculative-tokens", 2, "--drafter", other)
    refused = run(*words)
    assert refused.exit_code == 1
    assert "the drafter must have the target's tokenizer; expected that of target, got that of other" in refused.stderr
    forced = run(*words, "--allow-different-tokenizer")
    assert forced.exit_code == 0, forced.output
    assert "warning: the drafter must have the target's tokenizer" in forced.stderr


def test_a_plan_adds_weights_and_caches_and_refuses_what_does_not_fit() -> None:
    model = Transformer(tiny_config(), dtype=jnp.bfloat16, param_dtype=jnp.float32)
    plan = plan_memory([model, model], batch_size=3, capacity=10)
    numbers = sum(np.prod(leaf.shape) for leaf in _leaves(model))
    assert plan.params_bytes == 2 * 4 * numbers
    assert plan.cache_bytes == 2 * (2 * 2 * 3 * 2 * 10 * 8 * 2)  # models x (layers, keys and values, B, K, S, H, bytes)
    sparse = SparsityConfig(attention=SparseAttention(block_size=8, score="bounds"), reuse=Reuse(anchors=(0,)))
    with_blocks = plan_memory([model, model], batch_size=3, capacity=10, sparsity=sparse)
    # 16 slots, two blocks, in one of the two; the least and the greatest key components of its one choosing layer.
    assert with_blocks.cache_bytes == 2 * 2 * 3 * 2 * (16 + 10) * 8 * 2 + 2 * 3 * 2 * 2 * 8 * 2
    MemoryPlan(params_bytes=10, cache_bytes=5, available_bytes=15).check()
    with pytest.raises(ValueError, match=r"weights and caches need 3.0 GiB, .* 2.0 GiB: use a smaller model"):
        MemoryPlan(params_bytes=2**31, cache_bytes=2**30, available_bytes=2**31).check()


def _leaves(model: Transformer) -> list:
    return jax.tree.leaves(jax.eval_shape(model.init_params, jax.random.key(0)))


@pytest.mark.parametrize(("accepted", "warns"), [(0, True), (100, False)])
def test_a_drafter_that_is_hardly_ever_right_is_pointed_out(capsys: pytest.CaptureFixture, accepted: int, warns: bool) -> None:
    counts = jnp.array([[300 - accepted, accepted]])
    _print_statistics(Statistics(accepted_counts=counts, drafted_counts=jnp.array([[0, 300]])))
    assert ("hardly any draft was accepted in 300 steps" in capsys.readouterr().err) == warns
