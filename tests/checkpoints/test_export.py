"""Exported drafters: the official names and fields, and the same drafter when read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from safetensors.numpy import load_file
from typer.testing import CliRunner

from specjax import ModelConfig, RopeConfig
from specjax.checkpoints.export import export_command, export_drafter, export_params
from specjax.checkpoints.formats.drafters import open_drafter
from specjax.checkpoints.kinds import build_model
from specjax.checkpoints.source import check_source, read_params
from specjax.checkpoints.store import save_checkpoint
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.heads import FullHead, LowRankHead, ScreenedHead, TrimmedHead
from specjax.drafting.medusa import MedusaConfig
from tests.checkpoints.published_drafters import DRAFT_VOCAB_SIZE, KEPT_IDS, eagle3_tensors, official_config, write_drafter

SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, max_position_embeddings=128
)

PRUNED = TrimmedHead(num_tokens=DRAFT_VOCAB_SIZE)


def drafter(decoder: dict[str, Any] | None = None, **fields: Any) -> Eagle3Config:
    return Eagle3Config(decoder=ModelConfig(**SIZES | (decoder or {})), **dict(target_hidden_size=32) | fields)


def random_params(config: Any, dtype: Any = jnp.float32) -> dict:
    """Every leaf random, but for the token ids."""
    model = build_model(config, dtype)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), jax.eval_shape(model.init_params, jax.random.key(0))
    )
    if "token_ids" in params.get("draft_head", {}):
        params["draft_head"]["token_ids"] = jnp.asarray(KEPT_IDS if config.head == PRUNED else np.arange(96), jnp.int32)
    return params


def assert_reads_back(folder: Path, config: Eagle3Config, params: dict) -> None:
    source = open_drafter(folder)
    assert source is not None
    check_source(source)
    assert source.config == config
    found = read_params(source, str(params["fc"].dtype))
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(found), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), theirs)


DRAFTERS = {
    "pruned vocabulary": drafter(head=PRUNED),
    "whole vocabulary, own embedding": drafter(own_embedding=True, feature_layers=(0, 3, 6)),
    "the target's embedding and head": drafter(head=FullHead(shared=True), feature_layers=(1, 4)),
    "low rank": drafter(head=LowRankHead(rank=8)),
    "a target of another width": drafter(target_hidden_size=64, own_embedding=True, feature_layers=(2, 15, 27)),
    "two layers, biases": drafter(dict(num_layers=2, qkv_bias=True, output_bias=True, mlp_bias=True), head=PRUNED),
    "EAGLE-3.1": drafter(fc_norm=True, norm_output=True, norm_before_residual=True),
    "norm before fc": drafter(norm_before_fc=True),
    "layers whose ids look like outputs": drafter(feature_layers=(1, 2, 4)),
    "linear": drafter(dict(rope=RopeConfig(theta=500.0, rope_type="linear", factor=2.0))),
    "dynamic": drafter(dict(rope=RopeConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=64))),
    "llama3": drafter(dict(rope=RopeConfig(rope_type="llama3", factor=8.0, original_max_position_embeddings=64))),
    "yarn": drafter(
        dict(rope=RopeConfig(rope_type="yarn", factor=2.0, original_max_position_embeddings=64, attention_factor=1.07, truncate=False))
    ),
    "longrope": drafter(
        dict(
            rope=RopeConfig(
                rope_type="longrope",
                original_max_position_embeddings=64,
                attention_factor=1.1,
                short_factor=(1.0, 1.1, 1.2, 1.3),
                long_factor=(2.0, 2.5, 3.0, 4.0),
            )
        )
    ),
}


def test_weights_beyond_a_limit_are_written_in_shards_that_read_the_same(tmp_path: Path) -> None:
    config = drafter(head=LowRankHead(rank=8))
    params = random_params(config, jnp.bfloat16)
    limit = 16384
    export_params(config, params, tmp_path / "out", max_shard_bytes=limit)
    sizes = {path.name: sum(np.asarray(x).nbytes for x in load_file(path).values()) for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(sizes) > 1
    assert max(sizes.values()) <= limit
    assert "model.safetensors" not in sizes
    assert_reads_back(tmp_path / "out", config, params)
    # All in one file: no index is needed.
    export_params(config, params, tmp_path / "whole", max_shard_bytes=1 << 20)
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(ValueError, match="max_shard_bytes must be at least 1, got 0"):
        export_params(config, params, tmp_path / "none", max_shard_bytes=0)


@pytest.mark.filterwarnings("ignore:.*is read as boundaries")
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_is_bit_equal_when_it_is_read_again(tmp_path: Path, name: str) -> None:
    config = DRAFTERS[name]
    for dtype in (jnp.float32, jnp.bfloat16):
        params = random_params(config, dtype)
        export_params(config, params, tmp_path / "out", force=True)
        assert_reads_back(tmp_path / "out", config, params)


@pytest.mark.parametrize("rank", [None, 8])
def test_names_shapes_and_fields_are_the_official_ones(tmp_path: Path, rank: int | None) -> None:
    raw = official_config(**({} if rank is None else dict(draft_vocab_size=96, lm_head_rank_divisor=4)))
    tensors = eagle3_tensors(rank=rank)
    source = open_drafter(write_drafter(tmp_path / "published", raw, tensors))
    assert source is not None
    export_params(source.config, read_params(source, "float32"), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(written[name], tensor)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    # These say nothing about the drafter; the dtype is the one asked for.
    incidental = {"architectures", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "torch_dtype", "use_cache"}
    expected = {name: value for name, value in raw.items() if name not in incidental | {"transformers_version"}}
    assert {name: fields[name] for name in expected} == expected
    assert ("lm_head_rank_divisor" in fields) == (rank is not None)
    assert fields["torch_dtype"] == "float32"


def test_the_command_exports_a_checkpoint(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(export_command)
    config = drafter(head=PRUNED)
    params = random_params(config, jnp.bfloat16)
    record = {"num_steps": 7}
    save_checkpoint(tmp_path / "checkpoint", config, params, {"training": record})
    arguments = [str(tmp_path / "checkpoint"), str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert_reads_back(tmp_path / "out", config, params)
    assert json.loads((tmp_path / "out" / "training.json").read_text()) == record
    # Whoever may read one of the files may read the others.
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1
    assert "--force" in again.output
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (drafter(dict(qk_norm="head")), "cannot express qk_norm = 'head'"),
        (drafter(dict(layer_windows=(16,))), r"cannot express layer_windows = \(16,\)"),
        (drafter(dict(attention_sinks=True)), "cannot express attention_sinks = True"),
        (drafter(dict(activation="clamped_swiglu")), "cannot express activation = 'clamped_swiglu'"),
        (drafter(dict(qkv_bias=True)), "cannot express output_bias = False"),
        (drafter(head=LowRankHead(rank=7)), r"cannot express rank 7 of a low-rank head: it has hidden_size \(32\) divided by"),
        (drafter(head=LowRankHead(rank=32)), "cannot express rank 32 of a low-rank head"),
        (drafter(head=ScreenedHead(rank=8, num_candidates=16)), r"cannot express head = ScreenedHead\(rank=8, num_candidates=16"),
        (drafter(head=FullHead(bias=True)), r"cannot express head = FullHead\(shared=False, bias=True\)"),
        (drafter(head=TrimmedHead(num_tokens=96)), r"cannot express head = TrimmedHead\(num_tokens=96\) over 96 tokens"),
        (
            drafter(dict(rope=RopeConfig(rope_type="dynamic", factor=4.0, original_max_position_embeddings=64))),
            "cannot express decoder.max_position_embeddings = 128",
        ),
        (MedusaConfig(hidden_size=32, vocab_size=96, num_draft_heads=2), "only EAGLE-3 drafters can be exported, got MedusaConfig"),
    ],
)
def test_what_the_layout_cannot_express_is_refused_by_name(tmp_path: Path, config: Any, message: str) -> None:
    params = random_params(config) if isinstance(config, Eagle3Config) else {"fc": jnp.zeros(1)}
    with pytest.raises(ValueError, match=message):
        export_params(config, params, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_no_drafter_is_not_exported(tmp_path: Path) -> None:
    config = ModelConfig(**SIZES)
    save_checkpoint(tmp_path / "target", config, random_params(config))
    with pytest.raises(ValueError, match="only EAGLE-3 drafters can be exported, got ModelConfig"):
        export_drafter(tmp_path / "target", tmp_path / "out")
