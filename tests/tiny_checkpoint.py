"""A tiny checkpoint with a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specjax import ModelConfig, Transformer
from specjax.checkpoints.store import save_checkpoint

TEMPLATE = "{% for m in messages %}<u>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def byte_tokenizer(
    template: str | None = TEMPLATE, *, special_tokens: tuple[str, ...] = ("<u>", "<a>"), merges: tuple[tuple[str, str], ...] = ()
) -> PreTrainedTokenizerFast:
    """A token a byte, but for the merges (`Ġ` is the space); `<e>` ends a text."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", additional_special_tokens=list(special_tokens))
    fast.chat_template = template
    return fast


def write_checkpoint(
    path: Path,
    *,
    seed: int = 0,
    special_tokens: tuple[str, ...] = ("<u>", "<a>"),
    template: str | None = TEMPLATE,
    eos_token_ids: tuple[int, ...] = (),
) -> Path:
    """A random Llama of a few thousand parameters. EOS ids beside `<e>` stand in its generation_config.json."""
    fast = byte_tokenizer(template, special_tokens=special_tokens)
    folder = path.parent / f"{path.name}-tokenizer"
    fast.save_pretrained(folder)
    if eos_token_ids:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [fast.eos_token_id, *eos_token_ids]}))
    config = ModelConfig(
        vocab_size=len(fast),
        hidden_size=16,
        intermediate_size=24,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=512,
    )
    shapes = jax.eval_shape(Transformer(config, param_dtype=jnp.float32).init_params, jax.random.key(0))
    generator = np.random.default_rng(seed)
    params = jax.tree.map(lambda leaf: generator.normal(0.1, 0.3, leaf.shape).astype(np.float32), shapes)
    save_checkpoint(path, config, params, {"source": path.name, "quantisation": "none"}, folder)
    return path
