"""Drafters to begin a training with: of a target's own shape, their LM heads made from its LM head.

The target's final hidden state, which its LM head reads, is close to the last of the features that an EAGLE-3 drafter is given. So the
target's own head, its best low-rank factors or the rows of its frequent tokens are warm starts; `"random"` is what SlimSpec's drafters had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config, default_feature_layers
from specjax.drafting.heads import DraftHead, FullHead, LowRankHead, ScreenedHead, TrimmedHead
from specjax.drafting.heads.draft_head import DRAFT_HEAD, TOKEN_IDS
from specjax.drafting.heads.from_full_head import low_rank_from, screened_from, trimmed_from
from specjax.drafting.hydra import Hydra, HydraConfig
from specjax.drafting.medusa import Medusa, MedusaConfig
from specjax.model_config import ModelConfig, RopeConfig

INITS = ("weighted_svd", "svd", "random")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadStart:
    """What draft heads are made from.

    Attributes:
        lm_head: `[V,D]`, the target's.
        norm_scale: `[D]`, scale of the target's final norm, whose output its LM head reads: an EAGLE-3 drafter's begins with it, but with
            `init="random"`. `None`: with ones.
        init: How low-rank factors begin: `"weighted_svd"` (the target's head where its hidden states go), `"svd"`, or `"random"`, with
            which full and trimmed heads are random too.
        covariance: `[D,D]`, the mean of `h h^T` over the target's hidden states after the final norm; for `"weighted_svd"`.
        token_ids: For a trimmed head, by its number of tokens: which they are.

    Raises:
        ValueError: An unknown `init`.
    """

    lm_head: jax.Array
    norm_scale: jax.Array | None = None
    init: str = "weighted_svd"
    covariance: Any = None
    token_ids: Mapping[int, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.init not in INITS:
            raise ValueError(f"init must be one of {', '.join(INITS)}, got {self.init!r}")

    def params(self, head: DraftHead, rng: jax.Array) -> dict[str, jax.Array]:
        """Arrays of a head, matrices in float32.

        Args:
            head: The head.
            rng: For what is random.

        Raises:
            ValueError: A trimmed head without its tokens, low-rank factors without the covariance that they need, or a head that nothing is
                known of.
        """
        vocab_size, hidden_size = self.lm_head.shape
        random = head.init_params(rng, hidden_size=hidden_size, vocab_size=vocab_size, dtype=jnp.float32)
        if isinstance(head, TrimmedHead) and head.num_tokens not in self.token_ids:
            raise ValueError(f"a trimmed head needs to know which {head.num_tokens} tokens it has")
        if self.init == "random":
            chosen = {TOKEN_IDS: jnp.asarray(self.token_ids[head.num_tokens], jnp.int32)} if isinstance(head, TrimmedHead) else {}
            return random | chosen
        covariance = self.covariance if self.init == "weighted_svd" else None
        if self.init == "weighted_svd" and covariance is None and isinstance(head, LowRankHead | ScreenedHead):
            raise ValueError("init weighted_svd needs the covariance of the target's hidden states, got None")
        match head:
            case FullHead():
                made = random | ({} if head.shared else {"lm_head": self.lm_head})  # a bias begins at zero
            case LowRankHead():
                made = low_rank_from(self.lm_head, head.rank, covariance).params
            case TrimmedHead():
                made = trimmed_from(self.lm_head, self.token_ids[head.num_tokens]).params
            case ScreenedHead():
                made = screened_from(self.lm_head, head.rank, head.num_candidates, covariance, shared=head.shared).params
            case _:
                raise ValueError(f"there is no start for a head of type {type(head).__name__}")
        return {name: array if name == TOKEN_IDS else jnp.asarray(array, jnp.float32) for name, array in made.items()}


def new_eagle3(
    target: ModelConfig,
    head: DraftHead,
    *,
    num_layers: int = 1,
    fc_norm: bool = True,
    norm_output: bool = True,
    dtype: jnp.dtype = jnp.bfloat16,
) -> Eagle3:
    """An EAGLE-3 network for a target: layers of the target's own shape, with its embedding.

    Args:
        target: The target's shape. Of a mixture of experts, a layer's FFN is as wide as the experts that a token uses.
        head: The draft LM head.
        num_layers: Layers of the drafter.
        fc_norm: Norm each boundary's features: in some targets a few channels are far larger than the others.
        norm_output: Recursive steps go on from the normed state.
        dtype: Compute dtype; parameters are float32.
    """
    intermediate_size = target.intermediate_size
    if target.moe is not None:
        intermediate_size = max(target.moe.intermediate_size * target.moe.num_experts_per_token, target.hidden_size)
    decoder = ModelConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope=RopeConfig(theta=target.rope.theta),
    )
    config = Eagle3Config(
        decoder=decoder,
        target_hidden_size=target.hidden_size,
        head=head,
        feature_layers=default_feature_layers(target.num_layers),
        fc_norm=fc_norm,
        norm_output=norm_output,
    )
    return Eagle3(config, dtype=dtype, param_dtype=jnp.float32)


def new_medusa(target: ModelConfig, head: DraftHead, *, num_draft_heads: int, dtype: jnp.dtype = jnp.bfloat16) -> Medusa:
    """Medusa heads for a target, each with a draft LM head.

    Args:
        target: The target's shape.
        head: The draft LM head of each.
        num_draft_heads: K.
        dtype: Compute dtype; parameters are float32.
    """
    config = MedusaConfig(hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_draft_heads=num_draft_heads, head=head)
    return Medusa(config, dtype=dtype, param_dtype=jnp.float32)


def new_hydra(target: ModelConfig, head: DraftHead, *, num_draft_heads: int, dtype: jnp.dtype = jnp.bfloat16) -> Hydra:
    """Hydra heads for a target; arguments as those of `new_medusa`."""
    config = HydraConfig(hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_draft_heads=num_draft_heads, head=head)
    return Hydra(config, dtype=dtype, param_dtype=jnp.float32)


def initial_params(model: Eagle3 | Medusa | Hydra, start: HeadStart, rng: jax.Array) -> dict:
    """Params to begin with: a random body, and heads from `start`.

    Args:
        model: The network.
        start: What its heads are made from.
        rng: A typed key.

    Raises:
        ValueError: As `HeadStart.params`.
    """
    body_rng, head_rng = jax.random.split(rng)
    params = dict(model.init_params(body_rng))
    if isinstance(model, Eagle3) and start.norm_scale is not None and start.init != "random":
        params["final_norm"] = {"scale": jnp.asarray(start.norm_scale, jnp.float32)}
    head_params = start.params(model.config.head, head_rng)
    if not head_params:
        return params
    if isinstance(model, Eagle3):
        return params | {DRAFT_HEAD: head_params}
    return {name: dict(part) | {DRAFT_HEAD: head_params} for name, part in params.items()}
