"""What may sparse verification leave out of a target: which layers choose, by which thresholds, and what agreement is left?

Command: python -m experiments.run calibrate target=TARGET data=TEXT.txt --record
Hardware: one H200 for an 8B target in bfloat16
Time: 13 minutes for SmolLM2-135M behind 768 tokens on two CPU cores that had other work; not measured on a GPU yet
Result: of SmolLM2-135M (`calibrate_smollm2.json`), 0.79 to 0.83 of the tokens stay where attention keeps 0.25 to 0.41 of the blocks

Passes over texts find the layers that choose blocks anew ("anchors", by a greedy scan over the Jaccard similarity of layers' choices;
`theta`), the thresholds of channels that come to wished shares (`ffn_keeps`) and those of experts (`quantile`). Then each setting of
attention, channels and experts, and some of all together, runs along the texts in steps of G + 1 tokens beside the dense target: how
often both take the same token for the most likely, how far apart their distributions are, what was kept, and what a step costs.
`specjax.SparsityConfig.from_calibration` reads this experiment's JSON. arXiv:2512.21911.

Everything is teacher-forced: a text is given, and no drafter takes part. What is lost on a task is another question.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.calibrate_figures import calibration_figures
from experiments.experiment import ExperimentError, local_field, path_field
from experiments.models import Model, load_model
from experiments.texts import running_texts
from specjax import Reuse, SparseAttention, SparseFFN, SparseMoE, SparsityConfig
from specjax.sparsity.agreement import measure_agreement
from specjax.sparsity.calibrated_for import CalibratedFor
from specjax.sparsity.calibration import MLPSamples, choose_anchors, sample_mlp
from specjax.sparsity.selection_samples import SelectionSamples, sample_selections

# Tokens of a pass that samples networks and experts.
_PIECE = 512


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        target: A preset's name, or a checkpoint's path (ours, a Hugging Face folder or a GGUF file).
        data: Text files, or folders of token files; none takes random ids, which say nothing of a real target.
        num_texts: Pieces of text, spread evenly over the data.
        context: Tokens of each that are taken in before anything is measured.
        measured: Tokens, from the second one behind them on, for which passes are compared.
        num_speculative_tokens: G.
        block_size: Tokens a block of the cache.
        keeps: Shares of the context beyond `dense_below` that sparse attention keeps; none leaves attention out.
        dense_below: Tokens that are kept anyway.
        score: How blocks compete.
        theta: Similarity below which a layer chooses anew, of the blocks that compete: those that are always kept do not count in it.
        ffn_keeps: Shares of channels; none leaves them out.
        skips: Most experts that a token may skip; read only of a mixture of experts.
        quantile: Of the experts' ratios, the threshold; 0.5 is the paper's median.
        ratio: What the experts' thresholds bound, `share` or `pair`.
        refresh_every: Of all settings; 0 is never.
        dtype: Compute dtype, and that of random weights.
        implementation: Of the kernels; see `Kernels.of`.
        seed: Of random weights and ids.
        cache_dir: Where converted checkpoints are kept; `none` is the user's cache folder.
    """

    target: str = path_field("smollm2_135m")
    data: tuple[str, ...] = path_field(())
    num_texts: int = 4
    context: int = 4096
    measured: int = 240
    num_speculative_tokens: int = 5
    block_size: int = 64
    keeps: tuple[float, ...] = (0.1, 0.2, 0.4)
    dense_below: int = 1024
    score: str = "mean"
    theta: float = 0.3
    ffn_keeps: tuple[float, ...] = (0.4, 0.6, 0.8)
    skips: tuple[int, ...] = (1, 2)
    quantile: float = 0.5
    ratio: str = "share"
    refresh_every: int = 0
    dtype: str = "bfloat16"
    implementation: str = "auto"
    seed: int = 0
    cache_dir: str | None = local_field()

    def attention(self, keep: float) -> SparseAttention:
        """Sparse attention at one of the shares."""
        return SparseAttention(block_size=self.block_size, keep=keep, dense_below=self.dense_below, score=self.score)


def run(config: Config) -> Iterator[dict]:
    """A row of what selections share, one of thresholds, and one a setting."""
    options: dict[str, Any] = {"dtype": config.dtype, "implementation": config.implementation, "cache_dir": config.cache_dir}
    target = load_model(config.target, rng=jax.random.key(config.seed), **options)
    # + 1: the first token behind the context follows from the context, which is dense.
    window, length = target.model.config.max_position_embeddings, config.context + config.measured + 1
    if length > window:
        raise ExperimentError(f"context + measured + 1 = {length} tokens exceed the target's window of {window}")
    tokens = running_texts(config.data, target, number=config.num_texts, length=length, seed=config.seed)
    made_for = calibrated_for(target)
    about = {
        "model": target.name,
        "implementation": config.implementation,
        "weights": target.weights,
        "synthetic": False,
        "texts": config.num_texts,
        "context": config.context,
    }
    anchors = None
    if config.keeps:
        samples = selections(config, target, tokens)
        anchors, row = shared_choices(config, samples)
        yield about | row | {"calibrated_for": dataclasses.asdict(made_for)}
    networks = sample_networks(config, target, tokens)
    yield about | thresholds(config, target, networks) | {"calibrated_for": dataclasses.asdict(made_for)}
    for name, sparsity in settings(config, target, anchors, networks).items():
        yield about | measure(config, target, tokens, name, sparsity)


def calibrated_for(target: Model) -> CalibratedFor:
    """The target, as settings remember it."""
    metadata = None if target.checkpoint is None else target.checkpoint.metadata
    return CalibratedFor.of(target.model.config, name=target.name, metadata=metadata)


def selections(config: Config, target: Model, tokens: np.ndarray) -> SelectionSamples:
    """What every row chooses at the middle one of the shares, text by text."""
    attention = config.attention(sorted(config.keeps)[len(config.keeps) // 2])
    sizes: dict[str, Any] = dict(attention=attention, num_context=config.context, num_rows=config.num_speculative_tokens + 1)
    return reduce(add, (sample_selections(target.model, target.params, text[None], **sizes) for text in tokens))


def shared_choices(config: Config, samples: SelectionSamples) -> tuple[tuple[int, ...], dict]:
    """The anchors, and the row that says how alike choices are."""
    similarity, overlap = samples.layer_similarity(), samples.row_overlap()
    anchors = tuple(samples.layers[index] for index in choose_anchors(similarity, config.theta))
    adjacent = np.diagonal(similarity, offset=1)
    return anchors, {
        "kind": "selection",
        "layers": samples.layers,
        "anchors": anchors,
        "theta": config.theta,
        "layer_similarity": similarity,
        "mean_adjacent_similarity": float(adjacent.mean()) if adjacent.size else None,
        "row_overlap_per_layer": overlap.mean(axis=1),
        "row_overlap_per_distance": overlap.mean(axis=0),
        "mean_row_overlap": float(overlap.mean()),
        "samples": samples.chosen.shape[1],
    }


def sample_networks(config: Config, target: Model, tokens: np.ndarray) -> MLPSamples:
    """Gates and routing along the texts."""
    piece = min(_PIECE, tokens.shape[1])
    pieces = tokens[:, : tokens.shape[1] // piece * piece].reshape(-1, 1, piece)
    return sample_mlp(target.model, target.params, ((jnp.asarray(part), None) for part in pieces), ratio=config.ratio)


def thresholds(config: Config, target: Model, samples: MLPSamples) -> dict:
    """The row of thresholds."""
    tau = {str(keep): samples.tau(keep) for keep in config.ffn_keeps}
    return {
        "kind": "thresholds",
        "tau": tau,
        "tau_keeps": {keep: samples.kept(values) for keep, values in tau.items()},
        "beta": None if samples.ratios is None else samples.beta(config.quantile),
        "quantile": config.quantile,
        "ratio": config.ratio,
    }


def settings(config: Config, target: Model, anchors: tuple[int, ...] | None, samples: MLPSamples) -> dict[str, SparsityConfig]:
    """What is compared, by name: each component alone, then together from the mildest to the boldest."""
    model = target.model.config
    attention = {keep: config.attention(keep) for keep in sorted(config.keeps, reverse=True)}
    reuse = Reuse(anchors=anchors)
    channels = {keep: _channels(target, samples, keep) for keep in sorted(config.ffn_keeps, reverse=True)}
    experts: dict[int, SparseMoE] = {}
    if samples.ratios is not None:
        assert model.moe is not None
        beta = tuple(map(tuple, samples.beta(config.quantile).tolist()))
        most = model.moe.num_experts_per_token - 1
        experts = {skip: SparseMoE(max_skipped=skip, beta=beta, ratio=config.ratio) for skip in sorted(config.skips) if skip <= most}
    found: dict[str, dict[str, Any]] = {}
    for keep, value in attention.items():
        found[f"attention {keep:g}"] = dict(attention=value)
        if anchors is not None and len(anchors) < model.num_layers:
            found[f"attention {keep:g}, anchors"] = dict(attention=value, reuse=reuse)
    for keep, by_name in channels.items():
        found |= {f"channels {keep:g}, {name}": dict(ffn=value) for name, value in by_name.items()}
    found |= {f"skip up to {skip}": dict(moe=value) for skip, value in experts.items()}
    together = [list(part.items()) for part in (attention, channels, experts) if part]
    for parts in zip(*together, strict=False) if len(together) > 1 else ():
        whole: dict[str, Any] = {}
        for _, value in parts:
            whole |= _together(value, reuse)
        found["together " + ", ".join(f"{label:g}" for label, _ in parts)] = whole
    common: dict[str, Any] = dict(refresh_every=config.refresh_every, calibrated_for=calibrated_for(target))
    return {name: SparsityConfig(**parts, **common) for name, parts in found.items()}


def _channels(target: Model, samples: MLPSamples, keep: float) -> dict[str, SparseFFN]:
    """By a threshold for each token, as the paper does; shared by the rows, which is what saves reading, where there are no experts."""
    tau = tuple(samples.tau(keep).tolist())
    found = {"by threshold": SparseFFN(select="threshold", per="token", keep=keep, tau=tau)}
    if target.model.config.moe is None:
        found["shared by rows"] = SparseFFN(keep=keep)
    return found


def _together(value: Any, reuse: Reuse) -> dict[str, Any]:
    if isinstance(value, SparseAttention):
        return {"attention": value, "reuse": reuse}
    return {"moe": value} if isinstance(value, SparseMoE) else {"ffn": list(value.values())[-1]}


def measure(config: Config, target: Model, tokens: np.ndarray, name: str, sparsity: SparsityConfig) -> dict:
    """The row of a setting."""
    sizes: dict[str, Any] = dict(sparsity=sparsity, num_context=config.context, num_rows=config.num_speculative_tokens + 1)
    found = reduce(add, (measure_agreement(target.model, target.params, text[None], **sizes) for text in tokens)).summary()
    total = found["step_work"]["total"]
    return {
        "kind": "setting",
        "setting": name,
        "sparsity": sparsity.to_json(),
        "token_agreement": found["token_agreement"],
        "mean_kl": found["mean_kl"],
        "measured_tokens": found["num_tokens"],
        "attention_keep_ratio": found.get("sparse_attention", {}).get("keep_ratio"),
        "channel_keep_ratio": found.get("sparse_ffn", {}).get("keep_ratio"),
        "channel_read_ratio": found.get("sparse_ffn", {}).get("read_ratio"),
        "experts_per_token": found.get("sparse_moe", {}).get("experts_per_token"),
        "distinct_experts_per_pass": found.get("sparse_moe", {}).get("distinct_experts_per_pass"),
        "flops_ratio": total["flops"] / total["dense_flops"],
        "bytes_ratio": total["bytes"] / total["dense_bytes"],
        "step_work": found["step_work"],
    }


def show(row: dict) -> str:
    """A row's main figures on one line."""
    if row["kind"] == "selection":
        return (
            f"{len(row['anchors'])} of {len(row['layers'])} layers choose: {', '.join(map(str, row['anchors']))}; "
            f"overlap of draft rows {row['mean_row_overlap']:.3f}"
        )
    if row["kind"] == "thresholds":
        return f"thresholds for shares {', '.join(row['tau'])}" + ("" if row["beta"] is None else ", and of experts")
    return (
        f"{row['setting']:36} agreement {row['token_agreement']:.4f}  KL {row['mean_kl']:.4f}  "
        f"bytes {row['bytes_ratio']:.3f}  operations {row['flops_ratio']:.3f}"
    )


def table_rows(rows: list[dict]) -> list[dict]:
    """The settings; thresholds and choices are for programs and figures."""
    return [row for row in rows if row["kind"] == "setting"]


def columns(row: dict) -> dict:
    """What the report shows of a setting."""
    return {
        "setting": row["setting"],
        "keys kept": row["attention_keep_ratio"],
        "channels kept": row["channel_keep_ratio"],
        "experts a token": row["experts_per_token"],
        "operations a step": f"{row['flops_ratio']:.2f} ×",
        "bytes a step": f"{row['bytes_ratio']:.2f} ×",
        "same token": row["token_agreement"],
        "KL, nats": row["mean_kl"],
    }


plots = calibration_figures
