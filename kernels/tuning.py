"""How a kernel cuts its work, as a checked dataclass and as the text behind the `@` of an implementation's name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Self


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Base of a kernel's choices: all fields are ints, in the order of the text `8:64:4:3`.

    Raises:
        ValueError: A number that Triton cannot work with.
    """

    # Least and greatest value, by field.
    POWERS_OF_TWO: ClassVar[Mapping[str, tuple[int, int]]] = {}
    COUNTS: ClassVar[Mapping[str, tuple[int, int]]] = {}

    def __post_init__(self) -> None:
        for name, (least, most) in self.POWERS_OF_TWO.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most or value & (value - 1):
                raise ValueError(f"{type(self).__name__}.{name} must be a power of two from {least} to {most}, got {value!r}")
        for name, (least, most) in self.COUNTS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"{type(self).__name__}.{name} must be an int from {least} to {most}, got {value!r}")

    @classmethod
    def of_text(cls, text: str) -> Self:
        """From numbers between colons.

        Raises:
            ValueError: Another number of them, or one that cannot be.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        words = text.split(":")
        if len(words) != len(names) or not all(word.isdecimal() for word in words):
            raise ValueError(f"expected triton@{':'.join(name.upper() for name in names)}, got {text!r} behind the @")
        return cls(**dict(zip(names, map(int, words), strict=True)))
