"""The plan's order kept through Inductor's scheduler.

The scheduler fuses kernels that read the same, wherever they stand, and runs the fused one where the first of them
stood: a recompute next to a kernel of the start of the backward is then computed there, and kept. Here two kernels
become one only where that leaves the half's peak as it is, and the kernels keep the order in which they were planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Buffer:
    """Memory that a half allocates or is handed.

    Attributes:
        maker: the kernel that allocates it, None for an input.
        readers: kernels after the last of which it is freed.
        stays: it is returned.
        over: buffers (by index) that its maker reads and can write it over, where nobody else reads them then or later.
    """

    size_bytes: int
    maker: int | None
    readers: tuple[int, ...]
    stays: bool
    over: tuple[int, ...] = ()


class Order:
    """Where the kernels of one half run while some of them become one: at the planned place of one of its parts.

    Args:
        before: for each kernel, in planned order, those that it must come after.
    """

    def __init__(self, before: Sequence[Iterable[int]], buffers: Sequence[Buffer]) -> None:
        count = len(before)
        self.buffers = buffers
        self.place = list(range(count))
        self.members = [frozenset((i,)) for i in range(count)]
        self.before = [frozenset(b) for b in before]
        after: list[set[int]] = [set() for _ in range(count)]
        touched: list[set[int]] = [set() for _ in range(count)]
        for i, earlier in enumerate(self.before):
            for j in earlier:
                after[j].add(i)
        for b, buffer in enumerate(buffers):
            for near in (buffer, *(buffers[other] for other in buffer.over)):
                for i in (*near.readers, *(() if near.maker is None else (near.maker,))):
                    touched[i].add(b)
        self.after, self.touched = after, touched
        self.held = np.zeros(count, dtype=np.int64)
        for b in range(len(buffers)):
            self._add(self.held, 0, self._life(b, frozenset(), 0), buffers[b].size_bytes)

    @property
    def highest_bytes(self) -> int:
        """The highest point of the half, its freeable inputs included."""
        return int(self.held.max(initial=0))

    def place_for(self, first: int, second: int) -> int | None:
        """Where the kernels of which these are parts may run as one without a higher peak; None: nowhere."""
        if self.members[first] is self.members[second]:
            return self.place[first]
        found = []
        for at in sorted((self.place[first], self.place[second])):
            if self._ordered(first, second, at):
                held = self._fused(first, second, at)
                found.append((int(held.max()), int(held.sum()), at))
        best = min(found, default=None)
        return best[2] if best is not None and best[0] <= self.highest_bytes else None

    def fuse(self, first: int, second: int, at: int) -> None:
        """Let both run as one at `at`."""
        low, high = sorted((self.place[first], self.place[second]))
        self.held[low : high + 1] = self._fused(first, second, at)
        both = self.members[first] | self.members[second]
        for i in both:
            self.members[i], self.place[i] = both, at

    def _ordered(self, first: int, second: int, at: int) -> bool:
        """Whether the one that moves to `at` passes nothing that it must not."""
        mover = first if self.place[first] != at else second
        group, stays = self.members[mover], self.members[second if mover == first else first]
        if self.place[mover] < at:
            return all(self.place[j] > at for i in group for j in self.after[i] if j not in group and j not in stays)
        return all(self.place[j] < at for i in group for j in self.before[i] if j not in group and j not in stays)

    def _fused(self, first: int, second: int, at: int) -> np.ndarray:
        """What is held between the two places once both run at `at`."""
        low, high = sorted((self.place[first], self.place[second]))
        both = self.members[first] | self.members[second]
        held = self.held[low : high + 1].copy()
        for b in sorted({b for i in both for b in self.touched[i]}):
            self._add(held, low, self._life(b, frozenset(), 0), -self.buffers[b].size_bytes)
            self._add(held, low, self._life(b, both, at), self.buffers[b].size_bytes)
        return held

    def _life(self, b: int, moved: frozenset[int], at: int) -> tuple[int, int]:
        """From where to where a buffer is held with `moved` at `at`; an empty range inside one kernel."""
        buffer = self.buffers[b]
        maker, places = buffer.maker, [self._at(i, moved, at) for i in buffer.readers]
        start = 0 if maker is None else self._at(maker, moved, at)
        end = len(self.place) - 1 if buffer.stays else max(places, default=start)
        if maker is None:
            return start, end
        group = moved if maker in moved else self.members[maker]
        if places and not buffer.stays and group.issuperset(buffer.readers):
            return 0, -1
        return start + any(self._is_overwritten(other, maker, moved, at) for other in buffer.over), end

    def _is_overwritten(self, b: int, maker: int, moved: frozenset[int], at: int) -> bool:
        """Whether this kernel alone reads a buffer when it dies, which it did not make."""
        buffer, place = self.buffers[b], self._at(maker, moved, at)
        if buffer.stays or (buffer.maker is not None and self._at(buffer.maker, moved, at) == place):
            return False
        return all(i == maker or self._at(i, moved, at) < place for i in buffer.readers)

    def _at(self, i: int, moved: frozenset[int], at: int) -> int:
        return at if i in moved else self.place[i]

    @staticmethod
    def _add(held: np.ndarray, low: int, life: tuple[int, int], size_bytes: int) -> None:
        held[max(0, life[0] - low) : max(0, life[1] + 1 - low)] += size_bytes
