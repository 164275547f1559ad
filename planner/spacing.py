"""spacing: where a step has spacers, so that its larger blocks come to lie as closely as they can be packed.

torch's caching allocator takes the smallest free block that is large enough, and knows nothing of what comes next. What
comes next is known here: how long each block of a step is held. Packed by that, blocks waste next to nothing. Where the
allocator would take other memory than that, spacers are in its way while the op runs, each as small as it can be; there
are none where more than may be would be allocated for them, or over .1 % more than without. Around what still lies
elsewhere the rest is packed anew, and spacers that change nothing are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from passes.allocator import ENDLESS, LARGEST_SMALL, OWN_SEGMENT, SMALL_SEGMENT, Block, CachingAllocator
from passes.device import round_up
from passes.run.arena import Arena, Spacing

from .arena import ENOUGH, Reservation, aimed_bytes, least_to_ask_for
from .events import Apart, Order
from .footprint import Footprint, Start, ready
from .packing import FAR, Gap, Held, Packer, Run, any_in, by_place, gaps_of, held_blocks, meet, spacer_in

RESTS: tuple[Arena, ...] = ((), (OWN_SEGMENT,), (2 * OWN_SEGMENT,))  # segments beside it
MORE = (0, 1, 2, 3, 4, 6, 8, 12)  # how much larger than packed it may be, in units of 2 MiB
WAYS, TRIED, ANEW = 30, 6, 60  # ways to pack that are compared, and that are tried; how often one try packs anew
EVENTS = 600_000  # that are played in all
SINGLE = 2  # how many of an op's blocks are tried one by one
SLACK = 1.001  # allocated with spacers over without: where blocks lie decides which are given out with their rest
LASTING = 1000  # how much more it counts where a block lies that outlives its op
# Spacers that there may be for each op: where no more is reserved than aimed at, and elsewhere.
FEW, MANY = 0.1, 0.5
DROPS = 900_000  # events that are played to see which spacers change nothing


def spaced(
    order: Order, start: Start, measure: Callable[[Reservation], Footprint], most_bytes: int, aside_bytes: int,
    found: Reservation,
) -> Reservation:  # fmt: skip
    """What reserves less than `found` by spacers; `found` where nothing does.

    Args:
        measure: the footprint with a reservation.
        most_bytes: what may be allocated.
        aside_bytes: what the footprint counts besides what the allocator does.
    """
    needed = measure(found)
    if needed.allocated_bytes > most_bytes or _is_enough(needed):
        return found
    most_bytes = max(needed.allocated_bytes, min(most_bytes, int(SLACK * needed.allocated_bytes)))
    besides_bytes = start.others_bytes - aside_bytes
    search = _Search(order.apart, start, measure, order.before, needed, found, most_bytes, besides_bytes)
    return search.best()


def _is_enough(needed: Footprint) -> bool:
    return needed.reserved_bytes <= ENOUGH * needed.allocated_bytes


class _Search:
    def __init__(
        self, apart: Apart, start: Start, measure: Callable[[Reservation], Footprint], before: tuple[int, ...],
        needed: Footprint, found: Reservation, most_bytes: int, besides_bytes: int,
    ) -> None:  # fmt: skip
        self.apart, self.start, self.measure, self.before = apart, start, measure, (*before, *apart.workspaces)
        self.needed, self.found = needed, found
        self.most_bytes, self.limit_bytes = most_bytes, most_bytes + besides_bytes
        self.length = len(apart.steps[1])
        self.events = EVENTS
        self.packer = Packer(held_blocks(apart.steps[1]))

    def best(self) -> Reservation:
        given, aim = self.found, aimed_bytes(self.needed.allocated_bytes, self.start.expandable)
        share = FEW if self.needed.reserved_bytes <= aim else MANY
        for arena, way in self._arenas():
            if self.events <= 0 or self.packer.pairs <= 0 or _is_enough(self.needed):
                break
            self._attempt(arena, way)
        if self.found is given:
            return given
        self._drop_idle_ones()
        count = sum(len(sizes) for _, sizes in self.found.spacing.at) if self.found.spacing else 0
        return self.found if count <= share * len(self.apart.runs[1]) else given

    def _arenas(self) -> Iterator[tuple[Arena, int]]:
        """Arenas that the step might fit into, each with a way to pack it that says so: the closest ways first."""
        found, least = list[tuple[int, int, Arena, int]](), least_to_ask_for(self.start)
        for rest in RESTS:
            allocator = ready(self.start, rest, self.before)
            gaps, blocks = [*gaps_of(allocator), Gap(FAR, FAR)], self.packer.blocks
            ways = max(2, min(WAYS, self.packer.pairs // (4 * len(blocks) ** 2 + 1)))
            packed = sorted((self.packer.pack(blocks, gaps, {}, way)[1], way) for way in range(ways))
            for rank, (packed_bytes, way) in enumerate(packed[:TRIED]):
                size = max(round_up(packed_bytes, SMALL_SEGMENT), sum(rest) + SMALL_SEGMENT)
                for k, more in enumerate(MORE):
                    found.append((2 * rank + k, allocator.reserved_bytes, (*rest, size + more * SMALL_SEGMENT), way))
        for _, reserved, arena, way in sorted(found):
            if arena[-1] >= OWN_SEGMENT and sum(arena) >= least and reserved + arena[-1] < self.needed.reserved_bytes:
                yield arena, way

    def _attempt(self, arena: Arena, way: int) -> None:
        allocator = ready(self.start, arena, self.before)
        is_there = any(gap.size == arena[-1] for gap in gaps_of(allocator))
        if not is_there or allocator.peak_allocated_bytes > self.limit_bytes:
            return
        placing = _Placing(self.apart, self.packer, allocator, arena[-1], self.limit_bytes, way)
        self.events -= 2 * self.length
        if placing.run(self.needed.reserved_bytes):
            self._consider(arena, placing.spacers)

    def _consider(self, arena: Arena, at: Mapping[int, tuple[int, ...]], equal: bool = False) -> None:
        spacing = Spacing(tuple(sorted(at.items())), workspaces=bool(self.apart.workspaces))
        needed = self.measure(Reservation(arena, spacing))
        self.events -= 6 * self.length
        if needed.allocated_bytes <= self.most_bytes and needed.reserved_bytes < self.needed.reserved_bytes + equal:
            growth = max(0, needed.reserved_bytes - ready(self.start, arena, self.before).reserved_bytes)
            self.found, self.needed = Reservation(arena, spacing._replace(growth=growth)), needed

    def _drop_idle_ones(self) -> None:
        """Drop spacers that change nothing, many at once, then fewer."""
        assert self.found.spacing is not None
        left = [(place, size) for place, sizes in self.found.spacing.at for size in sizes]
        part, self.events = len(left), DROPS
        while part and self.events > 0:
            k = 0
            while k < len(left) and self.events > 0:
                fewer = [*left[:k], *left[k + part :]]
                if self._is_as_good(by_place(fewer)):
                    left = fewer
                else:
                    k += part
            part //= 2
        self._consider(self.found.arena, by_place(left), equal=True)

    def _is_as_good(self, at: Mapping[int, tuple[int, ...]]) -> bool:
        """In two steps, wherever the driver places new segments."""
        for descending in (False, True):
            allocator = ready(replace(self.start, descending=descending), self.found.arena, self.before)
            for events in self.apart.spaced(at):
                allocator.play(events)
                self.events -= len(events)
            if allocator.peak_reserved_bytes > self.needed.reserved_bytes:
                return False
        return allocator.peak_allocated_bytes <= self.limit_bytes


class _Placing:
    """One step, with spacers where blocks would not come to lie where they are packed.

    Attributes:
        spacers: their sizes, by the place of the op in the schedule.
        lying: the blocks that are held, with their addresses.
    """

    def __init__(
        self, apart: Apart, packer: Packer, allocator: CachingAllocator, largest: int, limit_bytes: int, way: int
    ) -> None:
        self.events, self.runs = apart.steps[1], apart.runs[1]
        self.packer, self.allocator, self.limit_bytes, self.way = packer, allocator, limit_bytes, way
        self.blocks, gaps = packer.blocks, gaps_of(allocator)
        arena = next(gap for gap in gaps if gap.size == largest)
        self.shift = arena.address - FAR
        self.gaps = [*(gap for gap in gaps if gap is not arena), Gap(FAR, FAR)]
        self.end = arena.address + arena.size
        self.planned, _ = packer.pack(self.blocks, self.gaps, {}, way)
        self.spacers: dict[int, tuple[int, ...]] = {}
        self.lying: dict[int, tuple[int, Held]] = {}
        self.made: list[Block] = []
        self.is_off, self.anew = False, 0

    def run(self, most_reserved: int) -> bool:
        """Whether less is reserved for the step."""
        done = 0
        for run in self.runs:
            self._play(done, run.start)
            self._op(run)
            done = run.end
            if self.allocator.peak_reserved_bytes >= most_reserved or self.anew > ANEW or self.packer.pairs <= 0:
                return False
        self._play(done, len(self.events))
        return self.allocator.peak_reserved_bytes < most_reserved

    def _op(self, run: Run) -> None:
        count = sum(event > 0 for event in self.events[run.start : run.end])
        wanted = [n for n in range(len(self.made), len(self.made) + count) if n in self.blocks]
        if not wanted:
            self._play(run.start, run.end)
            return
        if self.is_off:
            self._pack_anew(wanted[0])
        sizes = self._chosen(wanted, run)
        spacers = [self.allocator.allocate(size) for size in sizes]
        self._play(run.start, run.end)
        for spacer in spacers:
            self.allocator.release(spacer)
        if sizes:
            self.spacers[run.place] = sizes

    def _pack_anew(self, first: int) -> None:
        """Around what lies elsewhere: what it is in the way of, or else all that comes."""
        self.is_off, self.anew = False, self.anew + 1
        later = [n for n in self.blocks if n >= first]
        moved = [pair for n, pair in self.lying.items() if pair[0] != self.planned[n]]
        stuck = [n for n in later if any(meet(self.planned[n], self.blocks[n], *pair) for pair in moved)]
        staying = {n: (self.planned[n], self.blocks[n]) for n in set(later) - set(stuck)}
        found, packed_bytes = self.packer.pack(stuck, self.gaps, self.lying | staying, self.way)
        if packed_bytes > self.end - self.shift - FAR:
            other, other_bytes = self.packer.pack(later, self.gaps, self.lying, self.way)
            found = other if other_bytes < packed_bytes else found
        self.planned |= found

    def _chosen(self, wanted: Sequence[int], run: Run) -> tuple[int, ...]:
        """Spacers for all blocks of an op, for those that outlive it, for one, or none: what errs least."""
        lasting = [n for n in wanted if self.blocks[n].dies >= run.end]
        single = sorted(wanted, key=lambda n: -self.blocks[n].size)[:SINGLE]
        least, best = float(ENDLESS), tuple[int, ...]()
        ways = [(which, tight) for tight in (True, False) for which in (wanted, lasting, *([n] for n in single))]
        for sizes in dict.fromkeys([*(self._in_the_way(*way) for way in ways), ()]):
            if (wrong := self._wrong(sizes, run)) < least or (not sizes and wrong == least):
                least, best = wrong, sizes
            if not wrong:
                break
        return best

    def _in_the_way(self, which: Collection[int], tight: bool) -> tuple[int, ...]:
        """Sizes of spacers that leave no gap for these blocks that the allocator would take instead.

        Args:
            tight: whether they leave what is too small, or fill gaps.
        """
        gaps = gaps_of(self.allocator)
        targets, sizes = {self._address(n) for n in which}, list[int]()
        for n in which:
            address, size = self._address(n), self.blocks[n].size
            own = next((g for g in gaps if g.address <= address and address + size <= g.address + g.size), None)
            if own is None:
                continue
            front = address - own.address
            if front <= LARGEST_SMALL or any(own.address <= a < address for a in targets):
                front = 0
            least = min(size, front) if front else size
            others = [g for g in gaps if least <= g.size and g < own and not any_in(g, targets)]
            needed = [spacer_in(gap, least, gaps) if tight else gap.size for gap in others]
            needed += [front] if front else []
            for each in dict.fromkeys(needed):
                sizes += [each] * (needed.count(each) - sizes.count(each))
        return tuple(sizes)

    def _address(self, n: int) -> int:
        address = self.planned[n]
        return address + self.shift if address >= FAR else address

    def _wrong(self, sizes: Sequence[int], run: Run) -> float:
        """Bytes that come to lie elsewhere than packed, those that outlive the op above all; endless where too much
        would be allocated, or more be reserved. Nothing is changed.
        """
        allocator = self.allocator
        peaks = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        most = allocator.allocated_bytes + sum(sizes)
        if sizes and (most > self.limit_bytes or max(sizes) > max(gaps_of(allocator), default=Gap(0, 0)).size):
            return ENDLESS
        reserved, made, wrong, n = allocator.reserved_bytes, dict[int, Block](), 0, len(self.made) - 1
        spacers = [allocator.allocate(size) for size in sizes]
        is_more = allocator.reserved_bytes > reserved
        for event in self.events[run.start : run.end]:
            if event < 0:
                if (given := made.pop(-1 - event, None)) is not None:
                    allocator.release(given)
                continue
            reserved, n, block = allocator.reserved_bytes, n + 1, allocator.allocate(event)
            made[n], most = block, max(most, allocator.allocated_bytes)
            is_more = is_more or (n in self.blocks and allocator.reserved_bytes > reserved)
            if n in self.blocks and block.address != self._address(n):
                wrong += self.blocks[n].size * (LASTING if self.blocks[n].dies >= run.end else 1)
        is_more = is_more or most > self.limit_bytes
        for block in (*made.values(), *spacers):
            allocator.release(block)
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes = peaks
        return ENDLESS if sizes and is_more else wrong

    def _play(self, start: int, end: int) -> None:
        for event in self.events[start:end]:
            if event < 0:
                self.allocator.release(self.made[-1 - event])
                self.lying.pop(-1 - event, None)
                continue
            n, block = len(self.made), self.allocator.allocate(event)
            self.made.append(block)
            if n in self.blocks:
                held = self.blocks[n]
                self.is_off = self.is_off or block.address != self._address(n)
                inside = self.shift + FAR <= block.address < self.end
                address = block.address - self.shift if inside else block.address
                self.lying[n] = address, Held(block.size, held.born, held.dies)
