"""Real weights: set SPECJAX_TEST_MODELS to a folder of Hugging Face models (folders) and GGUF files, and run with `-m slow`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.convert import convert
from specjax.checkpoints.store import load_checkpoint

pytestmark = pytest.mark.slow

NUM_TOKENS = 512
# Two float32 implementations over tens of layers; logits reach 30, and a wrong frequency or layout moves them by their own size.
TOLERANCE = 2e-3
TEXT = " ".join(
    f"Step {index}: the drafter proposes, the target verifies; {index * 37 % 101} were kept. naïve – 日本語 def f(x): return x**{index}"
    for index in range(40)
)


def models() -> list[Path]:
    folder = os.environ.get("SPECJAX_TEST_MODELS")
    return sorted(path for path in Path(folder).iterdir() if path.suffix == ".gguf" or (path / "config.json").is_file()) if folder else []


@pytest.mark.skipif(not models(), reason="SPECJAX_TEST_MODELS names no folder with models")
@pytest.mark.parametrize("path", [path for path in models() if path.suffix != ".gguf"], ids=lambda path: path.name)
def test_logits_of_real_weights_equal_those_of_transformers(tmp_path: Path, path: Path, record_property) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    convert(path, tmp_path / "out", dtype="float32", check=False, progress=False)
    checkpoint = load_checkpoint(tmp_path / "out")
    tokens = np.asarray(checkpoint.tokenizer().encode(TEXT))[None, :NUM_TOKENS]
    assert tokens.shape == (1, NUM_TOKENS)
    original = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = original(torch.from_numpy(tokens)).logits.numpy()
    del original
    cache = checkpoint.model.init_cache(batch_size=1, capacity=NUM_TOKENS)
    output = jax.jit(checkpoint.model.apply)({"params": checkpoint.params}, jnp.asarray(tokens), cache)
    actual = np.asarray(checkpoint.model.apply({"params": checkpoint.params}, output.hidden, method="logits"))
    difference = float(np.abs(actual - expected).max())
    record_property("largest logit difference", difference)
    print(f"{path.name}: largest logit difference {difference:.3g}, largest logit {np.abs(expected).max():.3g}")
    assert difference <= TOLERANCE
    np.testing.assert_array_equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.skipif(not models(), reason="SPECJAX_TEST_MODELS names no folder with models")
@pytest.mark.parametrize("path", [path for path in models() if path.suffix == ".gguf"], ids=lambda path: path.name)
def test_a_real_gguf_equals_its_hugging_face_folder(tmp_path: Path, path: Path) -> None:
    folder = path.with_suffix("")
    if not (folder / "config.json").is_file():
        pytest.skip(f"no folder {folder.name} beside it to compare with")
    stored = {"float32": "float32"}.get(json.loads((folder / "config.json").read_text()).get("torch_dtype"), "bfloat16")
    convert(path, tmp_path / "gguf", dtype=stored, check=False, progress=False)
    convert(folder, tmp_path / "folder", dtype=stored, check=False, progress=False)
    ours, theirs = load_checkpoint(tmp_path / "gguf"), load_checkpoint(tmp_path / "folder")
    assert ours.model.config == theirs.model.config
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    first, second = ours.tokenizer(), theirs.tokenizer()
    assert first.get_vocab() == second.get_vocab()
    assert first.chat_template == second.chat_template
    assert (first.bos_token_id, first.eos_token_id, first.pad_token_id) == (second.bos_token_id, second.eos_token_id, second.pad_token_id)
    source = Path(__file__).read_text(encoding="utf-8")
    for text in (TEXT, source, "e\u0301 \u212b 🙂 <|im_start|>user\nhi<|im_end|> 1234,567.8\r\n\r\n   \t x"):
        assert first.encode(text) == second.encode(text)
        assert first.decode(first.encode(text)) == second.decode(second.encode(text))
