"""Which implementation of each operation a model runs: `Transformer(kernels=Kernels(attention="reference"))`."""

from __future__ import annotations

import dataclasses

from specjax.checks import require
from specjax.kernels import (
    cached_attention,
    expert_choice,
    expert_products,
    few_row_linear,
    gathered_ffn,
    low_rank_argmax,
    rope_and_write,
)
from specjax.kernels.expert_products import ExpertTuning
from specjax.kernels.few_row_attention import TuningConfig
from specjax.kernels.few_row_linear import LinearTuning
from specjax.kernels.measured import check_implementation

_OPERATIONS = dict(
    attention=cached_attention,
    projections=few_row_linear,
    cache_write=rope_and_write,
    expert_choice=expert_choice,
    experts=expert_products,
    channels=gathered_ffn,
    draft_head=low_rank_argmax,
)
# Of those whose work can be cut in more than one way.
_TUNINGS = dict(attention=TuningConfig, projections=LinearTuning, experts=ExpertTuning)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """A name for each kind of operation.

    `"auto"` takes what was measured to be the fastest on this device at this shape, and the reference where nothing was measured.
    `"reference"` is XLA's. `"triton"` raises where it cannot run, and says what is missing. XLA's all the same are: passes of more rows
    than a kernel is for, such as a prefill; what `jax.vmap` maps; products of a sparse network that are of all its channels, and of a dense
    one the gate and up that `split_gate_up` made; and the choice among more than 16384 channels. `"triton@..."` also says how the work is
    cut; see each operation. With several devices `"auto"` is the reference, and a forced kernel would gather what is sharded.

    Attributes:
        attention: `cached_attention`, `block_sparse_attention` and `block_selection` (which is never cut otherwise).
        projections: `few_row_linear`: queries, keys and values, output, gate and up, down, a drafter's fusion of features, with the norm
            before and the residual behind them, and the blocks of Medusa's and Hydra's heads.
        cache_write: `rope_and_write`.
        expert_choice: `expert_choice`, a router's.
        experts: `expert_products`; a kernel of it leaves no channels out. For gradients through a mixture of experts `"dense"`.
        channels: `largest` and `gathered_ffn`, of a sparse feed-forward network; a kernel of the second needs params of `split_gate_up`.
        draft_head: `low_rank_argmax`, the greedy pick of a low-rank draft head.

    Raises:
        ValueError: An implementation that an operation does not have, or a cut that it cannot have.
    """

    attention: str = "auto"
    projections: str = "auto"
    cache_write: str = "auto"
    expert_choice: str = "auto"
    experts: str = "auto"
    channels: str = "auto"
    draft_head: str = "auto"

    def __post_init__(self) -> None:
        for name, operation in _OPERATIONS.items():
            value = getattr(self, name)
            require(isinstance(value, str), f"Kernels.{name} must be the name of an implementation, got {value!r}")
            check_implementation(f"Kernels.{name}", value, operation.IMPLEMENTATIONS, tuning=_TUNINGS.get(name))

    @classmethod
    def of(cls, text: str) -> Kernels:
        """From a text, such as a command line has it.

        Args:
            text: One implementation for all operations that have it, such as `"reference"`, or fields as in
                `"attention=triton+projections=reference"`. What is not named is `"auto"`.

        Raises:
            ValueError: No operation has that implementation, no such field, or one that is given twice.
        """
        if "=" not in text:
            chosen = {name: text for name, operation in _OPERATIONS.items() if text in operation.IMPLEMENTATIONS}
            require(bool(chosen), f"no operation has the implementation {text!r}")
            return cls(**chosen)
        words = [word.partition("=") for word in text.split("+")]
        chosen = {name: value for name, _, value in words}
        require(set(chosen) <= set(_OPERATIONS), f"expected fields of {', '.join(_OPERATIONS)}, got {text!r}")
        require(len(chosen) == len(words), f"expected each field once, got {text!r}")
        return cls(**chosen)
