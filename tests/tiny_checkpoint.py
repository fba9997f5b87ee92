"""A tiny checkpoint with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specjax import ModelConfig, Transformer
from specjax.checkpoints.store import save_checkpoint

TEMPLATE = "{% for m in messages %}<u>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def write_checkpoint(path: Path, *, seed: int = 0, special_tokens: tuple[str, ...] = ("<u>", "<a>")) -> Path:
    """A random Llama of a few thousand parameters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", additional_special_tokens=list(special_tokens))
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path.parent / f"{path.name}-tokenizer")
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
    save_checkpoint(path, config, params, {"source": path.name, "quantisation": "none"}, path.parent / f"{path.name}-tokenizer")
    return path
