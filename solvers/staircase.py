"""Trades of bytes for cost: functions that fall in steps, as dynamic programs combine them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Staircase:
    """Costs that fall as bytes rise: with at least `bytes[j]` and less than `bytes[j + 1]`, the cost is `costs[j]`."""

    bytes: np.ndarray
    costs: np.ndarray

    def at(self, available_bytes: int) -> int | None:
        """The cost with that many bytes, or None where they are too few."""
        j = int(np.searchsorted(self.bytes, available_bytes, side="right")) - 1
        return int(self.costs[j]) if j >= 0 else None

    def raised(self, held_bytes: int, at_least: int, cost: int) -> Staircase:
        """With `held_bytes` held beside it, after something that takes `at_least` bytes and costs `cost`."""
        return Staircase(np.maximum(self.bytes + held_bytes, at_least), self.costs + cost)

    def plus(self, other: Staircase) -> Staircase:
        """One after the other within the same bytes."""
        if not len(self.bytes) or not len(other.bytes):
            return NOWHERE
        steps = np.concatenate((self.bytes, other.bytes))
        steps = np.unique(steps[steps >= max(self.bytes[0], other.bytes[0])])
        here = np.searchsorted(self.bytes, steps, side="right") - 1
        there = np.searchsorted(other.bytes, steps, side="right") - 1
        return Staircase(steps, self.costs[here] + other.costs[there])


NOWHERE = Staircase(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def lowest(parts: list[Staircase], limit_bytes: int) -> Staircase:
    """The lower envelope, up to `limit_bytes`."""
    sizes = np.concatenate([part.bytes for part in parts]) if parts else NOWHERE.bytes
    costs = np.concatenate([part.costs for part in parts]) if parts else NOWHERE.costs
    order = np.lexsort((costs, sizes))
    order = order[sizes[order] <= limit_bytes]
    sizes, costs = sizes[order], np.minimum.accumulate(costs[order])
    first = np.append(True, costs[1:] < costs[:-1])[: len(costs)]
    return Staircase(sizes[first], costs[first])
