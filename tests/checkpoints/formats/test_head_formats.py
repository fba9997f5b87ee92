"""Published Medusa and Hydra heads that need something from the target, or compute something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.checkpoints.formats.drafters import open_drafter
from specjax.drafting.heads import FullHead
from tests.checkpoints.published_drafters import (
    VOCAB_SIZE,
    WIDTH,
    opened,
    random_tensor,
    target,
    write_drafter,
)


def medusa_tensors(num_heads: int = 2, *, head: bool = True) -> dict[str, np.ndarray]:
    shapes = {f"{index}.0.linear.weight": (WIDTH, WIDTH) for index in range(num_heads)}
    if head:
        shapes |= {f"{index}.1.weight": (VOCAB_SIZE, WIDTH) for index in range(num_heads)}
    return {name: random_tensor(name, shape, seed=index) for index, (name, shape) in enumerate(shapes.items())}


def test_medusa_heads_without_lm_heads_take_the_targets_vocabulary(tmp_path: Path) -> None:
    raw = dict(medusa_num_heads=2, medusa_num_layers=1, version="2")
    folder = write_drafter(tmp_path, raw, medusa_tensors(head=False), file="medusa_lm_head.safetensors")
    config = opened(folder, target=target()).config
    assert (config.head, config.block_bias, config.vocab_size) == (FullHead(shared=True), False, VOCAB_SIZE)
    with pytest.raises(ValueError, match="its vocabulary has to be known"):
        open_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        (dict(truncated_vocab_size=50), {}, "truncated_vocab_size = 50"),
        (dict(original_lm_head=True), {}, "original_lm_head = True"),
        (dict(logit_scale=0.5), {}, "logit_scale = 0.5"),
        (dict(medusa_num_heads=3), {}, "Parameters left unfilled: head_2.block_0"),
        (dict(medusa_num_layers=...), {}, "medusa_num_layers"),
        ({}, {"token_map": np.arange(4)}, "Unmapped source tensors: token_map"),
        ({}, {"heads.0.0.linear.weight": np.zeros((WIDTH, WIDTH), np.float32)}, "twice, under two names"),
    ],
)
def test_medusa_heads_that_compute_something_else_are_refused(
    tmp_path: Path, changes: dict[str, Any], tensors: dict[str, np.ndarray], message: str
) -> None:
    raw = {name: value for name, value in (dict(medusa_num_heads=2, medusa_num_layers=1) | changes).items() if value is not ...}
    with pytest.raises(ValueError, match=message):
        opened(write_drafter(tmp_path, raw, medusa_tensors() | tensors, file="medusa_lm_head.safetensors"))


def test_heads_for_another_target_or_without_weights_are_refused(tmp_path: Path) -> None:
    raw = dict(medusa_num_heads=2, medusa_num_layers=1)
    folder = write_drafter(tmp_path, raw, medusa_tensors(), file="medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match="hidden size 32 and 96 tokens, the target has 32 and 97"):
        open_drafter(folder, target=target(vocab_size=97))
    (folder / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ValueError, match="needs medusa_lm_head.safetensors, medusa_lm_head.pt or model.safetensors"):
        open_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hydra_head_arch="prefix-mlp"), "hydra_head_arch 'prefix-mlp' is not supported"),
        (dict(hydra_head_arch="eagle-attn"), "hydra_head_arch 'eagle-attn'"),
        (dict(hidden_state_offset=1), "hidden_state_offset = 1"),
        (dict(hydra_num_heads=2), "Parameters left unfilled: .*hydra_mlp.1"),
        (dict(grounded_heads=False), "res_connection"),
    ],
)
def test_hydra_heads_that_compute_something_else_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    shapes = {f"hydra_mlp.0.0.{name}": (WIDTH, 2 * WIDTH) for name in ("linear", "res_connection")} | {
        "hydra_lm_head.0": (VOCAB_SIZE, WIDTH)
    }
    tensors = {f"{name}.weight": random_tensor("w", shape, seed=1) for name, shape in shapes.items()}
    tensors |= {f"{name}.bias": random_tensor("b", shape[:1], seed=2) for name, shape in shapes.items()}
    raw = dict(hydra_head_arch="mlp", hydra_num_heads=1, hydra_num_layers=1, grounded_heads=True)
    assert opened(write_drafter(tmp_path / "a", raw, tensors, file="hydra_lm_head.safetensors")).config.grounded
    with pytest.raises(ValueError, match=message):
        opened(write_drafter(tmp_path / "b", raw | changes, tensors, file="hydra_lm_head.safetensors"))
