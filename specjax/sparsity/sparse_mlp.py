"""What a pass leaves out of one layer's feed-forward network or mixture of experts: static choices, and thresholds as arrays."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from specjax.sparsity.sparse_ffn import SparseFFN
from specjax.sparsity.sparse_moe import SparseMoE

if TYPE_CHECKING:
    from specjax.sparsity.sparsity_config import SparsityConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseMLP:
    """Lossy, unless `ffn` and `moe` are exact or `None`. `SparseMLP()` leaves nothing out, and measures nothing.

    In a layer with experts, channels are left out of each expert, by a threshold for each token only.

    Attributes:
        ffn: Channels. Static; its own `tau` is not read.
        moe: Experts. Static; its own `beta` is not read.
        tau: Scalar float32: `ffn`'s threshold in this layer. `None` if none is needed.
        beta: `[at least m]` float32: `moe`'s thresholds in this layer. `None` if none are needed.
        counted: `[B,T]` bool, tokens that take part in shared choices, in what is measured and in calibration: not the padding behind a
            short draft. `None` is all.
    """

    ffn: SparseFFN | None = dataclasses.field(metadata={"static": True}, default=None)
    moe: SparseMoE | None = dataclasses.field(metadata={"static": True}, default=None)
    tau: jax.Array | None = None
    beta: jax.Array | None = None
    counted: jax.Array | None = None

    @classmethod
    def of_layer(cls, sparsity: SparsityConfig | None, layer: int, counted: jax.Array | None) -> SparseMLP | None:
        """What a layer leaves out of what a pass does.

        Args:
            sparsity: The pass's, checked against the model; `None` is dense.
            layer: Which.
            counted: `[B,T]` bool or `None`.

        Returns:
            `None` where there is nothing to say: the dense layer.
        """
        ffn, moe = (None, None) if sparsity is None else (sparsity.ffn, sparsity.moe)
        if ffn is None and moe is None and counted is None:
            return None
        tau = None if ffn is None else ffn.layer_tau(layer)
        beta = None if moe is None else moe.layer_beta(layer)
        return cls(
            ffn=ffn,
            moe=moe,
            tau=None if tau is None else jnp.float32(tau),
            beta=None if beta is None else jnp.asarray(beta, jnp.float32),
            counted=counted,
        )
