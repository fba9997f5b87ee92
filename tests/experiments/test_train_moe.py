"""A tiny mixture of experts, trained for a few seconds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import train_moe
from experiments.experiment import ExperimentError, parse_config
from experiments.models import load_model, stored_as
from experiments.moe_training import evaluate_texts, moe_step
from specjax import GenerateConfig, Kernels, MoEConfig, Transformer, generate
from specjax.checkpoints.store import abstract_checkpoint
from specjax.training.data import TokenBatch
from specjax.training.token_files import TokenSequence, tokenizer_fingerprint
from specjax.training.token_writer import writing_token_files
from specjax.training.train_step import TrainState
from tests.helpers import numpy_log_softmax, random_model, tiny_config
from tests.tiny_checkpoint import write_checkpoint

SMALL = ("num_layers=1", "hidden_size=32", "num_heads=1", "num_kv_heads=1", "num_experts=16", "expert_size=8", "sequence_length=16")
SMALL += ("batch=8", "micro_batch=4", "learning_rate=0.03", "warmup_steps=2", "dtype=float32", "report_every=10", "validation_batches=1")
# The same sums in float32, in batches of other sizes.
TOLERANCE = 1e-5


def write_counting(path, target_path, *, seed=0):
    """Texts that count upwards from anywhere: what follows is known from what stands before."""
    tokenizer, rng = abstract_checkpoint(target_path).tokenizer(), np.random.default_rng(seed)
    fingerprint = tokenizer_fingerprint(tokenizer)
    with writing_token_files(
        path, vocab_size=len(tokenizer), tokenizer=fingerprint, made={"kind": "text"}, force=False, resume=False
    ) as writer:
        texts = [(rng.integers(64) + np.arange(16)) % 64 for _ in range(64)]
        writer.extend([TokenSequence(tokens=text, loss_mask=np.ones(16, bool)) for text in texts], position=len(texts))
    return path


def config_of(target_path, data, out, *settings):
    words = (f"tokenizer={target_path}", f"data={data}", f"out={out}", *SMALL, *settings)
    return parse_config(train_moe.Config, words)


@pytest.mark.full
def test_the_loss_falls_all_experts_are_used_and_the_checkpoint_is_a_target(target_path, tmp_path):
    data, held_out = write_counting(tmp_path / "data", target_path), write_counting(tmp_path / "held-out", target_path, seed=1)
    rows = list(train_moe.run(config_of(target_path, data, tmp_path / "moe", f"validation={held_out}", "steps=20")))
    assert [row["step"] for row in rows] == [10, 20]
    assert rows[0]["train_tokens"] == 10 * 8 * 16
    assert rows[0]["perplexity"] > 10 > 3 > rows[-1]["validation_perplexity"] > 1
    assert rows[-1]["least_used"] > 0.2
    assert rows[-1]["most_used"] < 2  # 2 is every token
    assert all(train_moe.columns(row) and str(row["step"]) in train_moe.show(row) for row in rows)
    trained = load_model(str(tmp_path / "moe"), dtype="float32")
    assert trained.weights == "trained here for 20 steps, float32"
    assert trained.model.config.moe == MoEConfig(num_experts=16, num_experts_per_token=8, intermediate_size=8)
    output = generate(trained.model, trained.params, [[5, 6, 7, 8]], config=GenerateConfig(max_new_tokens=4))
    assert output.tokens.tolist() == [[9, 10, 11, 12]]
    assert trained.checkpoint.tokenizer().get_vocab() == abstract_checkpoint(target_path).tokenizer().get_vocab()


def moe_model() -> tuple[Transformer, dict]:
    model, params = random_model(tiny_config(moe=MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=8)))
    return model.clone(kernels=Kernels(experts="dense")), params


def batch_of(rows: int) -> TokenBatch:
    rng = np.random.default_rng(0)
    mask = rng.random((rows, 9)) < 0.7
    mask[:, 0] = False
    return TokenBatch(tokens=rng.integers(0, 64, (rows, 9)).astype(np.int32), loss_mask=mask)


@pytest.mark.full
def test_the_loss_is_the_models_negative_log_likelihood():
    model, params = moe_model()
    batch = batch_of(2)
    found = evaluate_texts(params, batch, model=model, micro_batch=1)
    output = model.apply({"params": params}, batch.tokens, model.init_cache(batch_size=2, capacity=9))
    log_probs = numpy_log_softmax(np.asarray(model.apply({"params": params}, output.hidden, method="logits")))
    rows, columns = np.nonzero(batch.loss_mask)
    np.testing.assert_allclose(found.sum_nll, -log_probs[rows, columns - 1, batch.tokens[rows, columns]].sum(), rtol=TOLERANCE)
    assert found.num_tokens == batch.loss_mask.sum()
    np.testing.assert_allclose(found.shares.sum(axis=1), 1.0, rtol=TOLERANCE)


@pytest.mark.full
def test_a_step_in_parts_is_the_step_of_the_whole_batch_where_nothing_is_balanced(target_path):
    model, params = moe_model()
    settings = (f"tokenizer={target_path}", "steps=5", *SMALL, "balance_weight=0")
    training = train_moe.training_of(parse_config(train_moe.Config, settings), abstract_checkpoint(target_path))
    states = []
    for micro_batch in (4, 2):
        of_this = type(training)(model, training.optimizer, 0.0, micro_batch)
        state, _ = moe_step(TrainState.of(of_this.optimizer, jax.tree.map(jnp.array, params)), batch_of(4), np.int32(5), training=of_this)
        states.append(state.optimizer)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE * max(1.0, float(np.abs(a).max()))), *states)


def test_weights_that_were_trained_here_are_not_called_real():
    assert stored_as({"quantisation": "none", "training_steps": 300}, "bfloat16") == "trained here for 300 steps, bfloat16"
    assert stored_as({"quantisation": "none"}, "bfloat16") == "real, bfloat16"
    assert stored_as({"quantisation": "Q4_K_M"}, "bfloat16") == "real, Q4_K_M dequantised to bfloat16"


def test_the_learning_rate_has_risen_within_a_tenth_of_a_short_run():
    assert train_moe.Config(steps=200).warmup_steps <= 200 / 10


def test_what_does_not_fit_is_refused(target_path, tmp_path):
    data = write_counting(tmp_path / "data", target_path)
    other = write_checkpoint(tmp_path / "other", special_tokens=("<a>", "<u>"))
    with pytest.raises(ExperimentError, match="another tokenizer"):
        list(train_moe.run(config_of(other, data, tmp_path / "moe", "steps=1")))
    with pytest.raises(ExperimentError, match="exists already"):
        list(train_moe.run(config_of(target_path, data, data, "steps=1")))
    with pytest.raises(ExperimentError, match="got 8 and 3"):
        config_of(target_path, data, tmp_path, "steps=1").__class__(batch=8, micro_batch=3, steps=1)
    with pytest.raises(ExperimentError, match="steps=NUMBER or max_seconds"):
        config_of(target_path, data, tmp_path, "max_seconds=none")
    with pytest.raises(ExperimentError, match="needs tokenizer="):
        list(train_moe.run(parse_config(train_moe.Config, ["steps=1"])))
