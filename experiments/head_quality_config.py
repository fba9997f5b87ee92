"""Settings of the experiment `head_quality`, for it and for what makes its rows."""

from __future__ import annotations

import dataclasses

from experiments.experiment import local_field, path_field


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        target: A checkpoint's path (ours, a Hugging Face folder or a GGUF file).
        drafters: Checkpoints of EAGLE-3 drafters with the same body's shape and a head of their own each, of which one has the full head;
            and of a draft model, with its own LM head or others.
        derive: trimmed:TOKENS, heads of the rows of each kind's full head.
        data: Token files by which those tokens are chosen, made by `specjax distill`; several folders are counted as one.
        data_dir: Folder of prompt sets, `NAME.jsonl` with `turns`.
        sets: Their names.
        prompts_per_set: Spread evenly over the set, at least as many as are decoded together; `none` takes all. Of a set that has enough,
            as many as fill batches.
        batches: Prompts decoded together.
        temperatures: 0 decodes greedily.
        new_tokens: Limit a prompt.
        num_speculative_tokens: G.
        context: Tokens in the cache where kappa and nu are measured.
        seed: For sampling.
        dtype: Compute dtype.
        implementation: Of the kernels; see `Kernels.of`.
        chat_template: Prompts are user messages in the tokenizer's own chat template; `false` takes them as bare text.
        repeats: Timed runs a batch; the median counts.
        short_steps: Steps of the short timing loops.
        long_steps: Steps of the long timing loops.
        loop_repeats: Pairs of timing loops.
        compile_threads: Programs to compile at a time.
        cache_dir: Where converted checkpoints are kept; `none` is the user's cache folder.
    """

    target: str = path_field("")
    drafters: tuple[str, ...] = path_field(())
    derive: tuple[str, ...] = ()
    data: tuple[str, ...] = path_field(())
    data_dir: str = path_field("")
    sets: tuple[str, ...] = ("mt_bench", "humaneval", "gsm8k")
    prompts_per_set: int | None = 8
    batches: tuple[int, ...] = (1, 64)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    new_tokens: int = 128
    num_speculative_tokens: int = 5
    context: int = 512
    seed: int = 0
    dtype: str = "bfloat16"
    implementation: str = "auto"
    chat_template: bool = True
    repeats: int = 1
    short_steps: int = 4
    long_steps: int = 24
    loop_repeats: int = 5
    compile_threads: int = 8
    cache_dir: str | None = local_field()
