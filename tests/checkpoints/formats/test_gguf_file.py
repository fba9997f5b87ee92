"""GGUF files: quantised blocks, the rows that llama files interleave, tied matrices stored twice, the tokenizer, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

from specjax import RopeConfig
from specjax.checkpoints.formats import gguf_file, gguf_tokenizer, hugging_face
from specjax.checkpoints.formats.families import model_config
from specjax.checkpoints.source import check_source, read_params
from specjax.models.rope import inverse_frequencies
from tests.checkpoints.sources import (
    CHAT_TEMPLATE,
    VOCAB_SIZE,
    after_quantisation,
    random_tensors,
    raw_config,
    write_folder,
    write_gguf,
    write_tokenizer,
)


def tiny_gguf(path: Path, family: str = "llama", *, tied: bool = True, **options: Any) -> Path:
    raw = raw_config(family, tie_word_embeddings=tied)
    return write_gguf(path / "model.gguf", family, model_config(raw), random_tensors(raw), **options)


@pytest.mark.parametrize("quantisation", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_holds_the_model_that_the_folder_holds(tmp_path: Path, family: str, quantisation: str) -> None:
    raw = raw_config(family)
    tensors = random_tensors(raw)
    folder = hugging_face.open_source(write_folder(tmp_path / "folder", raw, after_quantisation(tensors, quantisation)))
    file = gguf_file.open_source(write_gguf(tmp_path / "model.gguf", family, folder.config, tensors, quantisation=quantisation))
    check_source(file)
    assert file.config == folder.config
    assert file.quantisation == ("none" if quantisation in ("F32", "F16") else quantisation)
    jax.tree.map(np.testing.assert_array_equal, read_params(file, "float32"), read_params(folder, "float32"))


def test_without_an_output_matrix_the_model_is_tied(tmp_path: Path) -> None:
    assert gguf_file.open_source(tiny_gguf(tmp_path)).config.tie_word_embeddings


@pytest.mark.parametrize("precise", ["model.embed_tokens.weight", "lm_head.weight"])
def test_of_one_matrix_stored_twice_the_more_precise_copy_serves_as_both(tmp_path: Path, precise: str) -> None:
    raw = raw_config()
    tensors = random_tensors(raw)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    file = write_gguf(tmp_path / "m.gguf", "llama", model_config(raw), tensors, quantisation="Q4_1", quantisation_of={precise: "Q8_0"})
    source = gguf_file.open_source(file)
    check_source(source)
    assert source.config.tie_word_embeddings
    expected = after_quantisation(tensors, "Q8_0")["lm_head.weight"]
    np.testing.assert_array_equal(read_params(source, "float32")["embedding"], expected)
    assert not gguf_file.open_source(file, tie_embeddings=False).config.tie_word_embeddings


def test_two_matrices_stay_two_unless_told_otherwise(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path, tied=False)
    assert not gguf_file.open_source(file).config.tie_word_embeddings
    assert gguf_file.open_source(file, tie_embeddings=True).config.tie_word_embeddings


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rotary_factors_are_recognised(tmp_path: Path, factor: float) -> None:
    plain = RopeConfig(theta=500000.0)
    llama3 = RopeConfig(theta=500000.0, rope_type="llama3", factor=factor)
    divisors = inverse_frequencies(plain, 32) / inverse_frequencies(llama3, 32)
    options = dict(metadata={"llama.rope.freq_base": 500000.0})
    source = gguf_file.open_source(tiny_gguf(tmp_path, extra_tensors={"rope_freqs.weight": divisors}, **options))
    check_source(source)
    assert source.config.rope == llama3
    with pytest.raises(ValueError, match=r"factors in rope_freqs\.weight are not those of Llama 3\.1"):
        gguf_file.open_source(tiny_gguf(tmp_path, extra_tensors={"rope_freqs.weight": np.sqrt(divisors)}, **options))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma"}, "architecture 'gemma' is not supported; supported: llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "llama.expert_count=8"),
        ({"llama.attention.sliding_window": 4096}, "sliding window"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count=16"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer of kind 'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, "split rule 'tekken'"),
        ({"split.count": 2}, "split.count=2"),
    ],
)
def test_what_would_run_wrongly_is_refused_by_name(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        gguf_file.open_source(tiny_gguf(tmp_path, metadata=metadata))


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks llama\.attention\.layer_norm_rms_epsilon"):
        gguf_file.open_source(tiny_gguf(tmp_path, leave_out=("epsilon",)))


def test_a_tensor_that_fits_nowhere_is_named(tmp_path: Path) -> None:
    source = gguf_file.open_source(tiny_gguf(tmp_path, extra_tensors={"blk.0.attn_output.bias": np.zeros(64, np.float32)}))
    with pytest.raises(ValueError, match=r"Unmapped source tensors: model\.layers\.0\.self_attn\.o_proj\.bias"):
        check_source(source)


@pytest.mark.parametrize("share_of_file", [0.0, 0.0001, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, share_of_file: float) -> None:
    file = tiny_gguf(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share_of_file)])
    with pytest.raises(ValueError, match=r"model\.gguf is not a whole GGUF file"):
        gguf_file.open_source(file)


def test_a_file_that_is_not_there_or_not_gguf_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.gguf is not there"):
        gguf_file.open_source(tmp_path / "absent.gguf")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK" + bytes(1000))
    with pytest.raises(ValueError, match=r"other\.gguf is not a whole GGUF file"):
        gguf_file.open_source(other)


def test_the_tokenizer_equals_the_original_one(tmp_path: Path) -> None:
    folder = tmp_path / "original"
    folder.mkdir()
    write_tokenizer(folder)
    original = AutoTokenizer.from_pretrained(folder)
    gguf_file.open_source(tiny_gguf(tmp_path)).write_tokenizer(tmp_path / "rebuilt")
    rebuilt = AutoTokenizer.from_pretrained(tmp_path / "rebuilt")
    text = "hello world, 1234\n\nnaïve 日本 🙂 <|start|>hello<|end|>"
    assert rebuilt.encode(text) == original.encode(text)
    assert rebuilt.decode(rebuilt.encode(text)) == text
    assert rebuilt.decode(rebuilt.encode(text), skip_special_tokens=True) == text.replace("<|start|>", "").replace("<|end|>", "")
    assert rebuilt.encode("a<tool>b")[1] == VOCAB_SIZE - 1
    assert rebuilt.chat_template == original.chat_template == CHAT_TEMPLATE
    assert (rebuilt.bos_token_id, rebuilt.eos_token_id) == (original.bos_token_id, original.eos_token_id)
    # Padding of the embedding is no token.
    assert len(rebuilt) == len(original) < VOCAB_SIZE
    assert json.loads((tmp_path / "rebuilt" / "generation_config.json").read_text())["eos_token_id"] == [VOCAB_SIZE - 2]


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("gpt-2", ["a", " 123456", "\n", "\n", "don", "'t"]),
        ("smollm", ["a", " ", "1", "2", "3", "4", "5", "6", "\n", "\n", "don", "'t"]),
        ("qwen2", ["a", " ", "1", "2", "3", "4", "5", "6", "\n\n", "don", "'t"]),
        ("llama-bpe", ["a", " ", "123", "456", "\n\n", "don", "'t"]),
    ],
)
def test_each_split_rule_cuts_text_as_its_model_does(rule: str, pieces: list[str]) -> None:
    cut = gguf_tokenizer.PRE_TOKENIZERS[rule]().pre_tokenize_str("a 123456\n\ndon't")
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in cut] == pieces


def test_a_llama3_tokenizer_begins_with_its_first_token_and_qwen2_normalises(tmp_path: Path) -> None:
    options = dict(metadata={"tokenizer.ggml.pre": "llama-bpe"})
    gguf_file.open_source(tiny_gguf(tmp_path, **options)).write_tokenizer(tmp_path / "llama3")
    assert AutoTokenizer.from_pretrained(tmp_path / "llama3").encode("a")[0] == VOCAB_SIZE - 3
    options = dict(metadata={"tokenizer.ggml.pre": "qwen2"})
    gguf_file.open_source(tiny_gguf(tmp_path, **options)).write_tokenizer(tmp_path / "qwen2")
    qwen2 = AutoTokenizer.from_pretrained(tmp_path / "qwen2")
    assert qwen2.encode("e\u0301") == qwen2.encode("é")
