"""arena: how large a segment to ask for before the first step, so that torch's caching allocator reserves least.

Too small, and what does not fit takes segments besides; too large, and the rest of it is wasted. Between the two lies
one that the step just fits into, or nearly, which playing the step into segments of several sizes finds.
"""

from __future__ import annotations

from collections.abc import Callable

from passes.allocator import OWN_SEGMENT, SMALL_SEGMENT
from passes.device import round_up
from passes.run.arena import Arena, least_arena

from .footprint import Footprint, Start

ENOUGH = 1.02  # reserved over allocated; there is less to gain than a segment is large
EVENTS, FEWEST, MOST = 800_000, 12, 96  # of steps that are played in all, and how often one is
BASINS = 3  # sizes from which a smaller one is looked for


def best_arena(measure: Callable[[Arena], Footprint], start: Start, length: int, limit_bytes: int) -> Arena:
    """What to ask for in advance; nothing where no less would be reserved for it.

    Args:
        measure: the footprint with an arena.
        length: events of a step.
        limit_bytes: what may be allocated; less above it comes before less that is reserved.
    """
    plain = measure(())
    blocks = [block for segment in start.segments for block in segment.blocks]
    there, used = sum(size for size, _ in blocks), sum(size for size, used in blocks if used)
    high, low = plain.reserved_bytes - there, plain.allocated_bytes - there
    least = max(OWN_SEGMENT, least_arena(there - used + OWN_SEGMENT))  # somewhat more may lie idle when the step runs
    fits = plain.allocated_bytes <= limit_bytes and plain.reserved_bytes <= ENOUGH * plain.allocated_bytes
    if fits or low < 2 * OWN_SEGMENT or limit_bytes - used < 2 * OWN_SEGMENT or least > high:
        return ()
    tries = min(MOST, max(FEWEST, EVENTS // length))
    return _Search(measure, plain, limit_bytes, used - start.others_bytes).between(least, max(least, low), high, tries)


class _Search:
    def __init__(self, measure: Callable[[Arena], Footprint], plain: Footprint, limit_bytes: int, used: int) -> None:
        self.measure, self.limit_bytes = measure, limit_bytes
        self.largest = (limit_bytes - used) // SMALL_SEGMENT * SMALL_SEGMENT  # more would be a peak of its own
        self.found = {0: self._score(plain)}

    def between(self, least: int, low: int, high: int, tries: int) -> Arena:
        """Sizes from `least` to `low` evenly, since a small one may fill up what segments of 20 MiB leave over; from
        there on, where all fits into it, ever less densely. Then the ways from the best down to the next are halved.
        """
        under, above = tries // 2, tries // 4
        sizes = [least + (low - least) * k // under for k in range(under)]
        sizes += [low + (high - low) * k * k // above**2 for k in range(above)]
        for size in sizes:
            self._attempt(size)
        for size in sorted(self.found, key=self._order)[:BASINS]:
            self._descend(size, least, (tries - under - above) // BASINS)
        return self._arena(min(self.found, key=self._order))

    def _descend(self, size: int, least: int, tries: int) -> None:
        below = max((other for other in self.found if other < size), default=0)
        for _ in range(tries):
            middle = round_up((below + size) // 2, SMALL_SEGMENT)
            if not least <= middle < size:
                break
            if self._attempt(middle) < self.found[size]:
                size = middle
            else:
                below = middle

    def _order(self, size: int) -> tuple[tuple[int, int], int]:
        return self.found[size], size

    def _attempt(self, size: int) -> tuple[int, int]:
        size = round_up(size, SMALL_SEGMENT)
        if size not in self.found:
            self.found[size] = self._score(self.measure(self._arena(size)))
        return self.found[size]

    def _score(self, needed: Footprint) -> tuple[int, int]:
        return max(0, needed.allocated_bytes - self.limit_bytes), needed.reserved_bytes

    def _arena(self, size: int) -> Arena:
        """Asking for all at once must not be what peaks: the rest comes first, and is smaller."""
        if size <= self.largest:
            return (size,) if size else ()
        rest = max(size - self.largest, OWN_SEGMENT)
        return rest, size - rest
