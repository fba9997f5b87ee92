"""Checkpoints: what was saved comes back, on other devices too; nothing is ever half there."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from specjax import ModelConfig, RopeConfig, Transformer
from specjax.atomic import atomic_folder
from specjax.checkpoints.kinds import config_from_dict, config_to_dict
from specjax.checkpoints.store import load_checkpoint, read_model, save_checkpoint
from tests.checkpoints.sources import VOCAB_SIZE, write_tokenizer
from tests.helpers import tiny_config, tiny_target

ROOT = Path(__file__).parents[2]


def save_tiny(path: Path, **options: object) -> tuple[ModelConfig, dict]:
    model, params = tiny_target()
    save_checkpoint(path, model.config, params, {"source": "tiny"}, **options)
    return model.config, params


def python(script: str, *arguments: object, num_devices: int = 1) -> subprocess.CompletedProcess[str]:
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, env=os.environ | flags, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("changes", [{}, dict(tie_word_embeddings=False, qkv_bias=True, rope=RopeConfig(rope_type="llama3", factor=8.0))])
def test_a_configuration_survives_json(changes: dict) -> None:
    config = tiny_config(**changes)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


def test_a_configuration_with_unknown_fields_is_refused() -> None:
    with pytest.raises(ValueError, match="'surprise'"):
        config_from_dict(config_to_dict(tiny_config()) | {"surprise": 1})


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    write_tokenizer(tokenizer)
    config, params = save_tiny(tmp_path / "saved", tokenizer_dir=tokenizer)
    checkpoint = load_checkpoint(tmp_path / "saved")
    assert checkpoint.model == read_model(tmp_path / "saved")
    assert checkpoint.model.config == config
    assert checkpoint.model.dtype == checkpoint.model.param_dtype == jnp.float32
    jax.tree.map(np.testing.assert_array_equal, checkpoint.params, params)
    assert checkpoint.metadata == {"source": "tiny", "dtype": "float32"}
    assert checkpoint.eos_token_ids() == (VOCAB_SIZE - 2, 3)
    assert checkpoint.tokenizer().decode(checkpoint.tokenizer().encode("hello world")) == "hello world"
    # It can be moved.
    (tmp_path / "saved").rename(tmp_path / "moved")
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path / "moved").params, params)


def test_without_a_tokenizer_there_is_none(tmp_path: Path) -> None:
    save_tiny(tmp_path / "saved")
    checkpoint = load_checkpoint(tmp_path / "saved")
    assert checkpoint.tokenizer_path is None
    assert checkpoint.eos_token_ids() == ()


def test_the_dtype_asked_for_is_that_of_model_and_parameters(tmp_path: Path) -> None:
    _, params = save_tiny(tmp_path / "saved")
    checkpoint = load_checkpoint(tmp_path / "saved", dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(checkpoint.params)} == {jnp.dtype(jnp.bfloat16)}
    assert checkpoint.model.dtype == checkpoint.model.param_dtype == jnp.bfloat16
    jax.tree.map(lambda ours, saved: np.testing.assert_array_equal(ours, saved.astype(jnp.bfloat16)), checkpoint.params, params)
    with pytest.raises(ValueError, match=r"dtype must be one of \['bfloat16', 'float32'\], got float16"):
        load_checkpoint(tmp_path / "saved", dtype=jnp.float16)


@pytest.mark.full
def test_parameters_saved_on_eight_devices_are_restored_on_one_and_on_two(tmp_path: Path) -> None:
    save = """
        import sys
        import jax
        from jax.sharding import NamedSharding, PartitionSpec as P
        from specjax.checkpoints.store import save_checkpoint
        from tests.helpers import tiny_target
        assert jax.device_count() == 8
        mesh = jax.make_mesh((8,), ("model",))
        model, params = tiny_target()
        shard = lambda leaf: NamedSharding(mesh, P("model") if leaf.shape[0] % 8 == 0 else P())
        params = jax.device_put(params, jax.tree.map(shard, params))
        assert len(params["embedding"].addressable_shards) == 8
        save_checkpoint(sys.argv[1], model.config, params)
    """
    done = python(save, tmp_path / "saved", num_devices=8)
    assert done.returncode == 0, done.stderr
    _, params = tiny_target()
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path / "saved").params, params)
    restore = """
        import sys
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        from specjax.checkpoints.store import load_checkpoint
        from tests.helpers import tiny_target
        assert jax.device_count() == 2
        _, params = tiny_target()
        mesh = jax.make_mesh((2,), ("model",))
        each = jax.tree.map(lambda leaf: NamedSharding(mesh, P("model")), params)
        for shardings in (NamedSharding(mesh, P()), each):
            restored = load_checkpoint(sys.argv[1], shardings=shardings).params
            jax.tree.map(np.testing.assert_array_equal, restored, params)
        assert restored["embedding"].sharding == each["embedding"]
    """
    done = python(restore, tmp_path / "saved", num_devices=2)
    assert done.returncode == 0, done.stderr


def test_an_existing_destination_is_replaced_only_by_force(tmp_path: Path) -> None:
    save_tiny(tmp_path / "saved")
    (tmp_path / "saved" / "left-over").touch()
    with pytest.raises(FileExistsError, match="exists; pass --force"):
        save_tiny(tmp_path / "saved")
    save_tiny(tmp_path / "saved", force=True)
    assert names_in(tmp_path / "saved") == ["params", "specjax.json"]
    assert names_in(tmp_path) == ["saved"]


def test_a_file_or_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="is a file"):
        save_tiny(tmp_path / "file", force=True)
    with pytest.raises(PermissionError, match="not a writable folder"):
        save_tiny(tmp_path / "file" / "below")


def test_a_link_stays_and_the_folder_behind_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for _ in range(2):  # to where nothing is yet, then to what is replaced
        save_tiny(tmp_path / "link", force=True)
        assert (tmp_path / "link").is_symlink()
        assert names_in(tmp_path) == ["folder", "link"]
        assert names_in(tmp_path / "folder") == ["params", "specjax.json"]


def test_the_root_is_no_destination() -> None:
    with pytest.raises(PermissionError, match="/ cannot be replaced"):
        save_tiny(Path("/"), force=True)


def test_a_folder_that_is_no_checkpoint_is_not_replaced_by_force(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match=r"home holds no specjax\.json: it is not something that --force would replace"):
        save_tiny(tmp_path / "home", force=True)
    assert names_in(tmp_path / "home") == ["thesis.tex"]
    (tmp_path / "home" / "thesis.tex").unlink()
    save_tiny(tmp_path / "home", force=True)  # an empty folder is nothing to lose


def test_a_read_only_place_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, whom no mode bits stop.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="cannot be created"):
        save_tiny(tmp_path / "saved")


def test_a_failure_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    _, params = save_tiny(tmp_path / "saved")

    def interrupted() -> None:
        with atomic_folder(tmp_path / "saved", force=True, marker="specjax.json") as folder:
            (folder / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path / "saved").params, params)
    assert names_in(tmp_path) == ["saved"]


def test_a_failure_leaves_no_parents_that_it_made_but_all_in_which_there_is_something(tmp_path: Path) -> None:
    def interrupted(*, keep_unfinished: bool) -> None:
        with atomic_folder(tmp_path / "a" / "b" / "saved", marker="specjax.json", keep_unfinished=keep_unfinished) as folder:
            (folder / "half").touch()
            raise KeyboardInterrupt

    (tmp_path / "a").mkdir()
    with pytest.raises(KeyboardInterrupt):
        interrupted(keep_unfinished=False)
    assert names_in(tmp_path / "a") == []
    with pytest.raises(KeyboardInterrupt):
        interrupted(keep_unfinished=True)
    assert names_in(tmp_path / "a" / "b") == [".saved.incomplete"]


def test_a_run_that_can_be_gone_on_with_is_lost_by_force_alone(tmp_path: Path) -> None:
    kept = tmp_path / ".saved.incomplete" / "unfinished.json"
    kept.parent.mkdir()
    kept.touch()
    with pytest.raises(FileExistsError, match=r"\.saved\.incomplete holds an unfinished run \(unfinished\.json\): go on with it, choose"):
        save_tiny(tmp_path / "saved")
    assert kept.exists()
    save_tiny(tmp_path / "saved", force=True)
    assert names_in(tmp_path) == ["saved"]


def test_a_killed_run_leaves_the_old_one_and_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    die = """
        import os, signal, sys
        from specjax.atomic import atomic_folder
        with atomic_folder(sys.argv[1], force=True, marker="specjax.json") as folder:
            (folder / "half").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert python(die, tmp_path / "saved").returncode == -9
    assert names_in(tmp_path) == [".saved.incomplete"]
    with pytest.raises(ValueError, match="not a specjax checkpoint"):
        load_checkpoint(tmp_path / "saved")
    _, params = save_tiny(tmp_path / "saved")
    assert names_in(tmp_path) == ["saved"]
    assert python(die, tmp_path / "saved").returncode == -9
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path / "saved").params, params)
    save_tiny(tmp_path / "saved", force=True)
    assert names_in(tmp_path) == ["saved"]


def test_a_run_killed_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    _, params = save_tiny(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / ".saved.replaced")
    with pytest.raises(FileExistsError, match="exists; pass --force"):
        save_tiny(tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path / "saved").params, params)
    assert names_in(tmp_path) == ["saved"]


def test_two_writers_of_one_destination_do_not_mix(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "saved", marker="specjax.json") as folder:
        (folder / "first").touch()
        with pytest.raises(BlockingIOError, match="another process is writing"), atomic_folder(tmp_path / "saved", marker="specjax.json"):
            pass
    assert names_in(tmp_path / "saved") == ["first"]


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "saved")
    manifest = tmp_path / "saved" / "specjax.json"
    saved = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(saved | {"format_version": 4}))
    with pytest.raises(ValueError, match="checkpoint format 4, this version of specjax reads up to 3: upgrade specjax"):
        load_checkpoint(tmp_path / "saved")
    manifest.write_text(json.dumps(saved | {"kind": "eagle9"}))
    with pytest.raises(ValueError, match="knows checkpoints of kind transformer.*, not 'eagle9': upgrade specjax"):
        load_checkpoint(tmp_path / "saved")


@pytest.mark.parametrize("changes", [dict(qk_norm="head"), dict(qkv_bias=True)])
def test_a_checkpoint_of_the_first_format_is_read(tmp_path: Path, changes: dict) -> None:
    model = Transformer(tiny_config(**changes), dtype=jnp.float32, param_dtype=jnp.float32)
    params = model.init_params(jax.random.key(0))
    config = dataclasses.asdict(model.config)
    # The fields of that version; whether queries and keys are normed was a bool.
    fields = (
        "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim max_position_embeddings rms_norm_eps "
        "tie_word_embeddings qkv_bias"
    )
    old = {field: config[field] for field in fields.split()} | {"qk_norm": config["qk_norm"] is not None, "rope": dict(theta=10000.0)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved" / "params", params)
    manifest = {"format_version": 1, "model_config": old, "dtype": "float32", "metadata": {"source": "tiny"}}
    (tmp_path / "saved" / "specjax.json").write_text(json.dumps(manifest))
    checkpoint = load_checkpoint(tmp_path / "saved")
    assert checkpoint.model.config == model.config
    jax.tree.map(np.testing.assert_array_equal, checkpoint.params, params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dtype="float8"), "names the dtype 'float8'"),
        (dict(config=...), "is damaged: it lacks config"),
        (dict(config=[1]), r"is damaged: it has config = \[1\]"),
        (dict(metadata=None), "is damaged: it has metadata = None"),
        (dict(kind=[]), "is damaged: it has kind"),
        (dict(format_version=0), "is damaged: it names the format 0"),
    ],
)
def test_a_damaged_manifest_is_said(tmp_path: Path, changes: dict, message: str) -> None:
    save_tiny(tmp_path / "saved")
    file = tmp_path / "saved" / "specjax.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "saved")


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a specjax checkpoint; there is no specjax\.json"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match="convert it first: specjax convert"):
        load_checkpoint(tmp_path)


def test_damaged_parameters_are_said(tmp_path: Path) -> None:
    save_tiny(tmp_path / "saved")
    largest = max((file for file in (tmp_path / "saved" / "params").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    # In its own process: Orbax leaves reads of other parameters behind.
    done = python("import sys, specjax.checkpoints.store as store; store.load_checkpoint(sys.argv[1])", tmp_path / "saved")
    assert "ValueError: " in done.stderr
    assert re.search(r"params cannot be read: .*\. Is the copy whole\?", done.stderr)


def test_parameters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, params = tiny_target()
    with pytest.raises(ValueError, match=re.escape("params['embedding'] should have shape (64, 32) by the configuration, got (1, 2)")):
        save_checkpoint(tmp_path / "saved", model.config, {**params, "embedding": np.ones((1, 2), np.float32)})
    with pytest.raises(ValueError, match="one dtype out of .*, got bfloat16, float32"):
        save_checkpoint(tmp_path / "saved", model.config, {**params, "embedding": params["embedding"].astype(jnp.bfloat16)})
    assert names_in(tmp_path) == []
