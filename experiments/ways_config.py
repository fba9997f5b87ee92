"""Settings of the experiment `five_ways`, for it and for what runs its ways: on real prompts, or by a preset's shape alone."""

from __future__ import annotations

import dataclasses

from experiments.experiment import local_field, path_field
from experiments.presets import PRESETS
from experiments.sparse_settings import SparseWords
from experiments.ways import steady_rates
from specjax import Lossless


@dataclasses.dataclass(frozen=True)
class Config(SparseWords):
    """Settings, and those of `SparseWords`.

    Attributes:
        target: A preset's name, or a checkpoint's path.
        drafter: Likewise; or "prompt_lookup", or of a preset "eagle3".
        data: Folders of the task's data.
        task: Where prompts come from; see `experiments.tasks`. Not for a preset.
        library: What the task `long_code` is made of.
        text: What the task `text` is made of.
        prompts: How many.
        max_prompt_tokens: The most that a prompt has.
        new_tokens: Of each prompt; none ends before.
        contexts: Of a preset, tokens in the cache about where loops end.
        batches: Prompts decoded together.
        num_speculative_tokens: G.
        max_sparse_steps: Of two levels, the most before a dense pass.
        max_waiting_tokens: Of two levels, the most that may wait for it; the pass has a row more. `none`: what those steps may commit.
        adapt: Two levels choose how many, up to those, and may verify densely; `false` is always as many.
        measured_costs: They choose by times that are measured here; of a preset always.
        mean_acceptance_length: SYNTHETIC, of a preset; in sparse and dense steps alike.
        dense_acceptances: SYNTHETIC, of a preset: the chances of a token to be kept by the dense level.
        dtype: Compute dtype, and that of random weights.
        implementation: Of the kernels; see `Kernels.of`.
        chat_template: Prompts of chat tasks are user messages in the tokenizer's template; `false` takes them as bare text.
        repeats: Timed runs a batch, or pairs of loops; the median counts.
        short_steps: Of a preset, steps of the short loops.
        long_steps: Of the long loops.
        short_cycles: Cycles of the short loops with two levels.
        long_cycles: Of the long loops.
        compile_threads: Programs to compile at a time; of a checkpoint each runs once when it is compiled, with caches of its own.
        cache_dir: Where converted checkpoints are kept; `none` is the user's cache folder.
    """

    attention: tuple[float, ...] = (0.125,)
    reuse: tuple[str, ...] = ("tokens",)
    controls: tuple[str, ...] = ()
    target: str = path_field("")
    drafter: str = path_field("prompt_lookup")
    data: tuple[str, ...] = path_field(())
    task: str = "qmsum_questions"
    library: str = path_field("transformers")
    text: str = path_field("")
    prompts: int = 8
    max_prompt_tokens: int = 16000
    new_tokens: int = 128
    contexts: tuple[int, ...] = (8192, 32768, 131072)
    batches: tuple[int, ...] = (1,)
    num_speculative_tokens: int = 5
    max_sparse_steps: int = 8
    max_waiting_tokens: int | None = None
    adapt: bool = True
    measured_costs: bool = True
    mean_acceptance_length: float = 3.0
    dense_acceptances: tuple[float, ...] = (0.97, 0.98, 0.99)
    dtype: str = "bfloat16"
    implementation: str = "auto"
    chat_template: bool = True
    repeats: int = 3
    short_steps: int = 8
    long_steps: int = 32
    short_cycles: int = 4
    long_cycles: int = 16
    compile_threads: int = 4
    cache_dir: str | None = local_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target in PRESETS:  # before its weights are made
            steady_rates(self.mean_acceptance_length, self.num_speculative_tokens)

    def lossless(self, *, adapt: bool = False) -> Lossless:
        """What may wait for a dense pass."""
        return Lossless(max_steps=self.max_sparse_steps, max_tokens=self.max_waiting_tokens, adapt=adapt)
