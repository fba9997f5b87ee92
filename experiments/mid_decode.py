"""A decode in the middle, for timing: random tokens, keys and values, and the steps that a timed loop repeats from there."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.experiment import ExperimentError
from experiments.models import Model
from experiments.presets import kv_bytes, random_array
from experiments.record import device
from experiments.timing import Loop
from specjax import GenerateConfig, SamplingParams, SparsityConfig, Transformer
from specjax.capacity import rounded_capacity
from specjax.drafting.drafter import Drafter
from specjax.drafting.eagle3_drafter import Eagle3State
from specjax.generate import decode_step, prepare_call
from specjax.models.kv_cache import KVCache
from specjax.models.sparse_attention import prepare_cache
from specjax.requests import row_keys
from specjax.sampling import split_row_keys
from specjax.state import Commit, Context, DecodeState, Draft, FinishReason, SinceDense
from specjax.statistics import Statistics
from specjax.two_level.level_counts import LevelCounts
from specjax.two_level.pace import Pace
from specjax.verification.rejection_sampling import RejectionSampling
from specjax.verification.rule import VerificationRule
from specjax.verification_pass import counts_of_nothing

_DENSE, _RULE = SparsityConfig(), RejectionSampling()
# What a loop holds beside weights and cache: activations, gathered blocks, scores of the vocabulary. A guess on the safe side.
_SCRATCH_BYTES = 4e9


@dataclasses.dataclass(frozen=True)
class Middle:
    """Where the loops are: `num_steps` steps before the last pass's rows end at `context`.

    Attributes:
        batch: B.
        context: Tokens in the cache when the longest loop ends.
        num_steps: Steps of the longest loop.
        num_speculative_tokens: G; 0 decodes plainly.
        margin: Slots beyond `context`, for steps that commit more than one token.
        do_sample: Tokens are sampled, at temperature 1.
        block_size: The capacity is a multiple of this, too: blocks of the cache that sparse attention chooses from.
    """

    batch: int
    context: int
    num_steps: int
    num_speculative_tokens: int
    margin: int = 0
    do_sample: bool = False
    block_size: int = 64

    def __post_init__(self) -> None:
        if self.start < 2:
            raise ExperimentError(f"a context of {self.context} tokens is too short for loops of {self.num_steps} steps")

    @property
    def start(self) -> int:
        """Tokens in the cache at first."""
        return self.context - self.num_steps - self.num_speculative_tokens - 1

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return rounded_capacity(self.context + self.margin, self.block_size)

    def context_tokens(self, rng: jax.Array, vocab_size: int) -> Context:
        """Random tokens, as many as there are slots."""
        tokens = jax.random.randint(rng, (self.batch, self.capacity), 0, vocab_size, jnp.int32)
        return Context(tokens=tokens, length=jnp.full((self.batch,), self.start + 1, jnp.int32))

    def target_cache(self, target: Transformer, rng: jax.Array) -> KVCache:
        """A cache of random keys and values, which loops of one batch and capacity may share."""
        return _randomised(target.init_cache(batch_size=self.batch, capacity=self.capacity), rng)

    def drafter_state(self, drafter: Drafter, params: Any, context: Context, rng: jax.Array) -> Any:
        """The state of a drafter that has seen `context`, random."""
        state = _randomised(drafter.init(params, batch_size=self.batch, capacity=self.capacity), rng)
        if isinstance(state, Eagle3State):  # what its `commit` would do, without a pass
            return dataclasses.replace(state, cache=state.cache.with_length(context.length - 1))
        return drafter.commit(params, state, Commit(context=context, num_committed=jnp.ones_like(context.length), features=None))


def decoding_loop(
    target: Transformer,
    target_params: Any,
    drafter: Drafter | None,
    drafter_params: Any,
    middle: Middle,
    *,
    sparsity: SparsityConfig = _DENSE,
    verification: VerificationRule = _RULE,
    cache: KVCache | None = None,
    drafter_state: Any = None,
    num_steps: tuple[int, int] | None = None,
) -> Loop:
    """The library's own step: drafting, verification, commit. With two levels it is a cycle: sparse steps and the pass that checks them.

    Args:
        target: The target.
        target_params: Its params.
        drafter: `None` decodes plainly.
        drafter_params: Its params.
        middle: Where.
        sparsity: What verification leaves out.
        verification: The rule; one that makes acceptance up for loops whose steps are to commit as many tokens as real ones would.
        cache: From `middle.target_cache`, where several loops shall share one; its keys' summaries are made here.
        drafter_state: From `middle.drafter_state`, likewise.
        num_steps: Of the short and the long loop, where they are not those of other loops.

    Returns:
        The loop; its counts are the statistics.

    Raises:
        ExperimentError: The context, or the room behind it, is too short for the loop.
    """
    num_drafted, lossless = middle.num_speculative_tokens, sparsity.lossless
    unsettled = num_drafted if lossless is None else lossless.max_provisional(num_drafted)
    room = middle.capacity - middle.start - unsettled - 1
    longest = middle.num_steps if num_steps is None else num_steps[1]
    each = 1 if lossless is None and not verification.synthetic else unsettled + 1
    if room < longest * each:
        raise ExperimentError(f"loops of {longest} steps of up to {each} tokens need as much room, got a Middle with room for {room}")
    static = GenerateConfig(
        max_new_tokens=room,
        num_speculative_tokens=max(num_drafted, 1),
        do_sample=middle.do_sample,
        verification=verification,
        sparsity=sparsity,
        cache_capacity=middle.capacity + 128,  # room for the check's rounding; the cache below has `capacity`
    )
    prompt = np.zeros((middle.batch, 1), np.int32)
    sampled: dict[str, Any] = {"sampling": SamplingParams(), "rng": jax.random.key(4)} if middle.do_sample else {}
    request, static = prepare_call(target, drafter, drafter_params, prompt, config=static, ignore_eos=True, **sampled)
    static = dataclasses.replace(static, cache_capacity=middle.capacity)

    token_rng, cache_rng, drafter_rng = jax.random.split(jax.random.key(1), 3)
    context = middle.context_tokens(token_rng, target.config.vocab_size)
    cache = prepare_cache(middle.target_cache(target, cache_rng) if cache is None else cache, sparsity, target.config)
    if drafter is not None and drafter_state is None:
        drafter_state = middle.drafter_state(drafter, drafter_params, context, drafter_rng)
    state = DecodeState(
        context=context,
        num_generated=jnp.zeros((middle.batch,), jnp.int32),
        finish_reason=jnp.full((middle.batch,), FinishReason.RUNNING, jnp.int32),
        target_cache=cache.with_length(context.length - 1),
        drafter_state=drafter_state,
        row_keys=row_keys(request.rng, middle.batch),
        log_probs=jnp.zeros((middle.batch, 0), jnp.float32),
        statistics=Statistics.zeros(
            middle.batch,
            num_drafted,
            synthetic=drafter is not None and verification.synthetic,
            **counts_of_nothing(target, target_params, sparsity, cache),
            levels=None if lossless is None else LevelCounts.zeros(middle.batch, check_cost=lossless.check_cost),
        ),
        pace=None if lossless is None else Pace.unknown(),
        since_dense=SinceDense(dense_length=context.length - 1, num_steps=jnp.int32(0)) if sparsity.refresh_every else None,
    )

    def step(params, state):
        target_params, drafter_params, request = params
        return decode_step(target, drafter, static, target_params, drafter_params, request, state)

    # The request is an argument too: of constants the compiler makes use. With temperature, top-k and top-p known it drops from a sampling
    # step the branch that might sort, which a call's own steps have for every token that is drawn.
    arrays = (target_params, drafter_params, jax.device_put(request))
    return Loop(step, arrays, state, num_steps, count=lambda state: jax.device_get(state.statistics))


def does_not_fit(target: Model, *, batch: int, context: int, layouts: int = 1) -> str | None:
    """Why loops of that batch and context cannot run here; `None` where they can.

    Args:
        target: The target.
        batch: B.
        context: Tokens in the cache.
        layouts: How often its weights are held, in different layouts, at the most.
    """
    shape = target.model.config
    if context > shape.max_position_embeddings:
        return f"the model's window has {shape.max_position_embeddings} tokens"
    limit = device()["memory_bytes"]
    weights = layouts * sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
    cache = kv_bytes(shape, batch=batch, context=rounded_capacity(context), itemsize=jnp.dtype(target.model.dtype).itemsize)
    needed = weights + 2 * cache + _SCRATCH_BYTES  # the state that loops start from, and the one that they carry
    if limit is not None and needed > limit:
        return f"it needs about {needed / 1e9:.0f} GB, the device has {limit / 1e9:.0f} GB"
    return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafting:
    """What a step of drafting alone carries.

    Attributes:
        context: As in `DecodeState`.
        drafter_state: Likewise.
        row_keys: Likewise.
        draft: The latest one: what a verification would read is written.
    """

    context: Context
    drafter_state: Any
    row_keys: jax.Array
    draft: Draft


def drafting_loop(drafter: Drafter, drafter_params: Any, middle: Middle, *, vocab_size: int, feature_shape: tuple[int, Any] | None) -> Loop:
    """A step of the drafter without a target: it proposes G tokens, then commits the first of them.

    Args:
        drafter: The drafter.
        drafter_params: Its params.
        middle: Where.
        vocab_size: V.
        feature_shape: Width and dtype of the target's features; `None` if the drafter reads none.

    Raises:
        ExperimentError: The context is too short for the loop.
    """
    batch, num_drafted = middle.batch, middle.num_speculative_tokens
    token_rng, drafter_rng, feature_rng, rng = jax.random.split(jax.random.key(1), 4)
    context = middle.context_tokens(token_rng, vocab_size)
    probs = jnp.zeros((batch, num_drafted, vocab_size), jnp.float32) if middle.do_sample else None
    state = Drafting(
        context=context,
        drafter_state=middle.drafter_state(drafter, drafter_params, context, drafter_rng),
        row_keys=row_keys(rng, batch),
        draft=Draft(tokens=jnp.zeros((batch, num_drafted), jnp.int32), num_drafted=jnp.zeros((batch,), jnp.int32), probs=probs),
    )
    # Arguments, all of them: of a constant the compiler would make use.
    params = {
        "drafter": drafter_params,
        "sampling": SamplingParams().broadcast(batch) if middle.do_sample else None,
        "num_committed": jnp.ones((batch,), jnp.int32),
        "features": feature_shape and random_array(feature_rng, (batch, num_drafted + 1, feature_shape[0]), feature_shape[1]),
    }

    def step(params, state):
        next_keys, draft_keys = split_row_keys(state.row_keys, 2)
        draft, drafter_state = drafter.propose(
            params["drafter"],
            state.drafter_state,
            state.context,
            num_speculative_tokens=num_drafted,
            sampling=params["sampling"],
            row_keys=draft_keys,
        )
        rows, count, features = jnp.arange(batch), params["num_committed"], params["features"]
        tokens = state.context.tokens.at[rows, state.context.length].set(draft.tokens[:, 0])
        context = Context(tokens=tokens, length=state.context.length + count)
        if features is not None:  # they depend on the draft, as a target's do: otherwise their fusion would leave the loop
            features = features + (draft.tokens[:, -1] % 2).astype(features.dtype)[:, None, None]
        drafter_state = drafter.commit(params["drafter"], drafter_state, Commit(context=context, num_committed=count, features=features))
        return Drafting(context=context, drafter_state=drafter_state, row_keys=next_keys, draft=draft)

    return Loop(step, params, state)


def _randomised(tree: Any, rng: jax.Array) -> Any:
    """Random normal values in every array of floats."""
    leaves, treedef = jax.tree.flatten(tree)
    filled = [
        random_array(jax.random.fold_in(rng, index), leaf.shape, leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        for index, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, filled)
