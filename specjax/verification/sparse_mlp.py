"""What a pass of the target leaves out of its feed-forward networks and mixtures of experts: static choices, and thresholds a layer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from specjax.verification.sparse_ffn import SparseFFN
from specjax.verification.sparse_moe import SparseMoE

if TYPE_CHECKING:
    from specjax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseMLP:
    """Lossy, unless `ffn` and `moe` are exact or `None`. `SparseMLP()` leaves nothing out, and measures nothing.

    Thresholds are arrays: other values run the same program. In a layer with experts, channels are left out of each expert, by a threshold
    for each token only; what that keeps is not measured (a calibration's histogram tells).

    Attributes:
        ffn: Channels. Static.
        moe: Experts. Static.
        tau: `[L]` float32, or a scalar for all layers: `ffn`'s thresholds. `None` if none are needed.
        beta: `[L, at least m]` float32, or `[at least m]` for all layers: `moe`'s thresholds. `None` if none are needed.
        counted: `[B,T]` bool, tokens that take part in shared choices, in what is measured and in calibration: not the padding behind a
            short draft. `None` is all.
    """

    ffn: SparseFFN | None = dataclasses.field(metadata={"static": True}, default=None)
    moe: SparseMoE | None = dataclasses.field(metadata={"static": True}, default=None)
    tau: jax.Array | None = None
    beta: jax.Array | None = None
    counted: jax.Array | None = None

    def check(self, config: ModelConfig) -> None:
        """Whether it fits a model.

        Raises:
            ValueError: Thresholds missing, or of another number of layers; experts where the model has none; channels of experts chosen
                other than by a threshold for each token; or what `SparseMoE.check` refuses.
        """
        layers = config.num_layers
        with_experts = [layer for layer in range(layers) if config.has_experts(layer)]
        if self.ffn is not None and not self.ffn.exact:
            if with_experts and (self.ffn.select != "threshold" or self.ffn.per != "token"):
                raise ValueError(
                    "in a mixture of experts channels are left out by a threshold for each token: SparseFFN(select='threshold', "
                    f"per='token'), got select={self.ffn.select!r}, per={self.ffn.per!r}; layers with experts: {with_experts}"
                )
            if self.ffn.select == "threshold" and (self.tau is None or self.tau.shape not in ((), (layers,))):
                raise ValueError(f"SparseFFN(select='threshold') needs tau, a scalar or [{layers}], got {_shape(self.tau)}")
        if self.moe is not None:
            if config.moe is None or not with_experts:
                raise ValueError(f"SparseMoE needs a model with experts, this one has none in its {layers} layers")
            self.moe.check(config.moe)
            least = self.moe.max_skipped
            fits = self.beta is not None and self.beta.ndim in (1, 2) and self.beta.shape[-1] >= least
            if least and not (fits and self.beta is not None and self.beta.shape[:-1] in ((), (layers,))):
                raise ValueError(f"SparseMoE(max_skipped={least}) needs beta, [{least}] or [{layers},{least}], got {_shape(self.beta)}")

    def layer(self, index: int) -> SparseMLP:
        """The same with that layer's thresholds alone: a scalar tau, beta `[at least m]`."""
        tau = self.tau if self.tau is None or self.tau.ndim == 0 else self.tau[index]
        beta = self.beta if self.beta is None or self.beta.ndim == 1 else self.beta[index]
        return dataclasses.replace(self, tau=tau, beta=beta)


def _shape(array: jax.Array | None) -> list[int] | None:
    return None if array is None else list(array.shape)
