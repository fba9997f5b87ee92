"""One system that decodes prompts, in a process of its own: ours, transformers or vLLM. What `experiments.peers` starts.

Run as a program: the path of a JSON request, and the path for the JSON answer `{version, parts, left_out}`, which is rewritten after every
part: `{batch, tokens, seconds, mean_acceptance_length, load_s}`. torch and vllm are imported here alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import operator
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.record import write_json

Part = dict[str, Any]
Rows = Sequence[Sequence[int]]


def answer(request: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
    """Runs what was asked for.

    Args:
        request: From `experiments.peers.request`.
        write: Is given the answer as far as it is.
    """
    library = request["system"].partition("_")[0]
    answered: dict[str, Any] = {"version": _version(library), "parts": [], "left_out": []}
    write(answered)
    needed = {"specjax": (), "transformers": ("torch", "transformers"), "vllm": ("vllm",)}[library]
    for name in needed:
        try:
            importlib.import_module(name)
        except ImportError as error:
            answered["left_out"].append(f"{name} cannot be imported: {error}")
            write(answered)
            return
    for found in {"specjax": _specjax, "transformers": _transformers, "vllm": _vllm}[library](request):
        answered["left_out" if isinstance(found, str) else "parts"].append(found)
        write(answered)


def time_calls(
    decode: Callable[[Rows], list[list[int]]],
    prompts: Rows,
    *,
    batch: int,
    repeats: int,
    warm_ups: int = 1,
    warmed: Callable[[], Any] = lambda: None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Decodes prompts, `batch` at a time.

    Args:
        decode: From prompts to new tokens; it waits for the device.
        prompts: Token ids, for whole calls: fewer rows would be another shape, and its compilation be timed.
        batch: Prompts a call.
        repeats: Timed runs of each call, behind those that warm up, of the first.
        warm_ups: How many.
        warmed: Called behind those: what was counted until then does not count.

    Returns:
        New tokens of each prompt, and the seconds of each call's runs.

    Raises:
        ValueError: The last call would have fewer prompts.
    """
    if len(prompts) % batch:
        raise ValueError(f"prompts must fill whole calls of {batch}, got {len(prompts)}")
    groups = [prompts[index : index + batch] for index in range(0, len(prompts), batch)]
    for _ in range(warm_ups):
        decode(groups[0])
    warmed()
    tokens: list[list[int]] = []
    seconds: list[list[float]] = []
    for group in groups:
        times, found = [], []
        for _ in range(repeats):
            begin = time.perf_counter()
            found = decode(group)
            times.append(time.perf_counter() - begin)
        tokens += found
        seconds.append(times)
    return tokens, seconds


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "checkout" if library == "specjax" else "absent"


def _specjax(request: dict[str, Any]) -> Iterator[Part | str]:
    from experiments.decoding import Decoder
    from experiments.models import load_drafter, load_model
    from specjax import GenerateConfig
    from specjax.capacity import bucket

    begin = time.perf_counter()
    options = {name: request[name] for name in ("dtype", "implementation", "cache_dir")}
    target = load_model(request["target"], **options)
    drafter = None if request["drafter"] is None else load_drafter(request["drafter"], target, **options)
    load_s = time.perf_counter() - begin
    config = GenerateConfig(max_new_tokens=request["new_tokens"], num_speculative_tokens=request["num_speculative_tokens"])
    for call in request["calls"]:
        decoder = Decoder(
            target,
            None if drafter is None else drafter.drafter,
            None if drafter is None else drafter.params,
            config=config,
            batch=call["batch"],
            width=bucket(max(map(len, call["prompts"]))),
            eos_token_ids=(),
        )
        calls: list[Any] = []  # their statistics, which are read outside of what is timed

        def decode(rows: Rows, decoder: Any = decoder, calls: list = calls) -> list[list[int]]:
            decoded = decoder(rows)
            calls.append(decoded.statistics)
            return decoded.tokens

        tokens, seconds = time_calls(decode, call["prompts"], batch=call["batch"], repeats=request["repeats"], warmed=calls.clear)
        length = None if drafter is None else float(functools.reduce(operator.add, calls).mean_acceptance_length)
        yield {"batch": call["batch"], "tokens": tokens, "seconds": seconds, "mean_acceptance_length": length, "load_s": load_s}


def _transformers(request: dict[str, Any]) -> Iterator[Part | str]:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    begin = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def load(path: str, **settings: Any) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, request["dtype"]))
        model = model.to(device).eval()
        # A checkpoint's own settings sample, penalise repetitions and end texts; nothing of that is to happen.
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None, bos_token_id=None, **settings)
        return model

    model = load(request["target"])
    options: dict[str, Any] = {}
    if request["drafter"] is not None:
        # As many tokens a step as ours: not more after a success, nor fewer where the draft model is unsure.
        schedule = dict(num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
        options["assistant_model"] = load(request["drafter"], num_assistant_tokens=request["num_speculative_tokens"], **schedule)
    is_static = request["system"] == "transformers_static"
    if is_static:
        options["cache_implementation"] = "static"  # with it `generate` compiles the model's decode step on a GPU
    load_s = time.perf_counter() - begin
    passes: list[None] = []  # of the target
    if request["drafter"] is not None:
        model.register_forward_hook(lambda *_: passes.append(None))
    for call in request["calls"]:
        if request["drafter"] is not None and call["batch"] > 1:
            yield f"assisted generation decodes one prompt at a time, not {call['batch']}"
            continue
        # One shape for all calls, where each shape is compiled.
        width = max(map(len, call["prompts"])) if is_static else 0

        def decode(rows: Rows, width: int = width) -> list[list[int]]:
            padded = max(width, *map(len, rows))
            ids = torch.tensor([[0] * (padded - len(row)) + list(row) for row in rows], device=device)
            mask = torch.tensor([[0] * (padded - len(row)) + [1] * len(row) for row in rows], device=device)
            with torch.inference_mode():
                found = model.generate(ids, attention_mask=mask, max_new_tokens=request["new_tokens"], **options)
            return found[:, padded:].tolist()

        times = dict(repeats=request["repeats"], warm_ups=2 if is_static else 1)  # the second captures what the first has compiled
        tokens, seconds = time_calls(decode, call["prompts"], batch=call["batch"], **times, warmed=passes.clear)
        length = None
        if request["drafter"] is not None:
            length = request["repeats"] * sum(map(len, tokens)) / len(passes)
        yield {"batch": call["batch"], "tokens": tokens, "seconds": seconds, "mean_acceptance_length": length, "load_s": load_s}


def _vllm(request: dict[str, Any]) -> Iterator[Part | str]:
    vllm: Any = importlib.import_module("vllm")  # no requirement of ours: a peer that may be there

    begin = time.perf_counter()
    longest = max(len(prompt) for call in request["calls"] for prompt in call["prompts"])
    settings: dict[str, Any] = dict(model=request["target"], dtype=request["dtype"], max_num_seqs=max(c["batch"] for c in request["calls"]))
    # A prompt that was seen before is computed again, as by the others.
    settings |= dict(max_model_len=longest + request["new_tokens"] + 64, enable_prefix_caching=False, disable_log_stats=False)
    if request["drafter"] is not None:
        speculative = dict(method="draft_model", model=request["drafter"], num_speculative_tokens=request["num_speculative_tokens"])
        settings["speculative_config"] = speculative
    model = vllm.LLM(**settings)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True, detokenize=False)
    load_s = time.perf_counter() - begin

    def decode(rows: Rows) -> list[list[int]]:
        prompts = [{"prompt_token_ids": list(row)} for row in rows]
        return [list(found.outputs[0].token_ids) for found in model.generate(prompts, sampling, use_tqdm=False)]

    def counts() -> tuple[float, float]:
        values = {metric.name: metric.value for metric in model.get_metrics() if hasattr(metric, "value")}
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        steps, accepted = (float(values.get(name, 0.0)) for name in names)
        return steps, accepted

    for call in request["calls"]:
        before: list[tuple[float, float]] = []
        times = dict(batch=call["batch"], repeats=request["repeats"])
        tokens, seconds = time_calls(decode, call["prompts"], **times, warmed=lambda before=before: before.append(counts()))
        steps, accepted = (after - earlier for after, earlier in zip(counts(), before[0], strict=True))
        length = 1 + accepted / steps if request["drafter"] is not None and steps else None
        yield {"batch": call["batch"], "tokens": tokens, "seconds": seconds, "mean_acceptance_length": length, "load_s": load_s}


def main() -> None:
    """See the module's docstring."""
    asked, answered = map(Path, sys.argv[1:3])
    answer(json.loads(asked.read_text(encoding="utf-8")), lambda found: write_json(answered, found))


if __name__ == "__main__":
    main()
