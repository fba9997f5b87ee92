"""A mesh of simulated devices gives the tokens of one device."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from specjax import GenerateConfig, generate
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads import FullHead, LowRankHead, ScreenedHead, TrimmedHead
from specjax.sharding import cache_sharding, param_shardings
from tests.helpers import random_model, tiny_config

SCRIPT = """
import json
import sys
import jax, jax.numpy as jnp, numpy as np
from specjax import DraftModel, GenerateConfig, MoEConfig, ModelConfig, Transformer, generate, speculative_generate
from specjax import HydraDrafter, hydra_params
from specjax.drafting.heads import LowRankHead, ScreenedHead
from specjax.drafting.hydra import Hydra, HydraConfig
from specjax.sharding import cache_sharding, param_shardings

sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_heads=8, num_kv_heads=4, head_dim=8, max_position_embeddings=256)
# A dense model, with a draft model or with Hydra heads, and one with everything that GPT-OSS has.
moe = MoEConfig(num_experts=6, num_experts_per_token=2, intermediate_size=32, router_bias=True)
dense = ModelConfig(num_layers=1, qkv_bias=True, tie_word_embeddings=True, **sizes)
config = {
    "dense": dense,
    "hydra": dense,
    "experts": ModelConfig(num_layers=2, moe=moe, layer_windows=(4, None), attention_sinks=True, mlp_bias=True, output_bias=True, **sizes),
}[sys.argv[1]]
model = Transformer(config, dtype=jnp.float32, param_dtype=jnp.float32)
params = model.init_params(jax.random.key(0))
draft = jax.tree.map(lambda a, b: a + 0.3 * b, params, model.init_params(jax.random.key(1)))
heads = {(2, 4): ScreenedHead(rank=8, num_candidates=16, shared=True), (1, 8): LowRankHead(rank=8)}
hydra = Hydra(HydraConfig(hidden_size=32, vocab_size=96, num_draft_heads=2), dtype=jnp.float32, param_dtype=jnp.float32)
prompts = [[1, 2, 3], [5], [7, 8, 9, 10, 11], [12, 13]]
plain = GenerateConfig(max_new_tokens=12, num_speculative_tokens=2)
alone = generate(model, params, prompts, config=plain)
results = {"devices": jax.device_count()}
for shape in ((2, 4), (1, 8)) if sys.argv[1] == "dense" else ((2, 4),):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), ("data", "model"))
    sharded = GenerateConfig(max_new_tokens=12, num_speculative_tokens=2, cache_sharding=cache_sharding(config, mesh, batch_size=4))
    place = lambda tree: jax.device_put(tree, param_shardings(tree, config, mesh))
    head = heads[shape]
    head_params = head.init_params(jax.random.key(2), hidden_size=32, vocab_size=96, dtype=jnp.float32)
    placed, drafter, drafter_params = place(params), DraftModel(model, head=head), place(draft | {"draft_head": head_params})
    if sys.argv[1] == "hydra":
        drafter = HydraDrafter.for_target(hydra, config)
        drafter_params = hydra_params(hydra, place(hydra.init_params(jax.random.key(3))), config, placed)
    output = speculative_generate(model, placed, drafter, drafter_params, prompts, config=sharded)
    keys = output.continuation.target_cache.keys[0].sharding.spec
    results[str(shape)] = {"equal": bool((np.asarray(output.tokens) == np.asarray(alone.tokens)).all()),
                           "cache": [str(part) for part in keys],
                           "specs": {name: str(leaf.sharding.spec)
                                     for part in place(params)["layer_0"].values() for name, leaf in part.items()}}
print(json.dumps(results))
"""

SPARSE_SCRIPT = """
import json
import jax, jax.numpy as jnp, numpy as np
from specjax import GenerateConfig, ModelConfig, PromptLookup, SparseAttention, SparseFFN, SparsityConfig, Transformer
from specjax import speculative_generate
from specjax.sharding import cache_sharding, param_shardings

config = ModelConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8,
                     max_position_embeddings=256)
model = Transformer(config, dtype=jnp.float32, param_dtype=jnp.float32)
params = jax.tree.map(lambda x: 8 * x, model.init_params(jax.random.key(0)))
prompts = np.random.default_rng(0).integers(0, 96, (4, 60)).tolist()
attention = SparseAttention(block_size=8, keep=0.25, dense_below=16, tail_blocks=1)
sparsity = SparsityConfig(attention=attention, ffn=SparseFFN(keep=0.5), refresh_every=3)
common = dict(max_new_tokens=12, num_speculative_tokens=2, prefill_chunk_size=32, sparsity=sparsity)
def run(params, **options):
    return speculative_generate(model, params, PromptLookup(), None, prompts, config=GenerateConfig(**common, **options))
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
alone = run(params)
output = run(jax.device_put(params, param_shardings(params, config, mesh)), cache_sharding=cache_sharding(config, mesh, batch_size=4))
print(json.dumps({"equal": bool((np.asarray(output.tokens) == np.asarray(alone.tokens)).all()),
                  "channels": [x.statistics.summary()["sparse_ffn"]["keep_ratio"] for x in (alone, output)],
                  "keep_ratios": [float(x.statistics.attention_reads.keep_ratio) for x in (alone, output)],
                  "summaries": [str(part) for part in output.continuation.target_cache.summaries.layers[0][0].sharding.spec]}))
"""


@pytest.mark.full
def test_sparse_passes_and_refreshes_under_a_mesh_equal_those_of_one_device_and_summaries_are_split_as_the_cache() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SPARSE_SCRIPT], env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["equal"]
    assert result["keep_ratios"][0] == result["keep_ratios"][1] < 0.9
    assert 0.5 < result["channels"][0] == result["channels"][1] < 1  # refreshes keep all
    assert result["summaries"][:2] == ["data", "model"]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dense", "hydra", "experts"])
def test_tokens_under_a_mesh_equal_those_of_one_device(kind: str) -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, kind], env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert results.pop("devices") == 8
    assert all(result["equal"] for result in results.values()), results
    specs = results["(2, 4)"]["specs"]
    split = ["qkv", "output", *(["sinks", "expert_gate_up", "expert_down"] if kind == "experts" else ["gate_up", "down"])]
    assert all("model" in specs[name] for name in split), specs
    assert "data" in results["(2, 4)"]["cache"]
    assert "model" in results["(2, 4)"]["cache"]


def test_draft_heads_are_split_over_the_vocabulary_and_what_is_small_is_not_split() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    split, whole = ("model", None), ()
    for head, expected in (
        (FullHead(bias=True), dict(lm_head=split, bias=("model",))),
        (LowRankHead(rank=4), dict(down=whole, up=split)),
        (TrimmedHead(num_tokens=20), dict(lm_head=split, token_ids=whole)),
        (ScreenedHead(rank=4, num_candidates=8), dict(down=whole, up=split, lm_head=split)),
    ):
        config = Eagle3Config(decoder=tiny_config(num_layers=1), target_hidden_size=32, head=head, fc_norm=True)
        params = jax.eval_shape(Eagle3(config).init_params, jax.random.key(0))
        specs = jax.tree.map(lambda sharding: tuple(sharding.spec), param_shardings(params, config.decoder, mesh))
        assert specs["draft_head"] == expected
        assert specs["fc"] == whole
        assert specs["layer_0"]["mlp"]["down"] == split
        assert specs["layer_0"]["attention"]["qkv"] == (None, "model", None, None)


def test_a_mesh_of_explicit_axes_is_placed_with_auto_ones_and_arrays_on_it_are_refused_by_name() -> None:
    mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    model, params = random_model(tiny_config(num_layers=1))
    sharding = cache_sharding(model.config, mesh, batch_size=1)
    config = GenerateConfig(max_new_tokens=4, cache_sharding=sharding)
    placed = jax.device_put(params, param_shardings(params, model.config, mesh))
    assert (
        generate(model, placed, [[1, 2]], config=config).tokens.tolist() == generate(model, params, [[1, 2]], config=config).tokens.tolist()
    )
    explicit = jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    with pytest.raises(
        ValueError, match=r"target_params\['embedding'\] lies on a mesh with axes \('data', 'model'\) .*: expected Auto axes"
    ):
        generate(model, explicit, [[1, 2]], config=config)
