"""`specjax generate`: one prompt to one checkpoint, text as it comes, statistics at the end."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from specjax.capacity import bucket, rounded_capacity, slots_needed
from specjax.checkpoints.convert import one_line_errors
from specjax.checkpoints.manifest import read_transformer_config
from specjax.checkpoints.pairing import drafter_for_target
from specjax.checkpoints.store import Checkpoint, abstract_checkpoint, load_checkpoint
from specjax.commands.memory_plan import MemoryPlan, plan_memory
from specjax.drafting.drafter import Drafter
from specjax.drafting.prompt_lookup import PromptLookup
from specjax.generate import prepare_call
from specjax.generate_config import GenerateConfig
from specjax.requests import prepare
from specjax.sampling import MIN_TEMPERATURE, SamplingParams
from specjax.sparsity.sparsity_config import SparsityConfig
from specjax.state import FinishReason
from specjax.statistics import Statistics
from specjax.streaming import stream_generate
from specjax.two_level.lossless import Lossless
from specjax.two_level.measured_costs import CostsUnknown, measure_costs, room_for_loops

PROMPT_LOOKUP = "prompt-lookup"
NO_DRAFTER = "none"
# Below this mean acceptance length, over so many steps, drafts are as good as never accepted: that is a mismatch, not bad luck.
_SUSPICIOUS_LENGTH, _SUSPICIOUS_STEPS = 1.05, 200


def generate_command(
    target: Annotated[Path, typer.Argument(help="The target's checkpoint, made by `specjax convert`.")],
    prompt: Annotated[str, typer.Argument(help="The prompt; `-` reads it from standard input.")],
    drafter: Annotated[
        str,
        typer.Option(
            help="The checkpoint of a draft model, or of an EAGLE-3, Medusa or Hydra drafter; "
            f"`{PROMPT_LOOKUP}`; or `{NO_DRAFTER}` for plain decoding."
        ),
    ] = PROMPT_LOOKUP,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    num_speculative_tokens: Annotated[int, typer.Option(help="Tokens drafted in a step.")] = 5,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens that reach this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 32) - 1, help="Seed of the random key.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32; as stored if not given.")] = None,
    sparsity: Annotated[
        Path | None,
        typer.Option(help="JSON of a SparsityConfig, or a calibration's. Lossy: the target leaves work out, and its text may change."),
    ] = None,
    agreement: Annotated[float, typer.Option(help="Of a calibration: the least share of tokens on which sparse and dense agree.")] = 0.99,
    lossless: Annotated[
        bool,
        typer.Option("--lossless", help="Dense passes check what sparse ones commit, as often as measured times say, if at all."),
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Run to the limit.")] = False,
    allow_different_tokenizer: Annotated[
        bool, typer.Option("--allow-different-tokenizer", help="Only warn if the tokenizers differ.")
    ] = False,
) -> None:
    """Generates text, speculatively, and prints what the drafter was worth."""
    with one_line_errors():
        if dtype not in (None, "bfloat16", "float32"):
            raise ValueError(f"--dtype must be bfloat16 or float32, got {dtype!r}")
        number = None if dtype is None else jnp.dtype(dtype)
        left_out = SparsityConfig() if sparsity is None else _read_sparsity(sparsity, agreement)
        if lossless and left_out.is_dense:
            raise ValueError("--lossless checks sparse passes: give --sparsity FILE too")
        if lossless:
            left_out = dataclasses.replace(left_out, refresh_every=0, lossless=_checked(left_out))
        config = GenerateConfig(
            max_new_tokens=max_new_tokens,
            num_speculative_tokens=num_speculative_tokens,
            do_sample=not temperature < MIN_TEMPERATURE,
            sparsity=left_out,
        )
        paths = [target] if drafter in (PROMPT_LOOKUP, NO_DRAFTER) else [target, Path(drafter)]
        text = sys.stdin.read() if prompt == "-" else prompt
        left_out.check(read_transformer_config(target))
        abstract = [abstract_checkpoint(path, dtype=number) for path in paths]
        if left_out.calibrated_for is not None:
            left_out.calibrated_for.check_source(abstract[0].metadata)
        tokenizer = abstract[0].tokenizer()
        tokens = _encode(tokenizer, text, raw=raw)
        # `None` where nothing is filtered: that is another program, and the one that is timed is to be the one that runs.
        sampling = SamplingParams(temperature=temperature, top_k=top_k or None, top_p=None if top_p == 1 else top_p)
        call: dict[str, Any] = dict(
            sampling=sampling, eos_token_ids=abstract[0].eos_token_ids(), ignore_eos=ignore_eos, rng=jax.random.key(seed)
        )
        draft_length = 0 if drafter == NO_DRAFTER else num_speculative_tokens
        # Refuses what the call would, before minutes go into weights.
        _, static = prepare(abstract[0].model.config, [tokens], draft_length=draft_length, config=config, **call)
        models, capacity = [checkpoint.model for checkpoint in abstract], static.cache_capacity or 0
        plan = plan_memory(models, batch_size=1, capacity=capacity, sparsity=left_out)
        typer.echo(plan.describe(), err=True)
        plan.check()
        plan_of_timing = None
        if left_out.lossless is not None and lossless:
            num_new = room_for_loops(left_out.lossless, draft_length)
            capacity = max(capacity, _slots(len(tokens), num_new, draft_length=draft_length, config=config))
            plan_of_timing = plan_memory(models, batch_size=1, capacity=capacity, sparsity=left_out, copies=2)
        checkpoints = [load_checkpoint(path, dtype=number) for path in paths]
        chosen, params = _drafter(drafter, checkpoints, allow_different=allow_different_tokenizer)
        if plan_of_timing is not None:
            config = _by_measured_costs(config, checkpoints[0], chosen, params, tokens, sampling, seed, plan_of_timing)
        updates = stream_generate(
            checkpoints[0].model,
            checkpoints[0].params,
            chosen,
            params,
            [tokens],
            config=config,
            **call,
        )
        typer.echo("compiling …", err=True)
        _print_stream(updates, tokenizer)


def _read_sparsity(path: Path, agreement: float) -> SparsityConfig:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"--sparsity {path} is no JSON that can be read: {error}") from None
    if isinstance(values, dict) and "rows" in values:
        return SparsityConfig.from_calibration(path, agreement=agreement)
    return SparsityConfig.from_json(values)


def _slots(num_tokens: int, num_new: int, *, draft_length: int, config: GenerateConfig) -> int:
    """Of the cache, for so many new tokens behind a prompt, whether or not the model's window has room for them."""
    needed = slots_needed(
        start=0,
        num_columns=bucket(num_tokens),
        num_new=bucket(num_new),
        draft_length=config.max_unsettled(draft_length),
        chunk_size=config.prefill_chunk_size,
    )
    return rounded_capacity(needed)


def _checked(left_out: SparsityConfig) -> Lossless:
    """The file's own settings of two levels or the usual ones, not adapting: that is settled when costs are known."""
    return dataclasses.replace(left_out.lossless or Lossless(), adapt=False)


def _by_measured_costs(
    config: GenerateConfig,
    target: Checkpoint,
    drafter: Drafter | None,
    params: Any,
    tokens: list[int],
    sampling: SamplingParams,
    seed: int,
    plan: MemoryPlan,
) -> GenerateConfig:
    """Two levels that decide by what steps and checks take behind this prompt, which is printed with the break-even.

    Where that cannot be known they decide by what is known without: the text is the same.
    """
    given: dict[str, Any] = dict(sampling=sampling, rng=jax.random.key(seed)) if config.do_sample else {}
    models = (target.model, target.params, drafter, params)
    _, static = prepare_call(target.model, drafter, params, [tokens], config=config, **given)
    typer.echo(f"timing steps and checks; {plan.describe()} …", err=True)
    try:
        if not plan.fits:
            raise CostsUnknown(f"the device has no memory for two of the caches: {plan.describe()}")
        costs = measure_costs(*models, [tokens], config=dataclasses.replace(config, cache_capacity=static.cache_capacity), **given)
    except CostsUnknown as error:
        return dataclasses.replace(config, sparsity=_without_costs(config.sparsity, error))
    # Nobody knows yet what steps will commit: halfway.
    likely = 1.0 if drafter is None else 1 + config.num_speculative_tokens / 2
    typer.echo(costs.describe(tokens_per_step=likely), err=True)
    return dataclasses.replace(config, sparsity=dataclasses.replace(config.sparsity, lossless=costs.lossless()))


def _without_costs(sparsity: SparsityConfig, error: CostsUnknown) -> SparsityConfig:
    lossless = sparsity.lossless
    assert lossless is not None
    if sparsity.attention is None and lossless.step_cost is None:
        raise ValueError(f'--lossless has nothing to choose by, give a "step_cost" in the file\'s "lossless": {error}')
    typer.echo(f"two levels choose by {'bytes' if lossless.step_cost is None else 'the step_cost of the file'}: {error}", err=True)
    return dataclasses.replace(sparsity, lossless=dataclasses.replace(lossless, adapt=True))


def _drafter(name: str, checkpoints: list[Checkpoint], *, allow_different: bool) -> tuple[Drafter | None, Any]:
    if name == NO_DRAFTER:
        return None, None
    if name == PROMPT_LOOKUP:
        return PromptLookup(), None
    target, draft = checkpoints
    ready = drafter_for_target(draft, target, allow_different_tokenizer=allow_different)
    if ready.shared:
        typer.echo(f"the drafter uses the target's {', '.join(ready.shared)}", err=True)
    return ready.drafter, ready.params


def _encode(tokenizer: Any, text: str, *, raw: bool) -> list[int]:
    if raw or not tokenizer.chat_template:
        return tokenizer.encode(text)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(rendered, add_special_tokens=False)


def _print_stream(updates: Any, tokenizer: Any) -> None:
    """Prints text as it comes. Times count from the third update on: those before it hold the compilations."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)
    began, counted, output = None, 0, None
    for index, update in enumerate(updates):
        if began is not None:
            counted += len(update.new_tokens[0])
        for token in update.new_tokens[0]:
            typer.echo(stream.step(tokenizer.backend_tokenizer, token) or "", nl=False)
        sys.stdout.flush()
        if index == 1:
            began = time.perf_counter()
        output = update.output
    assert output is not None
    seconds = 0.0 if began is None else time.perf_counter() - began
    reason = FinishReason(int(np.asarray(output.finish_reason)[0])).name
    rate = f", {counted / seconds:.1f} tokens/s" if counted and seconds else ""
    typer.echo("")
    typer.echo(f"{int(output.lengths[0])} tokens, stopped by {reason}{rate}", err=True)
    if reason == FinishReason.NONFINITE_LOGITS.name:
        typer.echo("warning: the target's logits were not finite; the text ends before them", err=True)
    if output.statistics.draft_length > 0:
        _print_statistics(output.statistics)
    if output.statistics.pass_counts is not None:
        typer.echo(_sparse_line(output.statistics.summary()), err=True)


def _sparse_line(summary: dict[str, Any]) -> str:
    """What sparse passes kept, and what that saved."""
    names = {"sparse_attention": "of the cache", "sparse_ffn": "of the channels", "sparse_moe": "of the experts"}
    name = "sparse, checked by dense passes (lossless)" if "two_level" in summary else "sparse (lossy)"
    kept = [f"{summary[key]['keep_ratio']:.3f} {name}" for key, name in names.items() if key in summary]
    total = summary.get("step_work", {}).get("total")
    if total is None:
        return f"{name}: no pass was made"
    cost = f"a step moves {total['bytes'] / total['dense_bytes']:.3f} of a dense one's bytes"
    checks = ""
    if "two_level" in summary:
        rate = summary["two_level"]["dense_acceptance_rate"]
        checks = "; every step was verified densely" if rate is None else f"; dense passes kept {rate:.3f}"
    flops = f"does {total['flops'] / total['dense_flops']:.3f} of its operations"
    return f"{name}: kept {', '.join(kept)}; {cost}, and {flops}{checks}"


def _print_statistics(statistics: Statistics) -> None:
    summary = statistics.summary()
    per_position = " ".join(f"{rate:.2f}" for rate in summary["acceptance_rate_per_position"])
    typer.echo(
        f"mean_acceptance_length {summary['mean_acceptance_length']:.2f} (1 + accepted / steps, bonus included), "
        f"draft_acceptance_rate {summary['draft_acceptance_rate']:.2f} "
        f"({summary['num_accepted_tokens']} of {summary['num_draft_tokens']}), "
        f"steps {summary['steps']}, accepted per position {per_position}",
        err=True,
    )
    if summary["steps"] > _SUSPICIOUS_STEPS and summary["num_draft_tokens"] and summary["mean_acceptance_length"] < _SUSPICIOUS_LENGTH:
        typer.echo(f"warning: hardly any draft was accepted in {summary['steps']} steps: does the drafter fit this target?", err=True)
