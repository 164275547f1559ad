"""Random numbers that `walk.c` draws as well."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any

_64_BITS = (1 << 64) - 1


class SplitMix:
    """SplitMix64 (Steele, Lea, Flood 2014)."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def random(self) -> float:
        """A number in [0, 1)."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & _64_BITS
        z = ((self.state ^ self.state >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _64_BITS
        return ((z ^ z >> 31) >> 11) * 2.0**-53

    def below(self, count: int) -> int:
        """An integer of 0 to `count` - 1."""
        return int(self.random() * count)

    def draw_some(self, items: MutableSequence[Any], count: int) -> None:
        """Let so many of the items, drawn without replacement, stand first."""
        for k in range(count):
            j = k + self.below(len(items) - k)
            items[k], items[j] = items[j], items[k]
