"""The weights of a gated feed-forward network, in the layout of checkpoints or in the one that single channels can be gathered from."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from specjax.kernels.few_row_linear import product, rows_product


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projections:
    """The weights of one network, in either layout.

    Attributes:
        down: `[F,D]`.
        gate_up: `[D,2,F]`, or `None` where the two are split.
        gate: `[D,F]`, the first half of `gate_up`.
        up: `[F,D]`, the second half, transposed: a row a channel.
        gate_up_bias: `[2,F]` or `None`.
        down_bias: `[D]` or `None`.
    """

    down: jax.Array
    gate_up: jax.Array | None = None
    gate: jax.Array | None = None
    up: jax.Array | None = None
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None

    def halves(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gate and up of every channel, `[..., F]` each."""
        if self.gate_up is not None:
            both = product(x, self.gate_up)
            if self.gate_up_bias is not None:
                both = both + self.gate_up_bias.astype(x.dtype)
            return both[..., 0, :], both[..., 1, :]
        assert self.up is not None
        return self.gate_half(x), self._with_bias(rows_product(x, self.up), 1)

    def gate_half(self, x: jax.Array) -> jax.Array:
        """The gate alone, where the two are split."""
        assert self.gate is not None
        return self._with_bias(product(x, self.gate), 0)

    def require_rows(self, implementation: str) -> None:
        """Refuses a forced kernel that reads single channels, where the layout has no row a channel.

        Args:
            implementation: Of `gathered_ffn`.

        Raises:
            ValueError: `"triton"`, and the two are not split.
        """
        if implementation == "triton" and self.gate_up is not None:
            raise ValueError("Kernels(channels='triton') reads rows of up: it needs the params of split_gate_up, got gate_up")

    def out(self, inner: jax.Array) -> jax.Array:
        """The down projection of all channels."""
        return self.with_down_bias(product(inner, self.down))

    def with_down_bias(self, out: jax.Array) -> jax.Array:
        """With the bias, if there is one."""
        return out if self.down_bias is None else out + self.down_bias.astype(out.dtype)

    def _with_bias(self, half: jax.Array, which: int) -> jax.Array:
        return half if self.gate_up_bias is None else half + self.gate_up_bias[which].astype(half.dtype)


def split_gate_up(params: dict[str, Any]) -> dict[str, Any]:
    """A target's params with `gate_up [D,2,F]` of each feed-forward network as `gate [D,F]` and `up [F,D]`: the gathered form's layout.

    It costs no memory once the old arrays are gone, and a dense pass two products where it had one. What it computes is the same.

    Args:
        params: Of a `Transformer`. Networks that are mixtures of experts stay.

    Returns:
        New params; the other arrays are those given.
    """

    def split(layer: dict[str, Any]) -> dict[str, Any]:
        mlp = layer["mlp"]
        if "gate_up" not in mlp:
            return layer
        others = {name: array for name, array in mlp.items() if name != "gate_up"}
        return layer | {"mlp": others | {"gate": mlp["gate_up"][:, 0], "up": mlp["gate_up"][:, 1].T}}

    return {name: split(part) if name.startswith("layer_") else part for name, part in params.items()}
