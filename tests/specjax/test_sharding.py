"""A mesh of simulated devices gives the tokens of one device."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json
import jax, jax.numpy as jnp, numpy as np
from specjax import DraftModel, GenerateConfig, ModelConfig, Transformer, generate, speculative_generate
from specjax.sharding import cache_sharding, param_shardings

config = ModelConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=8, num_kv_heads=4, head_dim=8,
                     max_position_embeddings=256, qkv_bias=True, tie_word_embeddings=True)
model = Transformer(config, dtype=jnp.float32, param_dtype=jnp.float32)
params = model.init_params(jax.random.key(0))
draft = jax.tree.map(lambda a, b: a + 0.3 * b, params, model.init_params(jax.random.key(1)))
prompts = [[1, 2, 3], [5], [7, 8, 9, 10, 11], [12, 13]]
plain = GenerateConfig(max_new_tokens=12, num_speculative_tokens=2)
alone = generate(model, params, prompts, config=plain)
results = {"devices": jax.device_count()}
for shape in ((2, 4), (1, 8)):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), ("data", "model"))
    sharded = GenerateConfig(max_new_tokens=12, num_speculative_tokens=2, cache_sharding=cache_sharding(config, mesh, batch_size=4))
    place = lambda tree: jax.device_put(tree, param_shardings(tree, config, mesh))
    output = speculative_generate(model, place(params), DraftModel(model), place(draft), prompts, config=sharded)
    keys = output.continuation.target_cache.keys[0].sharding.spec
    results[str(shape)] = {"equal": bool((np.asarray(output.tokens) == np.asarray(alone.tokens)).all()),
                           "cache": [str(part) for part in keys],
                           "qkv": str(place(params)["layer_0"]["attention"]["qkv"].sharding.spec)}
print(json.dumps(results))
"""


def test_tokens_under_a_mesh_equal_those_of_one_device():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert results.pop("devices") == 8
    assert all(result["equal"] for result in results.values()), results
    assert "model" in results["(2, 4)"]["qkv"]
    assert "data" in results["(2, 4)"]["cache"]
    assert "model" in results["(2, 4)"]["cache"]
