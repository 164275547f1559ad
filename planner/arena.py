"""arena: how large segments to ask for before the first step, so that torch's caching allocator reserves least.

Too small, and what does not fit takes segments besides; too large, and the rest of it is wasted. Between the two lies
one that the step just fits into, or nearly, which playing the step into segments of several sizes finds. Where tensors
of one size break up what those of another need, several segments waste less than one: the best one is cut into parts
and changed a little, again and again, as in any local search.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from passes.allocator import OWN_SEGMENT, SMALL_SEGMENT
from passes.device import round_up
from passes.run.arena import Arena, Spacing, least_arena

from .footprint import Footprint, Start


class Reservation(NamedTuple):
    """What the device's caching allocator is asked for besides what the step needs.

    Attributes:
        arena: segments, before the first step.
        spacing: where there are spacers around ops, and cuBLAS's workspaces before the arena; None where not.
    """

    arena: Arena = ()
    spacing: Spacing | None = None


NOTHING = Reservation()
ENOUGH = 1.02  # reserved over allocated; there is less to gain than a segment is large
EVENTS, FEWEST, MOST = 600_000, 9, 72  # of steps that are played in all, and how often one is, in either search
SEGMENTS = 5
SMALL_STEP, LARGE_STEP = 100 << 20, 1 << 30
AIM, AIM_LARGE, AIM_EXPANDABLE = 1.15, 1.05, 1.03  # reserved over allocated: of larger steps, little is lost


def aimed_bytes(allocated_bytes: int, expandable: bool) -> float:
    """What is little to reserve for so much allocated; anything where segments are large beside it."""
    if allocated_bytes < SMALL_STEP:
        return math.inf
    if allocated_bytes < LARGE_STEP:
        return AIM * allocated_bytes
    return (AIM_EXPANDABLE if expandable else AIM_LARGE) * allocated_bytes


def best_arena(
    measure: Callable[[Arena], Footprint], start: Start, length: int, limit_bytes: int, gradient_bytes: int = 0
) -> Arena:
    """What to ask for in advance; nothing where no less would be reserved for it.

    Args:
        measure: the footprint with an arena.
        length: events of a step.
        limit_bytes: what may be allocated; less above it comes before less that is reserved.
        gradient_bytes: what may be there when the arena is asked for, besides what is now.
    """
    plain = measure(())
    there, used = there_and_used(start)
    high, low = plain.reserved_bytes - there, plain.allocated_bytes - there
    least = least_to_ask_for(start)
    fits = plain.allocated_bytes <= limit_bytes and plain.reserved_bytes <= ENOUGH * plain.allocated_bytes
    if fits or low < 2 * OWN_SEGMENT or limit_bytes - used < 2 * OWN_SEGMENT or least > high:
        return ()
    tries = min(MOST, max(FEWEST, EVENTS // length))
    search = _Search(measure, plain, limit_bytes, used - start.others_bytes + gradient_bytes)
    return search.between(least, max(least, low), high, tries)


def there_and_used(start: Start) -> tuple[int, int]:
    """Bytes that are reserved before the step, and how many of them are in use."""
    blocks = [block for segment in start.segments for block in segment.blocks]
    return sum(size for size, _ in blocks), sum(size for size, used in blocks if used)


def least_to_ask_for(start: Start) -> int:
    """Bytes of the smallest arena that a step asks for: somewhat more may lie idle when it runs."""
    there, used = there_and_used(start)
    return max(OWN_SEGMENT, least_arena(there - used + OWN_SEGMENT))


class _Search:
    def __init__(self, measure: Callable[[Arena], Footprint], plain: Footprint, limit_bytes: int, used: int) -> None:
        self.measure, self.limit_bytes = measure, limit_bytes
        self.largest = (limit_bytes - used) // SMALL_SEGMENT * SMALL_SEGMENT  # more would be a peak of its own
        self.found: dict[Arena, tuple[int, int]] = {(): self._score(plain)}

    def between(self, least: int, low: int, high: int, tries: int) -> Arena:
        """Sizes from `least` to `low` evenly, since a small one may fill up what segments of 20 MiB leave over; from
        there on, where all fits into it, ever less densely. Then other segments around the best of those.
        """
        under = 2 * tries // 3
        above = tries - under
        sizes = [least + (low - least) * k // under for k in range(under)]
        sizes += [low + (high - low) * k * k // above**2 for k in range(above)]
        for size in sizes:
            self._attempt(self._of(size))
        self._around(least, tries)
        return min(self.found, key=self._order)

    def _around(self, least: int, tries: int) -> None:
        rng = random.Random(0)
        best = min(self.found, key=self._order)
        for _ in range(tries if best else 0):
            other = _ascending(_changed(best, rng))
            if len(other) <= SEGMENTS and sum(other) >= least and self._attempt(other) <= self.found[best]:
                best = other

    def _order(self, arena: Arena) -> tuple[tuple[int, int], int, int]:
        return self.found[arena], len(arena), sum(arena)

    def _attempt(self, arena: Arena) -> tuple[int, int]:
        if arena not in self.found:
            self.found[arena] = self._score(self.measure(arena))
        return self.found[arena]

    def _score(self, needed: Footprint) -> tuple[int, int]:
        return max(0, needed.allocated_bytes - self.limit_bytes), needed.reserved_bytes

    def _of(self, size: int) -> Arena:
        """Asking for all at once must not be what peaks: the rest comes first, and is smaller."""
        rest = round_up(size, SMALL_SEGMENT) - self.largest
        return _ascending((size,) if rest <= 0 else (rest, size - rest))


def _changed(arena: Arena, rng: random.Random) -> list[int]:
    """Cut one of the segments in two, make it a little larger or smaller, add it to another, or have one more."""
    sizes, kind = list(arena), rng.random()
    size = sizes.pop(rng.randrange(len(sizes)))
    if kind < 0.35:
        part = int(size * rng.uniform(0.1, 0.9))
        return [*sizes, part, size - part]
    if kind < 0.8:
        return [*sizes, size + SMALL_SEGMENT * rng.choice((-8, -4, -3, -2, -1, 1, 2, 3, 4, 8))]
    if kind < 0.9 and sizes:
        sizes[rng.randrange(len(sizes))] += size
        return sizes
    return [*sizes, size, SMALL_SEGMENT * rng.randrange(5, 25)]


def _ascending(sizes: Iterable[int]) -> Arena:
    """Segments of such sizes that torch serves one by one: none is served from those before it."""
    found: list[int] = []
    for size in sorted(sizes):
        above = found[-1] + SMALL_SEGMENT if found else OWN_SEGMENT
        found.append(max(round_up(size, SMALL_SEGMENT), above))
    return tuple(found)
