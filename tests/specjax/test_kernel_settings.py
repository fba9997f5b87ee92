"""`Kernels`: one setting for all operations, and what is said of one that does not exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from specjax import Kernels, LowRankHead, MoEConfig, SparseFFN, SparsityConfig
from specjax.drafting.hidden_state_drafter import HiddenState
from specjax.models.projections import split_gate_up
from specjax.state import Context
from tests.drafters import hydra, medusa
from tests.helpers import random_model, tiny_config

MIXTURE = MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=16)


def test_one_implementation_is_for_all_operations_that_have_it() -> None:
    assert Kernels.of("auto") == Kernels()
    assert Kernels.of("dense") == Kernels(experts="dense")
    assert Kernels.of("reference").experts == "reference"
    everything = Kernels(**{field.name: "triton" for field in dataclasses.fields(Kernels)})
    assert Kernels.of("triton") == everything
    some = Kernels(attention="triton@2:64:4:3:128", projections="reference")
    assert Kernels.of("attention=triton@2:64:4:3:128+projections=reference") == some


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "no operation has the implementation 'fast'"),
        ("attention=fast", r"Kernels.attention: implementation must be one of \('auto', 'reference', 'triton'\), got 'fast'"),
        ("attention=reference@3", "Kernels.attention: implementation must be one of .*, got 'reference@3'"),
        ("experts=dense@4", "Kernels.experts: implementation must be one of .*, got 'dense@4'"),
        ("channels=auto@1", "Kernels.channels: implementation must be one of .*, got 'auto@1'"),
        ("cache_write=triton@1:2", "Kernels.cache_write: implementation must be one of .*, got 'triton@1:2'"),
        ("draft_head=triton@foo", "Kernels.draft_head: implementation must be one of .*, got 'triton@foo'"),
        ("projections=triton@1:2", "Kernels.projections: expected triton@BLOCK_D:.*, got '1:2' behind the @"),
        ("experts=triton@32:64:64:4:99", "Kernels.experts: ExpertTuning.num_stages must be an int from 1 to .*, got 99"),
        ("attention=triton+attention=reference", "expected each field once, got 'attention=triton[+]attention=reference'"),
        (
            "norms=triton",
            "expected fields of attention, .*, expert_choice, experts, channels, draft_head, got 'norms=triton'",
        ),
    ],
)
def test_what_does_not_exist_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Kernels.of(text)


@pytest.mark.parametrize("field", ["attention", "projections", "cache_write", "expert_choice", "experts", "channels"])
def test_a_forced_kernel_without_a_device_says_what_is_missing_before_anything_runs(field: str) -> None:
    model, params = random_model(tiny_config(num_layers=1, head_dim=16, moe=MIXTURE if "expert" in field else None))
    model = model.clone(kernels=Kernels(**{field: "triton"}))
    params = split_gate_up(params) if field == "channels" else params
    cache = model.init_cache(batch_size=1, capacity=4)
    sparsity = SparsityConfig(ffn=SparseFFN(keep=0.4)) if field == "channels" else None
    with pytest.raises(ValueError, match="needs a CUDA device, and JAX computes on 'cpu' here"):
        jax.eval_shape(lambda: model.apply({"params": params}, jnp.zeros((1, 1), jnp.int32), cache, sparsity=sparsity))


@pytest.mark.parametrize(
    ("field", "sparse", "message"),
    [
        ("experts", SparseFFN(select="threshold", per="token", tau=0.1), "a GatedUnit .* by a threshold is not; got 1 rows"),
        ("channels", SparseFFN(keep=0.4), r"Kernels\(channels='triton'\) .* needs the params of split_gate_up, got gate_up"),
    ],
)
def test_a_forced_kernel_that_could_never_run_is_refused(field: str, sparse: SparseFFN, message: str) -> None:
    model, params = random_model(tiny_config(num_layers=1, moe=MIXTURE if field == "experts" else None))
    cache = model.init_cache(batch_size=1, capacity=4)

    def sparse_pass(implementation: str) -> Any:
        one = model.clone(kernels=Kernels(**{field: implementation}))
        return one.apply({"params": params}, jnp.zeros((1, 1), jnp.int32), cache, sparsity=SparsityConfig(ffn=sparse))

    jax.eval_shape(lambda: sparse_pass("auto"))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: sparse_pass("triton"))


@pytest.mark.parametrize("make", [medusa, hydra])
@pytest.mark.parametrize("field", ["projections", "draft_head"])
def test_the_heads_of_medusa_and_of_hydra_run_what_kernels_names(make: Callable[..., Any], field: str) -> None:
    target, target_params = random_model(tiny_config(num_layers=1))
    drafter, params = make(target, target_params, head=LowRankHead(rank=8))
    forced = dataclasses.replace(drafter, model=drafter.model.clone(kernels=Kernels(**{field: "triton"})))

    def propose(drafter: Any) -> Any:
        state, context = HiddenState(jnp.zeros((1, 32))), Context(jnp.zeros((1, 4), jnp.int32), jnp.ones(1, jnp.int32))
        options: dict[str, Any] = dict(num_speculative_tokens=2, sampling=None, row_keys=jax.random.split(jax.random.key(0), 1))
        return drafter.propose(params, state, context, **options)

    jax.eval_shape(lambda: propose(drafter))
    with pytest.raises(ValueError, match="needs a CUDA device, and JAX computes on 'cpu' here"):
        jax.eval_shape(lambda: propose(forced))
