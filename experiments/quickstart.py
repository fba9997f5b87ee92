"""Does speculative decoding give the same words faster, on a real model and this machine?

Command: python -m experiments.run quickstart
Hardware: two CPU cores and 2 GB of memory; 93 MB of network and 650 MB of disk the first time
Time: 1 minute, a little more the first time
Result: the same words on every prompt, faster on all of them together

SmolLM2-135M-Instruct answers a few prompts greedily, plainly and with the EAGLE-3 drafter that comes with specjax (or another one). Half of
the prompts ask for text that already stands in them, the other half do not. On a CPU a verification pass of several rows costs more than a
plain step, so a step has to deliver more tokens than that to gain anything. Both ways take turns, and the median of their times counts.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.acceptance import end_of_text
from experiments.decoding import Decoded, Decoder
from experiments.experiment import ExperimentError, local_field, path_field
from experiments.fetch import smollm2
from experiments.models import PROMPT_LOOKUP, default_cache_dir, load_drafter, load_model
from experiments.prompts import encode
from specjax import GenerateConfig
from specjax.capacity import bucket

# The drafter for the model that is fetched.
SHIPPED = "smollm2_135m_instruct_eagle3"

# (whether the answer copies from the prompt, the prompt)
PROMPTS = (
    (
        True,
        "Correct the spelling of this text: The lighthous keeper climbed the narrow stairs every evening, lit the lamp, wrote the wether "
        "into his book, and looked out over the harbour until the last fishing boat had come home.",
    ),
    (
        True,
        "Repeat this text word for word: On Monday the committee met in the town hall to talk about the old bridge. Two engineers said "
        "that it would carry cars for another ten years, but that lorries should take the road along the river.",
    ),
    (False, "Write a short poem about the sea."),
    (False, "What is a good breakfast before a long walk, and why?"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        model: A GGUF file, a Hugging Face folder or a checkpoint; `none` fetches SmolLM2-135M-Instruct.
        drafter: Likewise a draft model with the same tokenizer, or an EAGLE-3, Medusa or Hydra drafter; or "prompt_lookup". `none` is the
            one that comes along for the model, and prompt lookup for a model of yours.
        new_tokens: Limit a prompt.
        num_speculative_tokens: G.
        repeats: How often each prompt is decoded each way.
        dtype: Compute dtype. In float32 the words are the same; in bfloat16 near-ties may differ.
        implementation: Of the kernels; see `Kernels.of`.
        cache_dir: Where the model is kept; `none` is the user's cache folder.
    """

    model: str | None = path_field()
    drafter: str | None = path_field()
    new_tokens: int = 64
    num_speculative_tokens: int = 3
    repeats: int = 3
    dtype: str = "float32"
    implementation: str = "auto"
    cache_dir: str | None = local_field()


def run(config: Config) -> Iterator[dict]:
    """One row a prompt, and one for all of them."""
    cache_dir = Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()
    options: dict[str, Any] = {"dtype": config.dtype, "implementation": config.implementation, "cache_dir": config.cache_dir}
    target = load_model(config.model or str(smollm2(cache_dir)), **options)
    if target.checkpoint is None:
        raise ExperimentError(f"the quickstart needs a model with a tokenizer, {config.model!r} is a preset of random weights")
    drafter = load_drafter(config.drafter or (PROMPT_LOOKUP if config.model else SHIPPED), target, **options)
    tokenizer = target.checkpoint.tokenizer()
    prompts = encode(tokenizer, [text for _, text in PROMPTS], chat_template=bool(tokenizer.chat_template))

    def decoder(drafter, params) -> Decoder:
        return Decoder(
            target,
            drafter,
            params,
            config=GenerateConfig(max_new_tokens=config.new_tokens, num_speculative_tokens=config.num_speculative_tokens),
            batch=1,
            width=bucket(max(map(len, prompts))),
            eos_token_ids=end_of_text(target),
        )

    print(f"Compiling {target.name} ({target.weights}), twice", flush=True)
    plain = decoder(None, None)
    speculative = decoder(drafter.drafter, drafter.params)
    common = {
        "target": target.name,
        "drafter": drafter.name,
        "weights": target.weights,
        "implementation": config.implementation,
        "synthetic": False,
        "num_speculative_tokens": config.num_speculative_tokens,
    }
    rows = []
    for (copies, text), prompt in zip(PROMPTS, prompts, strict=True):
        turns = [(plain([prompt]), speculative([prompt])) for _ in range(config.repeats)]
        without, ours = (_median(decoded) for decoded in zip(*turns, strict=True))
        rows.append(
            {
                **common,
                "prompt": text,
                "copies": copies,
                "text": tokenizer.decode(ours.tokens[0], skip_special_tokens=True),
                "identical": ours.tokens == without.tokens,
                "tokens": ours.num_tokens,
                "seconds": ours.seconds,
                "seconds_autoregressive": without.seconds,
                "tokens_per_s": ours.tokens_per_s,
                "tokens_per_s_autoregressive": without.tokens_per_s,
                "speedup": ours.tokens_per_s / without.tokens_per_s,
                **ours.statistics.summary(),
            }
        )
        yield rows[-1]
    yield {**common, "prompt": None, "compile_s": plain.compile_s + speculative.compile_s, **_overall(rows)}


def show(row: dict) -> str:
    """A prompt with its answer and figures, or the figures of all."""
    same = "the same words" if row["identical"] else "OTHER WORDS than plain decoding"
    verdict = f"{row['speedup']:.2f} times as fast" if row["speedup"] > 1 else f"speculation loses: {row['speedup']:.2f} times the speed"
    speed = f"{row['tokens_per_s']:.1f} tokens/s with the drafter, {row['tokens_per_s_autoregressive']:.1f} without: {verdict}; {same}"
    if row["prompt"] is None:
        return f"All prompts: {speed}.\nCompiling took {row['compile_s']:.0f} s and is not counted."
    heading = "copies from its prompt" if row["copies"] else "new text"
    counts = f"{row['num_accepted_tokens']} of {row['num_draft_tokens']} draft tokens accepted; mean acceptance length "
    counts += f"{row['mean_acceptance_length']:.2f} (1 + accepted / steps)"
    return f"--- {heading}\n> {row['prompt']}\n\n{row['text']}\n\n{speed}.\n{counts}.\n"


def columns(row: dict) -> dict:
    """What the report shows of a row."""
    kind = "all" if row["prompt"] is None else "copies from its prompt" if row["copies"] else "new text"
    length = row.get("mean_acceptance_length")
    return {
        "answer": kind,
        "mean acceptance length": length,
        "tokens/s": row["tokens_per_s"],
        "tokens/s without": row["tokens_per_s_autoregressive"],
        "speed-up": f"{row['speedup']:.2f} ×",
        "same words": row["identical"],
    }


def _median(decoded: Sequence[Decoded]) -> Decoded:
    """The same words each time, in the median of the times."""
    return dataclasses.replace(decoded[0], seconds=statistics.median(one.seconds for one in decoded))


def _overall(rows: list[dict]) -> dict:
    tokens = sum(row["tokens"] for row in rows)
    seconds, without = (sum(row[key] for row in rows) for key in ("seconds", "seconds_autoregressive"))
    return {
        "identical": all(row["identical"] for row in rows),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_autoregressive": tokens / without,
        "speedup": without / seconds,
    }
