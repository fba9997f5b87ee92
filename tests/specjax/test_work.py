"""What a pass costs: against numbers worked out by hand, and against XLA's own count for a tiny model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.presets import gpt_oss_20b, llama31_8b, qwen3_30b_a3b
from specjax import Kernels, ModelConfig, MoEConfig, Transformer
from specjax.sparsity.work import Kept, Work, expected_distinct_experts, pass_work
from tests.helpers import tiny_config

EXACT = 1e-12  # float64, sums of a few terms


def test_llama_31_8b_by_hand() -> None:
    found = pass_work(llama31_8b(), batch_size=2, num_tokens=6, context=32768)
    # 32 layers; query and output 4096 x 4096, key and value 4096 x 1024.
    projections = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert found.attention_projections == Work(2 * 12 * projections, 2 * projections)
    feed_forward = 32 * 3 * 4096 * 14336
    assert found.feed_forward == Work(2 * 12 * feed_forward, 2 * feed_forward)
    assert found.lm_head == Work(2 * 12 * 128256 * 4096, 2 * 128256 * 4096)
    # 131,072 bytes of keys and values a token: 32 layers, 2, 8 heads of 128, 2 bytes. Six new ones are written, and read.
    assert found.attention.moved_bytes == 2 * 131072 * (32768 + 12)
    pairs = 6 * 32768 + 21
    assert found.attention.flops == pytest.approx(2 * 32 * 4 * pairs * 4096, rel=EXACT)
    assert found.router == found.experts == Work()
    weights = 2 * (projections + feed_forward + 128256 * 4096)
    assert found.total.moved_bytes == weights + found.attention.moved_bytes
    assert weights == pytest.approx(15.0e9, rel=0.01)  # 16.1 GB less the embedding, of which only rows are read


def test_qwen3_30b_a3b_by_hand() -> None:
    found = pass_work(qwen3_30b_a3b(), batch_size=1, num_tokens=5, context=100, kept=Kept(experts_per_token=6, distinct_experts=20))
    expert = 3 * 2048 * 768
    assert found.experts == Work(48 * 2 * 5 * 6 * expert, 48 * 20 * expert * 2)
    assert found.router == Work(48 * 2 * 5 * 2048 * 128, 48 * 2048 * 128 * 2)
    assert found.feed_forward == Work()
    dense = pass_work(qwen3_30b_a3b(), batch_size=1, num_tokens=5, context=100)
    assert dense.experts.flops == 48 * 2 * 5 * 8 * expert
    assert dense.experts.moved_bytes == pytest.approx(48 * 2 * expert * 128 * (1 - (120 / 128) ** 5), rel=EXACT)


def test_channels_and_keys_left_out_are_neither_computed_nor_read() -> None:
    def of(**kept: Any) -> Any:
        return pass_work(llama31_8b(), batch_size=1, num_tokens=6, context=32768, kept=Kept(**kept))

    dense, sparse = of(), of(channels=0.4, keys=0.2)
    for name in ("flops", "moved_bytes"):  # the gate stays whole
        assert getattr(sparse.feed_forward, name) == pytest.approx(getattr(dense.feed_forward, name) * 1.8 / 3, rel=EXACT)
    assert sparse.attention.moved_bytes == pytest.approx(131072 * (0.2 * 32768 + 12), rel=EXACT)
    assert sparse.attention_projections == dense.attention_projections
    apart = of(channels=0.4, channels_read=0.9)  # each token its own channels
    assert apart.feed_forward.flops == sparse.feed_forward.flops
    assert apart.feed_forward.moved_bytes == pytest.approx(dense.feed_forward.moved_bytes * 2.8 / 3, rel=EXACT)
    saved = 1 - of(keys=0.2).total.moved_bytes / dense.total.moved_bytes
    assert saved == pytest.approx(0.18, abs=0.005)  # what the docstring says


def test_a_window_bounds_what_its_layers_read() -> None:
    config = gpt_oss_20b()
    window = min(window for window in config.layer_windows if window)
    long, longer = (pass_work(config, batch_size=1, num_tokens=4, context=context) for context in (4096, 8192))
    full = sum(config.window(layer) is None for layer in range(config.num_layers))
    assert 0 < full < config.num_layers
    per_token = 2 * config.num_kv_heads * config.head_dim * 2
    assert longer.attention.moved_bytes - long.attention.moved_bytes == full * per_token * 4096
    short = pass_work(tiny_config(num_layers=1, layer_windows=(5,)), batch_size=1, num_tokens=2, context=3)
    assert short.attention.flops == 4 * 4 * 8 * (4 + 5)  # the second row sees itself and four before it
    assert window == 128


def test_expected_distinct_experts_are_what_even_draws_give() -> None:
    assert expected_distinct_experts(128, 8, 1) == pytest.approx(8, rel=EXACT)
    draws = [jax.random.permutation(jax.random.key(seed), 16)[:4] for seed in range(300)]
    means = [len({int(e) for draw in draws[i : i + 3] for e in draw}) for i in range(0, 300, 3)]
    # 100 samples of a number with a spread below 1.5: the mean within 0.6 but for one time in 10,000.
    assert expected_distinct_experts(16, 4, 3) == pytest.approx(sum(means) / 100, abs=0.6)


@pytest.mark.parametrize(
    "changes", [{}, dict(moe=MoEConfig(num_experts=4, num_experts_per_token=4, intermediate_size=64))], ids=["dense", "experts"]
)
def test_the_operations_are_about_those_that_xla_counts(changes: dict) -> None:
    config: ModelConfig = tiny_config(hidden_size=64, intermediate_size=128, head_dim=16, vocab_size=256, **changes)
    model = Transformer(config, dtype=jnp.float32, param_dtype=jnp.float32, kernels=Kernels(experts="dense"))
    params = jax.eval_shape(model.init_params, jax.random.key(0))
    batch, tokens, context = 2, 6, 58
    cache = jax.eval_shape(lambda: model.init_cache(batch_size=batch, capacity=context + tokens))

    def run(params: Any, ids: jax.Array, cache: Any) -> jax.Array:
        return model.apply({"params": params}, model.apply({"params": params}, ids, cache).hidden, method="logits")

    cost: Any = jax.jit(run).lower(params, jax.ShapeDtypeStruct((batch, tokens), jnp.int32), cache).compile().cost_analysis()
    ours = pass_work(config, batch_size=batch, num_tokens=tokens, context=context).total.flops
    # XLA counts norms, softmax and activations too, and attention over all slots: about a tenth, at widths as small as these.
    assert ours < cost["flops"] < 1.25 * ours


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(keys=1.1), "Kept.keys must be a share from 0 to 1, got 1.1"),
        (dict(channels=-0.1), "Kept.channels must be a share from 0 to 1, got -0.1"),
        (dict(channels=0.5, channels_read=0.4), "Kept.channels_read must be at least channels = 0.5, got 0.4"),
        (dict(distinct_experts=-1), "Kept.distinct_experts must not be negative, got -1"),
    ],
)
def test_impossible_shares_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Kept(**settings)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens must be at least 1, got 0"):
        pass_work(tiny_config(), batch_size=1, num_tokens=0, context=1)
    with pytest.raises(ValueError, match="context must be at least 0, got -1"):
        pass_work(tiny_config(), batch_size=1, num_tokens=1, context=-1)
