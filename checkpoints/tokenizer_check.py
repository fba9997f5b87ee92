"""Do two models speak about the same tokens?

A drafter with another tokenizer drafts ids that mean other text: nearly all are rejected, and nothing else tells.
"""

from __future__ import annotations

import warnings
from typing import Any

from specjax.checkpoints.store import Checkpoint

# Texts that tokenizers with the same vocabulary but other split rules cut differently.
_PROBES = (
    "Hello,  world!\n\n\tdef f(x):\n    return x**2  # 1234567",
    "It's naïve – 12,345.67 €; e\u0301 日本語 🙂",
    "<|im_start|>user\nHi",
)
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tokenizer_difference(expected: Any, actual: Any) -> str:
    """Compares two `transformers` tokenizers.

    Args:
        expected: The target's.
        actual: The drafter's.

    Returns:
        The first difference found, as a sentence that can be read; empty if they map text to the same ids. A beginning-of-text, padding or
        end id that one of them leaves undefined is no difference.
    """
    expected_ids, actual_ids = expected.get_vocab(), actual.get_vocab()
    if expected_ids != actual_ids:
        if len(expected_ids) != len(actual_ids):
            return f"the vocabularies have {len(expected_ids)} and {len(actual_ids)} tokens"
        # Tokens that one lacks sort by their id in the other.
        differing = [token for token in expected_ids.keys() | actual_ids.keys() if expected_ids.get(token) != actual_ids.get(token)]
        token = min(differing, key=lambda token: (expected_ids.get(token, actual_ids.get(token)), token))
        return f"{len(differing)} tokens differ: {token!r} has id {expected_ids.get(token)} and {actual_ids.get(token)}"
    for name in _SPECIAL_IDS:
        ours, theirs = getattr(expected, name), getattr(actual, name)
        if ours is not None and theirs is not None and ours != theirs:
            return f"{name} is {ours} and {theirs}"
    for text in _PROBES:
        ours, theirs = (tokenizer.encode(text, add_special_tokens=False) for tokenizer in (expected, actual))
        if ours != theirs:
            return f"the vocabularies are equal, but {text!r} is split into {ours} and {theirs}"
    return ""


def check_same_tokenizer(target: Checkpoint, draft: Checkpoint, *, allow_different: bool = False) -> None:
    """Refuses a drafter whose tokenizer is not the target's.

    Args:
        target: The target's checkpoint.
        draft: The drafter's.
        allow_different: Warn only. The output stays the target's own; drafts will hardly ever be accepted.

    Raises:
        ValueError: The tokenizers differ, or one of the checkpoints has none; not with `allow_different`.
    """
    names = [checkpoint.metadata.get("source", "an unnamed source") for checkpoint in (target, draft)]
    without = [name for name, checkpoint in zip(names, (target, draft), strict=True) if checkpoint.tokenizer_path is None]
    if without:
        difference = f"{' and '.join(without)} has no tokenizer to compare"
    else:
        difference = tokenizer_difference(target.tokenizer(), draft.tokenizer())
    if not difference:
        return
    message = f"the drafter must have the target's tokenizer; expected that of {names[0]}, got that of {names[1]}: {difference}"
    if not allow_different:
        raise ValueError(f"{message} (allow_different=True runs anyway)")
    warnings.warn(message, stacklevel=2)
