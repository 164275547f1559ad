"""packing: addresses for blocks that are held for a while, so that they take as little room as they can.

Source: offline dynamic storage allocation, "greedy by size" (Pisarchyk and Lee, "Efficient Memory Management for Deep
Neural Net Inference", 2020): the largest block first, each in the smallest gap.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from passes.allocator import ENDLESS, GRANULE, LARGEST_SMALL, Block, CachingAllocator
from passes.device import round_up

FAR = ENDLESS  # where the last gap lies, which has no end
_LATE = ENDLESS // 2  # what makes a gap that grows come after all others that end
PAIRS = 60_000_000  # of blocks that are compared in all


class Held(NamedTuple):
    """A block: bytes, and the events that ask for it and give it back."""

    size: int
    born: int
    dies: int


class Gap(NamedTuple):
    """Free memory; `grows` where more can be mapped behind it, which the allocator would rather leave."""

    size: int
    address: int
    grows: bool = False

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Their order is that in which the allocator takes them."""
        return self.grows, self.size, self.address


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
    return [Gap(size, address, _can_grow(block)) for size, address, block in allocator.large.free]


def _can_grow(block: Block) -> bool:
    return block.after is not None and not block.after.mapped


class Packer:
    """Finds addresses for blocks, the largest first, each in the smallest gap there is for as long as it is held.

    Attributes:
        repeats: blocks that lie where an earlier one does.
        pairs: of blocks that may still be compared.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.repeats, self.pairs = _repeats(blocks), PAIRS
        last = {first: blocks[n].dies for n, first in self.repeats.items()}
        self.blocks = {n: block._replace(dies=last.get(n, block.dies)) for n, block in blocks.items()}

    def pack(
        self, which: Collection[int], gaps: Sequence[Gap], lying: Collection[tuple[int, Held]], way: int
    ) -> tuple[dict[int, int], int]:
        """Addresses of the blocks, and the bytes of the last of the gaps that they need, which has no end.

        Args:
            gaps: what is free besides, the last of them at `FAR`.
            lying: other blocks, each with its address.
            way: which of the ways to pack: but for the first, sizes are a little off.
        """
        rng, blocks = random.Random(way), self.blocks
        given = set(which)
        repeats = {n: self.repeats[n] for n in which if self.repeats.get(n) in given}
        which = [n for n in which if n not in repeats]
        off = {n: rng.uniform(0.8, 1.2) if way else 1.0 for n in which}
        ordered = sorted(which, key=lambda n: (-blocks[n].size * off[n], blocks[n].born - blocks[n].dies))
        room, top, by_address = len(lying) + len(which), 0, sorted(gaps, key=lambda gap: gap.address)
        addresses, ends, born, dies = (np.zeros(room, np.int64) for _ in range(4))
        for k, (address, held) in enumerate(lying):
            addresses[k], ends[k], born[k], dies[k] = address, address + held.size, held.born, held.dies
        found: dict[int, int] = {}
        for k, n in enumerate(ordered, len(lying)):
            block = blocks[n]
            self.pairs -= k
            meeting = np.nonzero((born[:k] < block.dies) & (dies[:k] > block.born))[0]
            busy = sorted(zip(addresses[meeting].tolist(), ends[meeting].tolist(), strict=True))
            found[n] = address = _smallest(by_address, busy, block.size)
            addresses[k], ends[k], born[k], dies[k] = address, address + block.size, block.born, block.dies
            if address >= FAR:
                top = max(top, address + block.size - FAR)
        return found | {n: found[first] for n, first in repeats.items()}, top


    def in_the_way_of(
        self, which: Sequence[int], addresses: Mapping[int, int], lying: Sequence[tuple[int, Held]]
    ) -> list[int]:
        """Those of the blocks that would lie upon one of `lying`, both being held at one time."""
        at = np.array([addresses[n] for n in which], np.int64)
        sizes, born, dies = np.array([self.blocks[n] for n in which], np.int64).reshape(-1, 3).T
        found = np.zeros(len(which), bool)
        for address, held in lying:
            in_time = (held.born < dies) & (born < held.dies)
            found |= in_time & (address < at + sizes) & (at < address + held.size)
        return [n for n, is_upon in zip(which, found.tolist(), strict=True) if is_upon]


def _repeats(blocks: Blocks) -> dict[int, int]:
    """Workspaces that are held right after an equal one was given back, with the first of those."""
    found: dict[int, int] = {}
    before = -1
    for n, block in blocks.items():
        last = blocks.get(before)
        if last is not None and last.size == block.size and (last.dies, block.born, block.dies - 1) == (
            last.born + 1, last.dies + 1, block.born
        ):  # fmt: skip
            found[n] = found.get(before, before)
        before = n
    return found


def _smallest(gaps: Sequence[Gap], busy: Sequence[tuple[int, int]], size: int) -> int:
    """The address of the smallest room for so many bytes; `gaps` and what is busy in them by address."""
    best, room, k = 0, ENDLESS, 0
    for gap in gaps:
        place, end, late = gap.address, gap.address + gap.size, _LATE * gap.grows
        while k < len(busy) and busy[k][0] < end:
            if size <= busy[k][0] - place and busy[k][0] - place + late < room:
                best, room = place, busy[k][0] - place + late
            place = max(place, busy[k][1])
            k += 1
        if size <= end - place and end - place + late < room and gap.address < FAR:
            best, room = place, end - place + late
        elif gap.address >= FAR and room == ENDLESS:
            best = place
    return best


def any_in(gap: Gap, addresses: Collection[int]) -> bool:
    """Whether an address is in a gap."""
    return any(gap.address <= a < gap.address + gap.size for a in addresses)


def spacer_in(gap: Gap, least: int, gaps: Sequence[Gap]) -> int:
    """The smallest size that is served from a gap and leaves less than `least` bytes of it."""
    smaller = max((g.size for g in gaps if g.rank < gap.rank and g.size <= gap.size), default=0)
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
