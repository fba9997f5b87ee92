"""Whether values can be read: those of a caller's own `jit` cannot."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer


def is_traced(tree: Any) -> bool:
    """Whether any array of a pytree is traced."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))
