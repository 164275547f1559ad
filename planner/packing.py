"""packing: addresses for blocks that are held for a while, so that they take as little room as they can.

Source: offline dynamic storage allocation, "greedy by size" (Pisarchyk and Lee, "Efficient Memory Management for Deep
Neural Net Inference", 2020): the largest block first, each in the smallest gap.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from passes.allocator import ENDLESS, GRANULE, LARGEST_SMALL, CachingAllocator
from passes.device import round_up

FAR = ENDLESS  # where the last gap lies, which has no end
PAIRS = 12_000_000  # of blocks that are compared in all


class Held(NamedTuple):
    """A block: bytes, and the events that ask for it and give it back."""

    size: int
    born: int
    dies: int


class Gap(NamedTuple):
    """Free memory, in the order in which the allocator takes it."""

    size: int
    address: int


Blocks = Mapping[int, Held]  # by the number of the allocation


def held_blocks(events: Sequence[int]) -> dict[int, Held]:
    """The blocks that come from the pool of larger ones, by the number of the allocation."""
    sizes, born, dies, count = dict[int, int](), dict[int, int](), dict[int, int](), 0
    for k, event in enumerate(events):
        if event > 0:
            if event > LARGEST_SMALL:
                sizes[count], born[count] = round_up(event, GRANULE), k
            count += 1
        else:
            dies[-1 - event] = k
    return {n: Held(size, born[n], dies.get(n, len(events))) for n, size in sizes.items()}


def gaps_of(allocator: CachingAllocator) -> list[Gap]:
    """The free memory for larger blocks."""
    return [Gap(size, address) for size, address, _ in allocator.large.free]


class Packer:
    """Finds addresses for blocks, the largest first, each in the smallest gap there is for as long as it is held.

    Attributes:
        pairs: of blocks that may still be compared.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks, self.pairs = blocks, PAIRS

    def pack(
        self, which: Collection[int], gaps: Sequence[Gap], lying: Mapping[int, tuple[int, Held]], way: int
    ) -> tuple[dict[int, int], int]:
        """Addresses of the blocks, and the bytes of the last of the gaps that they need, which has no end.

        Args:
            gaps: what is free besides, the last of them at `FAR`.
            lying: addresses of other blocks.
            way: which of the ways to pack: but for the first, sizes are a little off.
        """
        rng, blocks = random.Random(way), self.blocks
        off = {n: rng.uniform(0.8, 1.2) if way else 1.0 for n in which}
        ordered = sorted(which, key=lambda n: (-blocks[n].size * off[n], blocks[n].born - blocks[n].dies))
        placed = sorted((address, held) for address, held in lying.values())
        found: dict[int, int] = {}
        top, by_address = 0, sorted(gaps, key=lambda gap: gap.address)
        for n in ordered:
            block = blocks[n]
            busy = [(a, a + h.size) for a, h in placed if h.born < block.dies and block.born < h.dies]
            self.pairs -= len(placed)
            found[n] = _smallest(by_address, busy, block.size)
            insort(placed, (found[n], block))
            if found[n] >= FAR:
                top = max(top, found[n] + block.size - FAR)
        return found, top


def _smallest(gaps: Sequence[Gap], busy: Sequence[tuple[int, int]], size: int) -> int:
    """The address of the smallest room for so many bytes; `gaps` and what is busy in them by address."""
    best, room, k = 0, ENDLESS, 0
    for gap in gaps:
        place, end = gap.address, gap.address + gap.size
        while k < len(busy) and busy[k][0] < end:
            if size <= busy[k][0] - place < room:
                best, room = place, busy[k][0] - place
            place = max(place, busy[k][1])
            k += 1
        if size <= end - place < room and gap.address < FAR:
            best, room = place, end - place
        elif gap.address >= FAR and room == ENDLESS:
            best = place
    return best


def meet(address: int, block: Held, other_address: int, other: Held) -> bool:
    """Whether two blocks are held at one time and would lie upon each other."""
    in_time = other.born < block.dies and block.born < other.dies
    return in_time and other_address < address + block.size and address < other_address + other.size


def any_in(gap: Gap, addresses: Collection[int]) -> bool:
    """Whether an address is in a gap."""
    return any(gap.address <= a < gap.address + gap.size for a in addresses)


def spacer_in(gap: Gap, least: int, gaps: Sequence[Gap]) -> int:
    """The smallest size that is served from a gap and leaves less than `least` bytes of it."""
    smaller = max((g.size for g in gaps if g.size < gap.size), default=0)
    return min(gap.size, max(gap.size - least, smaller, LARGEST_SMALL) + GRANULE)


def by_place(spacers: Sequence[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """Sizes, each given with its place, by place."""
    found: dict[int, tuple[int, ...]] = {}
    for place, size in spacers:
        found[place] = (*found.get(place, ()), size)
    return found


class Run(NamedTuple):
    """The events of an op: from `start` to before `end`; `place` is its step's in the schedule."""

    place: int
    start: int
    end: int


def with_spacers(events: Sequence[int], runs: Sequence[Run], at: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Events with those of spacers between them: allocations are numbered anew."""
    found: list[int] = []
    numbers: list[int] = []
    count = done = 0

    def copy(end: int) -> None:
        nonlocal count, done
        for event in events[done:end]:
            if event > 0:
                numbers.append(count)
                count += 1
            found.append(event if event >= 0 else -1 - numbers[-1 - event])
        done = end

    for run in runs:
        if sizes := at.get(run.place):
            copy(run.start)
            spacers = range(count, count + len(sizes))
            found += sizes
            count += len(sizes)
            copy(run.end)
            found += [-1 - k for k in spacers]
    copy(len(events))
    return tuple(found)
