"""Builds a Hugging Face tokenizer from the vocabulary inside a GGUF file.

transformers has a reader of its own, but it needs PyTorch, and some split rules (`smollm`, and the normalisation of `qwen2`) come out
different from the model's original tokenizer. Byte-level BPE, which every family here uses, is small: a vocabulary, merges, a split rule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# GGUF's token types (`tokenizer.ggml.token_type`): control tokens are special, user-defined ones are matched whole but are text, and unused
# ones pad the embedding to a round size and are no tokens.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS % digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])


# `tokenizer.ggml.pre` → how text is split before BPE.
PRE_TOKENIZERS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": _digits_then_bytes,
    "qwen2": lambda: _split(r"\p{N}"),
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
}


def check_tokenizer(fields: Mapping[str, Any], name: str) -> None:
    """Refuses a vocabulary that `write_tokenizer` cannot rebuild.

    Args:
        fields: The file's metadata.
        name: What to call the file.

    Raises:
        ValueError: A kind of tokenizer or a split rule that is not known; the message names it.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(f"{name}: tokenizer of kind {kind!r} is not supported; supported: 'gpt2' (byte-level BPE)")
    rule = fields.get("tokenizer.ggml.pre")
    if rule not in PRE_TOKENIZERS:
        raise ValueError(f"{name}: split rule {rule!r} (tokenizer.ggml.pre) is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"):
        if key not in fields:
            raise ValueError(f"{name}: the file's metadata lacks {key}")


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> bool:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json.

    Args:
        fields: The file's metadata, which `check_tokenizer` accepted.
        folder: Where to; it is made.

    Returns:
        `True`: there is a tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _build(fields).save(str(folder / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]

    def token(kind: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{kind}_token_id")
        return None if index is None else tokens[index]

    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "model_max_length": fields.get(f"{fields['general.architecture']}.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    ends = [fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    generation_config = {
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({index for index in ends if index is not None}),
    }
    for file, values in (("tokenizer_config.json", tokenizer_config), ("generation_config.json", generation_config)):
        (folder / file).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return True


def _build(fields: Mapping[str, Any]) -> Tokenizer:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    rule = fields["tokenizer.ggml.pre"]
    vocabulary = {token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    # Llama 3 takes a word that is in the vocabulary as it is, without following the merges to it.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule == "llama-bpe"))
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[rule]()
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    # Llama 3's converter leaves the flag out, and its readers take it as set.
    if fields.get("tokenizer.ggml.add_bos_token", rule == "llama-bpe"):
        index = fields["tokenizer.ggml.bos_token_id"]
        first = tokens[index]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first}:1 $B:1", special_tokens=[(first, index)]
        )
    return tokenizer
