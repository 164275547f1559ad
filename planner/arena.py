"""arena: how large a segment to ask for before the first step, so that torch's caching allocator reserves least.

Too small, and what does not fit takes segments besides; too large, and the rest of it is wasted. Between the two lies
one that the step just fits into, or nearly, which playing the step into segments of several sizes finds.
"""

from __future__ import annotations

from collections.abc import Callable

from passes.allocator import SMALL_SEGMENT
from passes.device import round_up
from passes.run.arena import IDLE

from .footprint import Footprint, Start

ENOUGH = 1.02  # reserved over allocated; there is less to gain than a segment is large
LOW = 0.8  # of what must be allocated besides what there is: the rest may fit into holes
EVENTS, FEWEST, MOST = 200_000, 8, 24  # steps of a schedule that are played in all, and how often it is


def best_arena(measure: Callable[[int], Footprint], start: Start, length: int, limit_bytes: int) -> int:
    """Bytes to ask for in advance; 0 where nothing less would be reserved for it.

    Args:
        measure: the footprint with an arena of a size.
        length: of the schedule.
        limit_bytes: what may be allocated, if more than without an arena.
    """
    plain = measure(0)
    there = sum(size for s in start.segments for size, _ in s.blocks)
    idle = sum(size for s in start.segments for size, used in s.blocks if not used)
    limit = max(limit_bytes, plain.allocated_bytes)
    high = plain.reserved_bytes - there
    low = int(LOW * (plain.allocated_bytes - there))
    if plain.reserved_bytes <= ENOUGH * plain.allocated_bytes or low < SMALL_SEGMENT:
        return 0
    found = {0: plain.reserved_bytes}

    def attempt(size: int) -> int:
        size = round_up(size, SMALL_SEGMENT)
        if size not in found and idle <= IDLE * size:
            tried = measure(size)
            found[size] = tried.reserved_bytes if tried.allocated_bytes <= limit else plain.reserved_bytes
        return found.get(size, plain.reserved_bytes)

    tries = min(MOST, max(FEWEST, EVENTS // length))
    coarse = 2 * tries // 3
    for k in range(coarse):
        attempt(low + (high - low) * k // coarse)
    _refine(found, attempt, (high - low) // coarse, tries - coarse)
    return min(found, key=lambda size: (found[size], size))


def _refine(found: dict[int, int], attempt: Callable[[int], int], width: int, tries: int) -> None:
    """Halve the way from the best so far down to where the step fits no more."""
    best = min(found, key=lambda size: (found[size], size))
    low = best - width
    for _ in range(tries if best else 0):
        middle = round_up((low + best) // 2, SMALL_SEGMENT)
        if middle >= best:
            break
        if attempt(middle) < found[best]:
            best = middle
        else:
            low = middle
